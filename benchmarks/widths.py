"""Measures attention with values narrower than keys (multi-head latent attention), not padded beside padded to keys.

`bmburst launch --nproc 2 -- -m benchmarks.widths --output FILE.json`: 64K tokens over the ranks, 16 heads of 192 and
128, causal, zigzag, bf16, for each strategy and kernel. `own` gives values as they are. `padded` pads them before the
call, and cuts the output. `equal` has values of 192 without padding: what is left to `padded` are the copies.

A time is the median of forward and backward of one call on the slowest rank, in milliseconds; calls alternate. `MiB` is
what this rank's peak of torch's allocator rises in a call. Without GPUs the sequence is shorter, and the numbers only
show that the program runs.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

import bmburst
from benchmarks.attention.method import both
from benchmarks.engine.machine import RankGroup, publish, start_ranks
from benchmarks.engine.report import markdown_table
from benchmarks.engine.timing import in_turns
from bmburst.errors import UserError

HEADS, HEAD_DIM, VALUE_DIM = 16, 192, 128
WAYS = ("own", "padded", "equal")
_REPEATS, _SECONDS = 20, 20.0
_COLUMNS = ("kernel", "strategy", *(f"{way}, ms" for way in WAYS), "padded / own", *(f"{way}, MiB" for way in WAYS))


def main() -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536, help="tokens of the sequence (default: %(default)s)")
    parser.add_argument("--kernels", default="auto,triton", help="kernels (default: %(default)s)")
    parser.add_argument("--strategies", default="auto,heads,gather,ring", help="strategies (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="JSON file of the results; the table beside it as .md")
    options = parser.parse_args()
    device = start_ranks()
    group = RankGroup.world(device)
    tokens = options.tokens if device.type == "cuda" else 64 * group.size
    rows = []
    for kernel in options.kernels.split(","):
        for strategy in options.strategies.split(","):
            try:
                rows.append(_measured(group, tokens, kernel, strategy))
            except UserError as error:
                rows.append({"kernel": kernel, "strategy": strategy, "refused": str(error).splitlines()[0]})
            if device.type == "cuda":
                bmburst.empty_cache()
    if dist.get_rank() == 0:
        publish(options.output, "benchmarks.widths", table(rows), group.size, tokens=tokens, rows=rows)
    dist.destroy_process_group()
    return 0


def _measured(group: RankGroup, tokens: int, kernel: str, strategy: str) -> dict[str, Any]:
    """Return milliseconds and MiB of each way."""
    torch.manual_seed(group.rank)
    shape = 1, tokens // group.size, HEADS
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
    row: dict[str, Any] = {"kernel": kernel, "strategy": strategy}
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


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = []
    for row in rows:
        if "refused" in row:
            lines.append([row["kernel"], row["strategy"], row["refused"], *[""] * (len(_COLUMNS) - 3)])
            continue
        ratio = row["padded, ms"] / row["own, ms"]
        times, peaks = ([row[f"{way}, {unit}"] for way in WAYS] for unit in ("ms", "MiB"))
        shown = *(f"{each:.2f}" for each in times), f"{ratio:.3f}", *(f"{each:.0f}" for each in peaks)
        lines.append([row["kernel"], row["strategy"], *shown])
    return "\n".join(markdown_table(_COLUMNS, lines))


if __name__ == "__main__":
    sys.exit(main())
