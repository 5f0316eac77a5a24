"""Compares `strategy="auto"` with all strategies: `bmburst launch --nproc 2 -- -m benchmarks.strategies`.

The cases are those with close predictions for the strategies on 2 GPUs: short sequences, windows and packed documents.
A time is the median of forward and backward of one call, on the slowest rank; calls of the strategies alternate.
Without GPUs the sequences are shorter, and the numbers only show that the program runs.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import bmburst
from benchmarks.attention.method import both
from benchmarks.engine.machine import RankGroup, publish, start_ranks
from benchmarks.engine.timing import in_turns
from bmburst.attention.call import head_shapes
from bmburst.schedule.cost import Placement, Problem
from bmburst.schedule.hardware import HOST, hardware_like, load_hardware
from bmburst.schedule.layout import make_layout
from bmburst.schedule.mask import Mask
from bmburst.schedule.parallelism import Strategy
from bmburst.schedule.strategy import choose_strategy

HEAD_DIM, WINDOW = 128, 4096
LENGTHS = (1024, 4096, 16384, 700, 9000)  # of documents, again and again
CASES = (
    *((heads, 8192, "documents") for heads in ((32, 32), (40, 40))),
    *(((7, 7), 8192, mask) for mask in ("causal", "full", "window")),
    *((heads, tokens, "window") for heads in ((32, 32), (32, 8)) for tokens in (131072, 262144)),
    *(((8, 1), tokens, mask) for tokens in (65536, 131072, 524288) for mask in ("window", "documents")),
    *((heads, 524288, "window") for heads in ((12, 4), (28, 4))),
    ((32, 8), 131072, "documents"),
)
STRATEGIES = ("heads", "gather", "ring")
_META: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}
WARM_UP, REPEATS, SECONDS = 5, 31, 2.0


def main() -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=len(CASES), help="how many of the cases (default: all)")
    parser.add_argument("--output", type=Path, help="JSON file of the results; a table is written beside it")
    options = parser.parse_args()
    device = start_ranks()
    is_cuda = device.type == "cuda"
    rows = []
    for heads, tokens, mask in CASES[: options.cases]:
        rows.append(_measure(heads, tokens if is_cuda else tokens // 64, mask, device))
        if is_cuda:
            bmburst.empty_cache()
            torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        publish(options.output, "benchmarks.strategies", table(rows), dist.get_world_size(), rows=rows)
    dist.destroy_process_group()
    return 0


def predicted(row: Mapping[str, Any], ranks: int) -> tuple[str, dict[str, float]]:
    """Return what "auto" takes in a recorded case on H200s, and the predicted milliseconds of each measured strategy.

    Args:
        row: A row of the record.
        ranks: The number of GPUs.
    """
    layout = make_layout("zigzag", ranks, row["tokens"] // ranks)
    q, k = (torch.empty(1, layout.tokens, row[heads], HEAD_DIM, **_META) for heads in ("query_heads", "kv_heads"))
    mask, machine = _mask(row["mask"], row["tokens"]), load_hardware("h200")
    problem = Problem(head_shapes(layout, q, k), row["tokens"], mask, Placement("peer"), machine)

    def choose(strategy: str) -> Strategy:
        return choose_strategy(strategy, problem.shapes, problem.length, mask, problem.placement, machine)

    costs = {strategy: 1e3 * problem.cost(choose(strategy)).total for strategy in STRATEGIES if strategy in row}
    return _name(choose("auto"), ranks), costs


def _mask(name: str, tokens: int) -> Mask:
    if name == "documents":
        ends = itertools.takewhile(lambda end: end < tokens, itertools.accumulate(itertools.cycle(LENGTHS)))
        return bmburst.Documents.from_cu_seqlens([0, *ends, tokens])
    return {"window": bmburst.SlidingWindow(WINDOW), "causal": bmburst.Causal(), "full": bmburst.Full()}[name]


def _measure(heads: tuple[int, int], tokens: int, name: str, device: torch.device) -> dict[str, Any]:
    """Return a case's row: predicted choice, and milliseconds of each strategy that can do it."""
    group, mask = RankGroup.world(device), _mask(name, tokens)
    local = tokens // group.size
    torch.manual_seed(group.rank)
    q, k, v, grad = (
        torch.randn(1, local, count, HEAD_DIM, device=device, dtype=torch.bfloat16)
        for count in (heads[0], heads[1], heads[1], heads[0])
    )
    inputs = q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad
    shapes = head_shapes(make_layout("zigzag", group.size, local), q, k)
    placement = Placement("peer" if device.type == "cuda" else "gloo")
    machine = hardware_like(torch.cuda.get_device_name(device) if device.type == "cuda" else HOST)
    taken = _name(choose_strategy("auto", shapes, tokens, mask, placement, machine), group.size)
    can = [each for each in STRATEGIES if each != "heads" or not heads[0] % group.size]

    ways = (partial(bmburst.burst_attention, mask=mask, strategy=strategy) for strategy in can)
    calls = [partial(both, way, *inputs) for way in ways]
    for call in calls * WARM_UP:
        call()
    times = in_turns(*calls, group=group, repeats=REPEATS, seconds=SECONDS)
    row = {"query_heads": heads[0], "kv_heads": heads[1], "tokens": tokens, "mask": name, "auto": taken}
    return row | {strategy: statistics.median(found) for strategy, found in zip(can, times, strict=True)}


def _name(strategy: Strategy, ranks: int) -> str:
    return "heads" if strategy.ulysses_degree == ranks else strategy.outer


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown; the last column is auto's time over the best one's."""
    names = " | ".join(f"{name}, ms" for name in STRATEGIES)
    lines = [f"| query / KV heads | tokens | mask | {names} | auto takes | auto / best |", "|---" * 8 + "|"]
    for row in rows:
        found = {name: row[name] for name in STRATEGIES if name in row}
        cells = (f"{found[name]:.3f}" if name in found else "-" for name in STRATEGIES)
        ratio = found[row["auto"]] / min(found.values())
        own = f"{row['query_heads']} / {row['kv_heads']}"
        lines.append(f"| {own} | {row['tokens']} | {row['mask']} | {' | '.join(cells)} | {row['auto']} | {ratio:.3f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
