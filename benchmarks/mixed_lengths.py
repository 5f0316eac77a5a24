"""What dealing samples to data groups by predicted cost saves, by the model: `bmburst bench mixed-lengths`.

Documents of mixed lengths are packed into sequences as for fine-tuning, and each step's sequences are dealt to the data
groups as `bmburst train` does. A sequence takes the time of its matrix products and of attention inside its documents,
at the rates of a hardware file, shared by the ranks of its group. Data groups meet in every micro-batch of one
sequence, so a step takes the sum over micro-batches of the slowest group. If groups could run ahead of each other and
met only at the end of a step, they would wait less: that gain is given too, and what is measured lies between both.
Exchanges, elementwise operators and the host's time are left out: they add to both sides, and make the gain smaller.
Nothing is measured, and no GPU is needed.
"""

import argparse
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from benchmarks.engine.report import markdown_table
from benchmarks.engine.rows import Measured, RowBenchmark
from bmburst.amounts import short
from bmburst.blocks.config import LlamaConfig
from bmburst.blocks.presets import preset
from bmburst.data.dealing import contiguous, deal_samples, slowest
from bmburst.data.whole_documents import Ids, best_fit
from bmburst.plan.counts import attention_flops, causal_pairs, multiplied
from bmburst.schedule.hardware import Hardware, load_hardware
from bmburst_ops import ATTENTION_BACKWARD

_MODEL = "llama-3-8b"
_TOKENS = 512 * 1024  # of a step for each GPU, of documents before packing


class Case(NamedTuple):
    """Lengths of documents, GPUs in total, tokens of a sequence, data groups."""

    lengths: str
    gpus: int
    sequence: int
    groups: int


CASES = [
    Case(lengths, *sizes)
    for lengths in ("log-normal", "few long")
    for sizes in ((8, 131072, 1), (8, 32768, 4), (64, 131072, 8), (64, 32768, 32))
]


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hardware", default="h200", help="name of a hardware file (default: h200)")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps of a case (default: 20)")


def _measure(options: argparse.Namespace) -> Measured:
    hardware, config = load_hardware(options.hardware), preset(_MODEL)
    facts = {"hardware": hardware.name, "model": _MODEL, "steps": options.steps}
    return facts, (row(case, config, hardware, options.steps) for case in CASES)


def row(case: Case, model: LlamaConfig, hardware: Hardware, steps: int) -> dict[str, Any]:
    """Return the mean seconds of the steps of a case, as drawn and as dealt, and of groups that never wait.

    "once" is the time if groups met once a step.
    """
    rng, totals = np.random.default_rng(0), np.zeros(5)
    for _ in range(steps):
        costs = [seconds(each, case, model, hardware) for each in packed(rng, case)]
        mean = sum(costs) / case.groups
        shares = (contiguous(len(costs), case.groups), deal_samples(costs, case.groups, 1))
        met = (slowest(costs, share, together) * mean for together in (1, len(costs)) for share in shares)
        totals += [*met, mean]
    names = ("drawn", "dealt", "drawn_once", "dealt_once", "mean")
    return {**case._asdict(), **dict(zip(names, (totals / steps).tolist(), strict=True))}


def packed(rng: np.random.Generator, case: Case) -> list[Ids]:
    """Return the lengths of the documents of each sequence of a step, in random order; as many for each group."""
    mean = {"log-normal": 2700, "few long": 6000}[case.lengths]
    lengths = documents(rng, case.lengths, case.gpus * _TOKENS // mean)
    taken = np.flatnonzero(lengths <= case.sequence)
    order, ends = best_fit(taken, lengths, case.sequence)
    sequences = np.split(lengths[order], ends[:-1])
    count = len(sequences) // case.groups * case.groups
    return [sequences[i] for i in rng.permutation(len(sequences))[:count]]


def documents(rng: np.random.Generator, kind: str, count: int) -> Ids:
    """Return lengths from 64 to 128K: log-normal, or nine tenths below 4K and the others up to 128K."""
    if kind == "log-normal":
        drawn = np.exp(rng.normal(np.log(1200), 1.3, count))
    else:
        long = np.exp(rng.uniform(np.log(4000), np.log(131072), count))
        drawn = np.where(rng.random(count) < 0.9, rng.uniform(200, 4000, count), long)
        drawn = np.where(rng.random(count) < 0.004, 131072, drawn)
    found: Ids = np.clip(drawn, 64, 131072).astype(np.int64)
    return found


def seconds(lengths: Ids, case: Case, model: LlamaConfig, hardware: Hardware) -> float:
    """Return the seconds of a sequence, forward and backward, on the ranks of a group."""
    rates = 1 / hardware.attention_forward + ATTENTION_BACKWARD / hardware.attention_backward
    share = causal_pairs(lengths.tolist()) / causal_pairs([case.sequence])
    attention = model.num_layers * attention_flops(model, case.sequence) * share * rates
    products = 6 * multiplied(model) * case.sequence / hardware.matmul
    return float((attention + products) * case.groups / case.gpus)


def table(found: Mapping[str, Any]) -> str:
    """Return a record as Markdown."""
    title = (
        f"{found['model']} by the rates of {found['hardware']}, mean of {found['steps']} steps of about 512K tokens a "
        "GPU; s:"
    )
    columns = ["documents", "GPUs", "sequence", "data groups x ranks", "as drawn", "dealt", "gain"]
    lines = []
    for each in found["rows"]:
        ranks, once = each["gpus"] // each["groups"], each["drawn_once"] / each["dealt_once"]
        cells = [each["lengths"], each["gpus"], short(each["sequence"]), f"{each['groups']} x {ranks}"]
        cells += [f"{each['drawn']:.1f}", f"{each['dealt']:.1f}", f"{each['drawn'] / each['dealt']:.2f}"]
        lines.append([*cells, f"{once:.2f}", f"{each['mean']:.1f}"])
    return "\n".join([title, "", *markdown_table([*columns, "gain, met once a step", "if none waited"], lines)])


BENCHMARKS = (RowBenchmark(name="mixed-lengths", about=__doc__, configure=_configure, measure=_measure, table=table),)
