"""Measure one cell of the suites that are about speed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bmburst.amounts import GIB
from bmburst.bench.block import prepare_block, prepare_block_alone, projection_flops
from bmburst.bench.cells import ONE_GPU, PLAIN_MASKS, Cell
from bmburst.bench.inputs import Calls, prepare
from bmburst.bench.memory import Gauge
from bmburst.bench.methods import Method, Setting
from bmburst.bench.methods.one_gpu import OneGpu
from bmburst.bench.pairs import facts
from bmburst.bench.timing import Times, in_turns, quotient
from bmburst.bench.trace import record
from bmburst.bench.work import alone, forward_flops, one_gpu_memory, plain_causal
from bmburst_ops.constants import ATTENTION_BACKWARD


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How much is measured.

    Attributes:
        repeats: Rounds of calls for each direction.
        seconds: About how long the rounds of one direction may take.
        trace: Folder for profiler timelines, or None.
    """

    repeats: int
    seconds: float
    trace: Path | None = None


def memory_refusal(method: Method, cell: Cell, gauge: Gauge) -> str | None:
    """Return why the cell would not fit this rank's memory, by the method's estimate, or None."""
    beside = 0.0 if cell.method == ONE_GPU else one_gpu_memory(cell)
    needed, capacity = method.memory(cell) + beside, gauge.capacity(cell.ranks)
    if needed <= capacity:
        return None
    return f"would not fit: about {needed / GIB:.0f} GiB a rank, of {capacity / GIB:.0f} GiB"


def measure_speed(method: Method, cell: Cell, setting: Setting, gauge: Gauge, effort: Effort) -> dict[str, Any]:
    """Return what a cell's row says beside its name: times, rates, ratio, memory. All ranks return the same times.

    * `milliseconds`: the slowest rank's.
    * `tflops`: a GPU's share of the FLOPs over that time.
    * `ratio`: the median over the rounds of the method's rate over one GPU's.
    * `exposed_ms`: the median time less what one GPU's kernel would need for the same FLOPs: transfers that nothing
      hides, and whatever else the method does beside the kernel (layout changes, merges, smaller tiles).
    * Under masks beyond causal and full, `arithmetic_ms`: what one GPU's kernel needs for the same FLOPs under a plain
      causal mask; and `times_arithmetic`: the median over the rounds of the method's time over that.
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
    for direction, factor in (("forward", 1.0), ("forward_backward", 1 + ATTENTION_BACKWARD)):
        moved = None if traffic is None else getattr(traffic, direction)
        together = [getattr(own, _CALL[direction]) for own in (calls, *others)]
        row[direction] = _measure(together, _flops(cell, direction, factor), setting, effort) | {"bytes": moved}
        if effort.trace is not None:
            record(together[0], effort.trace, f"{cell.key}/{direction}", setting.party)
    return row


_CALL = {"forward": "forward", "forward_backward": "both"}


def _others(cell: Cell, setting: Setting) -> tuple[Calls, ...]:
    """Return one GPU on the same FLOPs, and if that is under another mask one GPU under a plain causal one."""
    if cell.suite == "block":
        return (prepare_block_alone(cell, setting),)
    if cell.mask in PLAIN_MASKS:
        return (prepare(OneGpu(), cell, setting),)
    return prepare(OneGpu(), cell, setting), prepare(OneGpu(), plain_causal(cell), setting)


def _flops(cell: Cell, direction: str, factor: float) -> list[float]:
    """FLOPs of a rank's share, and of what one GPU is given, which ends on a whole tile; of `_others`, in order."""
    method, one = forward_flops(cell) / cell.ranks, forward_flops(alone(cell))
    projections = projection_flops(cell, direction) if cell.suite == "block" else 0.0
    own = one if cell.method == ONE_GPU else method
    plain = [] if cell.mask in PLAIN_MASKS else [forward_flops(plain_causal(cell))]
    return [flops * factor + projections for flops in (own, one, *plain)]


def _measure(
    calls: Sequence[Callable[[], object]], flops: Sequence[float], setting: Setting, effort: Effort
) -> dict[str, Any]:
    """Return times and rates of the first call, and how they are to those of the second, and third if there is one."""
    rounds = in_turns(*calls, party=setting.party, repeats=effort.repeats, seconds=effort.seconds)
    times, one = (Times.of(milliseconds) for milliseconds in rounds[:2])
    same_work = flops[0] / flops[1]
    row: dict[str, Any] = {
        "milliseconds": times.to_dict(),
        "one_gpu_milliseconds": one.to_dict(),
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
