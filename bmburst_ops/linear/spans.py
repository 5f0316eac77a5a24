"""Fragments of a flat batch as kernels read them: their tokens and chunks, on the device."""

from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from bmburst_ops.fragments import CHUNK


class Spans(NamedTuple):
    """The tokens of some fragments, int64: `[fragments]` each.

    Attributes:
        begins: First tokens.
        ends: The tokens behind the last ones.
        firsts: Numbers of their first chunks, among the chunks of all fragments.
    """

    begins: Tensor
    ends: Tensor
    firsts: Tensor


class Fragments(NamedTuple):
    """All fragments of a flat batch.

    Attributes:
        spans: Their tokens.
        edges: Their edges in tokens, int64: `[fragments + 1]`.
        chunks: Fragment of each chunk, and its number in the fragment, int64: `[chunks, 2]`.
    """

    spans: Spans
    edges: Tensor
    chunks: Tensor


@lru_cache(maxsize=64)
def all_fragments(edges: tuple[int, ...], device: torch.device) -> Fragments:
    """Return the fragments between edges, without waiting for the device."""
    numbers = [(n, i) for n, count in enumerate(_counts(edges)) for i in range(count)]
    on_device = torch.tensor(edges, dtype=torch.int64).to(device)
    chunks = torch.tensor(numbers, dtype=torch.int64).view(-1, 2).to(device)
    return Fragments(chosen_spans(edges, tuple(range(len(edges) - 1)), device), on_device, chunks)


@lru_cache(maxsize=64)
def chosen_spans(
    edges: tuple[int, ...], chosen: tuple[int, ...], device: torch.device, empty: tuple[int, ...] = ()
) -> Spans:
    """Return the tokens of some of the fragments between edges, without waiting for the device.

    Args:
        edges: Edges of all fragments.
        chosen: Numbers of the fragments.
        device: Device of the result.
        empty: Those of them that shall have no tokens.
    """
    firsts = list(accumulate(_counts(edges), initial=0))
    rows = [(edges[n], edges[n + (n not in empty)], firsts[n]) for n in chosen]
    found = torch.tensor(rows, dtype=torch.int64)
    return Spans(*found.view(-1, 3).to(device).T.contiguous())


def _counts(edges: tuple[int, ...]) -> list[int]:
    """Return the number of chunks of each fragment."""
    return [-(-(end - begin) // CHUNK) for begin, end in pairwise(edges)]
