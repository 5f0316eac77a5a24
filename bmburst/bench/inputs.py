"""Random tensors of a cell, and one call of a method forward, or forward and backward."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bmburst.bench.cells import Cell
from bmburst.bench.methods.method import Attend, Method, Setting


@dataclass(frozen=True, slots=True)
class Calls:
    """A method on one rank's tensors, ready to be called again and again.

    Attributes:
        forward: Attention without autograd.
        both: Attention and the gradients of q, k and v.
    """

    forward: Callable[[], object]
    both: Callable[[], object]


def prepare(method: Method, cell: Cell, setting: Setting) -> Calls:
    """Return the method on random q, k, v and dO of this rank's shapes."""
    attend = method.bind(cell, setting)
    q, k, v, grad = random_inputs(method, cell, setting.party.device, setting.party.rank)
    return Calls(lambda: forward(attend, q, k, v), lambda: both(attend, q, k, v, grad))


def random_inputs(method: Method, cell: Cell, device: torch.device, seed: int) -> tuple[Tensor, ...]:
    """Return q, k, v, which want gradients, and dO."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype: torch.dtype = getattr(torch, cell.dtype)
    shapes = [method.input_shape(cell, heads) for heads in (cell.heads, cell.kv_heads, cell.kv_heads)]
    shapes.append(method.output_shape(cell))
    *inputs, grad = (torch.randn(s, generator=generator, device=device, dtype=dtype) for s in shapes)
    return *(t.requires_grad_() for t in inputs), grad


def forward(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention's output, as inference does."""
    with torch.no_grad():
        return attend(q, k, v)


def both(attend: Attend, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v."""
    return torch.autograd.grad(attend(q, k, v), (q, k, v), grad)
