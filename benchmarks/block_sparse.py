"""Compares block-sparse with dense attention: `bmburst launch --nproc 1 -- -m benchmarks.block_sparse`.

The input is 128K causal tokens with LLaMA-3-8B's heads, bfloat16, in random blocks of 128 tokens; diagonal blocks are
always visible. The density is the fraction of causal pairs that is visible. Calls of each kernel alternate with calls
of the fastest kernel for dense causal attention. A ratio of 1 means that the time is proportional to the density. For a
kernel that does not support the mask, the row gives the reason. `--small` is a tiny case, which also runs on a CPU.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.attention.methods.method import both, forward_without_grad
from benchmarks.engine.machine import publish
from benchmarks.engine.timing import RankGroup, Times, in_turns, quotient, start_ranks
from bmburst.attention.api import burst_attention
from bmburst.errors import UserError
from bmburst.schedule.mask import BlockSparse, Mask
from bmburst.schedule.tiles import visible_area
from bmburst_ops.pattern import BLOCK

TOKENS, SMALL_TOKENS, HEADS, KV_HEADS, HEAD_DIM = 131_072, 200, 32, 8, 128
DENSITIES = (0.1, 0.25, 0.5)
DIRECTIONS = ("forward", "forward and backward")
REPEATS, SECONDS = 5, 3.0
_SEED = 0


def main() -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default="triton,fa4", help="to measure, by name (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="a short sequence, to see it work")
    parser.add_argument("--output", type=Path, help="JSON file of the results; a table is written beside it")
    options = parser.parse_args()
    group = RankGroup.world(start_ranks())
    if group.size > 1:
        sys.exit(f"benchmarks.block_sparse is of one GPU, but {group.size} ranks were started\nfix: --nproc 1")
    tokens, effort = (SMALL_TOKENS, (2, 0.0)) if options.small else (TOKENS, (REPEATS, SECONDS))
    found: dict[str, Any] = {"tokens": tokens, "block_size": BLOCK, "head_dim": HEAD_DIM}
    found |= {"heads": HEADS, "kv_heads": KV_HEADS, "rows": []}
    for row in _measured(tokens, options.kernels.split(","), group, effort):
        found["rows"].append(row)
        print(f"measured: {_line(row)}", flush=True)
    publish(options.output, "benchmarks.block_sparse", table(found), **found)
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
    dtype = torch.bfloat16 if group.device.type == "cuda" else torch.float32
    shapes = [(1, tokens, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    q, k, v, grad = (torch.randn(shape, device=group.device, dtype=dtype) for shape in shapes)
    calls = partial(_calls, (q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad))
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


def _calls(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor], *, mask: Mask | str, kernel: str
) -> dict[str, Callable[[], object]]:
    attend = partial(burst_attention, mask=mask, kernel=kernel)
    calls = partial(forward_without_grad, attend, *inputs[:3]), partial(both, attend, *inputs)
    return dict(zip(DIRECTIONS, calls, strict=True))


def table(found: Mapping[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = [
        f"{found['tokens']:,} causal tokens in blocks of {found['block_size']}, {found['heads']} query and "
        f"{found['kv_heads']} KV heads of {found['head_dim']}; ms, dense ms, ms over density x dense ms:",
        "",
        f"| density | kernel | {' | '.join(DIRECTIONS)} |",
        "|---|---|---|---|",
    ]
    return "\n".join([*lines, *map(_line, found["rows"])])


def _line(row: Mapping[str, Any]) -> str:
    parts = [f"{row['density']:.1%}", row["kernel"]]
    for direction in DIRECTIONS:
        times = row.get(direction)
        numbers = times and (times["milliseconds"], times["dense_milliseconds"], times["ratio"])
        parts.append("{:.1f}, {:.1f}, {:.2f}".format(*numbers) if numbers else row["refused"])
    return f"| {' | '.join(parts)} |"


if __name__ == "__main__":
    sys.exit(main())
