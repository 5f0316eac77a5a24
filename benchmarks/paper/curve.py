"""Draws predictions for 8, 32 and 64 A100 with the paper's points: `python -m benchmarks.paper.curve`.

Predictions are those of `bmburst plan` and need no GPU. The plotted numbers are written to a JSON file with the
pictures. `python -m benchmarks.records --check` compares them with new predictions.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

from benchmarks.engine.report import save_figure
from benchmarks.paper.tables import FACTS, RESULTS
from bmburst.amounts import short
from bmburst.blocks.config import LlamaConfig
from bmburst.blocks.presets import PRESETS
from bmburst.outputs import blank_picture
from bmburst.plan.candidates import Candidate, Task
from bmburst.plan.counts import attention_flops
from bmburst.plan.search import predict
from bmburst.plan.ways import candidates
from bmburst.schedule.hardware import Hardware, load_hardware
from bmburst_ops import ATTENTION_BACKWARD

MODEL, POLICY = "llama-2-7b", "block-keep-attention"
CLUSTERS: Mapping[int, int] = MappingProxyType({8: 1, 32: 4, 64: 8})  # GPUs: nodes
LENGTHS = tuple(1024 << n for n in range(12))  # 1K to 2M
_PCIE = 20e9  # assumed bytes/s between two GPUs, and of collectives
_NODE_LINK = 0.88 * 75e9  # bytes/s of a node: 88 % of the paper's 600 Gb/s, the fraction in the hardware files
NUMBERS = "paper_prediction.json"
_TRAINED = ((8, False), (8, True), (32, False), (64, False))  # GPUs, and whether those of a node are linked by PCIe
_Lines = Mapping[str, Mapping[str, float]]
_COLOURS = {8: "#b2182b", 32: "#2166ac", 64: "#1b7837"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIR", help="folder (default: the records')")
    options = parser.parse_args(arguments)
    numbers = options.output / NUMBERS
    numbers.write_text(as_json(), encoding="utf-8")
    for path in (numbers, *draw(options.output)):
        print(path)
    return 0


def draw(folder: Path) -> tuple[Path, Path]:
    """Draw both pictures to a folder, and return their paths."""
    found = drawn()
    return (
        _draw_attention(found["attention"], folder / "paper_prediction-attention.png"),
        _draw_training(found["training"], folder / "paper_prediction-training.png"),
    )


def as_json() -> str:
    """Return the content of the file `NUMBERS`."""
    return json.dumps(drawn(), indent=1) + "\n"


@cache
def drawn() -> dict[str, dict[str, dict[str, float]]]:
    """Return the plotted numbers by picture, line and length in tokens, rounded to four digits."""
    attention = {f"predicted, {gpus} A100": {n: attention_rate(gpus, n) for n in LENGTHS[5:]} for gpus in CLUSTERS}
    attention["README of Burst-Attention, 8 A100"] = published_rates()
    training = {
        f"predicted, {gpus} A100, {'PCIe' if pcie else 'NVLink'}": {n: gain(gpus, n, pcie=pcie) for n in LENGTHS[2:9]}
        for gpus, pcie in _TRAINED
    }
    for point in FACTS["speedups"]:
        training[f"the paper, {point['gpus']} A100"] = {point["tokens"]: point["over_tensor_v3"]}
    return {"attention": _rounded(attention), "training": _rounded(training)}


def _rounded(lines: Mapping[str, Mapping[int, float]]) -> dict[str, dict[str, float]]:
    return {name: {f"{n}": float(f"{value:.4g}") for n, value in line.items()} for name, line in lines.items()}


def attention_rate(gpus: int, tokens: int) -> float:
    """Return the predicted TFLOP/s per GPU of forward and backward, for a ring that moves queries in backward."""
    model = LlamaConfig(
        vocab_size=64,
        hidden_size=4096,
        intermediate_size=64,
        num_layers=1,
        num_heads=32,
        num_kv_heads=32,
        max_position_embeddings=tokens,
    )
    nodes = CLUSTERS[gpus]
    task = Task(model=model, sequence=tokens, gpus=gpus, nodes=nodes)
    outer = "ring" if nodes == 1 else "double-ring"
    way = Candidate(task=task, outer=outer, ring_tensors="q", transport="nccl")
    cost = way.attention_cost(load_hardware("a100"))
    seconds = cost.forward.total + cost.backward.total
    return attention_flops(model, tokens) * (1 + ATTENTION_BACKWARD) / gpus / seconds / 1e12


def published_rates() -> dict[int, float]:
    """Return the README's TFLOP/s per GPU by length. Its times suggest attention without a mask: all scores count."""
    facts = FACTS["readme"]
    rates = {}
    for tokens, ms in zip(facts["tokens"], facts["forward_backward"], strict=True):
        rates[tokens] = 4.0 * tokens**2 * 4096 * (1 + ATTENTION_BACKWARD) / 8 / (ms / 1e3) / 1e12
    return rates


@cache
def gain(gpus: int, tokens: int, *, pcie: bool = False) -> float:
    """Return the predicted speedup of our training step of 7B over tensor parallelism v3 on all GPUs.

    Links between nodes are those of the paper. They bound the collectives of tensor parallelism across nodes. The
    tensor parallel degree is at most the number of heads; more GPUs than that also share the sequence.
    """
    task, hardware = _task(gpus, tokens), _machine(gpus, pcie=pcie)
    tensor = Candidate(task=task, tensor=min(gpus, task.model.num_heads), recompute=POLICY, transport="nccl")
    across = hardware if CLUSTERS[gpus] == 1 else replace(hardware, collective_bandwidth=_NODE_LINK)
    return predict(tensor, across).seconds / predict(_fastest(gpus, tokens, pcie=pcie), hardware).seconds


def way(gpus: int, tokens: int) -> str:
    """Return the name of the attention strategy that `gain` uses for our step with NVLink: the fastest one."""
    fastest = _fastest(gpus, tokens, pcie=False)
    return f"{fastest.strategy} by {fastest.transport}" if CLUSTERS[gpus] == 1 else fastest.strategy


@cache
def _fastest(gpus: int, tokens: int, *, pcie: bool) -> Candidate:
    hardware = _machine(gpus, pcie=pcie)
    ways = candidates(_task(gpus, tokens), recompute=(POLICY,), zero=(3,), tensor=(1,))
    return min(ways, key=lambda each: predict(each, hardware).seconds)


def _task(gpus: int, tokens: int) -> Task:
    model = replace(PRESETS[MODEL], max_position_embeddings=tokens)
    return Task(model=model, preset=MODEL, sequence=tokens, gpus=gpus, nodes=CLUSTERS[gpus])


def _machine(gpus: int, *, pcie: bool) -> Hardware:
    hardware, nodes = load_hardware("a100"), CLUSTERS[gpus]
    if nodes > 1:
        each = _NODE_LINK / (gpus // nodes)
        hardware = replace(hardware, inter_bandwidth=each, inter_lone_bandwidth=each)
    if not pcie:
        return hardware
    return replace(
        hardware,
        peer_bandwidth=_PCIE,
        nccl_bandwidth=_PCIE,
        all_to_all_bandwidth=_PCIE,
        collective_bandwidth=_PCIE,
    )


def table() -> list[str]:
    """Return the table of predicted and claimed speedups over tensor parallelism."""
    lines = ["| 7B, a step over TP v3's | predicted, NVLink | predicted, PCIe | the paper, PCIe |", "|---|---|---|---|"]
    claimed = {(point["gpus"], point["tokens"]): point["over_tensor_v3"] for point in FACTS["speedups"]}
    for gpus, tokens in ((gpus, length) for gpus in CLUSTERS for length in (32768, 131072)):
        found = claimed.get((gpus, tokens))
        paper = "-" if found is None else f"{found:.1f}"
        slow = f"{gain(gpus, tokens, pcie=True):.2f}" if CLUSTERS[gpus] == 1 else "-"
        lines.append(f"| {gpus} A100, {short(tokens)} | {gain(gpus, tokens):.2f} | {slow} | {paper} |")
    return [*lines, ""]


def _draw_attention(lines: _Lines, path: Path) -> Path:
    """Draw attention's rate over the length, and return the picture's path."""
    return _plot(lines, LENGTHS[5:], "attention forward + backward, TFLOP/s a GPU, 32 heads", path)


def _draw_training(lines: _Lines, path: Path) -> Path:
    """Draw the gain over tensor parallelism over the length, and return the picture's path."""
    return _plot(lines, LENGTHS[2:9], f"{MODEL}: time of a step by tensor parallelism v3 over ours", path)


def _plot(lines: _Lines, columns: Sequence[int], title: str, path: Path) -> Path:
    """Draw predictions as lines and published numbers as points. The number of GPUs in a name selects the color."""
    figure = blank_picture(8, 5)
    axes = figure.subplots()
    for name, line in lines.items():
        (colour,) = (colour for gpus, colour in _COLOURS.items() if f" {gpus} A100" in name)
        style = ("--" if "PCIe" in name else "-") if name.startswith("predicted") else "o"
        places = [columns.index(int(tokens)) for tokens in line]
        axes.plot(places, list(line.values()), style, color=colour, label=name)
    axes.set_xticks(range(len(columns)), [short(n) for n in columns])
    axes.set_xlabel("tokens")
    axes.set_title(title, fontsize=11)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return save_figure(figure, path)


if __name__ == "__main__":
    sys.exit(main())
