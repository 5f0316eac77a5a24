"""Errors of a tile of attention, and views of the same numbers with other strides."""

import math

import torch

from bmburst_ops.flash import Partial

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPSILON = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def error(ours, wanted):
    """Relative error of the whole tensor."""
    assert ours.shape == wanted.shape
    return ((ours.double().cpu() - wanted).norm() / wanted.norm()).item()


def some_heads(tensor, first=1):
    """The same numbers as a slice of the heads of a wider tensor."""
    wide = torch.full((*tensor.shape[:2], tensor.shape[2] + 3, tensor.shape[3]), math.nan).to(tensor)
    view = wide[:, :, first : first + tensor.shape[2]]
    return view.copy_(tensor)


def some_statistics(statistic):
    """The same numbers `[batch, heads, tokens]` as a slice of the heads and tokens of a larger one."""
    batch, heads, tokens = statistic.shape
    return torch.full((batch, heads + 2, tokens + 3), math.nan).to(statistic)[:, 1:-1, 3:].copy_(statistic)


def room(q, view, dtype=torch.float32):
    """Return where results of queries can go, which hold no number yet: the log-sum-exp is a slice, in a dtype."""
    batch, queries, heads, _ = q.shape
    lse = torch.full((batch, heads, queries), math.nan, dtype=dtype, device=q.device)
    return Partial(view(torch.full_like(q, math.nan)), some_statistics(lse))


def wider_room(q):
    """Return where results of 16-bit queries can go, each in a wider dtype than a kernel has it."""
    return room(q.float(), lambda tensor: tensor, torch.float64)


def assert_same(results, targets):
    """Results are the very tensors that were given for them, if any were."""
    assert targets is None or all(a is b for a, b in zip(results, targets, strict=True))


def head_major(tensor):
    """The same numbers, laid out head by head, as pulls by head group leave them."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def one_number_off(tensor):
    """The same numbers in rows that start where no vector load can."""
    wide = torch.zeros(*tensor.shape[:3], tensor.shape[3] + 1).to(tensor)
    return wide[..., 1:].copy_(tensor)


def every_second(tensor):
    """The same numbers in every second place."""
    return torch.stack([tensor, tensor], -1)[..., 1]
