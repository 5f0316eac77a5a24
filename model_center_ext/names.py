"""Modules under other names, with their parameters: the tree of names changes, the code that runs does not."""

from collections.abc import Iterable, Mapping
from typing import Any

import bmtrain as bmt
import torch

from bmburst.convert.model_center import ATTENTION_PLACES, BLOCK_PLACES, MLP_PLACES


def move(module: torch.nn.Module, places: Mapping[str, str], into: torch.nn.Module | None = None) -> None:
    """Register children of a module under dotted paths of names below another.

    The module's own code still reaches them under their first names, as plain attributes.

    Args:
        module: Has the children.
        places: First name to path; what the module has not is passed over.
        into: The root of the paths; by default the module itself.
    """
    root = module if into is None else into
    taken = {name: module._modules.pop(name) for name in places if name in module._modules}
    for name, child in taken.items():
        assert child is not None
        module.__dict__[name] = child
        *parents, last = places[name].split(".")
        at = root
        for parent in parents:
            if parent not in at._modules:
                at.add_module(parent, torch.nn.Module())
            at = at.get_submodule(parent)
        at.add_module(last, child)


def as_model_center(model: torch.nn.Module) -> None:
    """Give the parameters of a `bmburst.blocks.model.Llama` the names that they have in ModelCenter's Llama."""
    inner = model.get_submodule("model")
    for block in inner.get_submodule("layers"):  # type: ignore[attr-defined]  # a list of BMTrain's
        layer = block._module
        move(layer.self_attn, ATTENTION_PLACES)
        move(layer.mlp, MLP_PLACES)
        move(layer, BLOCK_PLACES)
        now = {id(parameter): name for name, parameter in layer.named_parameters()}
        for info in block._param_info:  # by which BMTrain saves and loads
            info["name"] = now[id(info["parameter"])]
    places = {"embed_tokens": "input_embedding", "layers": "encoder.layers", "norm": "encoder.output_layernorm"}
    move(inner, places, into=model)
    model.__dict__["model"] = model._modules.pop("model")
    move(model, {"lm_head": "output_projection"})


def initial_values(model: torch.nn.Module, methods: Mapping[str, bmt.ParameterInitializer]) -> None:
    """Say what `bmtrain.init_parameters` fills parameters with.

    Args:
        model: Whose parameters.
        methods: By a part of a parameter's name; the first that fits counts.
    """
    parameters: Iterable[tuple[str, Any]] = model.named_parameters()
    for name, parameter in parameters:
        parameter._init_method = next(method for part, method in methods.items() if part in name)
