"""How far a method's output and gradients are from attention in fp64, beside one GPU's kernel."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bmburst.bench.cells import ONE_GPU, Cell
from bmburst.bench.inputs import both, forward
from bmburst.bench.methods import Method, Setting
from bmburst.bench.party import Party
from bmburst.bench.patterns import pattern_of
from bmburst_ops.flash import Given, ReferenceKernel
from bmburst_ops.merge import row_dots

NAMES = ("o", "dq", "dk", "dv")
_SEED = 1


@dataclass(frozen=True, slots=True)
class Whole:
    """One attention over a whole sequence, on every rank alike.

    Attributes:
        inputs: q, k, v and dO in the cell's dtype, `[batch, tokens, heads, head_dim]`.
        exact: O, dQ, dK and dV in fp64, of those inputs as they are rounded.
    """

    inputs: tuple[Tensor, Tensor, Tensor, Tensor]
    exact: tuple[Tensor, Tensor, Tensor, Tensor]


def measure_accuracy(method: Method, cell: Cell, setting: Setting) -> dict[str, Any]:
    """Return the relative L2 errors of O, dQ, dK and dV over all ranks of the party: a row beside its name."""
    party = setting.party
    whole = _whole(
        cell.batch, cell.tokens, cell.heads, cell.kv_heads, cell.head_dim, cell.mask, cell.dtype, party.device
    )
    grad_in, out_in = _cutters(method, cell, party)
    q, k, v = (grad_in(t).contiguous().requires_grad_() for t in whole.inputs[:3])
    attend = method.bind(cell, setting)
    found = forward(attend, q, k, v), *both(attend, q, k, v, out_in(whole.inputs[3]).contiguous())
    expected = out_in(whole.exact[0]), *(grad_in(t) for t in whole.exact[1:])
    found, expected = (tuple(method.real(t, cell, party.rank) for t in tensors) for tensors in (found, expected))
    return {"errors": dict(zip(NAMES, _errors(found, expected, party), strict=True))}


def _cutters(method: Method, cell: Cell, party: Party) -> Any:
    if cell.method == ONE_GPU:  # the whole sequence, which one GPU can hold at these lengths
        return (lambda whole: whole), (lambda whole: whole)
    return (
        lambda whole: method.cut_input(whole, cell, party.rank),
        lambda whole: method.cut_output(whole, cell, party.rank),
    )


def _errors(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], party: Party) -> list[float]:
    pairs = zip(found, expected, strict=True)
    squares = torch.stack(
        [torch.stack(((a.double() - b).square().sum(), b.square().sum())) for a, b in pairs]
    )  # [4, 2]
    if party.size > 1:
        dist.all_reduce(squares, group=party.group)
    return [math.sqrt(wrong / right) for wrong, right in squares.tolist()]


@lru_cache(maxsize=1)  # cells of one shape follow each other
def _whole(
    batch: int, tokens: int, heads: int, kv_heads: int, head_dim: int, mask: str, dtype: str, device: torch.device
) -> Whole:
    generator = torch.Generator().manual_seed(_SEED)  # a CPU's: the same numbers wherever the ranks run
    shapes = [(batch, tokens, h, head_dim) for h in (heads, kv_heads, kv_heads, heads)]
    q, k, v, grad = (torch.randn(s, generator=generator).to(device, getattr(torch, dtype)) for s in shapes)
    kernel, pattern, scale = ReferenceKernel(), pattern_of(mask, tokens), head_dim**-0.5
    wide_q, wide_k, wide_v, wide_grad = (t.double() for t in (q, k, v, grad))
    out, lse = kernel.forward(wide_q, wide_k, wide_v, pattern=pattern, scale=scale)
    given = Given(wide_grad, wide_q, wide_k, wide_v, lse, row_dots(wide_grad, out))
    grads = kernel.backward(given, pattern=pattern, scale=scale, deterministic=True)
    return Whole((q, k, v, grad), (out, *grads))
