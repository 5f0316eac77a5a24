"""A way to train as the command that does it."""

import shlex

from bmburst.plan.candidates import Candidate
from bmburst.schedule.strategy_names import name_of


def options(candidate: Candidate) -> list[str]:
    """Return the options of `bmburst train` that make a run of this way."""
    task, model = candidate.task, candidate.task.model
    words = ["--preset", task.preset, "--sequence-length", str(task.sequence)]
    if task.sequence > model.max_position_embeddings:
        words += ["--model.max_position_embeddings", str(task.sequence)]
    words += ["--dtype", task.dtype, "--batch-size", str(task.batch)]
    if task.micro_batch > 1:
        words += ["--micro-batch-size", str(task.micro_batch)]
    words += ["--data-parallel", str(candidate.data), "--sequence-parallel", str(candidate.sequence)]
    if candidate.tensor > 1:
        words += ["--tensor-parallel", str(candidate.tensor)]
    if 1 < candidate.heads < candidate.sequence:
        words += ["--head-parallel", str(candidate.heads)]
    strategy = name_of(candidate.heads, candidate.sequence, candidate.outer)
    words += ["--strategy", strategy, "--recompute", candidate.recompute]
    words += ["--parallel.zero_level", str(candidate.zero)]
    if task.loss_chunk != 1024:
        words += ["--loss-chunk-tokens", str(task.loss_chunk)]
    if task.mlp_chunk is not None:
        words += ["--mlp-chunk-tokens", str(task.mlp_chunk)]
    return words


def command(candidate: Candidate) -> str:
    """Return the shell command; on several nodes, what each of them starts."""
    task = candidate.task
    if task.nodes == 1:
        return shlex.join(["bmburst", "train", "--nproc", str(task.gpus), *options(candidate)])
    launch = ["bmburst", "launch", "--nproc", str(task.gpus_per_node), "--nnodes", str(task.nodes)]
    places = ["--node-rank", "$RANK_OF_NODE", "--master-addr", "$FIRST_NODE"]
    train = ["--", "-m", "bmburst", "train", *options(candidate), "--output", "runs/planned"]
    return f"{shlex.join(launch)} {' '.join(places)} {shlex.join(train)}"
