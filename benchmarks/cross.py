"""Compares cross-attention over ranks with one GPU's kernel: `bmburst launch --nproc 2 -- -m benchmarks.cross`.

The input is 64K queries and 128K keys with LLaMA-3-8B's heads, bfloat16. Calls of each strategy and transport alternate
with calls of one GPU's kernel on all queries and keys. A ratio of 1 means that `n` ranks are `n` times as fast as that
kernel. A time is the median on the slowest rank. `--small` is a tiny case, which also runs on a CPU.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.attention.method import both, forward_without_grad
from benchmarks.engine.machine import RankGroup, publish, start_ranks, write_record
from benchmarks.engine.timing import beside_one_gpu
from bmburst.attention.api import burst_attention
from bmburst.comm.groups import communicator, single_rank_group
from bmburst.errors import UserError

QUERIES, KEYS, HEADS, KV_HEADS, HEAD_DIM = 65_536, 131_072, 32, 8, 128
METHODS = (("auto", "auto"), ("heads", "nccl"), ("gather", "auto"), ("burst", "auto"), ("kv", "auto"))
NAMES = ("mask", "layout", "key_layout")
CASES = (("causal", "zigzag", "zigzag"), ("causal", "striped", "striped"), ("full", "zigzag", "zigzag"))
"""Values of `NAMES`; without a mask every layout gives each rank the same work."""
REPEATS, SECONDS = 5, 3.0


class Inputs(NamedTuple):
    """Queries, keys, values and the gradient of the output, each `[1, tokens, heads, head_dim]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor

    @classmethod
    def random(cls, queries: int, keys: int, device: torch.device) -> "Inputs":
        """Return random inputs, bfloat16 on a GPU, else float32."""
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        shapes = [(1, queries, HEADS, HEAD_DIM), *[(1, keys, KV_HEADS, HEAD_DIM)] * 2, (1, queries, HEADS, HEAD_DIM)]
        q, k, v, grad = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
        return cls(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad)


def main() -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="short sequences, to see it work")
    parser.add_argument("--output", type=Path, help="JSON file of the results; a table is written beside it")
    parser.add_argument(
        "--case",
        action="append",
        type=_case,
        dest="cases",
        metavar="MASK/LAYOUT/KEY_LAYOUT",
        help=f"what to measure; can be given again (default: {', '.join(map('/'.join, CASES))})",
    )
    options = parser.parse_args()
    options.cases = options.cases or CASES
    group = RankGroup.world(start_ranks())
    lengths = (96, 160) if options.small else (QUERIES, KEYS)
    rows: list[dict[str, Any]] = []
    found = {"queries": lengths[0], "keys": lengths[1], "heads": HEADS, "kv_heads": KV_HEADS, "rows": rows}
    for row in _measured(options.cases, lengths, group, (2, 0.0) if options.small else (REPEATS, SECONDS)):
        rows.append(row)
        if group.rank == 0:
            write_record(options.output, "benchmarks.cross", group.size, **found)
            case = "/".join(row[name] for name in NAMES)
            print(f"measured: {case}, {row['strategy']} over {row['transport']}", flush=True)
    if group.rank == 0:
        publish(options.output, "benchmarks.cross", table(found, group.size), group.size, **found)
    dist.destroy_process_group()
    return 0


def _case(text: str) -> tuple[str, str, str]:
    mask, layout, key_layout = text.split("/")
    return mask, layout, key_layout


def _measured(
    cases: Sequence[tuple[str, str, str]], lengths: Sequence[int], group: RankGroup, effort: tuple[int, float]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each case, strategy and transport; every rank calls it."""
    queries, keys = lengths
    single = single_rank_group(communicator(None))
    whole = Inputs.random(queries, keys, group.device)
    part = Inputs.random(queries // group.size, keys // group.size, group.device)
    for case, (strategy, transport) in product(cases, METHODS):
        named = dict(zip(NAMES, case, strict=True))
        one = _calls(whole, mask=named["mask"], key_length=keys, layout="contiguous", group=single)
        ours = _calls(part, **named, key_length=keys, strategy=strategy, transport=transport)
        row: dict[str, Any] = {**named, "strategy": strategy, "transport": transport}
        try:
            for direction, call in ours.items():
                row[direction] = beside_one_gpu(call, one[direction], group=group, repeats=effort[0], seconds=effort[1])
        except UserError as error:
            row["refused"] = str(error).splitlines()[0]
        yield row


def _calls(inputs: Inputs, **options: Any) -> dict[str, Callable[[], object]]:
    attend = partial(burst_attention, **options)
    return {
        "forward": partial(forward_without_grad, attend, *inputs[:3]),
        "forward and backward": partial(both, attend, *inputs),
    }


def table(found: Mapping[str, Any], ranks: int) -> str:
    """Return the results as Markdown."""
    lines = [
        f"{found['queries']:,} queries x {found['keys']:,} keys over {ranks} ranks, {found['heads']} query and "
        f"{found['kv_heads']} KV heads; ms, one GPU's ms on the whole, ratio to {ranks} times its speed:",
        "",
        "| mask | layout of queries | of keys | strategy | transport | forward | forward and backward |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        cells = [row[name] for name in (*NAMES, "strategy", "transport")]
        for direction in ("forward", "forward and backward"):
            times = row.get(direction)
            cells.append(
                f"{times['milliseconds']:.1f}, {times['one_gpu_milliseconds']:.1f}, {times['ratio']:.3f}"
                if times
                else row["refused"]
            )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
