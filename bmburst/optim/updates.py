"""AdamW updates: on the CPU with state in host memory, or where the weights are by a fused kernel or torch operations.

For weights on a GPU and state in host memory, the gradient is copied to the host in pieces. `bmburst_ops.host_adamw`
updates moments and fp32 master weights in place, and the weights, rounded to nearest even, are copied back. Copies
overlap with arithmetic: while the CPU updates one piece, the gradients of the next pieces and the weights of earlier
pieces are being copied.

Weights in host memory are updated block by block during the next forward pass. For bf16 weights, the host keeps only a
16-bit remainder: weight and remainder together are the fp32 master. Weight and state then take 2 + 2 + 8 bytes; with a
separate master they would take 14. Where moments are small (`bmburst.optim.states`), remainders replace masters
everywhere, and are updated with weights that are copied from the GPU like gradients.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from bmburst.comm.host_memory import HostShard
from bmburst.optim.states import MASTER, MEAN, REMAINDER, SQUARE, STEP, Part, Run, runs_of
from bmburst_ops.host_adamw import Rates, adamw_, joined, split, widened

PIECE = 1 << 22
"""Elements of a piece."""
DEPTH = 3
"""Pieces in flight, each with pinned memory: one is copied in, one updated, one copied out."""
_WIDE = 4  # bytes of the widest dtype


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Update:
    """One parameter to update.

    Attributes:
        weights: Contiguous fp32, bf16 or fp16, on any device; written.
        gradient: Same shape, dtype and device as `weights`; only read.
        state: Moments `exp_avg` and `exp_avg_sq`, with scales if they are codes, and unless `weights` are fp32, the
            fp32 master weights `_param_fp32` or, for small moments of bf16 weights, `_param_remainder`, int16; updated
            in place. `step`: number of steps taken, incremented.
        parts: The runs of the weights that are updated.
        rates: The rates of the step.
    """

    weights: Tensor
    gradient: Tensor
    state: dict[str, Any]
    parts: Sequence[Part]
    rates: Rates


class HostAdam:
    """Updates parameters on a GPU from state in host memory (arXiv:1711.05101, algorithm 2).

    It allocates pinned memory for `2 * depth * piece` fp32 elements, independent of the model; fewer if the largest
    parameter is smaller than a piece. Without a GPU, the host runtime executes the same copies in order.

    Args:
        piece: Elements that are copied and updated at once; a multiple of 64.
        depth: Number of pieces in flight.
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
        """Update weights and state. The current stream waits for the copies of the weights.

        The call returns when the CPU arithmetic is done; copies of the last weights may still be pending. The host
        waits only for the gradient of each piece, not for other work of other streams.

        Args:
            updates: One per parameter. State and gradients must not change during the call.
            scale: Divisor of the gradients, applied in fp32.
        """
        jobs = [(update, run) for update in updates for run in runs_of(update.parts, self._piece, update.state)]
        for update in updates:
            update.state[STEP] += 1
        if not jobs:
            return
        self._prepare(max(run.at.stop - run.at.start for _, run in jobs))
        current = torch.cuda.current_stream()
        # Copies must wait for the kernels that write the gradients and for those that read the old weights.
        self._incoming.wait_stream(current)
        self._outgoing.wait_stream(current)
        try:
            self._work_off(jobs, scale)
        finally:
            # The caller may free or overwrite tensors that the copies still use.
            current.wait_stream(self._incoming)
            current.wait_stream(self._outgoing)

    def _work_off(self, jobs: "Sequence[tuple[Update, Run]]", scale: float) -> None:
        slots, depth = self._slots, self._depth
        for slot, (update, run) in zip(slots, jobs, strict=False):
            self._fetch(slot, update, run)
        for number, (update, run) in enumerate(jobs):
            slot = slots[number % depth]
            slot.here.synchronize()
            weights = _arithmetic(update, run, slot, scale)
            with torch.cuda.stream(self._outgoing):
                update.weights.view(-1)[run.at].copy_(weights, non_blocking=True)
                slot.gone.record(self._outgoing)
            if number + depth < len(jobs):
                self._fetch(slot, *jobs[number + depth])

    def _fetch(self, slot: "_Slot", update: Update, run: Run) -> None:
        """Start to copy a piece's gradient to the host, and its weights if they have no separate master."""
        dtype, at = update.weights.dtype, run.at
        with torch.cuda.stream(self._incoming):
            slot.of("gradient", dtype, at).copy_(update.gradient.reshape(-1)[at], non_blocking=True)
            if MASTER not in update.state:
                self._incoming.wait_event(slot.gone)  # the slot's previous weights must be copied out first
                slot.of("weights", dtype, at).copy_(update.weights.view(-1)[at], non_blocking=True)
            slot.here.record(self._incoming)

    def _prepare(self, numbers: int) -> None:
        """Create streams and pinned memory at the first step, or again if the memory is too small."""
        if self._incoming is None:
            self._incoming, self._outgoing = torch.cuda.Stream(), torch.cuda.Stream()
        if not self._slots or self._slots[0].numbers < numbers:
            for slot in self._slots:
                slot.gone.synchronize()
            self._slots = [_Slot(numbers) for _ in range(self._depth)]


class _Slot:
    """Pinned memory for one piece, with the events of its copies: `here` to the host, `gone` to the device."""

    def __init__(self, numbers: int) -> None:
        self.numbers = numbers
        self._memory = {
            name: torch.empty(numbers * _WIDE, dtype=torch.uint8, device="cpu", pin_memory=True)
            for name in ("gradient", "weights")
        }
        self.here, self.gone = torch.cuda.Event(), torch.cuda.Event()

    def of(self, name: str, dtype: torch.dtype, run: slice) -> Tensor:
        """Return the memory for a piece's gradient or weights."""
        return self._memory[name].view(dtype)[: run.stop - run.start]


def _arithmetic(update: Update, run: Run, slot: _Slot, scale: float) -> Tensor:
    """Update a piece's state, and return its weights in pinned memory.

    Args:
        update: The parameter.
        run: The piece.
        slot: Holds the gradient, and weights without a separate master.
        scale: See `HostAdam.step`.
    """
    dtype, state, at = update.weights.dtype, update.state, run.at
    weights, gradient = slot.of("weights", dtype, at), slot.of("gradient", dtype, at)
    if MASTER in state:
        slot.gone.synchronize()  # the slot's previous weights were copied out
    _on_host(weights, gradient, update, run, state[STEP], scale)
    return weights


def _on_host(weights: Tensor, gradient: Tensor, update: Update, run: Run, step: int, scale: float) -> None:
    """Update a run's state and its weights, flat `[n]` in host memory."""
    state, at = update.state, run.at
    master, remainder = (state[name].view(-1)[at] if name in state else None for name in (MASTER, REMAINDER))
    adamw_(
        weights,
        gradient,
        (state[MEAN].view(-1)[at], state[SQUARE].view(-1)[at]),
        update.rates,
        step=step,
        scale=scale,
        master=master,
        remainder=remainder,
        rounding=run.rounding(state, step),
    )


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class ShardUpdate(Update):
    """One shard in host memory to update: flat weights, `shard.weights`, and their gradient, `shard.parameter.grad`.

    The state of bf16 weights has `_param_remainder`, int16, and that of fp16 weights `_param_fp32`.

    Attributes:
        shard: The shard.
        scale: Divisor of the gradient, applied in fp32.
    """

    shard: HostShard
    scale: float


class LateUpdates:
    """Updates shards in a background thread, in the order in which the forward pass needs them.

    Call `HostShard.settle`, which waits for the update, before reading a shard's weights or state.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="host-adam")

    def start(self, updates: Sequence[ShardUpdate]) -> None:
        """Start to update shards. Weights, gradients and states must not be used until the shard is settled."""
        for each in sorted(updates, key=lambda each: each.shard.order):
            each.state[STEP] += 1
            each.shard.update_with(self._thread.submit(_update, each, each.state[STEP]))


def _update(update: ShardUpdate, step: int) -> None:
    """Update a shard's weights and state; `step` counts from 1."""
    update.shard.wait_for_gradient()
    with torch.no_grad():
        for part in update.parts:
            weights, gradient = update.weights[part.at], update.gradient[part.at]
            _on_host(weights, gradient, update, Run(part.at, part), step, update.scale)


_AT_ONCE = 1 << 24
"""Elements of 16-bit weights that torch operations update at once; bounds the fp32 copy of the gradient."""


def step_fused(kernel: Any, updates: Iterable[Update], scale: float) -> None:
    """Update 16-bit weights with `bmburst_ops.triton_elementwise`.

    Args:
        kernel: The module `bmburst_ops.triton_elementwise`.
        updates: One per parameter, all on one GPU, with fp32 masters.
        scale: Divisor of the gradients, applied in fp32.
    """
    for update in updates:
        state = update.state
        state[STEP] += 1
        kernel.adamw_(
            *(state[MASTER], update.weights, update.gradient, state[MEAN], state[SQUARE]),
            **update.rates._asdict(),
            step=state[STEP],
            scale=scale,
        )


def step_small(kernel: Any, updates: Sequence[Update], scale: float) -> None:
    """Update weights with small moments with `bmburst_ops.triton_moments`.

    Args:
        kernel: The module `bmburst_ops.triton_moments`.
        updates: One per parameter, all on one GPU.
        scale: Divisor of the gradients, applied in fp32.
    """
    for update in updates:
        state = update.state
        state[STEP] += 1
        for part in update.parts:
            weights, gradient, mean, square, master, remainder = _of_run(update, part.at)
            kernel.adamw_(
                *(weights, gradient, (mean, square), Run(part.at, part).rounding(state, state[STEP])),
                **update.rates._asdict(),
                step=state[STEP],
                scale=scale,
                master=master,
                remainder=remainder,
            )


def step_plain(updates: Iterable[Update], scale: float) -> None:
    """Update weights like `step_fused` or `step_small`, with torch operations on their fp32 masters.

    Args:
        updates: See there; on any device.
        scale: See there.
    """
    for update in updates:
        state = update.state
        state[STEP] += 1
        for run in runs_of(update.parts, _AT_ONCE, state):
            weights, gradient, mean, square, master, remainder = _of_run(update, run.at)
            own = weights if master is None else master
            own = own if remainder is None else joined(weights, remainder)
            wide = gradient.to(torch.float32, copy=True).div_(scale)
            with widened((mean, square), run.rounding(state, state[STEP])) as moments:
                _by_torch([own], [wide], [moments[0]], [moments[1]], [state[STEP] - 1], update.rates, foreach=False)
            if remainder is not None:
                split(own, weights, remainder)
            elif master is not None:
                weights.copy_(master)


def _of_run(update: Update, at: slice) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return a run's weights, gradient, moments, and its master or remainders, flat."""
    state, gradient = update.state, update.gradient.reshape(-1)[at]
    weights, mean, square = (each.view(-1)[at] for each in (update.weights, state[MEAN], state[SQUARE]))
    master, remainder = (state[name].view(-1)[at] if name in state else None for name in (MASTER, REMAINDER))
    return weights, gradient, mean, square, master, remainder


def step_wide(parameters: Sequence[Tensor], states: Sequence[dict[str, Any]], rates: Rates, scale: float) -> None:
    """Update fp32 weights with torch operations.

    Args:
        parameters: Parameters that have a gradient.
        states: State of each parameter; an empty state is initialized.
        rates: The rates of the step.
        scale: Divisor of the gradients.
    """
    for parameter, state in zip(parameters, states, strict=True):
        if not state:
            state.update({STEP: 0, MEAN: torch.zeros_like(parameter), SQUARE: torch.zeros_like(parameter)})
    gradients = [p.grad if scale == 1 else p.grad / scale for p in parameters if p.grad is not None]
    means, squares, steps = ([state[name] for state in states] for name in (MEAN, SQUARE, STEP))
    _by_torch(list(parameters), gradients, means, squares, steps, rates)
    for state in states:
        state[STEP] += 1


def _by_torch(
    weights: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    steps: Sequence[int],
    rates: Rates,
    *,
    foreach: bool | None = None,
) -> None:
    adamw(
        weights,
        gradients,
        means,
        squares,
        [],
        [torch.tensor(float(step)) for step in steps],
        foreach=foreach,
        amsgrad=False,
        beta1=rates.betas[0],
        beta2=rates.betas[1],
        lr=rates.lr,
        weight_decay=rates.weight_decay,
        eps=rates.eps,
        maximize=False,
    )
