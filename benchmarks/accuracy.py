"""Compares predictions with measured and published numbers: `python -m benchmarks.accuracy`.

`benchmarks/runs/measured.toml` and `published.toml` contain the runs and their sources.
"""

import argparse
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engine.report import markdown_table
from bmburst.amounts import GIB
from bmburst.blocks.config import LlamaConfig, LoRAConfig
from bmburst.blocks.presets import PRESETS
from bmburst.plan.candidates import Candidate, Offload, Task
from bmburst.plan.counts import FUSED, OPERATORS, attention_flops
from bmburst.plan.search import predict
from bmburst.schedule.hardware import Hardware, load_hardware
from bmburst_ops import ATTENTION_BACKWARD

MEASURED, PUBLISHED = "measured", "published"
_HEAD_DIM = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One measured number with its prediction."""

    group: str  # who measured it, and whether it is of attention or training
    name: str  # the run
    source: str  # file or publication with the number
    quantity: str  # what was measured, with its unit
    actual: float  # as measured
    predicted: float  # by the planner
    assumed: str = ""  # assumptions that the source does not state, or limits of the comparison

    @property
    def error(self) -> float:
        """Relative error, predicted / actual - 1."""
        return self.predicted / self.actual - 1


def compare_predictions() -> list[Comparison]:
    """Return all comparisons."""
    measured, published = _read(MEASURED), _read(PUBLISHED)
    return [
        *_measured_attention(measured["attention"], load_hardware("h200")),
        *_measured_training(measured["training"]),
        *_published_attention(published["attention"]),
        *_published_training(published),
    ]


def markdown(comparisons: Sequence[Comparison]) -> str:
    """Return a summary of median and largest errors, and the comparisons, as Markdown tables."""
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for each in comparisons:
        groups.setdefault((each.group, each.quantity), []).append(each)
    lines = []
    for (group, quantity), rows in groups.items():
        sizes = [abs(each.error) for each in rows]
        worst = max(rows, key=lambda each: abs(each.error))
        largest = f"{worst.error:+.1%} ({worst.name})"
        lines.append([f"{group}: {quantity}", len(rows), f"{median(sizes):.1%}", largest])
    text = markdown_table(["what", "runs", "median of the errors' size", "largest"], lines)
    for (group, quantity), rows in groups.items():
        lines = []
        for each in rows:
            note = f"{each.source}{'; assumed: ' + each.assumed if each.assumed else ''}"
            lines.append([each.name, f"{each.actual:.4g}", f"{each.predicted:.4g}", f"{each.error:+.1%}", note])
        text += [
            "",
            f"## {group}: {quantity}",
            "",
            *markdown_table(["run", "actual", "predicted", "error", "source"], lines),
        ]
    return "\n".join(text)


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "runs" / f"{name}.toml").read_text(encoding="utf-8"))


def _attention_task(heads: int, kv_heads: int, tokens: int, gpus: int, nodes: int) -> Task:
    model = LlamaConfig(
        vocab_size=64,
        hidden_size=heads * _HEAD_DIM,
        intermediate_size=64,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_HEAD_DIM,
        max_position_embeddings=tokens,
    )
    return Task(model=model, sequence=tokens, gpus=gpus, nodes=nodes)


def _way(task: Task, row: Mapping[str, Any], **more: Any) -> Candidate:
    data = row.get("data", 1)
    degree = row["heads"]
    outer = row["outer"] if task.gpus // data > degree else "none"
    return Candidate(task=task, data=data, ulysses_degree=degree, outer=outer, ring_tensors=row["travellers"], **more)


def _measured_attention(rows: Sequence[Mapping[str, Any]], hardware: Hardware) -> Iterator[Comparison]:
    """Compare each row. A run on one GPU has the FLOPs of one rank of the other runs."""
    for row in rows:
        task = _attention_task(row["num_heads"], row["num_kv_heads"], row["tokens"], row["ranks"], 1)
        alone = row["heads"] == 0
        if alone:  # the same FLOPs on one GPU
            tokens = int(row["tokens"] / row["ranks"] ** 0.5)
            task = _attention_task(row["num_heads"], row["num_kv_heads"], tokens, 1, 1)
            way = Candidate(task=task)
        else:
            way = _way(task, row, transport=row["transport"])
        cost = way.attention_cost(hardware)
        start = 0.0 if alone else hardware.call_start
        forward = cost.forward.total + start
        both = forward + cost.backward.total
        for quantity, actual, predicted in (
            ("forward, ms", row["forward_ms"], forward),
            ("forward + backward, ms", row["both_ms"], both),
        ):
            run = {"group": "this project, attention", "name": row["cell"], "source": row["source"]}
            yield Comparison(**run, quantity=quantity, actual=actual, predicted=predicted * 1e3)


def _measured_training(rows: Sequence[Mapping[str, Any]]) -> Iterator[Comparison]:
    """Compare each row. Rows of long sequences also have the GPU, the offload and the rank of adapters."""
    for row in rows:
        hardware, whole = load_hardware(row.get("hardware", "h200")), PRESETS[row["preset"]]
        model = replace(whole, num_layers=row.get("layers", whole.num_layers), sliding_window=row.get("window"))
        lora = LoRAConfig(rank=row["lora"]) if "lora" in row else None
        task = Task(model=model, preset=row["preset"], sequence=row["sequence"], gpus=row["gpus"], lora=lora)
        choices = {key: row[key] for key in ("recompute", "zero") if key in row}
        way = Candidate(
            task=task, ulysses_degree=row["gpus"], offload=Offload(row.get("offload", "nothing")), **choices
        )
        found = predict(way, hardware, operators=OPERATORS[row["operators"]])
        quantities = [("step, s", row["seconds"], found.seconds)] if "seconds" in row else []
        if "memory_gib" in row:
            quantities.append(("torch's allocator, GiB", row["memory_gib"], found.memory.allocated / GIB))
        if "outside_gib" in row:
            outside = found.memory.total - found.memory.allocated
            quantities.append(("beside torch's allocator, GiB", row["outside_gib"], outside / GIB))
        for quantity, actual, predicted in quantities:
            run = {"group": "this project, training", "name": row["name"], "source": row["source"]}
            run["assumed"] = row.get("assumed", "") if quantity == "step, s" else ""
            yield Comparison(**run, quantity=quantity, actual=actual, predicted=predicted)


def _published_attention(rows: Sequence[Mapping[str, Any]]) -> Iterator[Comparison]:
    for row in rows:
        task = _attention_task(row["num_heads"], row["num_kv_heads"], row["sequence"], row["gpus"], row["nodes"])
        way = _way(task, row, transport="nccl")
        cost = way.attention_cost(load_hardware(row["hardware"]))
        flops = attention_flops(task.model, task.sequence) / task.gpus / 1e12
        both = cost.forward.total + cost.backward.total
        kernel = cost.forward.kernel + cost.backward.kernel
        values = {
            "forward": ("forward, TFLOP/s a GPU", flops / cost.forward.total),
            "backward": ("backward, TFLOP/s a GPU", ATTENTION_BACKWARD * flops / cost.backward.total),
            "both": ("forward + backward, TFLOP/s a GPU", (1 + ATTENTION_BACKWARD) * flops / both),
            "ratio_both": ("forward + backward, ratio to the kernel", kernel / both),
        }
        yield from _published("attention", row["name"], row, values)


def _published_training(published: Mapping[str, Any]) -> Iterator[Comparison]:
    for row in published["training"]:
        shape = {key: value for key, value in published["shapes"][row["shape"]].items() if key != "source"}
        data = row.get("data", 1)
        task = Task(
            model=LlamaConfig(**shape, max_position_embeddings=row["sequence"]),
            preset=row["shape"],
            sequence=row["sequence"],
            gpus=row["gpus"],
            nodes=row["nodes"],
            batch=data,
            loss_chunk=row["sequence"] if row.get("whole_logits") else 1024,
            mlp_chunk=0,
        )
        way = _way(task, row, transport="nccl", recompute=row["recompute"])
        machine = replace(load_hardware(row["hardware"]), **row.get("changes", {}))
        found = predict(way, machine, operators=OPERATORS[row.get("operators", FUSED.name)])
        values = {
            "tokens_per_second": ("tokens/s/GPU", found.tokens_per_second),
            "mfu": ("MFU", found.utilisation),
            "memory": ("memory, GB", found.memory.allocated / GIB),
        }
        yield from _published("training", f"{row['name']}, {row['shape']}", row, values)


def _published(
    what: str, name: str, row: Mapping[str, Any], values: Mapping[str, tuple[str, float]]
) -> Iterator[Comparison]:
    """Yield a comparison for each key of `values` that a row has; `values` maps keys to `(quantity, predicted)`."""
    name += f", {row['sequence'] // 1024}K, {row['gpus']} x {row['hardware'].upper()}"
    run = {"group": f"published, {what}", "name": name, "source": row["source"], "assumed": row.get("assumed", "")}
    for key, (quantity, predicted) in values.items():
        if key in row:
            yield Comparison(**run, quantity=quantity, actual=row[key], predicted=predicted)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(markdown(compare_predictions()))
