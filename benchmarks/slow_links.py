"""Measures the double ring beside a flat ring over slow links: `bmburst bench double-ring`.

Each rank is a process on a CPU in its own network namespace, and the kernel limits its outgoing traffic (HTB, and reno
for TCP; `benchmarks.netns`): by default, 200 Mbit/s to ranks of its node and 20 Mbit/s to other nodes. Blocks move with
gloo. It needs root and iproute2. Attention is in fp32, causal and zigzag, and backward moves queries in both rings.
Calls of the two rings alternate, and their outputs and gradients are compared. A time is the median of the slowest
rank, with the range. There is little to compute: this shows what moves, not how well it overlaps with attention.

"Least" is what the slow links alone need for the bytes that cross them. Every hop of a flat ring uses each node's port
once, so it waits for the slow link at every hop. A rank of the double ring sends a block per other node over it, and as
many of gradients; where ranks of a node share a port, theirs add up. The kernel counts the bytes, headers included.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks import netns
from benchmarks.engine.report import markdown_table
from benchmarks.engine.rows import Measured, RowBenchmark
from bmburst.attention.api import burst_attention
from bmburst.comm.checks import CheckedCommunicator
from bmburst.comm.collectives import ProcessGroupCommunicator
from bmburst.comm.communicator import gather_objects
from bmburst.errors import UserError

STRATEGIES = {"flat ring": "burst", "double ring": "double-ring"}
PORTS: tuple[netns.Port, ...] = ("rank", "node")
_MODULE = "benchmarks.slow_links"
_PORT = 29517  # of the rendezvous of the ranks
_TOLERANCE = 1e-4  # for fp32 sums in a different order


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionJob:
    """The work of each rank: causal multi-head attention in fp32 on CPUs, with the layout "zigzag"."""

    batch: int = 32
    tokens: int = 32
    heads: int = 8
    head_dim: int = 64
    repeats: int = 5

    @property
    def queries(self) -> int:
        """Bytes of a rank's queries, in fp32."""
        return self.batch * self.tokens * self.heads * self.head_dim * 4

    def bytes_between(self, hops: int, returns: int) -> tuple[int, int]:
        """Return the bytes that a rank sends in forward and in backward.

        `hops` are those of blocks: K and V in forward; Q, dO, log-sum-exp and delta in backward. `returns` are those of
        gradients (dQ).
        """
        statistics = 2 * self.batch * self.tokens * self.heads * 4
        return hops * 2 * self.queries, hops * (2 * self.queries + statistics) + returns * self.queries


class RepeatTimes(NamedTuple):
    """For each repeat, the seconds of the slowest rank, and the bytes that the busiest port sent to other nodes."""

    forward: list[float]
    backward: list[float]
    sent: list[int]


def _configure(parser: argparse.ArgumentParser) -> None:
    default, add = AttentionJob(), parser.add_argument
    add("--nodes", type=int, default=2, help="nodes, default 2")
    add("--places", type=int, default=2, help="ranks of a node, default 2")
    add("--fast", type=float, default=200, help="Mbit/s of a rank to its node, default 200")
    add("--slow", type=float, default=20, help="Mbit/s of a port to other nodes, default 20")
    whose = "whether each rank or each node has a port to other nodes"
    add("--port", nargs="+", default=PORTS, choices=PORTS, help=whose)
    add("--tokens", type=int, default=default.tokens, help="tokens a rank")
    add("--batch", type=int, default=default.batch, help="sequences")
    add("--repeats", type=int, default=default.repeats, help="timed calls of each ring; calls alternate")


def _measure(options: argparse.Namespace) -> Measured:
    if (problem := netns.refusal()) is not None:
        raise UserError(f"cannot measure here: {problem}\nfix: Linux with iproute2, as root")
    shape = netns.Shape(options.nodes, options.places, options.fast, options.slow)
    job = AttentionJob(batch=options.batch, tokens=options.tokens, repeats=options.repeats)
    ports = (replace(shape, port=port) for port in options.port)
    rows = ({"port": at.port, "times": time_on_network(at, job)} for at in ports)
    return {"network": asdict(shape), "job": asdict(job)}, rows


def _communicator(rank: int, size: int, url: str) -> CheckedCommunicator:
    """Start this rank, and return its communicator.

    The communicator does not check that ranks make the same calls, because the check sends a message before each hop.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=size, timeout=timedelta(minutes=10))
    world = dist.group.WORLD
    assert world is not None  # init_process_group created it
    return CheckedCommunicator(ProcessGroupCommunicator(world), torch.device("cpu"), always=False)


def time_on_network(shape: netns.Shape, job: AttentionJob) -> dict[str, RepeatTimes]:
    """Run the job on every rank of a network; RuntimeError, with its output, if one fails."""
    with netns.network(shape) as network:
        setting = {"shape": asdict(shape), "job": asdict(job), "ports": network.ports}
        found = netns.run_ranks(network, (_MODULE,), _PORT, **setting)
    return {name: RepeatTimes(*times) for name, times in found.items()}


def run_rank(rank: int, shape: dict[str, Any], job: dict[str, Any], url: str, ports: list[tuple[str, str]]) -> None:
    """Time both rings, alternating; rank 0 prints the times as JSON."""
    comm, what = _communicator(rank, netns.Shape(**shape).ranks, url), AttentionJob(**job)
    torch.manual_seed(rank)
    shapes = (what.batch, what.tokens, what.heads, what.head_dim)
    q, k, v = (torch.randn(shapes).requires_grad_() for _ in range(3))
    grad = torch.randn(shapes)
    times = {name: RepeatTimes([], [], []) for name in STRATEGIES}
    for repeat in range(1 + what.repeats):
        results = []
        for name, strategy in STRATEGIES.items():
            gather_objects(comm, None)
            before = netns.sent(ports) if rank == 0 else [0]
            gather_objects(comm, None)
            start = time.perf_counter()
            out = burst_attention(q, k, v, group=comm, strategy=strategy)
            forward = max(gather_objects(comm, time.perf_counter() - start))
            start = time.perf_counter()
            results.append((out, *torch.autograd.grad(out, (q, k, v), grad)))
            backward = max(gather_objects(comm, time.perf_counter() - start))
            after = netns.sent(ports) if rank == 0 else [0]
            if repeat:  # the first call opens connections
                moved = max(b - a for a, b in zip(before, after, strict=True))
                times[name].forward.append(forward)
                times[name].backward.append(backward)
                times[name].sent.append(moved)
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=_TOLERANCE, atol=_TOLERANCE)
    if rank == 0:
        print(json.dumps(times))
    dist.destroy_process_group()


def least(shape: netns.Shape, job: AttentionJob, name: str) -> tuple[float, float, float]:
    """Return lower bounds from the slow links: seconds of forward and backward, and bytes of a port.

    In a flat ring each hop uses every node's port once: size - 1 hops of blocks, size hops of gradients. In a double
    ring each rank sends nodes - 1 of each.
    """
    if name == "flat ring":
        counts = job.bytes_between(shape.ranks - 1, shape.ranks)
    else:
        counts = job.bytes_between(shape.nodes - 1, shape.nodes - 1)
    sharing = shape.places if shape.port == "node" and name == "double ring" else 1
    forward, backward = (sharing * count for count in counts)
    rate = shape.slow * 1e6 / 8
    return forward / rate, backward / rate, forward + backward


def table(record: Mapping[str, Any]) -> str:
    """Return a record as Markdown."""
    shape, job = netns.Shape(**record["network"]), AttentionJob(**record["job"])
    tables = [
        f"Batch {job.batch}, {job.tokens} tokens a rank, {job.heads} heads of {job.head_dim}; {job.repeats} calls.\n"
    ]
    for row in record["rows"]:
        times = {name: RepeatTimes(*series) for name, series in row["times"].items()}
        tables.append(_table(replace(shape, port=row["port"]), job, times))
    return "\n".join(tables).rstrip()


def _table(shape: netns.Shape, job: AttentionJob, results: dict[str, RepeatTimes]) -> str:
    whose = {"rank": "each rank has a port to the other nodes", "node": "the ranks of a node share one port"}
    title = (
        f"{shape.nodes} nodes x {shape.places} ranks, {shape.fast:g} Mbit/s inside a node, {shape.slow:g} Mbit/s "
        f"between nodes; {whose[shape.port]}\n"
    )
    rows = []
    for name, times in results.items():
        bound, cells = least(shape, job, name), [name]
        for series, seconds in zip(times[:2], bound, strict=False):
            cells += [f"{statistics.median(series):.2f} ({min(series):.2f} to {max(series):.2f})", f"{seconds:.2f}"]
        rows.append([*cells, f"{statistics.median(times.sent) / 1e6:.1f}", f"{bound[2] / 1e6:.1f}"])
    columns = ["ring", "forward (s)", "least", "backward (s)", "least", "MB over the busiest port", "by formula"]
    flat, double = results.values()
    ratios = [statistics.median(a) / statistics.median(b) for a, b in zip(flat[:2], double[:2], strict=True)]
    bounds = zip(*(least(shape, job, name)[:2] for name in results), strict=True)
    of_links = [a / b for a, b in bounds]
    end = (
        f"\nFlat over double: {ratios[0]:.2f} forward (slow links alone: {of_links[0]:.2f}), "
        f"{ratios[1]:.2f} backward ({of_links[1]:.2f}).\n"
    )
    return "\n".join([title, *markdown_table(columns, rows), end])


BENCHMARKS = (RowBenchmark(name="double-ring", about=__doc__, configure=_configure, measure=_measure, table=table),)

if __name__ == "__main__":  # `--rank JSON`: a rank of `netns.run_ranks`
    run_rank(**json.loads(sys.argv[2]))
