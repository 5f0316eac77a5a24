"""Measure one cell of the suites that are about speed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bmburst.bench.block import prepare_block, prepare_block_alone, projection_flops
from bmburst.bench.cells import ONE_GPU, Cell
from bmburst.bench.inputs import Calls, prepare
from bmburst.bench.memory import Gauge
from bmburst.bench.methods import Method, Setting
from bmburst.bench.methods.one_gpu import OneGpu
from bmburst.bench.timing import in_turns
from bmburst.bench.trace import record
from bmburst.bench.work import BACKWARD, forward_flops, one_gpu_memory, one_gpu_tokens

_GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How much is measured.

    Attributes:
        repeats: Pairs of calls for each direction.
        seconds: About how long the pairs of one direction may take.
        trace: Folder for profiler timelines, or None.
    """

    repeats: int
    seconds: float
    trace: Path | None = None


def memory_refusal(method: Method, cell: Cell, gauge: Gauge) -> str | None:
    """Return why the cell would not fit this rank's memory, by the method's estimate, or None."""
    alone = 0.0 if cell.method == ONE_GPU else one_gpu_memory(cell)
    needed, capacity = method.memory(cell) + alone, gauge.capacity(cell.ranks)
    if needed <= capacity:
        return None
    return f"would not fit: about {needed / _GIB:.0f} GiB a rank, of {capacity / _GIB:.0f} GiB"


def measure_speed(method: Method, cell: Cell, setting: Setting, gauge: Gauge, effort: Effort) -> dict[str, Any]:
    """Return what a cell's row says beside its name: times, rates, ratio, memory. All ranks return the same times.

    * `milliseconds`: the slowest rank's.
    * `tflops`: a GPU's share of the FLOPs over that time.
    * `ratio`: the median over the pairs of the method's rate over one GPU's.
    * `exposed_ms`: the median time less what one GPU's kernel would need for the same FLOPs: transfers that nothing
      hides, and whatever else the method does beside the kernel (layout changes, merges, smaller tiles).
    """
    traffic, decided = method.resolve(cell, setting)
    gauge.clear()
    calls = prepare_block(method, cell, setting) if cell.suite == "block" else prepare(method, cell, setting)
    for call in (calls.forward, calls.both):
        call()
    peak = gauge.peak()
    alone = _alone(cell, setting)
    row: dict[str, Any] = {"peak_memory_gib": None if peak is None else peak / _GIB, **decided}
    for direction, factor in (("forward", 1.0), ("forward_backward", 1 + BACKWARD)):
        moved = None if traffic is None else getattr(traffic, direction)
        shares = _flops(cell, direction, factor)
        pair = getattr(calls, _CALL[direction]), getattr(alone, _CALL[direction])
        row[direction] = _measure(pair, shares, setting, effort) | {"bytes": moved}
        if effort.trace is not None:
            record(pair[0], effort.trace, f"{cell.key}/{direction}", setting.party)
    return row


_CALL = {"forward": "forward", "forward_backward": "both"}


def _alone(cell: Cell, setting: Setting) -> Calls:
    if cell.suite == "block":
        return prepare_block_alone(cell, setting)
    return prepare(OneGpu(), cell, setting)


def _flops(cell: Cell, direction: str, factor: float) -> tuple[float, float]:
    """FLOPs of a rank's share, and of the sequence that one GPU is given, which ends on a whole tile."""
    method, alone = forward_flops(cell) / cell.ranks, forward_flops(cell, one_gpu_tokens(cell))
    projections = projection_flops(cell, direction) if cell.suite == "block" else 0.0
    own = alone if cell.method == ONE_GPU else method
    return own * factor + projections, alone * factor + projections


def _measure(
    pair: tuple[Callable[[], object], Callable[[], object]],
    flops: tuple[float, float],
    setting: Setting,
    effort: Effort,
) -> dict[str, Any]:
    times, alone, ratio = in_turns(*pair, setting.party, repeats=effort.repeats, seconds=effort.seconds)
    mine, ones = flops
    same_work = mine / ones
    return {
        "milliseconds": times.to_dict(),
        "one_gpu_milliseconds": alone.to_dict(),
        "tflops": mine / times.median / 1e9,
        "one_gpu_tflops": ones / alone.median / 1e9,
        "ratio": ratio * same_work,
        "exposed_ms": times.median - alone.median * same_work,
    }
