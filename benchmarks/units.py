"""Times attention's forward pass by the division of a rank's heads into units, and by one collective each way.

    bmburst bench units --gpus 4 --heads 28 --kv-heads 4 --tokens 160K

Each way is timed in turns with one GPU's kernel on the same FLOPs, and after it the choice of the cost model. Rates of
ways show what the cost model should choose (`bmburst.schedule.units.unit_plans`).
"""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

from benchmarks.attention.cells import Cell, forward_flops, one_gpu_cell
from benchmarks.attention.method import LocalKernel, OneGpu, Setting, prepare
from benchmarks.attention.methods import Ours
from benchmarks.engine.machine import RankGroup, start_ranks
from benchmarks.engine.report import markdown_table
from benchmarks.engine.rows import Measured, Row, RowBenchmark
from benchmarks.engine.timing import Times, in_turns, quotient
from bmburst.amounts import short, tokens
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


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", type=int, default=32, help="query heads (default: 32)")
    parser.add_argument("--kv-heads", type=int, default=8, help="KV heads (default: 8)")
    parser.add_argument("--tokens", type=tokens, default=65536, help="tokens of the sequence (default: 64K)")


def _measure(options: argparse.Namespace) -> Measured:
    facts = {"heads": options.heads, "kv_heads": options.kv_heads, "tokens": options.tokens}
    return facts, _rows(options, RankGroup.world(start_ranks()))


def _rows(options: argparse.Namespace, group: RankGroup) -> Iterator[Row]:
    """Yield a row for the choice of the cost model, and for each way."""
    cell = Cell(
        suite="sequence", method="ours", ranks=group.size, device="cuda", dtype="bfloat16", tokens=options.tokens,
        heads=options.heads, kv_heads=options.kv_heads,
    )  # fmt: skip
    setting = Setting(group=group, kernel=LocalKernel())
    one, same_work = (
        prepare(OneGpu(), cell, setting),
        forward_flops(cell) / group.size / forward_flops(one_gpu_cell(cell)),
    )
    own = options.heads // group.size, max(1, options.kv_heads // group.size)
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
        ratio = quotient(alone, times) * same_work
        yield {"units": name, "forward_ms": Times.of(times).median, "ratio": ratio}


def table(record: Mapping[str, Any]) -> str:
    """Return a record as Markdown."""
    title = (
        f"{record['heads']} query heads, {record['kv_heads']} KV heads, {short(record['tokens'])} tokens, "
        f"{record['machine']['ranks']} GPUs:"
    )
    lines = [[row["units"], f"{row['forward_ms']:.3f}", f"{row['ratio']:.3f}"] for row in record["rows"]]
    columns = ["query heads of units", "forward, ms", "ratio to one GPU"]
    return "\n".join([title, "", *markdown_table(columns, lines)])


BENCHMARKS = (
    RowBenchmark(
        name="units", about=__doc__, configure=_configure, measure=_measure, table=table, ranks=4, needs_gpu=True
    ),
)
