"""Fragments of a flat batch as kernels read them: their tokens and chunks, on the device."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bmburst_ops.flash.inputs import DeviceVectors, copy_to_device
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


def all_fragments(edges: tuple[int, ...], device: torch.device) -> Fragments:
    """Return the fragments between edges, without waiting for the device."""
    *spans, on_device, chunks = _all_sent(edges, device).here()
    return Fragments(Spans(*spans), on_device, chunks.view(-1, 2))


def chosen_spans(
    edges: tuple[int, ...], chosen: tuple[int, ...], device: torch.device, empty: tuple[int, ...]
) -> Spans:
    """Return the tokens of some of the fragments between edges, without waiting for the device.

    Args:
        edges: Edges of all fragments.
        chosen: Numbers of the fragments.
        device: Device of the result.
        empty: Those of them that shall have no tokens.
    """
    return Spans(*_chosen_sent(edges, chosen, device, empty).here())


def numbers_on(device: torch.device, numbers: tuple[int, ...]) -> Tensor:
    """Return numbers on a device, int64, without waiting for it."""
    return _numbers_sent(numbers, device).here()[0]


@lru_cache(maxsize=64)
def _all_sent(edges: tuple[int, ...], device: torch.device) -> DeviceVectors:
    on_host = torch.tensor(edges, dtype=torch.int64)
    spans = _spans(on_host)
    numbers = torch.repeat_interleave(_counts(on_host))  # the fragment of each chunk
    chunks = torch.stack((numbers, torch.arange(len(numbers)) - spans.firsts[numbers]), 1)
    return copy_to_device([t.numpy() for t in (*spans, on_host, chunks)], device, torch.int64)


@lru_cache(maxsize=64)
def _chosen_sent(
    edges: tuple[int, ...], chosen: tuple[int, ...], device: torch.device, empty: tuple[int, ...]
) -> DeviceVectors:
    numbers, without = (torch.tensor(each, dtype=torch.int64) for each in (chosen, empty))
    begins, ends, firsts = (t[numbers] for t in _spans(torch.tensor(edges, dtype=torch.int64)))
    ends = torch.where(torch.isin(numbers, without), begins, ends)
    return copy_to_device([t.numpy() for t in (begins, ends, firsts)], device, torch.int64)


@lru_cache(maxsize=64)
def _numbers_sent(numbers: tuple[int, ...], device: torch.device) -> DeviceVectors:
    return copy_to_device([np.array(numbers, np.int64)], device, torch.int64)


def _spans(edges: Tensor) -> Spans:
    """Return the tokens of all fragments, on the host."""
    counts = _counts(edges)
    return Spans(edges[:-1], edges[1:], counts.cumsum(0) - counts)


def _counts(edges: Tensor) -> Tensor:
    """Return the number of chunks of each fragment."""
    return edges.diff().add(CHUNK - 1).div(CHUNK, rounding_mode="floor")
