"""Measures a cell of the attention benchmark on a rank: time relative to one GPU's kernel, or errors against fp64."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.attention.cells import (
    PLAIN_MASKS,
    TREE,
    Cell,
    accuracy_ranks,
    facts,
    forward_flops,
    one_gpu_cell,
    one_gpu_memory,
    pattern_of,
    plain_causal,
)
from benchmarks.attention.kind import timeline_title
from benchmarks.attention.method import (
    Attend,
    Calls,
    LocalKernel,
    Method,
    OneGpu,
    Setting,
    both,
    forward_without_grad,
    prepare,
)
from benchmarks.attention.methods import all_methods
from benchmarks.engine.job import Job, RankRun
from benchmarks.engine.kinds import ONE_GPU, Row
from benchmarks.engine.machine import Gauge, RankGroup
from benchmarks.engine.timing import Timer, Times, in_turns, quotient, record_timeline
from bmburst.amounts import GIB
from bmburst_ops import ATTENTION_BACKWARD
from bmburst_ops.flash import BackwardInputs, ReferenceKernel, Scoring
from bmburst_ops.merge import row_dots
from bmburst_ops.rotary import apply_rotary

_ERRORS = ("o", "dq", "dk", "dv")
_SEED = 1  # of the inputs for accuracy
_CALL = {"forward": "forward", "forward_backward": "both"}


class AttentionRun(RankRun[Cell]):
    """See `RankRun`."""

    def prepare(self) -> None:
        """See `RankRun.prepare`."""
        self.kernel = LocalKernel(self.job.kernel)
        self.methods = all_methods(self.device.type)
        self.groups = {size: self._group(size) for size in accuracy_ranks(self.world)}

    def refusal(self, cell: Cell) -> str | None:
        """See `RankRun.refusal`."""
        method = self.methods[cell.method]
        return method.refusal(cell) or _memory_refusal(method, cell, self.gauge)

    def measure(self, cell: Cell) -> Row:
        """See `RankRun.measure`."""
        method, group = self.methods[cell.method], self.groups[cell.ranks]
        assert group is not None  # this rank takes part
        deterministic = self.job.options["deterministic"]
        setting = Setting(group=group, kernel=self.kernel, kernel_name=self.job.kernel, deterministic=deterministic)
        if cell.suite == "accuracy":
            found = measure_accuracy(method, cell, setting)
        else:
            found = measure_speed(method, cell, setting, self.gauge, self.job)
        return {"layout": method.layout(cell), "kernel": self._kernel_name(cell), **found}

    def _kernel_name(self, cell: Cell) -> str:
        dtype: torch.dtype = getattr(torch, cell.dtype)
        q = torch.empty(1, 1, 1, cell.head_dim, dtype=dtype, device=self.device)
        return self.kernel.name(q, q, pattern_of(cell.mask, cell.tokens))

    def _group(self, size: int) -> RankGroup | None:
        """Return the group of the first `size` ranks; None if this rank is not in it. All ranks call it."""
        group = dist.group.WORLD if size == self.world else dist.new_group(list(range(size)))
        if self.rank >= size:
            return None
        assert group is not None  # this rank is in it
        whole = size == self.world
        return RankGroup(process_group=group, rank=self.rank, size=size, device=self.device, is_world=whole)


def _memory_refusal(method: Method, cell: Cell, gauge: Gauge) -> str | None:
    """Return why the cell would not fit in this rank's memory, by the method's estimate, or None."""
    beside = 0.0 if cell.method == ONE_GPU else one_gpu_memory(cell)
    needed, capacity = method.memory(cell) + beside, gauge.capacity(cell.ranks)
    if needed <= capacity:
        return None
    return f"would not fit: about {needed / GIB:.0f} GiB a rank, of {capacity / GIB:.0f} GiB"


def measure_speed(
    method: Method, cell: Cell, setting: Setting, gauge: Gauge, job: Job, timer: Timer = in_turns
) -> dict[str, Any]:
    """Return the contents of a cell's row: times, rates, ratio, memory. All ranks return the same times.

    * `milliseconds`: time of the slowest rank.
    * `tflops`: a GPU's share of the FLOPs divided by that time.
    * `ratio`: the method's rate divided by that of one GPU, median over the rounds.
    * `exposed_ms`: the median time minus the time of one GPU's kernel for the same FLOPs. It includes exposed transfers
      and other work of the method (layout changes, merges, smaller tiles).
    * `host_us`: median microseconds of the host per call, forward (with autograd) and backward, of the slowest rank.
    * Under documents and windows, `arithmetic_ms`: the time of one GPU's kernel for the same FLOPs under a
      plain causal mask; and `times_arithmetic`: the method's time divided by that, median over the rounds.
    """
    traffic, decided = method.resolve(cell, setting)
    gauge.clear()
    calls = prepare_block(method, cell, setting) if cell.suite == "block" else prepare(method, cell, setting)
    for call in (calls.forward, calls.both):
        call()
    peak = gauge.peak()
    others = _others(cell, setting)
    row: dict[str, Any] = {"peak_memory_gib": None if peak is None else peak / GIB, **decided}
    row |= facts(cell.mask, cell.tokens)
    if calls.host is not None:
        row["host_us"] = host_microseconds(calls.host, setting.group)
    for direction, factor in (("forward", 1.0), ("forward_backward", 1 + ATTENTION_BACKWARD)):
        moved = None if traffic is None else getattr(traffic, direction)
        together = [getattr(own, _CALL[direction]) for own in (calls, *others)]
        row[direction] = _measure(together, _flops(cell, direction, factor), setting, job, timer) | {"bytes": moved}
        if job.trace_folder is not None:
            title = timeline_title(cell, direction)
            record_timeline(together[0], job.trace_folder, f"{cell.key}/{direction}", title, setting.group)
    return row


def host_microseconds(host: Callable[[], tuple[float, float]], group: RankGroup) -> dict[str, float]:
    """Return the median microseconds of the host in forward and backward, of the slowest rank. All ranks call it.

    Each call begins on an idle GPU and is not waited for: there it is the time between call and return. On a CPU the
    kernels count too, but not the waits for other ranks. Long calls are repeated less often.
    """

    def once() -> tuple[float, float]:
        group.barrier()
        return host()

    began = time.perf_counter()
    once()
    group.barrier()
    took = group.largest(time.perf_counter() - began)
    calls = min(_HOST_CALLS, int(_HOST_SECONDS / took) + 1)
    seconds = [once() for _ in range(calls)][calls // 4 :]  # graphs are captured after a few calls
    medians = torch.tensor(seconds, dtype=torch.float64, device=group.device).median(0).values * 1e6
    forward, backward = group.all_reduce(medians, dist.ReduceOp.MAX).tolist()
    return {"forward": forward, "backward": backward}


_HOST_CALLS = 24
_HOST_SECONDS = 2.0


def _others(cell: Cell, setting: Setting) -> tuple[Calls, ...]:
    """Return the calls of one GPU with the same FLOPs and, for documents and windows, also plain causal attention."""
    if cell.suite == "block":
        return (prepare_block_on_one_gpu(cell, setting),)
    if cell.mask in PLAIN_MASKS:
        return (prepare(OneGpu(), cell, setting),)
    if cell.mask == TREE:
        return (prepare(OneGpu(), plain_causal(cell), setting),)
    return prepare(OneGpu(), cell, setting), prepare(OneGpu(), plain_causal(cell), setting)


def _flops(cell: Cell, direction: str, factor: float) -> list[float]:
    """Return the FLOPs of a rank's share of the cell, and of each call of `_others`."""
    method, one = forward_flops(cell) / cell.ranks, forward_flops(one_gpu_cell(cell))
    projections = projection_flops(cell, direction) if cell.suite == "block" else 0.0
    own = one if cell.method == ONE_GPU else method
    plain = [] if cell.mask in (*PLAIN_MASKS, TREE) else [forward_flops(plain_causal(cell))]
    return [flops * factor + projections for flops in (own, one, *plain)]


def _measure(
    calls: Sequence[Callable[[], object]], flops: Sequence[float], setting: Setting, job: Job, timer: Timer
) -> dict[str, Any]:
    """Return times and rates of the first call, and their ratios to those of the second and, if present, third call."""
    rounds = timer(*calls, group=setting.group, repeats=job.repeats, seconds=job.cell_seconds)
    times, one = (Times.of(milliseconds) for milliseconds in rounds[:2])
    same_work = flops[0] / flops[1]
    row: dict[str, Any] = {
        "milliseconds": asdict(times),
        "one_gpu_milliseconds": asdict(one),
        "tflops": flops[0] / times.median / 1e9,
        "one_gpu_tflops": flops[1] / one.median / 1e9,
        "ratio": quotient(rounds[1], rounds[0]) * same_work,
        "exposed_ms": times.median - one.median * same_work,
    }
    if len(rounds) > 2:
        same_work = flops[0] / flops[2]
        plain = Times.of(rounds[2]).median
        row |= {"arithmetic_ms": plain * same_work, "arithmetic_tflops": flops[2] / plain / 1e9}
        row["times_arithmetic"] = quotient(rounds[0], rounds[2]) / same_work
    return row


@dataclass(frozen=True, slots=True)
class _Whole:
    """Attention over a whole sequence, the same on every rank."""

    inputs: tuple[Tensor, ...]  # q, k, v and dO in the cell's dtype, `[batch, tokens, heads, head_dim]`
    exact: tuple[Tensor, ...]  # O, dQ, dK and dV in fp64, computed from the rounded inputs


def measure_accuracy(method: Method, cell: Cell, setting: Setting) -> dict[str, Any]:
    """Return the contents of an accuracy row: relative L2 errors of O, dQ, dK and dV over all ranks of the group."""
    group = setting.group
    whole = _whole(replace(cell, suite="", method="", ranks=1), group.device)
    is_whole = cell.method == ONE_GPU
    *inputs, grad = (t if is_whole else method.cut(t, cell, group.rank).contiguous() for t in whole.inputs)
    q, k, v = (t.requires_grad_() for t in inputs)
    attend = method.bind(cell, setting)
    found = forward_without_grad(attend, q, k, v), *both(attend, q, k, v, grad)
    expected = tuple(t if is_whole else method.cut(t, cell, group.rank) for t in whole.exact)
    found, expected = (tuple(method.real(t, cell, group.rank) for t in tensors) for tensors in (found, expected))
    return {"errors": dict(zip(_ERRORS, relative_errors(found, expected, group), strict=True))}


def relative_errors(found: Sequence[Tensor], expected: Sequence[Tensor], group: RankGroup) -> list[float]:
    """Return the relative error (L2) of each tensor over all ranks; every rank calls it."""
    pairs = zip(found, expected, strict=True)
    squares = torch.stack([torch.stack(((a.double() - b).square().sum(), b.square().sum())) for a, b in pairs])
    return [math.sqrt(wrong / right) for wrong, right in group.all_reduce(squares).tolist()]


@lru_cache(maxsize=1)  # cells of the same shape are adjacent
def _whole(cell: Cell, device: torch.device) -> _Whole:
    generator = torch.Generator().manual_seed(_SEED)  # on the CPU: the same numbers on every device
    counts = (cell.heads, cell.kv_heads, cell.kv_heads, cell.heads)
    shapes = [(cell.batch, cell.tokens, heads, cell.head_dim) for heads in counts]
    q, k, v, grad = (torch.randn(s, generator=generator).to(device, getattr(torch, cell.dtype)) for s in shapes)
    kernel, pattern, scale = ReferenceKernel(), pattern_of(cell.mask, cell.tokens), cell.head_dim**-0.5
    wide_q, wide_k, wide_v, wide_grad = (t.double() for t in (q, k, v, grad))
    out, lse = kernel.forward(wide_q, wide_k, wide_v, Scoring(pattern, scale))
    given = BackwardInputs(wide_grad, wide_q, wide_k, wide_v, lse, row_dots(wide_grad, out))
    grads = kernel.backward(given, Scoring(pattern, scale), deterministic=True)
    return _Whole((q, k, v, grad), (out, *grads))


_THETA = 500_000.0  # LLaMA 3's base of the rotary embedding
_STEPS = {"forward": 1, "forward_backward": 3}  # products per weight: forward; weight gradient and input gradient


def projection_flops(cell: Cell, direction: str) -> float:
    """Return the FLOPs of a rank's projections, "forward" or "forward_backward"."""
    tokens, width = cell.batch * cell.tokens // cell.ranks, cell.heads * cell.head_dim
    outputs = (cell.heads + 2 * cell.kv_heads) * cell.head_dim + width
    return 2.0 * tokens * width * outputs * _STEPS[direction]


def prepare_block(method: Method, cell: Cell, setting: Setting) -> Calls:
    """Return a LLaMA attention block (projections, rotary embedding) around a method, on random hidden states.

    Projections and rotary embedding run on a rank's tokens for every method.
    """
    if cell.method == ONE_GPU:
        return prepare_block_on_one_gpu(cell, setting)
    block = _Block.random(cell, setting, method.positions(cell, setting.group.rank))
    attend = method.bind(cell, setting)

    def forward() -> Tensor:
        with torch.no_grad():
            return block(attend)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(block(attend), (block.hidden, block.qkv, block.out), block.grad)

    return Calls(forward, both)


def prepare_block_on_one_gpu(cell: Cell, setting: Setting) -> Calls:
    """Return one GPU's block with a rank's share of the FLOPs.

    Its projections have a rank's number of tokens, and its attention has a sequence of S / sqrt(P) tokens.
    """
    block = _Block.random(cell, setting, torch.arange(cell.tokens // cell.ranks))
    kernel = prepare(OneGpu(), cell, setting)
    shape = (cell.batch, cell.tokens // cell.ranks, cell.heads, cell.head_dim)
    attended = torch.randn(shape, device=block.hidden.device, dtype=block.hidden.dtype).requires_grad_()
    given: list[Tensor] = []

    def forward() -> None:
        with torch.no_grad():
            block.heads()
            kernel.forward()
            block.project(attended)

    def both() -> None:
        heads = block.heads()
        if not given:
            given.extend(torch.randn_like(t) for t in heads)
        result = block.project(attended)
        torch.autograd.grad(result, (attended, block.out), block.grad)
        kernel.both()
        torch.autograd.grad(heads, (block.hidden, block.qkv), given)

    return Calls(forward, both)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    """An attention block on a rank: weights, hidden states and rotary angles."""

    hidden: Tensor  # input, `[batch, local_tokens, width]`
    grad: Tensor  # gradient of the output, with the shape of `hidden`
    qkv: Tensor  # weight, `[(heads + 2 kv_heads) x dim, width]`
    out: Tensor  # weight, `[width, heads x dim]`
    angles: tuple[Tensor, Tensor]  # cosine and sine, `[batch, local_tokens, dim / 2]` in fp32
    split: tuple[int, int, int]  # numbers of heads of q, k and v

    @classmethod
    def random(cls, cell: Cell, setting: Setting, positions: Tensor) -> "_Block":
        """Return a random block. Weights are equal on all ranks, hidden states differ."""
        device, width = setting.group.device, cell.heads * cell.head_dim
        dtype: torch.dtype = getattr(torch, cell.dtype)
        split = (cell.heads, cell.kv_heads, cell.kv_heads)

        def draw(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
            generator = torch.Generator(device).manual_seed(seed)
            return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

        shape = (cell.batch, cell.tokens // cell.ranks, width)
        pairs = torch.arange(0, cell.head_dim, 2, dtype=torch.float64) / cell.head_dim
        angles = (positions[None, :, None] / _THETA**pairs).expand(cell.batch, -1, -1)
        return cls(
            hidden=draw(10 + setting.group.rank, *shape).requires_grad_(),
            grad=draw(10_000 + setting.group.rank, *shape),
            qkv=draw(0, sum(split) * cell.head_dim, width, scale=width**-0.5).requires_grad_(),
            out=draw(1, width, width, scale=width**-0.5).requires_grad_(),
            angles=(angles.cos().float().to(device), angles.sin().float().to(device)),
            split=split,
        )

    def __call__(self, attend: Attend) -> Tensor:
        """Return the block's output, with the shape of the hidden states."""
        return self.project(attend(*self.heads()))

    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q and k after rotary embedding, and v."""
        q, k, v = linear(self.hidden, self.qkv).unflatten(-1, (sum(self.split), -1)).split(self.split, 2)
        return apply_rotary(q, *self.angles), apply_rotary(k, *self.angles), v

    def project(self, attended: Tensor) -> Tensor:
        """Return the output projection of `[batch, local_tokens, heads, dim]`."""
        return linear(attended.flatten(2), self.out)
