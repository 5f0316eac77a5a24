"""Compares time and memory of training steps with `bmburst plan`: `python -m benchmarks.plan_measure`.

Each case is some layers of a preset, which the trainer trains for a few steps. It prints, with the prediction, the
median time of a step, the peak of torch's allocator, and the driver's memory outside the allocator. `--output FILE`
also writes them as JSON. No case starts after `--budget`.
"""

import argparse
import dataclasses
import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from bmburst.amounts import GIB


class Case(NamedTuple):
    """One run: layers of a preset, tokens of a sequence, recompute policy, ZeRO's stage."""

    preset: str
    layers: int
    tokens: int
    recompute: str
    zero: int

    @property
    def name(self) -> str:
        """The case in a line."""
        return f"{self.preset} x{self.layers}, {self.tokens // 1024}K, {self.recompute}, ZeRO-{self.zero}"


CASES = (
    Case("llama-2-7b", 4, 8192, "block-keep-attention", 3),
    Case("llama-2-7b", 4, 32768, "block-keep-attention", 3),
    Case("llama-2-7b", 4, 32768, "block", 3),
    Case("llama-2-7b", 4, 32768, "none", 3),
    Case("llama-2-7b", 4, 32768, "block-keep-attention", 2),
    Case("llama-3-8b", 2, 65536, "block-keep-attention", 3),
    Case("llama-2-7b", 2, 131072, "block-keep-attention", 3),
    Case("llama-2-7b", 8, 65536, "block-keep-attention", 3),
    Case("llama-2-7b", 4, 16384, "none", 2),
)
SMALL = (Case("llama-tiny", 2, 512, "block", 3), Case("llama-tiny", 3, 512, "none", 2))


def main() -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1, help="ranks that share each sequence (default: 1)")
    parser.add_argument("--hardware", default="h200", help="machine of the predictions (default: h200)")
    parser.add_argument("--steps", type=int, default=4, help="steps that are measured (default: 4)")
    parser.add_argument("--budget", type=float, default=85.0, help="seconds after which no case begins (default: 85)")
    parser.add_argument("--small", action="store_true", help="two tiny cases, to see it work, also on a CPU")
    parser.add_argument("--output", type=Path, help="JSON file of the results")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        return _rank(args)
    from benchmarks.engine.machine import write_record
    from bmburst.runtime.launch import LaunchSpec, launch

    with tempfile.TemporaryDirectory(prefix="bmburst-plan-") as folder:
        words = ["--rank", folder, "--steps", str(args.steps), "--budget", str(args.budget)]
        words += ["--gpus", str(args.gpus), *(["--small"] if args.small else [])]
        status = launch(LaunchSpec(nproc=args.gpus), ["-m", "benchmarks.plan_measure", *words])
        file = Path(folder) / "measured.jsonl"
        found = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    rows = [row | predicted(Case(*row["case"]), args.gpus, args.hardware) for row in found]
    write_record(args.output, "benchmarks.plan_measure", args.gpus, rows=rows)
    print(table(rows, args.gpus))
    return status


def predicted(case: Case, gpus: int, hardware: str) -> dict[str, Any]:
    """Return what the planner says of a case."""
    from bmburst.blocks.presets import preset
    from bmburst.plan.candidates import Candidate, Task
    from bmburst.plan.search import predict
    from bmburst.schedule.hardware import load_hardware

    model = dataclasses.replace(preset(case.preset), num_layers=case.layers)
    task = Task(model=model, preset=case.preset, sequence=case.tokens, gpus=gpus)
    way = Candidate(task=task, ulysses_degree=gpus, recompute=case.recompute, zero=case.zero)
    found = predict(way, load_hardware(hardware))
    return {
        "predicted_seconds": found.seconds,
        "predicted_allocated_gib": found.memory.allocated / GIB,
        "predicted_moment": found.memory.moment,
        "predicted_outside_gib": sum(found.memory.outside.values()) / GIB,
        "predicted_parts": dataclasses.asdict(found.time),
        "predicted_lines": dict(found.memory.lines),
    }


def table(rows: list[dict[str, Any]], gpus: int) -> str:
    """Return measured and predicted side by side, as Markdown."""
    lines = [
        f"| {gpus} GPU{'s' if gpus > 1 else ''} | s a step | predicted | error | GiB allocated | predicted | error "
        "| GiB beside torch | predicted |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        seconds, memory = row["seconds"], row["allocated_gib"]
        wrong = row["predicted_seconds"] / seconds - 1
        more = row["predicted_allocated_gib"] / memory - 1 if memory else 0.0
        lines.append(
            f"| {Case(*row['case']).name} | {seconds:.3f} | {row['predicted_seconds']:.3f} | {wrong:+.1%} | "
            f"{memory:.2f} | {row['predicted_allocated_gib']:.2f} | {more:+.1%} | {row['outside_gib']:.2f} | "
            f"{row['predicted_outside_gib']:.2f} |"
        )
    return "\n".join(lines)


def _rank(args: argparse.Namespace) -> int:
    begun = time.monotonic()
    # Ranks must agree on which cases there is time for: rank 0 says so before each.
    from bmburst.comm import gather_objects
    from bmburst.mesh import Mesh
    from bmburst.runtime import start

    runtime = start()
    world = Mesh.over_bmtrain().world
    for case in SMALL if args.small else CASES:
        late = gather_objects(world, time.monotonic() - begun > args.budget)
        if late[0]:
            break
        row = {"case": list(case), **_measure(case, args, args.rank)}
        if runtime.rank == 0:
            with (args.rank / "measured.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{time.monotonic() - begun:5.0f} s  {case.name}: {row['seconds']:.3f} s a step", flush=True)
    return 0


def _measure(case: Case, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import torch

    import bmburst
    from benchmarks.engine.machine import beside_peak
    from bmburst.blocks.presets import preset
    from bmburst.train.config import DataConfig, ParallelConfig, TrainConfig
    from bmburst.train.trainer import Trainer

    model = dataclasses.replace(preset(case.preset), num_layers=case.layers, max_position_embeddings=1 << 20)
    config = TrainConfig(
        preset=None,
        model=model,
        sequence_length=case.tokens,
        steps=args.steps + 2,
        dtype="bfloat16",
        recompute=case.recompute,
        output=folder / "run",
        data=DataConfig(source="stdlib", tokenizer="bytes"),
        parallel=ParallelConfig(
            sequence_parallel=args.gpus,
            strategy="auto",
            zero_level=case.zero,  # type: ignore[arg-type]  # check_fields looks
        ),
    )
    on_gpu = torch.cuda.is_available()
    trainer = Trainer(config)
    for _ in range(2):  # kernels are compiled, gradients and optimizer states made
        trainer.step()
    steps = [trainer.step() for _ in range(args.steps)]
    seconds = [step.seconds for step in steps]
    found = {
        "seconds": statistics.median(seconds),
        "all_seconds": seconds,
        "allocated_gib": max(step.memory_gib for step in steps) if on_gpu else 0.0,  # a step begins a new peak
        "outside_gib": 0.0,
    }
    if on_gpu:
        found["outside_gib"] = beside_peak(torch.device("cuda", torch.cuda.current_device())) / GIB
    del trainer
    gc.collect()
    bmburst.empty_cache()  # or what lies beside torch would be the largest case's from here on
    return found


if __name__ == "__main__":
    sys.exit(main())
