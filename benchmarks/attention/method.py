"""The interface of an attention method, the kernel that all methods run, and calls on random tensors.

bmburst computes delta and passes it to a kernel's backward. Other projects pass the output, and the kernel computes
delta. If a kernel supports this, peers and the one-GPU comparison use it here, so that bmburst's interface does not
slow them down.
"""

import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.attention.cells import (
    MASKS,
    PLAIN_MASKS,
    Cell,
    Traffic,
    mask_of,
    one_gpu_cell,
    one_gpu_memory,
    pattern_of,
    sizes,
)
from benchmarks.engine.kinds import ONE_GPU
from benchmarks.engine.machine import RankGroup
from bmburst.comm.waits import WaitMeter
from bmburst.schedule.layout import make_layout
from bmburst_ops.flash import BackwardInputs, Band, Gradients, Scoring, Segments, select_kernel
from bmburst_ops.flash.fa4 import fa4_options
from bmburst_ops.flash.inputs import aligned, fa2_arguments, gradient_memory, package_arguments
from bmburst_ops.merge import row_dots

PackedPattern = Band | Segments
"""The mask of a call, aligned at the bottom right."""


class ForBackward(NamedTuple):
    """Arguments of backward besides the inputs: dO, output and log-sum-exp, and memory for the gradients."""

    grad: Tensor
    out: Tensor
    lse: Tensor
    into: Gradients | None = None


class LocalKernel:
    """A kernel of `bmburst_ops.flash`, selected by name and by the tensors of each call.

    Args:
        name: A name of `bmburst_ops.flash.NAMES`; "auto" selects the first that supports the tensors.
    """

    def __init__(self, name: str = "auto") -> None:
        self.choice = name

    def name(self, q: Tensor, k: Tensor, pattern: PackedPattern) -> str:
        """Return the name of the kernel for these inputs."""
        return select_kernel(self.choice, q, k, needs=pattern.needs).name

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pattern: PackedPattern, scale: float) -> tuple[Tensor, Tensor]:
        """Return output, in q's dtype, and log-sum-exp `[batch, heads, queries]`."""
        part = select_kernel(self.choice, q, k, needs=pattern.needs).forward(q, k, v, Scoring(pattern, scale))
        return part.out.to(q.dtype), part.lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, results: ForBackward, pattern: PackedPattern, scale: float
    ) -> Gradients:
        """Return the gradients, in q's dtype, from the global output and log-sum-exp."""
        kernel = select_kernel(self.choice, q, k, needs=pattern.needs)
        own = _OWN_BACKWARD.get(kernel.name)
        if own is not None:
            return own(q, k, v, results, pattern, scale)
        grad, out, lse, into = results
        given = BackwardInputs(grad, q, k, v, lse, row_dots(grad, out))
        grads = kernel.backward(given, Scoring(pattern, scale), deterministic=False, into=into)
        return Gradients(*(g.to(x.dtype) for g, x in zip(grads, (q, k, v), strict=True)))


def _flash_attention_4(
    q: Tensor, k: Tensor, v: Tensor, results: ForBackward, pattern: PackedPattern, scale: float
) -> Gradients:
    interface, call = importlib.import_module("flash_attn.cute.interface"), package_arguments(pattern, q, k)
    flat_q, flat_k, flat_v, out, grad = (aligned(call.flat(t)) for t in (q, k, v, results.out, results.grad))
    memory = gradient_memory(flat_q, flat_k, flat_v, call.flat_targets(results.into))
    lse = call.flat_statistic(results.lse).float().contiguous()
    named = {"dq": memory.q, "dk": memory.k, "dv": memory.v}
    interface._flash_attn_bwd(flat_q, flat_k, flat_v, out, grad, lse, softmax_scale=scale, **named, **fa4_options(call))
    return call.gradients(memory, q.shape[0], results.into)


def _torch(q: Tensor, k: Tensor, v: Tensor, results: ForBackward, pattern: PackedPattern, scale: float) -> Gradients:
    unused = torch.empty(0, dtype=torch.int64, device=q.device)  # random state of a dropout that is zero
    call = fa2_arguments(pattern, q, k)
    grad, flat_q, flat_k, flat_v, out = (aligned(call.flat(t)) for t in (results.grad, q, k, v, results.out))
    lse = call.flat_statistic(results.lse).contiguous()
    lengths = call.queries, call.keys, call.longest_queries, call.longest_keys
    left, right = call.window
    window = {} if left == right == -1 else {"window_size_left": left, "window_size_right": right}
    found = torch.ops.aten._flash_attention_backward(
        *(grad, flat_q, flat_k, flat_v, out, lse, *lengths, 0.0, call.causal, unused, unused), scale=scale, **window
    )
    return call.gradients(Gradients(*found), q.shape[0], results.into)


Backward = Callable[[Tensor, Tensor, Tensor, ForBackward, PackedPattern, float], Gradients]
_OWN_BACKWARD: Mapping[str, Backward] = MappingProxyType({"fa4": _flash_attention_4, "torch": _torch})


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of a rank's q, k and v. It is differentiable, and every rank of the group calls it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Settings of a run that a method needs, besides the cell."""

    group: RankGroup
    kernel: LocalKernel  # the kernel under test
    kernel_name: str = "auto"  # the name of the --kernel option, for methods that select a kernel themselves
    deterministic: bool = False  # whether gradients must be bitwise reproducible, if the method supports it


def applied(function: type[torch.autograd.Function], *arguments: object) -> Attend:
    """Return an autograd function of q, k, v and these arguments as attention."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = function.apply(q, k, v, *arguments)
        return out

    return attend


class Method(ABC):
    """One way to run attention over ranks. This base class shards a sequence into equal parts."""

    name = ""  # of the method in cells
    masks: tuple[str, ...] = PLAIN_MASKS  # the masks that it supports

    def refusal(self, cell: Cell) -> str | None:
        """Return why the cell cannot run, as far as its mask and shape determine that, or None."""
        return self.mask_refusal(cell) or self.shape_refusal(cell)

    def mask_refusal(self, cell: Cell) -> str | None:
        """Return why the method does not support the cell's mask, or None."""
        if cell.mask in self.masks:
            return None
        return f"the method supports {' and '.join(self.masks)} masks only, not '{cell.mask}'"

    def shape_refusal(self, cell: Cell) -> str | None:
        """Return why the method does not support the cell's shape, or None."""
        del cell
        return None

    def layout(self, cell: Cell) -> str:
        """Return the layout of the tokens over the ranks."""
        del cell
        return "contiguous"

    def traffic(self, cell: Cell) -> Traffic | None:
        """Return the bytes that a rank receives; None if unknown."""
        del cell
        return None

    def resolve(self, cell: Cell, setting: Setting) -> tuple[Traffic | None, dict[str, Any]]:
        """Return `traffic` for the choices of the method, and these choices for the row. All ranks call it."""
        del setting
        return self.traffic(cell), {}

    def memory(self, cell: Cell) -> float:
        """Return the approximate peak bytes of a rank in forward and backward."""
        own = sizes(cell)
        return own.held + own.q * own.wide

    def meter(self, setting: Setting) -> WaitMeter | None:
        """Return the meter of waits of the host; None on a GPU, where the host does not wait, or if unknown."""
        del setting
        return None

    @abstractmethod
    def bind(self, cell: Cell, setting: Setting) -> Attend:
        """Return the method's attention on this rank. It may raise errors of a missing package."""

    def positions(self, cell: Cell, rank: int) -> Tensor:
        """Return the global positions of a rank's tokens."""
        layout = make_layout(self.layout(cell), cell.ranks, cell.tokens // cell.ranks, mask_of(cell.mask, cell.tokens))
        return torch.cat([run.start + run.stride * torch.arange(run.tokens) for run in layout.runs(rank)])

    def cut(self, whole: Tensor, cell: Cell, rank: int) -> Tensor:
        """Return a rank's part of q, k, v or the output `[batch, tokens, heads, head_dim]`, or of its gradient."""
        return whole[:, self.positions(cell, rank).to(whole.device)]

    def real(self, held: Tensor, cell: Cell, rank: int) -> Tensor:
        """Return a rank's output or gradient without padding."""
        del cell, rank
        return held

    def shape(self, cell: Cell, heads: int) -> tuple[int, ...]:
        """Return the shape of a rank's q, k, v or output, which has as many heads as q."""
        return cell.batch, cell.tokens // cell.ranks, heads, cell.head_dim


def heads_refusal(cell: Cell) -> str | None:
    """Return why heads cannot be divided evenly over the ranks, or None."""
    for kind, heads in (("query", cell.heads), ("key/value", cell.kv_heads)):
        if heads % cell.ranks:
            return f"{heads} {kind} heads do not divide by {cell.ranks} ranks"
    return None


class OneGpu(Method):
    """One GPU's kernel with a rank's share of the FLOPs (`one_gpu_cell`): the reference of every ratio.

    In the suite "accuracy" it computes the whole sequence.
    """

    name = ONE_GPU
    masks = MASKS

    def traffic(self, cell: Cell) -> Traffic:
        """See `Method.traffic`: nothing moves."""
        del cell
        return Traffic(0, 0)

    def memory(self, cell: Cell) -> float:
        """See `Method.memory`."""
        return one_gpu_memory(cell)

    def bind(self, cell: Cell, setting: Setting) -> Attend:
        """See `Method.bind`."""
        return applied(_Local, setting.kernel, pattern_of(cell.mask, cell.tokens), cell.head_dim**-0.5)

    def shape(self, cell: Cell, heads: int) -> tuple[int, ...]:
        """See `Method.shape`."""
        own = one_gpu_cell(cell)
        return cell.batch, own.tokens, own.heads if heads == cell.heads else own.kv_heads, cell.head_dim


class _Local(torch.autograd.Function):
    """`(q, k, v, kernel, pattern, scale) -> out`: the kernel as a differentiable function."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: LocalKernel, pattern: PackedPattern, scale: float
    ) -> Tensor:
        out, lse = kernel.forward(q, k, v, pattern, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = kernel, pattern, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kernel, pattern, scale = ctx.call
        q, k, v, out, lse = ctx.saved_tensors
        return *kernel.backward(q, k, v, ForBackward(grad, out, lse), pattern, scale), None, None, None


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls of a method on one rank's tensors; `host` returns the host's seconds in attention and in its backward."""

    forward: Callable[[], object]  # attention without autograd
    both: Callable[[], object]  # attention and the gradients of q, k and v
    host: Callable[[], tuple[float, float]] | None = None


def prepare(method: Method, cell: Cell, setting: Setting, clock: Callable[[], float] = time.perf_counter) -> Calls:
    """Return calls of the method on random q, k, v and dO of this rank's shapes; `clock` is the host's, in seconds."""
    attend = method.bind(cell, setting)
    q, k, v, grad = random_inputs(method, cell, setting.group.device, setting.group.rank)
    meter = method.meter(setting)

    def host() -> tuple[float, float]:
        with waits_of(meter) as waited:
            began = clock()
            out = attend(q, k, v)
            middle, first = clock(), waited()
            torch.autograd.grad(out, (q, k, v), grad)
            return middle - began - first, clock() - middle - waited()

    return Calls(lambda: forward_without_grad(attend, q, k, v), lambda: both(attend, q, k, v, grad), host)


@contextmanager
def waits_of(meter: WaitMeter | None) -> Iterator[Callable[[], float]]:
    """Return a function that returns the seconds of the host in waits for other ranks since its last call."""
    if meter is None:
        yield lambda: 0.0
        return
    meter.read()
    meter.running = True
    try:
        yield meter.read
    finally:
        meter.running = False


def random_inputs(method: Method, cell: Cell, device: torch.device, seed: int) -> tuple[Tensor, ...]:
    """Return q, k, v, which require gradients, and dO."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype: torch.dtype = getattr(torch, cell.dtype)
    shapes = [method.shape(cell, heads) for heads in (cell.heads, cell.kv_heads, cell.kv_heads, cell.heads)]
    *inputs, grad = (torch.randn(s, generator=generator, device=device, dtype=dtype) for s in shapes)
    return *(t.requires_grad_() for t in inputs), grad


def forward_without_grad(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention's output, without autograd."""
    with torch.no_grad():
        return attend(q, k, v)


def both(attend: Attend, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v."""
    return torch.autograd.grad(attend(q, k, v), (q, k, v), grad)
