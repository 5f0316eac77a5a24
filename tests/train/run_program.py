"""A small training run, and the moments at which it can be killed."""

import json
import os
import signal
from importlib import import_module
from pathlib import Path
from random import Random
from threading import Timer
from time import sleep
from typing import Any

import torch

from bmburst.train.config import DataConfig, ParallelConfig, ScheduleConfig, TrainConfig
from bmburst.train.trainer import Trainer, run
from tests import tiny

STEPS = 6
SHAPE = tiny.config(vocab_size=tiny.BYTES, hidden_size=16, intermediate_size=24, num_heads=2, num_kv_heads=1)


def config(folder: Path, name: str, **changes: Any) -> TrainConfig:
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("".join(f"line {i}: the quick brown fox, {i * i} times.\n" for i in range(400)))
    values: dict[str, Any] = {
        "preset": None,
        "model": SHAPE,
        "sequence_length": 48,
        "steps": STEPS,
        "batch_size": 2,
        "checkpoint_every": 2,
        "eval_every": 3,
        "eval_sequences": 3,  # not as many for each of 2 data ranks
        "sample_tokens": 0,
        "output": folder / name,
        "data": DataConfig(source=str(text), held_out_fraction=0.2),
        "schedule": ScheduleConfig(warmup_steps=2),
    }
    values |= changes
    parallel = values.get("parallel", ParallelConfig())
    if parallel.layout != "balanced":  # less work: a step in one piece
        values.setdefault("micro_batch_size", values["batch_size"] // parallel.data_parallel)
    return TrainConfig(**values)


def lines(run: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Return the lines of a file of a run."""
    return [json.loads(line) for line in (run / file).read_text().splitlines()]


def trainer(folder: Path, name: str, **changes: Any) -> Trainer:
    return Trainer(config(folder, name, **changes))


def sharpen(made: Trainer) -> None:
    """Make the weights so large that the next token hangs on the ones before it."""
    with torch.no_grad():
        for parameter in made.optimizer.param_groups[0]["params"]:
            parameter.mul_(15)


def train(folder: Path, name: str, **changes: Any) -> None:
    changes.setdefault("parallel", ParallelConfig())
    run(config(folder, name, **changes))


def train_and_die(folder: Path, name: str, moment: str, count: int, resume: bool, **changes: Any) -> None:
    """Train, and let rank 0 be killed at the count-th time that it comes to a function of `bmburst.checkpoint`."""
    module, *path, function = moment.split(".")
    owner: Any = import_module(f"bmburst.checkpoint.{module}")
    for part in path:
        owner = getattr(owner, part)
    calls = 0
    original = getattr(owner, function)

    def deadly(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, function, deadly)
    train(folder, name, resume=resume, **changes)


def train_and_be_killed(folder: Path, name: str, seed: int, steps: int, resume: bool) -> None:
    """Train, and let a rank be killed at a random moment after its first save has begun, while saves take long.

    Rank 0 adds each step that was reported as saved to the file `reported`.
    """
    from bmburst.checkpoint.background import BackgroundSaves
    from bmburst.checkpoint.staging import Staging
    from bmburst.checkpoint.tensor_files import SafetensorsWriter

    draws = Random(seed)
    target, delay = str(draws.randrange(2)), draws.uniform(0.0, 1.0)  # seconds: some saves
    copy, write_run, wait = Staging.copy, SafetensorsWriter.write_run, BackgroundSaves.wait
    timers: list[Timer] = []

    def begun(*args: Any) -> None:
        if os.environ["RANK"] == target and not timers:
            timers.append(Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)))
            timers[0].start()
        copy(*args)

    def slowly(*args: Any) -> None:
        sleep(0.005)
        write_run(*args)

    def noted(saves: Any) -> None:
        step = saves._save._draft.progress.step if saves.is_writing else None
        wait(saves)
        if step is not None and os.environ["RANK"] == "0":
            with (folder / "reported").open("a") as file:
                file.write(f"{step}\n")

    Staging.copy, SafetensorsWriter.write_run = begun, slowly  # type: ignore[method-assign]
    BackgroundSaves.wait = noted  # type: ignore[method-assign]
    train(folder, name, steps=steps, eval_every=0, resume=resume)
