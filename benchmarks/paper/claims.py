"""The paper's claims, each evaluated by recorded numbers or by formulas.

A recorded time is the median of calls, with their minimum and maximum. If the ranges of two methods overlap, their
difference is within the spread of the measurements. Imports no torch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from benchmarks.inference.kind import paper as first_token_facts
from benchmarks.paper import curve, overheads
from benchmarks.paper.overheads import LI
from benchmarks.paper.tables import (
    ATTENTION,
    FACTS,
    FIRST,
    INFERENCE,
    KIB,
    LENGTHS,
    MISSING,
    PAPER,
    PERPLEXITY,
    TRAIN,
    TRAINED,
    Recorded,
    Row,
    step_key,
    way_of,
)

CONFIRMED, NOT_CONFIRMED, NOT_TESTABLE = "confirmed", "not confirmed", "not testable here"
SMALLER = f"{NOT_CONFIRMED}: a smaller saving"


class Verdict(NamedTuple):
    """The verdict on a claim, and the numbers that support it."""

    verdict: str
    numbers: str


UNKNOWN = Verdict(MISSING, "-")


class Times(NamedTuple):
    """Milliseconds of calls: median, minimum and maximum."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, row: Row, *directions: str) -> "Times":
        """Return a row's time, or the sum of the times of several directions.

        Args:
            row: A recorded row.
            directions: Keys of `milliseconds`, for example "forward" and "backward"; none if the row has one time.
        """
        found: list[Mapping[str, Any]] = [row["milliseconds"][d] for d in directions] or [row["milliseconds"]]
        return cls(*(sum(times[name] for times in found) for name in cls._fields))

    def over(self, other: "Times") -> float:
        """Return the ratio of the medians."""
        return self.median / other.median

    def overlaps(self, other: "Times") -> bool:
        """Return whether the ranges overlap."""
        return self.least <= other.most and other.least <= self.most


def judged(holds: bool, numbers: str, where: str = "") -> Verdict:
    """Return the verdict "confirmed" or "not confirmed".

    Args:
        holds: Whether the claim holds.
        numbers: See `Verdict`.
        where: Where it was tested, for example "on NVLink".
    """
    return Verdict(f"{CONFIRMED if holds else NOT_CONFIRMED} {where}".rstrip(), numbers)


def by_share(share: float, least: float, numbers: str) -> Verdict:
    """Return the verdict on a claimed saving: `SMALLER` if there is a saving, but a smaller one.

    Args:
        share: The saving as a fraction; negative if more is needed.
        least: The claimed fraction.
        numbers: See `Verdict`.
    """
    if share >= least:
        return Verdict(CONFIRMED, numbers)
    return Verdict(SMALLER if share > 0 else NOT_CONFIRMED, numbers)


def by_length(ratios: Mapping[int, float], numbers: str) -> Verdict:
    """Return whether the others take longer at all lengths, or at all except the shortest.

    Args:
        ratios: The others' time divided by ours, by tokens in ascending order.
        numbers: See `Verdict`.
    """
    if not ratios:
        return UNKNOWN
    lengths = list(ratios)
    below = [tokens for tokens in lengths if ratios[tokens] <= 1]
    if len(lengths) > 1 and below == lengths[:1]:
        return Verdict(f"confirmed from {lengths[1] // KIB}K on, not at {lengths[0] // KIB}K", numbers)
    return judged(not below, numbers)


def fewer_bytes(share: float) -> str:
    """Return a fraction of bytes as text: "12.0% fewer bytes", or "more bytes" if it is negative."""
    return f"{abs(share):.1%} {'fewer' if share > 0 else 'more'} bytes"


def overlapping(names: Iterable[str]) -> str:
    """Return the end of a sentence that names the methods whose ranges overlap with ours; "" without any."""
    named = " and ".join(names)
    return f", ranges overlap with {named}" if named else ""


_LESS, _LESS_A_HOP = 0.4, 0.24  # claimed savings of bytes: over ring attention, and over kv in backward
_MHA, _TWO, _GQA = (overheads.EXAMPLES[name] for name in ("MHA, 8 GPUs", "MHA, 2 GPUs", "GQA 32/8, 8 GPUs"))
_BOTH = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of the paper or its repository.

    Attributes:
        text: The claim.
        source: The table, figure or section that makes it.
        judge: Returns the verdict.
    """

    text: str
    source: str
    judge: Callable[[Recorded], Verdict]


def _less_as_published(records: Recorded) -> Verdict:
    del records
    share = overheads.fewer_as_published(_MHA.head_dim)
    return by_share(share, _LESS, f"forward and backward by the paper's table 1: {share:.1%} fewer numbers, MHA")


def _less_than_scattered(records: Recorded) -> Verdict:
    del records
    share = overheads.fewer_in_all(_MHA, LI)
    return by_share(share, _LESS, f"forward and backward by formula, MHA, 8 GPUs: {fewer_bytes(share)}")


def _less_than_kv(records: Recorded) -> Verdict:
    in_all = overheads.fewer_in_all(_MHA, "kv")
    backward = {"MHA": overheads.fewer(_MHA), "GQA 32/8": overheads.fewer(_GQA)}
    parts = [f"forward and backward by formula, MHA, 8 GPUs: {fewer_bytes(in_all)}"]
    parts += [f"backward, {heads}: {fewer_bytes(share)}" for heads, share in backward.items()]
    counted = {heads: _counted(records, heads) for heads in ("mha", "gqa")}
    parts += [f"counted on 2 GPUs, {h.upper()}: {fewer_bytes(s)}" for h, s in counted.items() if s is not None]
    return by_share(in_all, _LESS, "; ".join(parts))


def _counted(records: Recorded, heads: str) -> float | None:
    """Return the fraction of bytes that burst saved over kv in backward on two GPUs, as counted in a run."""
    kv, burst = (records.measured(PAPER, f"backward/65536/{heads}/{method}@2") for method in ("kv", "burst"))
    return None if kv is None or burst is None else float(1 - burst["bytes"] / kv["bytes"])


def _less_a_hop(records: Recorded) -> Verdict:
    shares = {
        "gradients in 16 bits, a hop": overheads.fewer_a_hop(_MHA),
        "gradients in fp32 as they are sent, 2 GPUs": overheads.fewer(_TWO),
        "8 GPUs": overheads.fewer(_MHA),
    }
    counted = _counted(records, "mha")
    if counted is not None:
        shares["counted on 2 GPUs"] = counted
    text = "; ".join(f"{name}: {fewer_bytes(share)}" for name, share in shares.items())
    return by_share(min(shares.values()), _LESS_A_HOP, text)


def _never_slower(records: Recorded) -> Verdict:
    kv, burst = (records.measured(PAPER, f"backward/65536/mha/{method}@2") for method in ("kv", "burst"))
    if kv is None or burst is None:
        return UNKNOWN
    pairs = {name: (Times.of(kv, name), Times.of(burst, name)) for name in (*_BOTH, "transfers")}
    text = "; ".join(
        f"{name}: kv takes {a.over(b):.2f} times as long" + (", ranges overlap" if a.overlaps(b) else "")
        for name, (a, b) in pairs.items()
    )
    return judged(all(a.over(b) >= 1 for a, b in pairs.values()), text, "at 64K on 2 GPUs")


def _twice_at_32k(records: Recorded) -> Verdict:
    ours, theirs = (records.measured(TRAIN, step_key("llama-2-7b", 32 * KIB, m)) for m in ("ours", "tensor-v3"))
    found = [curve.gain(8, 32 * KIB, pcie=pcie) for pcie in (False, True)]
    predicted = f"8 GPUs, predicted with {curve.way(8, 32 * KIB)}: {found[0]:.2f} times with NVLink"
    predicted += f", {found[1]:.2f} with PCIe"
    if ours is None or theirs is None:
        return Verdict(NOT_TESTABLE, f"{predicted}; on 2 {MISSING}")
    ratio = Times.of(theirs).over(Times.of(ours))
    return Verdict(NOT_TESTABLE, f"{predicted}; on 2 H200: {ratio:.2f} times{way_of(ours)}")


def _fastest(records: Recorded, model: str, zero: int) -> Verdict:
    parts, nearest, way = [], {}, ""
    for tokens in LENGTHS[2:]:
        rows = {m: records.measured(TRAIN, step_key(model, tokens, m, zero)) for m in TRAINED}
        ours = rows.pop("ours")
        others = {name: Times.of(row) for name, row in rows.items() if row is not None}
        if ours is not None and others:
            mine, way = Times.of(ours), way_of(ours)
            least = min(others, key=lambda name: others[name].median)
            nearest[tokens] = others[least].over(mine)
            near = overlapping(name for name, times in others.items() if times.overlaps(mine))
            parts.append(f"{tokens // KIB}K: next {least}, {nearest[tokens]:.3f} times ours{near}")
    return by_length(nearest, "; ".join(parts) + way)


def _ring_out_of_memory(records: Recorded) -> Verdict:
    rows = {n: records.row(TRAIN, step_key("llama-2-7b", n, "ring-li")) for n in LENGTHS}
    known = {n: row for n, row in rows.items() if row is not None}
    if not known:
        return UNKNOWN
    failed = [n for n, row in known.items() if "memory" in row.get("reason", "")]
    if not failed:
        return judged(False, f"it runs up to {max(known) // KIB}K")
    ours = records.measured(TRAIN, step_key("llama-2-7b", failed[0], "ours"))
    reason, way = known[failed[0]]["reason"], "" if ours is None else way_of(ours)
    return judged(ours is not None, f"{failed[0] // KIB}K: {reason}; ours runs there{way}")


def _first_token(records: Recorded, size: str, version: int) -> Verdict:
    facts, model = first_token_facts(), f"llama-2-{size}"
    theirs, ratios, papers, once = facts["models"][model], {}, [], []
    for place, tokens in enumerate(facts["tokens"]):
        keys = [f"prompt/{model}/{tokens}/causal/{method}@2" for method in ("heads", f"tensor-v{version}")]
        heads, tensor = (records.measured(FIRST, key) or records.measured(INFERENCE, key) for key in keys)
        if heads is not None and tensor is not None:
            ratios[tokens] = tensor["first_token_seconds"] / heads["first_token_seconds"]
            papers.append(theirs[f"TP v{version} + flash"][place] / theirs["Burst"][place])
            once += [f"{tokens // KIB}K"] if heads.get("rounds") == tensor.get("rounds") == 1 else []
    if not ratios:
        return UNKNOWN
    text = ", ".join(f"{ratio:.2f} times as long at {tokens // KIB}K" for tokens, ratio in ratios.items())
    span = " to ".join(dict.fromkeys(f"{bound:.2f}" for bound in (min(papers), max(papers))))
    where = f"on 2 GPUs with NVLink{', measured once at ' + ', '.join(once) if once else ''}"
    paper = f"the paper: {span} times on 8 A100 over PCIe"
    return by_length(ratios, f"TP takes {text}, {where} ({paper}); ours is `heads`")


def _local_optimization(records: Recorded) -> Verdict:
    flash, whole = (records.measured(PAPER, f"tile/16384/mha/{m}@2") for m in ("flash", "whole-tile"))
    if flash is None or whole is None:
        return UNKNOWN
    with_it, without = (Times.of(row, *_BOTH) for row in (flash, whole))
    peaks = [row["peak_memory_gib"] or 0.0 for row in (flash, whole)]
    numbers = (
        f"16K: {without.over(with_it):.1f} times as long without it, {peaks[1]:.1f} GiB in place of {peaks[0]:.1f}"
    )
    saves = without.over(with_it) > 1 and not without.overlaps(with_it)
    return judged(saves and peaks[1] >= peaks[0], numbers)


def _saves_time(records: Recorded, other: str, where: str, *, memory: bool = False) -> Verdict:
    """Judge a part of the global optimization: its alternative must be slower, and their ranges must not overlap."""
    parts, holds = [], True
    for tokens in (32 * KIB, 128 * KIB):
        online, without = (records.measured(PAPER, f"merge/{tokens}/mha/{m}@2") for m in ("online", other))
        if online is None or without is None:
            return UNKNOWN
        for direction in _BOTH:
            a, b = Times.of(online, direction), Times.of(without, direction)
            holds = holds and b.over(a) > 1 and not b.overlaps(a)
            near = ", ranges overlap" if b.overlaps(a) else ""
            parts.append(f"{tokens // KIB}K {direction}: {b.over(a):.3f} times as long without{near}")
        if memory:
            peaks = [row["peak_gib"]["forward"] or 0.0 for row in (online, without)]
            holds = holds and peaks[0] < peaks[1]
            parts.append(f"{tokens // KIB}K forward: {peaks[0]:.1f} GiB, without {peaks[1]:.1f}")
    return judged(holds, "; ".join(parts), where)


def _perplexities(records: Recorded) -> Verdict:
    found = records.record(PERPLEXITY)
    if found is None:
        return UNKNOWN
    values = [row["perplexity"] for row in found["rows"].values() if "perplexity" in row]
    rounded = {f"{value:.3f}" for value in values}
    spread = f"{min(values):.4f} to {max(values):.4f}, {len(values)} methods"
    papers = [value for value in FACTS["perplexity"].values() if isinstance(value, float)]
    return judged(len(rounded) == 1, f"{spread} (the paper: {min(papers)} to {max(papers)})")


def _one_gpu(records: Recorded) -> Verdict:
    ours, flash = (records.measured(ATTENTION, f"accuracy/4096/mha/causal/{m}@1") for m in ("ours", "one-gpu"))
    if ours is None or flash is None:
        return UNKNOWN
    one, other = (", ".join(f"{value:.2e}" for value in row["errors"].values()) for row in (ours, flash))
    return judged(one == other, f"errors of O, dQ, dK, dV against fp64: {one}; FlashAttention-4 alone: {other}")


def _scaling(records: Recorded) -> Verdict:
    one, two = (records.measured(FIRST, f"prompt/llama-2-13b/65536/causal/heads@{n}") for n in (1, 2))
    if one is None or two is None:
        return Verdict(NOT_TESTABLE, "8 GPUs; on 2 " + MISSING)
    gain = one["first_token_seconds"] / two["first_token_seconds"]
    return Verdict(NOT_TESTABLE, f"8 GPUs; from 1 to 2 ours (`heads`) gains {gain:.2f} times")


def _batches(records: Recorded) -> Verdict:
    rows = [records.measured(TRAIN, f"step/llama-2-7b-x2/{name}4096/ours@2") for name in ("", "2x", "4x", "8x")]
    known = [row for row in rows if row is not None]
    if len(known) < len(rows):
        return UNKNOWN
    speeds = [row["tokens_per_second"] for row in known]
    numbers = ", ".join(f"{speed:,.0f}" for speed in speeds)
    text = f"tokens/s a GPU with batch 1, 2, 4, 8: {numbers}{way_of(known[0])}"
    return judged(speeds == sorted(speeds), text)


def _higher_throughput(records: Recorded) -> Verdict:
    """Compare throughput with the others at each batch size. The largest batch that fits was not measured."""
    parts, holds, way = [], True, ""
    for batch in (1, 2, 4, 8):
        key = f"step/llama-2-7b-x2/{f'{batch}x' if batch > 1 else ''}4096"
        ours, tensor, ring = (records.measured(TRAIN, f"{key}/{m}@2") for m in ("ours", "tensor-v3", "ring-li"))
        if ours is None or tensor is None or ring is None:
            return UNKNOWN
        mine, way = Times.of(ours), way_of(ours)
        others = {"TP v3": Times.of(tensor), "RingAttention": Times.of(ring)}
        holds = holds and all(times.over(mine) > 1 for times in others.values())
        near = overlapping(name for name, times in others.items() if times.overlaps(mine))
        longer = ", ".join(f"{name} takes {times.over(mine):.2f} times as long" for name, times in others.items())
        parts.append(f"batch {batch}: {longer}{near}")
    return judged(holds, "; ".join(parts) + way)


def _memory_as_tensor(records: Recorded) -> Verdict:
    parts, holds, way = [], True, ""
    for tokens in (32 * KIB, 128 * KIB):
        ours, theirs = (records.measured(TRAIN, step_key("llama-2-7b", tokens, m)) for m in ("ours", "tensor-v3"))
        if ours is None or theirs is None or not (ours["peak_memory_gib"] and theirs["peak_memory_gib"]):
            return UNKNOWN
        ratio = ours["peak_memory_gib"] / theirs["peak_memory_gib"]
        holds, way = holds and ratio < 1.25, way_of(ours)
        peaks = f"{ours['peak_memory_gib']:.1f} GiB and {theirs['peak_memory_gib']:.1f}"
        parts.append(f"{tokens // KIB}K: {peaks}, {ratio:.2f} times")
    return judged(holds, "; ".join(parts) + way)


def _far(records: Recorded) -> Verdict:
    del records
    predicted = f"predicted at 128K with {curve.way(32, 128 * KIB)}: {curve.gain(32, 128 * KIB):.2f} times"
    return Verdict(NOT_TESTABLE, f"32 GPUs; {predicted}")


_RING, _TOKENS = "40 % less communication than", "tables 2, 3"
CLAIMS: Sequence[Claim] = (
    Claim(f"{_RING} RingAttention, as the paper counts both", "README", _less_as_published),
    Claim(f"{_RING} RingAttention with a reduce-scatter", "README", _less_than_scattered),
    Claim(f"{_RING} `kv`, a ring of K and V", "README", _less_than_kv),
    Claim(
        "At least 24 % fewer bytes than `kv` in backward, MHA, head dim 128, statistics in fp32", "table 1", _less_a_hop
    ),
    Claim("`burst` is never slower than `kv` over NCCL, MHA", "table 1", _never_slower),
    Claim("Twice the training speed of tensor parallelism at 32K on 8 A100", "abstract", _twice_at_32k),
    *(
        Claim(f"Fastest of all methods at long lengths, {name}", "figures 2, 3", partial(_fastest, model=model, zero=n))
        for name, model, n in (("7B", "llama-2-7b", 3), ("7B under ZeRO-2", "llama-2-7b", 2), ("13B", "llama-2-13b", 3))
    ),
    Claim("Ring self-attention runs out of memory where Burst does not", "figure 2, tables 2, 3", _ring_out_of_memory),
    *(
        Claim(f"First token of {size.upper()} ahead of TP v{n}", table, partial(_first_token, size=size, version=n))
        for table, size in (("table 2", "7b"), ("table 3", "13b"))
        for n in (1, 3)
    ),
    Claim("LAO saves time and memory", _TOKENS, _local_optimization),
    Claim(
        "Merging results as they arrive saves time and memory",
        "section on GAO",
        partial(_saves_time, other="at-the-end", where="on 2 GPUs", memory=True),
    ),
    Claim(
        "Transfers beside kernels save time",
        "section on GAO",
        partial(_saves_time, other="no-overlap", where="on NVLink"),
    ),
    Claim("All methods give the same perplexity", "table 4", _perplexities),
    Claim("On one GPU it equals FlashAttention", "figure 4a", _one_gpu),
    Claim("Tensor parallelism stops gaining from 4 to 8 GPUs, Burst does not", "figure 4a", _scaling),
    Claim("Throughput grows with the batch", "figure 4b", _batches),
    Claim("Higher throughput than the others at each batch size", "figure 4b", _higher_throughput),
    Claim("With ZeRO it takes about the memory of Megatron v3", "figure 3", _memory_as_tensor),
    Claim("Nearly 2.0 times as fast beyond 128K on 32 A100", "figure 3", _far),
)
