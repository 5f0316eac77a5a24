"""Times attention's forward pass by the division of a rank's heads into units, and by one collective each way.

    torchrun --nproc-per-node 4 -m benchmarks.units --heads 28 --kv-heads 4 --tokens 163840

Each way is timed in turns with one GPU's kernel on the same FLOPs, and after it the choice of the cost model. Rates of
ways show what the cost model should choose (`bmburst.schedule.units.unit_plans`).
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

from benchmarks.attention import Cell, forward_flops, one_gpu_cell
from benchmarks.attention.method import LocalKernel, OneGpu, Setting, prepare
from benchmarks.attention.methods import Ours
from benchmarks.engine.machine import RankGroup, publish, require_gpu, start_ranks
from benchmarks.engine.report import markdown_table
from benchmarks.engine.timing import Times, in_turns, quotient
from bmburst.amounts import short
from bmburst.attention import call as decided
from bmburst.schedule.parallelism import Strategy
from bmburst.schedule.strategy import choose_strategy

REPEATS, SECONDS = 15, 20.0


def ways(heads: int, kv_heads: int) -> Iterator[Strategy]:
    """Yield exchanges of heads by one collective, at once over copy engines, and in units, for a rank's heads."""
    plain, group = Strategy(1, "ring", "q"), heads // kv_heads
    yield replace(plain, at_once=True)
    yield plain
    step = 1 if kv_heads <= 2 else group
    half = heads // 2 // step * step
    splits: list[tuple[int, ...]] = [(step, heads - step), (heads - step, step), (half, heads - half)]
    splits += [(step, heads - 2 * step, step), (2 * step, heads - 4 * step, 2 * step)]
    for units in dict.fromkeys(splits):
        if min(units) > 0:
            yield replace(plain, forward_units=units)


def main() -> None:
    """Measure the ways, and print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    require_gpu("benchmarks.units")
    device = start_ranks()
    group = RankGroup.world(device)
    cell = Cell(
        suite="sequence", method="ours", ranks=group.size, device="cuda", dtype="bfloat16", tokens=args.tokens,
        heads=args.heads, kv_heads=args.kv_heads,
    )  # fmt: skip
    setting = Setting(group=group, kernel=LocalKernel())
    one, same_work = (
        prepare(OneGpu(), cell, setting),
        forward_flops(cell) / group.size / forward_flops(one_gpu_cell(cell)),
    )
    rows = []
    own = args.heads // group.size, max(1, args.kv_heads // group.size)
    for way in [None, *ways(*own)]:

        def taken(name: str, *rest: object, way: Strategy | None = way) -> Strategy:
            chosen = choose_strategy(name, *rest)  # type: ignore[arg-type]
            if way is None:
                return chosen
            return replace(chosen, forward_units=way.forward_units, at_once=way.at_once)

        with mock.patch.object(decided, "choose_strategy", taken):
            method = Ours("heads")
            decided._decided_calls.cache_clear()
            calls = prepare(method, cell, setting)
            times, alone = in_turns(calls.forward, one.forward, group=group, repeats=REPEATS, seconds=SECONDS)
        name = (
            "chosen" if way is None else "one collective each way" if way.at_once else str(way.forward_units or own[0])
        )
        rows.append([name, f"{Times.of(times).median:.3f}", f"{quotient(alone, times) * same_work:.3f}"])
    if group.rank == 0:
        title = (
            f"{args.heads} query heads, {args.kv_heads} KV heads, {short(args.tokens)} tokens, {group.size} GPUs\n\n"
        )
        table = "\n".join(markdown_table(["query heads of units", "forward, ms", "ratio to one GPU"], rows))
        publish(args.output, "benchmarks.units", title + table, group.size, rows=rows)


if __name__ == "__main__":
    torch.set_grad_enabled(True)
    main()
