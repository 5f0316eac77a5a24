"""The load balancing loss of routers (Mixtral, Qwen3-MoE, OLMoE and others) over the tokens of all ranks.

transformers computes E * sum_e f_e P_e, with f_e the mean number of choices of expert e by a token and P_e its mean
probability, over the real tokens of the batch and all layers (Switch Transformer, arXiv 2101.03961). f has no gradient,
and P is a sum over tokens. So the ranks add up f and the number of tokens, and each keeps its own part of P: the sum
of the ranks' shares is the loss, and no gradient is exchanged.
"""

import ast
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from bmburst.comm.communicator import Communicator
from bmburst.errors import UserError
from bmburst.integrations.transformers_modules import outermost

_NAME, _MARK = "load_balancing_loss_func", "over_ranks"
_READ = frozenset({"feb00e22c290", "011f7aa3f7fd"})
"""Digests of the function's statements as they were read, the same for 30 model types: in transformers 5.17 to 5.22,
and in 5.23 and 5.24, which count choices by another function."""


def asks_router_loss(model: object, inputs: Mapping[str, object]) -> bool:
    """Return whether a call of a model adds its router's loss to its own: by an argument, or by its configuration."""
    asked, whole = inputs.get("output_router_logits"), outermost(model)
    config = None if whole is None else whole.config.get_text_config()
    return bool(getattr(config, "output_router_logits", False) if asked is None else asked)


def require_router_loss(model: object, *, is_tree: bool) -> None:
    """Check that the router's loss of a model can be added up over ranks.

    Raises:
        UserError: It is not the function that was read, or rows share tokens.
    """
    function, whole = vars(_module(model)).get(_NAME), outermost(model)
    was_read = function is not None and _digest(function) in _READ
    if not was_read or getattr(whole, "router_aux_loss_coef", None) is None:
        raise UserError(
            f"the router's loss of {type(whole).__name__} was not read\n"
            "allowed: that of Mixtral, Qwen3-MoE and others, over all layers\nfix: config.output_router_logits = False"
        )
    if is_tree:
        raise UserError(
            "a router's loss counts each token once, but rows of a tree share tokens\n"
            "fix: config.output_router_logits = False, or the rows one by one"
        )


@contextmanager
def router_shares(model: object, real: Tensor, comm: Communicator) -> Iterator[list[Tensor]]:
    """Inside this block, a call of the model appends this rank's share of the router's loss to the list.

    Args:
        model: A model that has passed `require_router_loss`; None: the list stays empty.
        real: Which local tokens are no padding, bool `[batch, local_tokens]`.
        comm: The ranks that share the batch.
    """
    shares: list[Tensor] = []
    if model is None:
        yield shares
        return
    module = _module(model)
    before = vars(module)[_NAME]

    def over_ranks(gate_logits: Any, num_experts: int, top_k: int, attention_mask: object = None) -> Tensor:
        del attention_mask  # of this rank's part
        shares.append(_share(gate_logits, num_experts, top_k, real.flatten(), comm))
        return shares[-1]

    setattr(over_ranks, _MARK, True)
    setattr(module, _NAME, over_ranks)
    try:
        yield shares
    finally:
        setattr(module, _NAME, before)


def require_router_loss_elsewhere(model: object, inputs: Mapping[str, object]) -> None:
    """Raise UserError if a call of a model asks for its router's loss outside of `router_shares`."""
    if asks_router_loss(model, inputs) and not hasattr(vars(_module(model)).get(_NAME), _MARK):
        raise UserError(
            "the router's loss is no part of logits\nallowed: Part.loss, which adds it\n"
            "fix: config.output_router_logits = False"
        )


def router_share(model: object, shares: list[Tensor]) -> Tensor:
    """Return the share of the last call of a model; UserError if it computed none, or without gradients."""
    lost = torch.is_grad_enabled() and bool(shares) and not shares[-1].requires_grad
    if not shares or (lost and any(parameter.requires_grad for parameter in _parameters(model))):
        raise UserError(
            "the router's loss has no gradient: layers are recomputed in backward by a policy that returns none\n"
            "fix: model.gradient_checkpointing_enable(); or config.output_router_logits = False, with TRL "
            "router_aux_loss_coef=0.0"
        )
    return shares[-1]


def router_loss(model: object, share: Tensor, part: Tensor, total: Tensor | int, ranks: int) -> Tensor:
    """Return what a rank adds to its loss. The mean over all ranks is the mean of the parts' losses by their labels.

    Args:
        model: The model.
        share: Of this rank.
        part: Labels of the part on all ranks of the sequence.
        total: Labels of all parts of the step.
        ranks: Number of all ranks.
    """
    weight = part / (total.clamp(min=1) if isinstance(total, Tensor) else max(total, 1))
    coefficient: float = getattr(outermost(model), "router_aux_loss_coef")  # noqa: B009
    return (ranks * coefficient) * weight * share


def _share(gate_logits: tuple[Tensor, ...], experts: int, top_k: int, real: Tensor, comm: Communicator) -> Tensor:
    """Return this rank's share of the loss, a scalar; UserError if no layer has a router."""
    if not gate_logits:  # transformers fails, too
        raise UserError(
            "the router's loss was asked for, but no layer of the model has experts\n"
            "fix: config.output_router_logits = False, or layers with experts"
        )
    counts = torch.zeros(experts, dtype=torch.float64, device=real.device)
    sums: Tensor | float = 0.0
    for logits in gate_logits:
        probabilities = torch.softmax(logits.reshape(-1, experts), dim=-1)
        chosen = probabilities.topk(top_k, dim=-1).indices[real]
        counts += torch.bincount(chosen.flatten(), minlength=experts)
        wide = probabilities.to(torch.promote_types(probabilities.dtype, torch.float32))
        sums = sums + (wide * real[:, None]).sum(0)
    tokens = (real.sum() * len(gate_logits)).to(counts)
    (total,) = comm.all_reduce(torch.cat([counts, tokens[None]])).wait()
    counts, tokens = total[:-1], total[-1].clamp(min=1)
    assert isinstance(sums, Tensor)
    return experts * ((counts / tokens**2).to(sums.dtype) * sums).sum()


def _module(model: object) -> Any:
    """Return the Python module of a model; FSDP2 replaces a module's class by a subclass."""
    kinds = (sys.modules[kind.__module__] for kind in type(outermost(model)).__mro__)
    return next((module for module in kinds if _NAME in vars(module)), sys.modules[__name__])


def _parameters(model: object) -> Iterator[nn.Parameter]:
    return model.parameters() if isinstance(model, nn.Module) else iter(())


@lru_cache(maxsize=64)
def _digest(function: Callable[..., Any]) -> str:
    """Return a digest of the statements of a function, without annotations and docstring."""
    (parsed,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(parsed, ast.FunctionDef)
    parsed.body, parsed.returns = parsed.body[1:], None
    for argument in parsed.args.args:
        argument.annotation = None
    return hashlib.sha256(ast.unparse(parsed).encode()).hexdigest()[:12]
