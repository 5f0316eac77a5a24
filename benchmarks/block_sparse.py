"""Compares block-sparse with dense attention: `bmburst launch --nproc 1 -- -m benchmarks.block_sparse`.

The input is 128K causal tokens with LLaMA-3-8B's heads, bfloat16, in random blocks of 128 tokens; diagonal blocks are
always visible. The density is the fraction of causal pairs that is visible. Calls of each kernel alternate with calls
of the fastest kernel for dense causal attention. A ratio of 1 means that the time is proportional to the density. For a
kernel that does not support the mask, the row gives the reason. `--small` is a tiny case, which also runs on a CPU.

With `--nproc N` the sequence is split over N ranks, and calls alternate with calls of one GPU's kernel on all tokens
and the same blocks. A ratio of 1 then means that N ranks are N times as fast. Of the N x N partitions (the queries of
one rank, the keys of one rank), those without a visible pair are skipped; the row has their share.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.attention.method import both, forward_without_grad
from benchmarks.engine.machine import RankGroup, publish, start_ranks, write_record
from benchmarks.engine.timing import Times, beside_one_gpu, in_turns, quotient
from bmburst.attention.api import burst_attention
from bmburst.attention.call import decide
from bmburst.attention.options import AttentionOptions
from bmburst.comm.groups import communicator, single_rank_group
from bmburst.errors import UserError
from bmburst.schedule.layout import padded_layout
from bmburst.schedule.mask import BlockSparse
from bmburst.schedule.tiles import visible_area
from bmburst_ops.pattern import BLOCK

TOKENS, SMALL_TOKENS, HEADS, KV_HEADS, HEAD_DIM = 131_072, 200, 32, 8, 128
DENSITIES = (0.1, 0.25, 0.5)
DIRECTIONS = ("forward", "forward and backward")
REPEATS, SECONDS = 5, 3.0
LAYOUTS = ("zigzag", "striped", "contiguous", "balanced")
_MODULE = "benchmarks.block_sparse"
_BESIDE = ("dense_milliseconds", "one_gpu_milliseconds")  # of one rank, of several
_SEED = 0


def main() -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default="triton,fa4", help="to measure, by name (default: %(default)s)")
    parser.add_argument(
        "--layout", choices=LAYOUTS, default="zigzag", help="of the tokens on several ranks (default: %(default)s)"
    )
    parser.add_argument("--small", action="store_true", help="a short sequence, to see it work")
    parser.add_argument("--output", type=Path, help="JSON file of the results; a table is written beside it")
    options = parser.parse_args()
    group = RankGroup.world(start_ranks())
    tokens, effort = (SMALL_TOKENS, (2, 0.0)) if options.small else (TOKENS, (REPEATS, SECONDS))
    found: dict[str, Any] = {"tokens": tokens, "block_size": BLOCK, "head_dim": HEAD_DIM}
    found |= {"heads": HEADS, "kv_heads": KV_HEADS}
    found |= {"sequence_ranks": group.size, "layout": options.layout} if group.size > 1 else {}
    found |= {"rows": []}
    kernels = options.kernels.split(",")
    measured = partial(_split, layout=options.layout) if group.size > 1 else _measured
    for row in measured(tokens, kernels, group=group, effort=effort):
        found["rows"].append(row)
        if group.rank == 0:
            write_record(options.output, _MODULE, group.size, **found)
            print(f"measured: {_line(row, over_ranks=group.size > 1)}", flush=True)
    if group.rank == 0:
        publish(options.output, _MODULE, table(found), group.size, **found)
    dist.destroy_process_group()
    return 0


def sparse_mask(tokens: int, density: float) -> tuple[BlockSparse, float]:
    """Return a causal mask of random blocks, the same for the same arguments, and its actual density.

    Args:
        tokens: Tokens of the sequence.
        density: Target fraction of causal pairs that are visible.
    """
    blocks = -(-tokens // BLOCK)
    on = np.tri(blocks, dtype=bool) & (np.random.default_rng(_SEED).random((blocks, blocks)) < density)
    mask = BlockSparse(on | np.eye(blocks, dtype=bool), BLOCK, causal=True)
    return mask, visible_area(mask, tokens, np.arange(tokens)) / (tokens * (tokens + 1) / 2)


def _measured(
    tokens: int, kernels: Sequence[str], group: RankGroup, effort: tuple[int, float]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each density and kernel."""
    calls = partial(_calls, _inputs(tokens, group.device))
    dense = calls(mask="causal", kernel="auto")
    for density in DENSITIES:
        mask, own = sparse_mask(tokens, density)
        for kernel in kernels:
            row: dict[str, Any] = {"asked": density, "density": own, "kernel": kernel}
            try:
                for direction, call in calls(mask=mask, kernel=kernel).items():
                    times = in_turns(call, dense[direction], group=group, repeats=effort[0], seconds=effort[1])
                    row[direction] = {
                        "milliseconds": Times.of(times[0]).median,
                        "dense_milliseconds": Times.of(times[1]).median,
                        "ratio": quotient(times[0], times[1]) / own,
                    }
            except UserError as error:
                row["refused"] = str(error).splitlines()[0]
            yield row


def _split(
    tokens: int, kernels: Sequence[str], layout: str, group: RankGroup, effort: tuple[int, float]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each density and kernel, over the ranks and on one; every rank calls it."""
    comm = communicator(None)
    whole = _inputs(tokens, group.device)
    for density in DENSITIES:
        mask, own = sparse_mask(tokens, density)
        cut = padded_layout(layout, group.size, tokens, mask)
        part = _inputs(cut.tokens, group.device)
        for kernel in kernels:
            row: dict[str, Any] = {"asked": density, "density": own, "kernel": kernel}
            try:
                options = AttentionOptions(mask=mask, kernel=kernel, layout=layout)
                call = decide(comm, *part[:3], tokens, options)
                pairs = product(range(group.size), repeat=2)
                row["skipped"] = sum(not call.tiles(*pair) for pair in pairs) / group.size**2
                one = _calls(whole, mask=mask, kernel=kernel, layout="contiguous", group=single_rank_group(comm))
                ours = _calls(part, mask=mask, kernel=kernel, layout=layout, length=tokens, group=comm)
                for direction, attend in ours.items():
                    row[direction] = beside_one_gpu(
                        attend, one[direction], group=group, repeats=effort[0], seconds=effort[1]
                    )
            except UserError as error:
                row["refused"] = str(error).splitlines()[0]
            yield row


def _inputs(tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random queries, keys, values and the gradient of the output, bfloat16 on a GPU, else float32."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shapes = [(1, tokens, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    q, k, v, grad = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad


def _calls(inputs: tuple[Tensor, Tensor, Tensor, Tensor], **options: Any) -> dict[str, Callable[[], object]]:
    attend = partial(burst_attention, **options)
    calls = partial(forward_without_grad, attend, *inputs[:3]), partial(both, attend, *inputs)
    return dict(zip(DIRECTIONS, calls, strict=True))


def table(found: Mapping[str, Any]) -> str:
    """Return the results as Markdown."""
    ranks = found.get("sequence_ranks", 1)
    shape = (
        f"{found['tokens']:,} causal tokens in blocks of {found['block_size']}, {found['heads']} query and "
        f"{found['kv_heads']} KV heads of {found['head_dim']}"
    )
    if ranks > 1:
        title = f"{shape}, {found['layout']} over {ranks} ranks; ms, one GPU's ms, ratio to {ranks} times its speed:"
        columns = ["density", "kernel", "partitions skipped", *DIRECTIONS]
    else:
        title = f"{shape}; ms, dense ms, ms over density x dense ms:"
        columns = ["density", "kernel", *DIRECTIONS]
    lines = [title, "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return "\n".join([*lines, *(_line(row, over_ranks=ranks > 1) for row in found["rows"])])


def _line(row: Mapping[str, Any], *, over_ranks: bool) -> str:
    parts = [f"{row['density']:.1%}", row["kernel"]]
    if over_ranks:
        parts.append(f"{row['skipped']:.0%}" if "skipped" in row else "-")
    for direction in DIRECTIONS:
        times = row.get(direction)
        numbers = times and (times["milliseconds"], times[_BESIDE[over_ranks]], times["ratio"])
        parts.append("{:.1f}, {:.1f}, {:.2f}".format(*numbers) if numbers else row["refused"])
    return f"| {' | '.join(parts)} |"


if __name__ == "__main__":
    sys.exit(main())
