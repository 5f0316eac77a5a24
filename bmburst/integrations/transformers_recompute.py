"""Activation checkpointing of transformers' layers that does not run attention again."""

from functools import partial

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from bmburst.errors import UserError
from bmburst.recompute import checkpoint
from bmburst.recompute.host_store import HostStore
from bmburst.recompute.policy import Policy


def recompute(model: torch.nn.Module, policy: str = "block-keep-attention") -> None:
    """Make a model's layers compute their activations again in backward, by a policy of bmburst.

    In the place of `gradient_checkpointing_enable`, which would send keys and values a second time.

    Args:
        model: A model of transformers, before or after it is wrapped.
        policy: One of `bmburst.recompute.policy`; a part of attention, as "block-keep-attention:0.5" keeps, must be
            one that the layout has. "block-keep-attention+first-20" holds for the first 20 layers, in the order of
            `model.modules()`.

    Raises:
        UserError: The policy is unknown or names too many layers, or the model has no layers that can, or has dropout:
            random numbers are not drawn again.
    """
    chosen = Policy.parse(policy)
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    layers = [module for module in modules if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(
            f"{type(model).__name__} has no layers of transformers that can be computed again\n"
            "give a PreTrainedModel, wrapped or not, of a family that has gradient checkpointing"
        )
    dropout = _dropout(model)
    if dropout is not None:
        raise UserError(
            f"a layer computed again would draw other random numbers, and the model has {dropout}\n"
            "fix: set it to 0, or model.gradient_checkpointing_enable()"
        )
    store = HostStore()
    for layer, own in zip(layers, chosen.of_layers(len(layers)), strict=True):
        layer._gradient_checkpointing_func = partial(checkpoint, own, store=store)
        layer.gradient_checkpointing = True


def _dropout(model: torch.nn.Module) -> str | None:
    """Return a dropout that is on: of a module, or of a configuration for a function."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0:
            return f"{name} of {module.p:g}"
        if isinstance(module, PreTrainedModel):
            for key, value in module.config.to_dict().items():
                if ("dropout" in key or "pdrop" in key) and isinstance(value, float) and value > 0:
                    return f"{key} of {value:g}"
    return None
