"""AdamW's arithmetic in host memory: for weights on a GPU, beside their copies, and for weights that live there.

Of a GPU's weights the gradient comes in pieces, `bmburst_ops.host_adamw` updates moments and fp32 master weights where
they lie, and the weights go back, rounded to nearest even. While the processor is at one piece, the gradients of the
next ones are on their way in and the weights of those before on their way out.

Weights that live in host memory are updated one block after the other beside the next forward pass. Of their master
weights only what bf16 weights lack is kept, a 16-bit remainder. The host then holds 2 + 2 + 8 bytes for a weight and
its state, where a master of its own takes 14.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bmburst.comm.host_memory import HostShard, host_zeros
from bmburst_ops.host_adamw import adamw_, pieces

MASTER, MEAN, SQUARE, STEP = "_param_fp32", "exp_avg", "exp_avg_sq", "step"
REMAINDER = "_param_remainder"
PIECE = 1 << 22
"""Numbers of a piece."""
DEPTH = 3
"""Pieces that have pinned memory: one comes, one is worked on, one goes."""
_WIDE = 4  # bytes of the widest dtype


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Update:
    """One parameter that is to take a step.

    Attributes:
        weights: Contiguous, in fp32, bf16 or fp16, on any device; written.
        gradient: In the shape, dtype and device of `weights`; only read.
        state: Moments `exp_avg` and `exp_avg_sq` and, unless `weights` are fp32, the master weights `_param_fp32`: fp32
            in host memory, updated in place; and `step`, the steps taken before, counted up.
        lr: Learning rate.
        betas: Decay of the moments.
        eps: Added to the root of the second moment.
        weight_decay: Per unit of `lr`; decoupled.
    """

    weights: Tensor
    gradient: Tensor
    state: dict[str, Any]
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


class HostAdam:
    """Updates parameters on a GPU from state in host memory (arXiv:1711.05101, algorithm 2).

    It takes `2 * depth * piece` numbers of pinned memory, fewer where the largest parameter is smaller than a piece,
    whatever the model. Where there is no GPU the same copies are made in order, by BMTrain's host runtime.

    Args:
        piece: Numbers that are copied and updated at once; a multiple of 64.
        depth: Pieces under way at a time.
    """

    def __init__(self, *, piece: int = PIECE, depth: int = DEPTH) -> None:
        if piece < 1 or piece % 64 or depth < 1:
            raise ValueError(f"piece {piece}, depth {depth}: a positive multiple of 64, and at least 1")
        self._piece, self._depth = piece, depth
        self._slots: list[_Slot] = []
        self._incoming: Any = None
        self._outgoing: Any = None

    @torch.no_grad()
    def step(self, updates: Sequence[Update], scale: float = 1) -> None:
        """Update weights and state; the current stream then waits for the weights.

        The host comes back when its arithmetic is done, while the last weights may still be on their way. It waits for
        gradients one piece at a time and for nothing else: not for what other streams do.

        Args:
            updates: Each parameter once. State and gradients must not change meanwhile.
            scale: Gradients are divided by it, in fp32.
        """
        jobs = [(update, run) for update in updates for run in pieces(update.weights.numel(), self._piece)]
        for update in updates:
            update.state[STEP] += 1
        if not jobs:
            return
        self._prepare(max(run.stop - run.start for _, run in jobs))
        current = torch.cuda.current_stream()
        # Gradients must be finished before they are read, and weights no longer be read before they are written.
        self._incoming.wait_stream(current)
        self._outgoing.wait_stream(current)
        try:
            self._work_off(jobs, scale)
        finally:
            # The caller may free or overwrite what we still read or write.
            current.wait_stream(self._incoming)
            current.wait_stream(self._outgoing)

    def _work_off(self, jobs: "Sequence[tuple[Update, slice]]", scale: float) -> None:
        slots, depth = self._slots, self._depth
        for slot, (update, run) in zip(slots, jobs, strict=False):
            self._fetch(slot, update, run)
        for number, (update, run) in enumerate(jobs):
            slot = slots[number % depth]
            slot.here.synchronize()
            weights = _arithmetic(update, run, slot, scale)
            with torch.cuda.stream(self._outgoing):
                update.weights.view(-1)[run].copy_(weights, non_blocking=True)
                slot.gone.record(self._outgoing)
            if number + depth < len(jobs):
                self._fetch(slot, *jobs[number + depth])

    def _fetch(self, slot: "_Slot", update: Update, run: slice) -> None:
        """Have a piece's gradient on its way here, and its weights where they have no master."""
        with torch.cuda.stream(self._incoming):
            slot.of("gradient", update.weights.dtype, run).copy_(update.gradient.reshape(-1)[run], non_blocking=True)
            if _is_master(update):
                self._incoming.wait_event(slot.gone)  # it goes into the memory that the piece before leaves from
                slot.of("weights", update.weights.dtype, run).copy_(update.weights.view(-1)[run], non_blocking=True)
            slot.here.record(self._incoming)

    def _prepare(self, numbers: int) -> None:
        """Make streams and memory, at the first step or where they are too small."""
        if self._incoming is None:
            self._incoming, self._outgoing = torch.cuda.Stream(), torch.cuda.Stream()
        if not self._slots or self._slots[0].numbers < numbers:
            for slot in self._slots:
                slot.gone.synchronize()
            self._slots = [_Slot(numbers) for _ in range(self._depth)]


class _Slot:
    """Pinned memory for a piece on its way in and on its way out, and when it has come and gone."""

    def __init__(self, numbers: int) -> None:
        self.numbers = numbers
        self._memory = {
            name: torch.empty(numbers * _WIDE, dtype=torch.uint8, device="cpu", pin_memory=True)
            for name in ("gradient", "weights")
        }
        self.here, self.gone = torch.cuda.Event(), torch.cuda.Event()

    def of(self, name: str, dtype: torch.dtype, run: slice) -> Tensor:
        """Return the memory of a run's gradient or weights."""
        return self._memory[name].view(dtype)[: run.stop - run.start]


def _arithmetic(update: Update, run: slice, slot: _Slot, scale: float) -> Tensor:
    """Update a piece's state, and return its weights in pinned memory.

    Args:
        update: The parameter.
        run: The piece.
        slot: Holds the gradient, and the weights where they are their own master.
        scale: See `HostAdam.step`.
    """
    dtype, state = update.weights.dtype, update.state
    weights, master = slot.of("weights", dtype, run), None
    if not _is_master(update):
        master = state[MASTER].view(-1)[run]
        slot.gone.synchronize()  # the weights of the piece before have left this memory
    moments = state[MEAN].view(-1)[run], state[SQUARE].view(-1)[run]
    gradient = slot.of("gradient", dtype, run)
    adamw_(weights, gradient, moments, update, step=state[STEP], scale=scale, master=master)
    return weights


def _is_master(update: Update) -> bool:
    """Whether weights are fp32 themselves: then no second copy is kept that could fall behind them."""
    return update.weights.dtype == torch.float32


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class ShardUpdate:
    """One shard that is to take a step.

    Attributes:
        shard: Weights and gradient, the latter in `shard.parameter.grad`.
        gradient: Flat, in the dtype of the weights, in host memory; only read.
        factor: Of the gradient, before it is divided by the scale; None for 1.
        state: Moments `exp_avg` and `exp_avg_sq`, fp32; `_param_remainder`, int16, of bf16 weights; `_param_fp32` of
            fp16 weights; and `step`, counted up.
        lr: Learning rate.
        betas: Decay of the moments.
        eps: Added to the root of the second moment.
        weight_decay: Per unit of `lr`; decoupled.
        scale: Gradients are divided by it, in fp32.
    """

    shard: HostShard
    gradient: Tensor
    factor: float | None
    state: dict[str, Any]
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    scale: float


class LateUpdates:
    """Updates shards in a thread of its own, in the order in which the forward pass needs them.

    Who reads a shard's weights or state waits for its update, by `HostShard.settle`.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="host-adam")

    def start(self, updates: Sequence[ShardUpdate]) -> None:
        """Start to update shards; weights, gradients and states must not be touched until they are settled."""
        for each in sorted(updates, key=lambda each: each.shard.order):
            each.state[STEP] += 1
            each.shard.update_with(self._thread.submit(_update, each, each.state[STEP]))


def initial_state(weights: Tensor) -> dict[str, Any]:
    """Return the state of weights before their first step."""
    state = {name: host_zeros(weights.shape, torch.float32) for name in (MEAN, SQUARE)}
    if weights.dtype == torch.bfloat16:
        state[REMAINDER] = host_zeros(weights.shape, torch.int16)
    elif weights.dtype == torch.float16:
        state[MASTER] = weights.float()
    return {STEP: 0, **state}


def _update(update: ShardUpdate, step: int) -> None:
    """Update a shard's weights and state; `step` counts from 1."""
    update.shard.wait_for_gradient()
    state = update.state
    with torch.no_grad():
        adamw_(
            update.shard.weights,
            update.gradient,
            (state[MEAN], state[SQUARE]),
            update,
            step=step,
            scale=update.scale,
            factor=update.factor,
            master=state.get(MASTER),
            remainder=state.get(REMAINDER),
        )
