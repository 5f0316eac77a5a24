"""Measures attention with values narrower than keys (multi-head latent attention), not padded beside padded to keys.

`bmburst bench widths --output FILE.json`: 64K tokens over the ranks, 16 heads of 192 and 128, causal, zigzag, bf16, for
each strategy and kernel. `own` gives values as they are. `padded` pads them before the
call, and cuts the output. `equal` has values of 192 without padding: what is left to `padded` are the copies.

A time is the median of forward and backward of one call on the slowest rank, in milliseconds; calls alternate. `MiB` is
what this rank's peak of torch's allocator rises in a call. Without GPUs the sequence is shorter, and the numbers only
show that the program runs.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

import bmburst
from benchmarks.attention.method import both
from benchmarks.engine.machine import RankGroup, start_ranks
from benchmarks.engine.report import markdown_table
from benchmarks.engine.rows import Measured, Row, RowBenchmark
from benchmarks.engine.timing import in_turns
from bmburst.amounts import tokens
from bmburst.errors import UserError, first_line

HEADS, HEAD_DIM, VALUE_DIM = 16, 192, 128
WAYS = ("own", "padded", "equal")
_REPEATS, _SECONDS = 20, 20.0
_COLUMNS = ("kernel", "strategy", *(f"{way}, ms" for way in WAYS), "padded / own", *(f"{way}, MiB" for way in WAYS))


def _configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tokens", type=tokens, default=65536, help="tokens of the sequence (default: 64K)")
    add("--kernels", default="auto,triton", help="kernels (default: %(default)s)")
    add("--strategies", default="auto,heads,gather,ring", help="strategies (default: %(default)s)")


def _measure(options: argparse.Namespace) -> Measured:
    group = RankGroup.world(start_ranks())
    length = options.tokens if group.device.type == "cuda" else 64 * group.size
    return {"tokens": length}, _rows(options, group, length)


def _rows(options: argparse.Namespace, group: RankGroup, length: int) -> Iterator[Row]:
    """Yield a row for each kernel and strategy."""
    for kernel, strategy in product(options.kernels.split(","), options.strategies.split(",")):
        try:
            yield _measured(group, length, kernel, strategy)
        except UserError as error:
            yield {"kernel": kernel, "strategy": strategy, "refused": first_line(error)}
        if group.device.type == "cuda":
            bmburst.empty_cache()


def _measured(group: RankGroup, length: int, kernel: str, strategy: str) -> Row:
    """Return milliseconds and MiB of each way."""
    torch.manual_seed(group.rank)
    shape = 1, length // group.size, HEADS
    q, k, wide, wide_grad = (torch.randn(*shape, HEAD_DIM, device=group.device, dtype=torch.bfloat16) for _ in range(4))
    v, grad = (t[..., :VALUE_DIM].contiguous() for t in (wide, wide_grad))
    attend = partial(bmburst.burst_attention, kernel=kernel, strategy=strategy)

    def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, pad(v, (0, HEAD_DIM - VALUE_DIM)))[..., :VALUE_DIM]

    for tensor in (q, k, v, wide):
        tensor.requires_grad_()
    calls = {
        "own": partial(both, attend, q, k, v, grad),
        "padded": partial(both, padded, q, k, v, grad),
        "equal": partial(both, attend, q, k, wide, wide_grad),
    }
    row: Row = {"kernel": kernel, "strategy": strategy}
    times = in_turns(*calls.values(), group=group, repeats=_REPEATS, seconds=_SECONDS)
    for way, found in zip(WAYS, times, strict=True):
        row[f"{way}, ms"] = statistics.median(found)
        row[f"{way}, MiB"] = _peak(calls[way], group.device)
    return row


def _peak(call: Callable[[], object], device: torch.device) -> float:
    """Return by how many MiB the peak of torch's allocator is above what is allocated before a call; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / (1 << 20)


def table(record: Mapping[str, Any]) -> str:
    """Return a record as Markdown."""
    lines = []
    for row in record["rows"]:
        if "refused" in row:
            lines.append([row["kernel"], row["strategy"], row["refused"], *[""] * (len(_COLUMNS) - 3)])
            continue
        ratio = row["padded, ms"] / row["own, ms"]
        times, peaks = ([row[f"{way}, {unit}"] for way in WAYS] for unit in ("ms", "MiB"))
        shown = *(f"{each:.2f}" for each in times), f"{ratio:.3f}", *(f"{each:.0f}" for each in peaks)
        lines.append([row["kernel"], row["strategy"], *shown])
    return "\n".join(markdown_table(_COLUMNS, lines))


BENCHMARKS = (RowBenchmark(name="widths", about=__doc__, configure=_configure, measure=_measure, table=table, ranks=2),)
