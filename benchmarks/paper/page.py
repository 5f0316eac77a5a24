"""Writes `docs/paper.md`: the verdicts on the paper's claims, and all tables between the page's markers.

Verdicts are computed from the recorded numbers. Tables are between `<!-- table: NAME -->` and `<!-- end -->`.
`python -m benchmarks.records` rewrites all of them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from benchmarks.inference.kind import paper as first_token_facts
from benchmarks.paper import curve, overheads, tables
from benchmarks.paper.tables import ATTENTION, FACTS, FIRST, INFERENCE, MISSING, PAPER, PERPLEXITY, TRAIN, Recorded, Row

PAGE = Path(__file__).parents[2] / "docs" / "paper.md"
_TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.S)
_KIB, LI = 1024, "RingAttention (Li et al.)"
_SAME = 0.02  # of a time: what runs differ by anyway
CONFIRMED, NOT_CONFIRMED, NOT_TESTABLE = "confirmed", "not confirmed", "not testable here"


class Verdict(NamedTuple):
    """What our runs say of a claim, and the numbers that say it."""

    verdict: str
    numbers: str


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim.

    Attributes:
        text: What the paper or its repository says.
        source: Where.
        judge: Returns the verdict.
    """

    text: str
    source: str
    judge: Callable[[Recorded], Verdict]


def claims_table(records: Recorded) -> list[str]:
    """Return all claims with their verdicts."""
    lines = ["| claim | where | here | numbers |", "|---|---|---|---|"]
    for claim in CLAIMS:
        verdict, numbers = claim.judge(records)
        lines.append(f"| {claim.text} | {claim.source} | {verdict} | {numbers} |")
    return [*lines, ""]


def _if(holds: bool, numbers: str) -> Verdict:
    return Verdict(CONFIRMED if holds else NOT_CONFIRMED, numbers)


def _by_length(ratios: Mapping[int, float], least: float, numbers: str) -> Verdict:
    """Return whether all ratios are above `least`; if only the shortest length is not, the length from which they are.

    Args:
        ratios: By tokens, ascending.
        least: The bound.
        numbers: What the verdict says beside.
    """
    lengths = list(ratios)
    below = [tokens for tokens in lengths if ratios[tokens] <= least]
    if len(lengths) > 1 and below == lengths[:1]:
        return Verdict(f"confirmed from {lengths[1] // _KIB}K on, not at {lengths[0] // _KIB}K", numbers)
    return _if(not below, numbers)


def _less_communication(records: Recorded) -> Verdict:
    kv, burst, gqa_kv, gqa = (
        records.measured(PAPER, f"backward/65536/{h}/{m}@2") for h in ("mha", "gqa") for m in ("kv", "burst")
    )
    eight, grouped = overheads.EXAMPLES["MHA, 8 GPUs"], overheads.EXAMPLES["GQA 32/8, 8 GPUs"]
    published, scattered = overheads.fewer_as_published(eight.head_dim), overheads.fewer_in_all(eight, LI)
    said = (
        f"backward by formula on 8 GPUs: {_less(overheads.fewer(eight))} than kv, with GQA 32/8 "
        f"{_less(overheads.fewer(grouped))}; in all, over RingAttention {published:.0%} as the paper counts, but "
        f"{_less(scattered)} than with a reduce-scatter"
    )
    if kv is None or burst is None or gqa_kv is None or gqa is None:
        return Verdict(f"{_if(overheads.fewer(eight) > 0, '').verdict} for MHA, by formula", said)
    fewer, with_groups = (1 - b["bytes"] / a["bytes"] for a, b in ((kv, burst), (gqa_kv, gqa)))
    moved = f"counted on 2 GPUs: {_less(fewer)} than kv, with GQA 32/8 {_less(with_groups)}"
    return Verdict(f"{_if(fewer > 0, '').verdict} for MHA", f"{moved}; {said}")


def _less(share: float) -> str:
    return f"{abs(share):.0%} {'fewer' if share > 0 else 'more'} bytes"


def _twice_at_32k(records: Recorded) -> Verdict:
    ours, theirs = (records.measured(TRAIN, f"step/llama-2-7b-x2/32768/{m}@2") for m in ("ours", "tensor-v3"))
    found = [curve.gain(8, 32 * _KIB, pcie=pcie) for pcie in (False, True)]
    predicted = f"8 GPUs, predicted: {found[0]:.2f} times with NVLink, {found[1]:.2f} with PCIe"
    if ours is None or theirs is None:
        return Verdict(NOT_TESTABLE, f"{predicted}; on 2 {MISSING}")
    return Verdict(NOT_TESTABLE, f"{predicted}; on 2 H200, 2 layers: {_ratio(theirs, ours):.2f} times")


def _ratio(one: Row, other: Row) -> float:
    return float(one["milliseconds"]["median"] / other["milliseconds"]["median"])


def _fastest(records: Recorded) -> Verdict:
    others = ("ulysses", "zigzag-ring-nccl", "tensor-v1", "tensor-v3", "ring-li")
    said, nearest = [], {}
    for tokens in (16 * _KIB, 32 * _KIB, 64 * _KIB, 128 * _KIB):
        ours = records.measured(TRAIN, f"step/llama-2-7b-x2/{tokens}/ours@2")
        if ours is None:
            return Verdict(MISSING, "-")
        rows = {m: records.measured(TRAIN, f"step/llama-2-7b-x2/{tokens}/{m}@2") for m in others}
        ratios = {name: _ratio(row, ours) for name, row in rows.items() if row is not None}
        if ratios:
            least = min(ratios, key=lambda name: ratios[name])
            said.append(f"{tokens // _KIB}K: next {least}, {ratios[least]:.2f} times ours")
            nearest[tokens] = ratios[least]
    return _by_length(nearest, 1 - _SAME, "; ".join(said))


def _ring_out_of_memory(records: Recorded) -> Verdict:
    lengths = tuple(_KIB * n for n in (1, 4, 16, 32, 64, 128))
    rows = {n: records.row(TRAIN, f"step/llama-2-7b-x2/{n}/ring-li@2") for n in lengths}
    known = {n: row for n, row in rows.items() if row is not None}
    if not known:
        return Verdict(MISSING, "-")
    failed = [n for n, row in known.items() if "memory" in row.get("reason", "")]
    if not failed:
        return _if(False, f"it runs up to {max(known) // _KIB}K")
    ours = records.measured(TRAIN, f"step/llama-2-7b-x2/{failed[0]}/ours@2")
    reason = known[failed[0]]["reason"]
    return _if(ours is not None, f"2 layers, {failed[0] // _KIB}K: {reason}; ours runs there")


def _first_token(records: Recorded) -> Verdict:
    ratios = {}
    for tokens in (4 * _KIB, 32 * _KIB, 128 * _KIB):
        heads, tensor = (
            records.measured(INFERENCE, f"prompt/llama-2-7b/{tokens}/causal/{m}@2") for m in ("heads", "tensor-v1")
        )
        if heads is None or tensor is None:
            return Verdict(MISSING, "-")
        ratios[tokens] = tensor["first_token_seconds"] / heads["first_token_seconds"]
    said = ", ".join(f"{ratio:.2f} times as long at {tokens // _KIB}K" for tokens, ratio in ratios.items())
    facts = first_token_facts()
    theirs = facts["models"]["llama-2-7b"]
    places = [facts["tokens"].index(tokens) for tokens in ratios]
    papers = [theirs["TP v1 + flash"][place] / theirs["Burst"][place] for place in places]
    span = f"{min(papers):.2f} to {max(papers):.2f} times on 8 A100 over PCIe"
    numbers = f"TP v1 takes {said}, on 2 GPUs with NVLink (the paper: {span})"
    return _by_length(ratios, 1.0, numbers)


def _local_optimization(records: Recorded) -> Verdict:
    flash, whole = (records.measured(PAPER, f"tile/16384/mha/{m}@2") for m in ("flash", "whole-tile"))
    if flash is None or whole is None:
        return Verdict(MISSING, "-")
    times = [sum(row["milliseconds"][d]["median"] for d in ("forward", "backward")) for row in (flash, whole)]
    peaks = [row["peak_memory_gib"] or 0.0 for row in (flash, whole)]
    numbers = f"16K: {times[1] / times[0]:.1f} times as long without it, {peaks[1]:.1f} GiB in place of {peaks[0]:.1f}"
    return _if(times[1] > times[0] and peaks[1] >= peaks[0], numbers)


def _overlap(records: Recorded) -> Verdict:
    said, holds = [], True
    for tokens in (32 * _KIB, 128 * _KIB):
        online, waiting = (records.measured(PAPER, f"merge/{tokens}/mha/{m}@2") for m in ("online", "no-overlap"))
        if online is None or waiting is None:
            return Verdict(MISSING, "-")
        a, b = (sum(r["milliseconds"][d]["median"] for d in ("forward", "backward")) for r in (online, waiting))
        holds = holds and b > a
        said.append(f"{tokens // _KIB}K: {b / a:.3f} times as long without")
    return _if(holds, "; ".join(said) + " (NVLink)")


def _perplexities(records: Recorded) -> Verdict:
    found = records.record(PERPLEXITY)
    if found is None:
        return Verdict(MISSING, "-")
    values = [row["perplexity"] for row in found["rows"].values()]
    rounded = {f"{value:.3f}" for value in values}
    spread = f"{min(values):.4f} to {max(values):.4f}, {len(values)} methods"
    papers = [value for value in FACTS["perplexity"].values() if isinstance(value, float)]
    return _if(len(rounded) == 1, f"{spread} (the paper: {min(papers)} to {max(papers)})")


def _one_gpu(records: Recorded) -> Verdict:
    ours, flash = (records.measured(ATTENTION, f"accuracy/4096/mha/causal/{m}@1") for m in ("ours", "one-gpu"))
    if ours is None or flash is None:
        return Verdict(MISSING, "-")
    one, other = (", ".join(f"{value:.2e}" for value in row["errors"].values()) for row in (ours, flash))
    return _if(one == other, f"errors of O, dQ, dK, dV against fp64: {one}; FlashAttention-4 alone: {other}")


def _scaling(records: Recorded) -> Verdict:
    one, two = (records.measured(FIRST, f"prompt/llama-2-13b/65536/causal/heads@{n}") for n in (1, 2))
    if one is None or two is None:
        return Verdict(NOT_TESTABLE, "8 GPUs; on 2 " + MISSING)
    gain = one["first_token_seconds"] / two["first_token_seconds"]
    return Verdict(NOT_TESTABLE, f"8 GPUs; from 1 to 2 ours gains {gain:.2f} times")


def _batches(records: Recorded) -> Verdict:
    rows = [records.measured(TRAIN, f"step/llama-2-7b-x2/{name}4096/ours@2") for name in ("", "2x", "4x", "8x")]
    speeds = [row["tokens_per_second"] for row in rows if row is not None]
    if len(speeds) < len(rows):
        return Verdict(MISSING, "-")
    numbers = ", ".join(f"{speed:,.0f}" for speed in speeds)
    return _if(speeds == sorted(speeds), f"tokens/s a GPU with batch 1, 2, 4, 8: {numbers}")


def _memory_as_tensor(records: Recorded) -> Verdict:
    said, holds = [], True
    for tokens in (32 * _KIB, 128 * _KIB):
        ours, theirs = (records.measured(TRAIN, f"step/llama-2-7b-x2/{tokens}/{m}@2") for m in ("ours", "tensor-v3"))
        if ours is None or theirs is None or not (ours["peak_memory_gib"] and theirs["peak_memory_gib"]):
            return Verdict(MISSING, "-")
        ratio = ours["peak_memory_gib"] / theirs["peak_memory_gib"]
        holds = holds and ratio < 1.25
        said.append(f"{tokens // _KIB}K: {ours['peak_memory_gib']:.1f} GiB and {theirs['peak_memory_gib']:.1f}")
    return _if(holds, "; ".join(said))


def _far(records: Recorded) -> Verdict:
    del records
    return Verdict(NOT_TESTABLE, f"32 GPUs; predicted at 128K: {curve.gain(32, 128 * _KIB):.2f} times")


CLAIMS: Sequence[Claim] = (
    Claim("40 % less communication than ring attention", "README", _less_communication),
    Claim("Twice the training speed of tensor parallelism at 32K on 8 A100", "abstract", _twice_at_32k),
    Claim("Fastest of all methods at long lengths", "figures 2, 3", _fastest),
    Claim("Ring self-attention runs out of memory where Burst does not", "figure 2, tables 2, 3", _ring_out_of_memory),
    Claim("First token ahead of tensor parallelism", "tables 2, 3", _first_token),
    Claim("LAO saves time and memory", "tables 2, 3", _local_optimization),
    Claim("Transfers beside kernels save time", "section on GAO", _overlap),
    Claim("All methods give the same perplexity", "table 4", _perplexities),
    Claim("On one GPU it equals FlashAttention", "figure 4a", _one_gpu),
    Claim("Tensor parallelism stops gaining from 4 to 8 GPUs, Burst does not", "figure 4a", _scaling),
    Claim("Throughput grows with the batch", "figure 4b", _batches),
    Claim("With ZeRO it takes about the memory of Megatron v3", "figure 3", _memory_as_tensor),
    Claim("Nearly 2.0 times as fast beyond 128K on 32 A100", "figure 3", _far),
)


TABLES: Mapping[str, Callable[[Recorded], list[str]]] = MappingProxyType(
    {
        "communication": lambda _: tables.communication(),
        "memory": lambda _: tables.memory(),
        "burst-and-kv": lambda _: tables.burst_and_kv(),
        "backward": tables.backward,
        "slow-link": tables.slow_link,
        "merge": tables.merge,
        "tile": tables.tile,
        "first-token-7b": partial(tables.first_token, model="llama-2-7b"),
        "first-token-13b": partial(tables.first_token, model="llama-2-13b"),
        "perplexity": tables.perplexity,
        "training-7b": partial(tables.training, model="llama-2-7b"),
        "training-13b": partial(tables.training, model="llama-2-13b"),
        "training-13b-h100": partial(tables.training, model="llama-2-13b", record=tables.TRAIN_H100, gpu="H100"),
        "zero": tables.zero,
        "scaling": tables.scaling,
        "batches": tables.batches,
        "readme-lengths": tables.readme_lengths,
        "readme-batches": tables.readme_batches,
        "prediction": lambda _: curve.table(),
        "claims": claims_table,
    }
)


def filled(text: str, records: Recorded) -> str:
    """Return the page with its tables as the records say.

    Args:
        text: The page.
        records: What was recorded.
    """

    def table(found: re.Match[str]) -> str:
        lines = "\n".join(TABLES[found[2]](records)).rstrip()
        return f"{found[1]}\n{lines}\n\n{found[3]}"

    return _TABLE.sub(table, text)
