"""Where a pipeline is faster than ZeRO, by the planner: `bmburst bench links`.

A step of a model on two nodes of 8 GPUs, whose links between nodes are slow or fast: with ZeRO-3 over all ranks, with
ZeRO-3 over the ranks of a node, and in two stages, one on each node. In each of them the planner chooses the fastest
mesh, attention strategy, recompute policy and offload that fit. Nothing is measured, and no GPU is needed.
"""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.engine.report import markdown_table
from benchmarks.engine.rows import Measured, RowBenchmark
from bmburst.amounts import short
from bmburst.blocks.presets import PRESETS
from bmburst.plan.candidates import Task
from bmburst.plan.search import Prediction, search
from bmburst.schedule.hardware import Hardware, load_hardware

_GPUS, _NODES = 16, 2
_LONE = 5e10  # bytes per second that one GPU can take from a link that no other uses
GIGABITS = (50, 100, 400, 3200)
"""Rates of a node's links to others, in 1e9 bits per second."""
WAYS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "ZeRO-3 over all": {"groups": ("world",), "zero": (3,)},
        "ZeRO-3 in a node": {"groups": ("node",), "zero": (3,)},
        "2 stages": {"pipe": (2,)},
    }
)


class Case(NamedTuple):
    """Preset, tokens of a sequence, sequences of a step."""

    preset: str
    tokens: int
    batch: int


CASES = (Case("llama-3-8b", 8192, 64), Case("llama-3-70b", 8192, 64), Case("llama-3-70b", 32768, 16))


def _configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--hardware", default="h100", help="name of a hardware file (default: h100)")
    add("--cases", type=int, default=len(CASES), metavar="N", help="how many of the cases (default: all)")


def _measure(options: argparse.Namespace) -> Measured:
    hardware = load_hardware(options.hardware)
    rows = (row(case, gigabits, hardware) for case in CASES[: options.cases] for gigabits in GIGABITS)
    return {"hardware": hardware.name}, rows


def row(case: Case, gigabits: int, hardware: Hardware) -> dict[str, Any]:
    """Return the predicted seconds of the ways at a rate of the links between nodes; None if a way does not fit."""
    rate = gigabits * 1e9 / 8
    machine = replace(hardware, inter_bandwidth=rate * _NODES / _GPUS, inter_lone_bandwidth=min(rate, _LONE))
    whole = PRESETS[case.preset]
    task = Task(
        model=replace(whole, max_position_embeddings=max(case.tokens, whole.max_position_embeddings)),
        preset=case.preset,
        sequence=case.tokens,
        gpus=_GPUS,
        nodes=_NODES,
        batch=case.batch,
        state="bfloat16",
    )
    found = {name: search(task, machine, tensor=(1,), **limits)[0] for name, limits in WAYS.items()}
    return {**case._asdict(), "gigabits": gigabits} | {name: _facts(best) for name, best in found.items()}


def _facts(best: Prediction) -> dict[str, Any]:
    return {"seconds": best.seconds if best.memory.fits else None, "way": best.candidate.name}


def table(record: Mapping[str, Any]) -> str:
    """Return a record as Markdown; the fastest way of each is bold."""
    lines = []
    for each in record["rows"]:
        seconds = {name: each[name]["seconds"] for name in WAYS}
        least = min(value for value in seconds.values() if value is not None)
        cells = ["-" if (s := seconds[name]) is None else f"**{s:.2f}**" if s == least else f"{s:.2f}" for name in WAYS]
        model = f"{each['preset']}, {each['batch']} x {short(each['tokens'])}"
        lines.append([model, f"{each['gigabits']} Gbit/s", *cells])
    columns = ["a step", "links of a node", *(f"{name}, s" for name in WAYS)]
    return "\n".join(markdown_table(columns, lines))


BENCHMARKS = (RowBenchmark(name="links", about=__doc__, configure=_configure, measure=_measure, table=table),)
