"""Times alternating calls on the slowest rank, and records and draws profiler timelines."""

import json
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine.machine import RankGroup
from benchmarks.engine.report import WIDTH, set_title
from bmburst.comm.streams import CALLS
from bmburst.outputs import blank_picture, is_picture, require_own, save_picture

LEAST = 3  # measured rounds, however long they take
Timer = Callable[..., tuple[tuple[float, ...], ...]]
"""Measures calls as `in_turns` does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Times of one call, in milliseconds: median, minimum and maximum."""

    median: float
    least: float
    most: float
    count: int  # of measurements

    @classmethod
    def of(cls, milliseconds: Sequence[float]) -> "Times":
        """Return the statistics of measurements in milliseconds."""
        return cls(
            median=statistics.median(milliseconds),
            least=min(milliseconds),
            most=max(milliseconds),
            count=len(milliseconds),
        )


def mark(device: torch.device) -> torch.cuda.Event | float:
    """Return a point in time: an event on the current stream of a GPU, or the clock of a CPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds_between(before: torch.cuda.Event | float, after: torch.cuda.Event | float) -> float:
    """Return the milliseconds between two marks; waits for the later one."""
    if isinstance(before, float) or isinstance(after, float):
        assert isinstance(before, float) and isinstance(after, float)  # marks of one device
        return (after - before) * 1e3
    after.synchronize()
    return float(before.elapsed_time(after))


def once(call: Callable[[], object], group: RankGroup) -> float:
    """Return the milliseconds of one call on the slowest rank. All ranks of the group must call it.

    The devices are idle when the ranks start, so the time includes launch overhead of the host.
    """
    group.barrier()
    before = mark(group.device)
    call()
    return group.largest(milliseconds_between(before, mark(group.device)))


def gpu_seconds(call: Callable[[], object], scratch: torch.Tensor | None) -> tuple[float, float]:
    """Return the seconds of a call on this GPU, and the seconds of its launch on the host.

    Before the call, `scratch` is written, which flushes the GPU's caches and hides the launch. Without it the GPU is
    idle before the call.
    """
    device = torch.device("cuda")
    if scratch is None:
        torch.cuda.synchronize()
    else:
        scratch.zero_()
    begun = time.perf_counter()
    before = mark(device)
    call()
    after = mark(device)
    host = time.perf_counter() - begun
    torch.cuda.synchronize()
    return milliseconds_between(before, after) / 1e3, host


def median_seconds(
    calls: Sequence[Callable[[], object]], scratch: torch.Tensor | None = None, *, repeats: int, warm_up: int
) -> list[tuple[float, float]]:
    """Return the medians of `gpu_seconds` for each call. Calls alternate, and `warm_up` rounds are not measured."""
    rounds = [[gpu_seconds(call, scratch) for call in calls] for _ in range(warm_up + repeats)][warm_up:]
    by_call = [zip(*times, strict=True) for times in zip(*rounds, strict=True)]
    return [(statistics.median(gpu), statistics.median(host)) for gpu, host in by_call]


def in_turns(
    *calls: Callable[[], object],
    group: RankGroup,
    repeats: int,
    seconds: float,
    time_of: Callable[[Callable[[], object], RankGroup], float] = once,
) -> tuple[tuple[float, ...], ...]:
    """Measure calls in rounds; each round calls all of them once.

    There are at most `repeats` rounds, which take about `seconds`; if that does not suffice, fewer are measured, but at
    least `min(LEAST, repeats)`. `time_of` returns the milliseconds of one call, the same on all ranks. Returned are,
    for each call, its milliseconds in each round, on the slowest rank.
    """

    def once_each() -> tuple[float, ...]:
        return tuple(time_of(call, group) for call in calls)

    # Warm-up compiles kernels, creates buffers and communicators, and records CUDA graphs of short calls. One round is
    # enough for long calls. `time_of` returns the same on all ranks, so they agree on the number of rounds.
    for _ in range(CALLS):
        if sum(once_each()) > seconds * 1e3 / 4:
            break
    first = once_each()
    affordable = int(seconds * 1e3 / max(sum(first), 1e-3))
    count = min(repeats, max(LEAST, affordable))
    return tuple(zip(first, *(once_each() for _ in range(count - 1)), strict=True))


def quotient(times: Sequence[float], others: Sequence[float]) -> float:
    """Return the median over the rounds of the ratio of two calls' times."""
    return statistics.median(one / other for one, other in zip(times, others, strict=True))


def beside_one_gpu(
    ours: Callable[[], object], one: Callable[[], object], *, group: RankGroup, repeats: int, seconds: float
) -> dict[str, float]:
    """Return the median times of a call over ranks and of one GPU on the same work, and the ratio of their speeds."""
    times = in_turns(ours, one, group=group, repeats=repeats, seconds=seconds)
    return {
        "milliseconds": Times.of(times[0]).median,
        "one_gpu_milliseconds": Times.of(times[1]).median,
        "ratio": quotient(times[1], times[0]) / group.size,
    }


Span = tuple[float, float]
"""Start and end in milliseconds, relative to the first span of the timeline."""

ATTENTION, PRODUCTS, OTHER = "attention", "matrix products", "other kernels"
NCCL, PEERS, HOST = "NCCL's kernels", "copies between GPUs", "copies to and from the host"
INSIDE = "copies inside the GPU"
_COLOURS = {
    ATTENTION: "#b2182b",
    PRODUCTS: "#2166ac",
    OTHER: "#969696",
    NCCL: "#762a83",
    PEERS: "#1b7837",
    HOST: "#8c510a",
    INSIDE: "#80cdc1",
}
_TAIL = 8192  # bytes at the end of a timeline that contain its path
_COMPUTE, _MOVES = (ATTENTION, PRODUCTS, OTHER), (NCCL, PEERS, HOST, INSIDE)
_NAMES = (  # the first pattern that matches an event's name determines its kind
    (NCCL, "^nccl"),
    (PEERS, "memcpy ptop"),
    (HOST, "memcpy (htod|dtoh)"),
    (INSIDE, "memcpy"),
    (ATTENTION, "flash|fmha|attention|^(forward|keys|queries)_kernel"),  # the last are bmburst's Triton kernels
    (PRODUCTS, "gemm|nvjet|cutlass|xmma"),
)


def record_timeline(
    call: Callable[[], object], folder: Path, name: str, title: tuple[str, str], group: RankGroup
) -> None:
    """Record one call on rank 0 and write `FOLDER/NAME.json`, for chrome://tracing or Perfetto. All ranks must call it.

    For GPUs, a picture with the same name is drawn.

    The call has been warmed up. Slashes in the name become points. `title` has the title and the subtitle of the
    picture.
    """
    from torch.profiler import ProfilerActivity, profile

    on_gpu = group.device.type == "cuda"

    def together() -> None:
        group.barrier()
        call()

    if group.rank != 0:
        together()
        return
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as timeline:
        together()
        if on_gpu:
            torch.cuda.synchronize()
    folder.mkdir(parents=True, exist_ok=True)
    path = timeline_file(folder, name)
    timeline.export_chrome_trace(str(path))
    draw_timeline(path, path.with_suffix(".png"), title)


def timeline_file(folder: Path, name: str) -> Path:
    """Return the file that `record_timeline` writes for a name; its picture has the suffix .png."""
    return folder / f"{name.replace('/', '.')}.json"


def require_timelines(folder: Path, names: Iterable[str]) -> None:
    """Raise UserError unless recording replaces only timelines and pictures that `record_timeline` wrote."""
    for path in (timeline_file(folder, name) for name in names):
        require_own("--trace", path, "a timeline of bmburst bench", _is_timeline)
        require_own("--trace", path.with_suffix(".png"), "a picture of bmburst", is_picture)


def _is_timeline(path: Path) -> bool:
    """Return whether torch's profiler wrote the file: a timeline ends with the path to which it was written."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        end = file.read().decode("utf-8", "replace")
    return re.search(rf'"traceName": "(.*/)?{re.escape(path.name)}"\s*}}\s*$', end) is not None


def lanes(events: Iterable[Mapping[str, Any]]) -> dict[str, list[Span]]:
    """Return the spans of GPU activity by kind, sorted, with overlapping spans merged.

    `events` are the `traceEvents` of torch's profiler, with times in microseconds.
    """
    found: dict[str, list[Span]] = {}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy"):
            start = float(event["ts"]) / 1e3
            found.setdefault(_kind(str(event["name"])), []).append((start, start + float(event["dur"]) / 1e3))
    first = min((start for spans in found.values() for start, _ in spans), default=0.0)
    return {kind: _joined((a - first, b - first) for a, b in found[kind]) for kind in _COLOURS if kind in found}


def hidden(moving: Sequence[Span], computing: Sequence[Span]) -> float:
    """Return the fraction of transfer time during which a kernel runs, 0 to 1.

    Spans are sorted, as `lanes` returns them; those of kernels are disjoint.
    """
    whole = sum(b - a for a, b in moving)
    if not whole or not computing:
        return 0.0 if whole else 1.0
    # A step has thousands of both. Interpolating the cumulated kernel time at the edges of transfers avoids pairs.
    kernels = np.array(computing)
    computed = np.cumsum(kernels[:, 1] - kernels[:, 0])
    edges = np.stack((np.append(0.0, computed[:-1]), computed), axis=1)
    begun, ended = np.interp(np.array(moving).T, kernels.ravel(), edges.ravel())
    return float((ended - begun).sum() / whole)


def draw_timeline(trace: Path, picture: Path, title: tuple[str, str]) -> Path | None:
    """Draw a timeline of one GPU, and return the path of the picture; None if the timeline has no GPU activity."""
    found = lanes(json.loads(trace.read_text())["traceEvents"])
    if not found:
        return None
    computing = _joined(span for kind in _COMPUTE for span in found.get(kind, ()))
    labels = {kind: _label(kind, spans, computing) for kind, spans in found.items()}
    return draw_lanes(found, labels, picture, title)


def draw_lanes(
    found: Mapping[str, Sequence[Span]], labels: Mapping[str, str], picture: Path, title: tuple[str, str]
) -> Path:
    """Draw the spans of each kind in a lane with a label, and return the picture's path."""
    figure = blank_picture(WIDTH, 1.3 + 0.55 * len(found))
    axes = figure.subplots()
    for row, (kind, spans) in enumerate(found.items()):
        # An outline makes spans shorter than a pixel visible.
        axes.broken_barh([(a, b - a) for a, b in spans], (row - 0.1, 0.5), color=_COLOURS[kind], linewidth=0.5)
        axes.text(0.01, row - 0.16, labels[kind], transform=axes.get_yaxis_transform(), fontsize=9)
    axes.set_yticks([])
    axes.set_ylim(len(found) - 0.45, -0.6)
    axes.set_xlim(0, max(spans[-1][1] for spans in found.values() if spans))
    axes.set_xlabel("milliseconds")
    axes.grid(axis="x", alpha=0.3)
    set_title(figure, *title)
    save_picture(figure, picture)
    return picture


def _label(kind: str, spans: Sequence[Span], computing: Sequence[Span]) -> str:
    text = f"{kind}: {sum(b - a for a, b in spans):.1f} ms"
    return f"{text}, {hidden(spans, computing):.0%} beside kernels" if kind in _MOVES else text


def _kind(name: str) -> str:
    return next((kind for kind, pattern in _NAMES if re.search(pattern, name.lower())), OTHER)


def _joined(spans: Iterable[Span]) -> list[Span]:
    ordered = np.array(sorted(spans), dtype=float).reshape(-1, 2)
    if not len(ordered):
        return []
    ends = np.maximum.accumulate(ordered[:, 1])
    is_new = np.concatenate(([True], ordered[1:, 0] > ends[:-1]))
    last = np.concatenate((is_new[1:], [True]))
    return list(zip(ordered[is_new, 0].tolist(), ends[last].tolist(), strict=True))
