"""Rotary tables of transformers that depend on the largest position that a model sees, on split sequences.

Frequencies of the types "dynamic" and "longrope" do, and with `long_mscale` the scale of PhiMoE's tables of any type.
A rank sees only its own positions:

- In training, the ranks must compute the same tables, or the model is refused.
- In generation, every rotary module gets the last position of the whole text in addition. transformers also keeps the
  frequencies of the longest text so far. Here they follow the text alone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmburst.errors import UserError
from bmburst.integrations.transformers_modules import Modules


class Rotary(NamedTuple):
    """A rotary module whose tables depend on the length.

    Attributes:
        module: The module.
        kind: Its rope type.
        layers: The type of layers, where the module has tables for several.
        original: The greatest length with the tables of short texts.
        longest: The greatest length whose frequencies the module keeps.
    """

    module: torch.nn.Module
    kind: str
    layers: str | None
    original: int
    longest: int

    @property
    def is_dynamic(self) -> bool:
        """Whether each greater length has frequencies of its own; else all of them have the same."""
        return "dynamic" in self.kind


def by_length(modules: Modules) -> Iterator[Rotary]:
    """Yield the rotary modules of a model whose tables depend on the length, once for each type of layers."""
    for module in modules.having("rope_type"):
        kinds = module.rope_type
        for layers, kind in kinds.items() if isinstance(kinds, dict) else ((None, kinds),):
            if not isinstance(kind, str) or kind == "default":
                continue
            config = module.config
            parameters = config.rope_parameters if layers is None else config.rope_parameters[layers]
            if "dynamic" in kind:
                own = f"{layers}_max_seq_len_cached"
                longest = getattr(module, own, module.max_seq_len_cached)
                yield Rotary(module, kind, layers, int(module.original_max_seq_len), int(longest))
            elif kind == "longrope" or "long_mscale" in parameters:
                original = parameters.get("original_max_position_embeddings", config.max_position_embeddings)
                yield Rotary(module, kind, layers, original, original)


def require_one_frequency(modules: Modules, ends: Callable[[], tuple[int, ...]], *, of_rows: bool) -> None:
    """Check that all ranks, and all rows of a tree, compute the same rotary tables.

    Args:
        modules: Those of a model of transformers.
        ends: Returns the largest position id + 1 of each rank; called only if the model depends on it.
        of_rows: Whether the ends are those of rows that a tree shares with others.

    Raises:
        UserError: They would choose different tables by their largest positions.
    """
    for rotary in by_length(modules):
        each = ends()
        longest = max(each)
        same = set(each) if rotary.is_dynamic else {min(end, rotary.original + 1) for end in each}
        # At the original length itself, a module keeps the frequencies of a longer text that it has seen.
        allowed = rotary.original - (rotary.longest > rotary.original)
        if longest > allowed and len(same) > 1:
            striped = "" if of_rows else 'SplitSequences(mesh, layout="striped"), or '
            what = "rows of a tree" if of_rows else "ranks, or rows with their padding,"
            raise UserError(
                f"rope type {rotary.kind!r} takes its rotary tables from the largest position, and {what} have "
                f"{min(each)} to {longest}\n"
                f"fix: {striped}sequences of at most {allowed} with their padding, or another rope type"
            )


@contextmanager
def one_length(model: torch.nn.Module, length: int) -> Iterator[None]:
    """Compute rotary tables with the frequencies of a text of `length` tokens, whichever positions the model gets."""

    def extended(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        last = positions.new_full((*positions.shape[:-1], 1), length - 1)
        longer = torch.cat((positions, last), -1)
        if "position_ids" in kwargs:
            return args, kwargs | {"position_ids": longer}
        return (args[0], longer, *args[2:]), kwargs

    def cut(_: torch.nn.Module, __: object, tables: Any) -> Any:
        return tables[..., :-1, :] if isinstance(tables, Tensor) else tuple(each[..., :-1, :] for each in tables)

    handles = []
    for module in {id(rotary.module): rotary.module for rotary in by_length(Modules(model))}.values():
        handles.append(module.register_forward_pre_hook(extended, with_kwargs=True))
        handles.append(module.register_forward_hook(cut))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def own_frequencies(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Begin and end with the frequencies of a short text: dynamic rotary modules remember the longest text so far."""

    def forget() -> None:
        for rotary in by_length(Modules(model)):
            chosen = {} if rotary.layers is None else {"layer_type": rotary.layers}
            place = torch.zeros(1, 1, dtype=torch.int64, device=device)
            rotary.module(torch.zeros(1, device=device), place, **chosen)

    forget()
    try:
        yield
    finally:
        forget()
