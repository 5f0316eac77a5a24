"""Generates the recipes of real models, recipes/*.yaml, and their table in docs/recipes.md, with the planner.

    python -m benchmarks.recipes

Toy recipes, recipes/toy_*.yaml, are written by hand. tests/train/test_recipes.py recomputes the numbers.
"""

import argparse
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bmburst.blocks.config import LlamaConfig, LoRAConfig
from bmburst.blocks.families import RopeScaling
from bmburst.blocks.presets import PRESETS
from bmburst.cli.files import FIRST_LINE, recipe, settings_of
from bmburst.config import overlay
from bmburst.plan.candidates import Task
from bmburst.plan.search import search
from bmburst.schedule.hardware import load_hardware
from bmburst.train.resolve import PLACEHOLDER

ROOT = Path(__file__).parents[1]
FOLDER, PAGE = ROOT / "recipes", ROOT / "docs" / "recipes.md"
LORA = LoRAConfig(rank=16, alpha=32.0, targets=("all-linear",))
K, M = 1 << 10, 1 << 20
MODELS = ("llama-3-8b", "qwen3-8b", "mistral-7b-v0.3", "minicpm5-1b")
NATIVE = {"qwen3-8b": 32 * K}
"""Tokens that a model was trained on, where config.json allows more: of Qwen3, its model card."""
_BEGIN, _END = "<!-- table: python -m benchmarks.recipes -->", "<!-- end of table -->"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What a recipe is for.

    Attributes:
        kind: "pretrain", "extend" or "chat".
        model: The preset.
        tokens: Of a sequence.
        gpus: On one node.
        hardware: Of `load_hardware`.
        batch: Sequences of a step.
        rope: How a context beyond the model's is reached: "yarn" or "theta".
        lora: Whether adapters are trained.
        base: What to start from, for the placeholder; the model.
    """

    kind: str
    model: str
    tokens: int
    gpus: int
    hardware: str
    batch: int = 1
    rope: str = "yarn"
    lora: bool = False
    base: str = ""

    @property
    def name(self) -> str:
        """Name of the file, without .yaml."""
        parts = [self.kind, self.model, f"{self.tokens // M}m" if self.tokens >= M else f"{self.tokens // K}k"]
        parts += [self.rope] if self.kind == "extend" else []
        parts += ["lora"] if self.lora else ["full"] if self.kind != "pretrain" else []
        return "_".join([*parts, f"{self.gpus}x{self.hardware}"])

    @property
    def title(self) -> str:
        """What the recipe does, in words."""
        what = {"pretrain": "continued pretraining of", "extend": "a longer context for", "chat": "conversations for"}
        how = ", LoRA" if self.lora else ""
        return f"{what[self.kind]} {self.model}, sequences of {self.tokens:,} tokens{how}"

    def longer(self) -> dict[str, Any]:
        """Return the fields of the model that its context needs; none where it is long enough."""
        model = PRESETS[self.model]
        native = NATIVE.get(self.model, model.max_position_embeddings)
        if self.tokens <= native:
            return {}
        factor, fields = self.tokens / native, {"max_position_embeddings": self.tokens}
        if self.rope == "theta":  # the base of NTK-aware scaling: the slowest frequency is divided by the factor
            power = model.head_dim / (model.head_dim - 2)
            return {**fields, "rope_theta": float(f"{model.rope_theta * factor**power:.3g}")}
        return {
            **fields,
            "rope_scaling": {"kind": "yarn", "factor": factor, "original_max_position_embeddings": native},
        }

    def settings(self) -> dict[str, Any]:
        """Return the fields that the planner does not decide."""
        data = {"source": f"{PLACEHOLDER}{'CHATS.jsonl' if self.kind == 'chat' else 'TEXT'}"}
        if self.kind == "chat":  # records are read with the tokenizer of init_from
            own: dict[str, Any] = {"pack": "documents", "steps": 500}
        else:
            own, data = {"steps": 1000}, {**data, "tokenizer": PLACEHOLDER + self.model}
        lr = 1e-4 if self.lora else 1e-5
        own |= {"optimizer": {"lr": lr}, "schedule": {"kind": "cosine", "warmup_steps": own["steps"] // 20}}
        longer = self.longer()
        return {**own, "data": data, "checkpoint_every": 100} | ({"model": longer} if longer else {})


def jobs() -> Iterator[Job]:
    """Yield every recipe of a real model, those too that do not fit."""
    for model in MODELS:
        for tokens in (32 * K, 128 * K, 512 * K):
            for gpus in (1, 2, 8):
                for hardware in _machines(model, tokens, gpus):
                    batch = max(1, gpus * 32 * K // tokens)
                    yield Job(kind="pretrain", model=model, tokens=tokens, gpus=gpus, hardware=hardware, batch=batch)
    for rope, lora in (("yarn", False), ("yarn", True), ("theta", False)):
        first = Job(
            kind="extend", model="llama-3-8b", tokens=128 * K, gpus=8, hardware="h200", batch=2, rope=rope, lora=lora
        )
        yield first
        yield dataclasses.replace(
            first, tokens=M, batch=1, base="MERGED_MODEL_OF_128K" if lora else "CHECKPOINT_OF_128K"
        )
    for model in ("llama-3-8b", "qwen3-8b"):
        one = Job(kind="chat", model=model, tokens=8 * K, gpus=8, hardware="h100", batch=16)
        yield one
        yield dataclasses.replace(one, gpus=1, batch=4, lora=True)


def _machines(model: str, tokens: int, gpus: int) -> tuple[str, ...]:
    """Return what has recipes: both machines of the first model; of others H200, and H100 of 8 GPUs below 512K."""
    if model == MODELS[0]:
        return "h100", "h200"
    return ("h100",) if gpus == 8 and tokens < 512 * K else ("h200",)


def text_of(job: Job) -> str | None:
    """Return the recipe of a job; None if it does not fit."""
    hardware = load_hardware(job.hardware)
    task = Task(
        model=_model(job),
        preset=job.model,
        init_from=PLACEHOLDER + (job.base or job.model),
        sequence=job.tokens,
        gpus=job.gpus,
        batch=job.batch,
        lora=LORA if job.lora else None,
    )
    best = search(task, hardware)[0]
    if not best.memory.fits:
        return None
    settings = overlay(settings_of(best.candidate), job.settings())
    return recipe(best, settings, f"recipes/{job.name}.yaml", job.title)


def _model(job: Job) -> LlamaConfig:
    fields: Mapping[str, Any] = job.longer()
    scaling = {"rope_scaling": RopeScaling(**fields["rope_scaling"])} if "rope_scaling" in fields else {}
    return dataclasses.replace(PRESETS[job.model], **{**fields, **scaling})


def table() -> str:
    """Return the table of all recipes of real models, from the comments in their files."""
    lines = ["| recipe | tokens/s | s a step | GiB of a GPU | GiB of the host |", "| --- | --- | --- | --- | --- |"]
    for path in sorted(FOLDER.glob("*.yaml")):
        if path.name.startswith("toy_"):
            continue
        found = expectation(path.read_text())
        numbers = [
            f"{found['tokens/s']:,.0f}",
            f"{found['seconds']:.4g}",
            *(f"{found[key]:.1f}" for key in ("gpu", "host")),
        ]
        lines.append(f"| [{path.stem}](../recipes/{path.name}) | {' | '.join(numbers)} |")
    return "\n".join(lines)


def expectation(text: str) -> dict[str, float]:
    """Return the numbers that a recipe's comments expect: tokens/s, seconds of a step, GiB of a GPU and of the host."""
    said = (line.removeprefix("#   ").partition(": ") for line in text.splitlines() if line.startswith("#   "))
    lines = {name: numbers.replace(",", "").split() for name, _, numbers in said}
    speed, gpu, host = lines["speed"], lines["memory of a GPU"], lines["memory of a host"]
    return {
        "tokens/s": float(speed[0]),
        "seconds": float(speed[-4]),
        "gpu": float(gpu[0]),
        "host": float(host[0]),
    }


def main() -> None:
    """Write recipes and table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    for path in FOLDER.glob("*.yaml"):
        if not path.name.startswith("toy_") and path.read_text().startswith(FIRST_LINE):
            path.unlink()
    for job in jobs():
        text = text_of(job)
        if text is not None:
            (FOLDER / f"{job.name}.yaml").write_text(text)
    if PAGE.is_file():
        before, _, rest = PAGE.read_text().partition(_BEGIN)
        PAGE.write_text(f"{before}{_BEGIN}\n\n{table()}\n\n{_END}{rest.partition(_END)[2]}")


if __name__ == "__main__":
    main()
