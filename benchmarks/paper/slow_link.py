"""Measures backward's transfers in a ring over a slow link: `python -m benchmarks.paper.slow_link --output FILE.json`.

Each rank is a process on a CPU in its own network namespace, and the kernel limits its outgoing traffic
(`benchmarks.netns`). Either K and V move with their gradients ("kv"), or Q, dO and statistics move with dQ ("burst"),
with as many KV heads as heads, and with a quarter. Only transfers are timed, without arithmetic. The program needs root
and iproute2. If namespaces cannot be created, it prints the reason and exits with status 1.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import netns
from benchmarks.engine.machine import describe_run
from benchmarks.paper.variants import Counting, backward_transfers
from bmburst.attention.call import decide
from bmburst.attention.options import AttentionOptions
from bmburst.comm.checks import CheckedCommunicator
from bmburst.comm.collectives import ProcessGroupCommunicator
from bmburst.comm.protocol import gather_objects
from bmburst_ops.flash import BackwardInputs

MODULE = "benchmarks.paper.slow_link"
_MEETING = 29519
SETUPS = {"mha": (8, 8), "gqa": (8, 2)}
HEAD_DIM = 128


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="ranks, each on a node of its own (default: 4)")
    parser.add_argument("--rate", type=float, default=100, help="Mbit/s of a rank's link (default: 100)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a rank (default: 256)")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls of each, in turns (default: 3)")
    parser.add_argument("--output", type=Path, help="JSON file of the results; a table is written beside it")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.rank is not None:
        run_rank(**json.loads(args.rank))
        return 0
    problem = netns.refusal()
    if problem is not None:
        print(f"cannot measure here: {problem}")
        return 1
    found = {
        "machine": describe_run(["python", "-m", MODULE, *sys.argv[1:]], "cpu", args.ranks),
        "rate": args.rate,
        "tokens": args.tokens,
        "rows": _measure(args.ranks, args.rate, args.tokens, args.repeats),
    }
    print(table(found))
    if args.output is not None:
        args.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        args.output.with_suffix(".md").write_text(f"# Backward over a slow link\n\n{table(found)}\n", encoding="utf-8")
    return 0


def _measure(ranks: int, rate: float, tokens: int, repeats: int) -> list[dict[str, Any]]:
    with netns.network(netns.Shape(nodes=ranks, places=1, fast=rate, slow=rate)) as network:
        setting = {"ranks": ranks, "tokens": tokens, "repeats": repeats}
        rows: list[dict[str, Any]] = netns.run_ranks(network, MODULE, _MEETING, **setting)
    return rows


def run_rank(rank: int, ranks: int, tokens: int, repeats: int, url: str) -> None:
    """Time both ways in turns; rank 0 prints the rows as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=ranks, timeout=timedelta(minutes=10))
    world = dist.group.WORLD
    assert world is not None  # it was just begun
    # Calls are not compared between ranks: that is another message on the slow link before each hop.
    comm = CheckedCommunicator(ProcessGroupCommunicator(world), torch.device("cpu"), always=False)
    cases = list(product(SETUPS, ("kv", "burst")))
    seconds: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
    received: dict[tuple[str, str], int] = {}
    for repeat in range(1 + repeats):
        for case in cases:
            took, received[case] = _once(comm, *case, tokens)
            if repeat:  # the first call opens connections
                seconds[case].append(took)
    if rank == 0:
        rows = [
            {"heads": heads, "strategy": strategy, "seconds": statistics.median(times), "all_seconds": times}
            | {"bytes": received[heads, strategy]}
            for (heads, strategy), times in seconds.items()
        ]
        print(json.dumps(rows))
    dist.destroy_process_group()


def _once(comm: CheckedCommunicator, setup: str, strategy: str, tokens: int) -> tuple[float, int]:
    """Return the seconds of the slowest rank for what backward moves, in bfloat16, and the bytes that this one got."""
    heads, kv_heads = SETUPS[setup]
    q, k = (torch.zeros(1, tokens, count, HEAD_DIM, dtype=torch.bfloat16) for count in (heads, kv_heads))
    statistic = torch.zeros(1, heads, tokens)
    given = BackwardInputs(q, q, k, k, statistic, statistic)
    call = decide(comm, q, k, k, None, AttentionOptions(mask="full", layout="contiguous", strategy=strategy))
    counted = Counting(call.comm)
    gather_objects(comm, None)
    begun = time.perf_counter()
    backward_transfers(replace(call, comm=counted), given)
    return max(gather_objects(comm, time.perf_counter() - begun)), counted.received


def table(found: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    ranks = found["machine"]["ranks"]
    lines = [
        f"{ranks} ranks of {found['tokens']} tokens, head dim {HEAD_DIM}, bfloat16, links of {found['rate']:g} Mbit/s.",
        "",
        "| heads | what moves | MB received in backward | seconds | least, by the link |",
        "|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        least = row["bytes"] * 8 / found["rate"] / 1e6
        moved = f"{row['bytes'] / 1e6:.2f}"
        lines.append(f"| {row['heads']} | {row['strategy']} | {moved} | {row['seconds']:.2f} | {least:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
