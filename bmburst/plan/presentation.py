"""Shows predictions of training and generation: as text with the command, as JSON, and as a picture."""

import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from bmburst.amounts import GIB, enumerated, gib, short
from bmburst.outputs import blank_picture, explained_write, save_picture
from bmburst.plan.candidates import Candidate, Offload, Task
from bmburst.plan.inference import Generation, GenerationTask
from bmburst.plan.search import Prediction
from bmburst.plan.step import StepTime
from bmburst.recompute.policy import Policy
from bmburst.schedule.hardware import Hardware
from bmburst.schedule.parallelism import name_of


def options(candidate: Candidate) -> list[str]:
    """Return the options of `bmburst train` that run a candidate."""
    task, model = candidate.task, candidate.task.model
    words = ["--preset", task.preset] if task.init_from is None else ["--init-from", task.init_from]
    words += ["--sequence-length", str(task.sequence)]
    if task.sequence > model.max_position_embeddings:
        words += ["--model.max_position_embeddings", str(task.sequence)]
    words += ["--dtype", task.dtype, "--batch-size", str(task.batch)]
    if task.micro_batch > 1:
        words += ["--micro-batch-size", str(task.micro_batch)]
    if candidate.pipe > 1:
        words += ["--pipeline-parallel", str(candidate.pipe)]
    words += ["--data-parallel", str(candidate.data), "--sequence-parallel", str(candidate.sequence)]
    if candidate.tensor > 1:
        words += ["--tensor-parallel", str(candidate.tensor)]
    if 1 < candidate.ulysses_degree < candidate.sequence:
        words += ["--head-parallel", str(candidate.ulysses_degree)]
    strategy = name_of(candidate.ulysses_degree, candidate.sequence, candidate.outer)
    words += ["--strategy", strategy, "--recompute", candidate.recompute]
    words += ["--parallel.zero_level", str(candidate.zero)]
    if candidate.shards < task.gpus:
        words += ["--parallel.zero_group", "node" if candidate.shards == task.gpus_per_node else str(candidate.shards)]
    if candidate.offload is not Offload.NOTHING:
        words += ["--optimizer.offload"]
    if candidate.offload is Offload.WEIGHTS:
        words += ["--optimizer.offload_weights"]
    if task.state != "float32":
        words += ["--optimizer.state", task.state]
    uses_host = candidate.offload is not Offload.NOTHING or Policy.parse(candidate.recompute).offloads
    if task.host_memory is not None and uses_host:  # a virtual machine may have less free at first
        words += ["--host-memory", f"{task.host_memory:g}G"]
    if task.lora is not None:
        words += ["--lora.rank", str(task.lora.rank), "--lora.alpha", f"{task.lora.alpha:g}"]
        words += ["--lora.base", task.lora.base] if task.lora.is_4bit else []
        for name in ("targets", "rank_pattern", "modules_to_save"):
            if value := getattr(task.lora, name):
                words += [f"--lora.{name}", ",".join(value)]
        words += ["--checkpoint-every", "never"] if task.init_from is None else []  # needed without a base model
    if task.pairs:
        words += ["--dpo.beta", "0.1"]  # a usual value; it has no effect on time and memory
        is_named = task.init_from is None or (task.lora is not None and task.lora.is_4bit)
        words += ["--dpo.reference", "DIR"] if task.second_model and is_named else []
    if task.pack is not None:
        words += ["--pack", task.pack]
    if candidate.is_balanced:
        words += ["--parallel.layout", "balanced"]
    if task.loss_chunk != 1024:
        words += ["--loss-chunk-tokens", str(task.loss_chunk)]
    if task.mlp_chunk is not None:
        words += ["--mlp-chunk-tokens", str(task.mlp_chunk)]
    return words


def command(candidate: Candidate) -> str:
    """Return the shell command of a candidate; with several nodes, the command to run on each node."""
    task = candidate.task
    ranks = ["--nproc", str(task.gpus)] if task.nodes == 1 else []
    return started(task, ["train", *ranks, *options(candidate)])


def started(task: Task, words: Sequence[str]) -> str:
    """Return the shell command that starts `bmburst` with these words; with several nodes, the one of each node."""
    if task.nodes == 1:
        return shlex.join(["bmburst", *words])
    launch = f"torchrun --nnodes {task.nodes} --nproc-per-node {task.gpus_per_node}"
    own = shlex.join(["-m", "bmburst", *words, "--output", "runs/planned", "--resume", "auto"])
    return f"{launch} --node-rank $RANK_OF_NODE --master-addr $FIRST_NODE {own}"


PARTS = {declared.name: declared.name.replace("_", " ") for declared in fields(StepTime)}


def report(task: Task, hardware: Hardware, shown: Sequence[Prediction], total: int, needs: str = "") -> str:
    """Return the report: the task, the comparison, and time, memory and command of the best candidate.

    If nothing fits, the first line says so.

    Args:
        task: The training task.
        hardware: The machine.
        shown: The predictions to show, the best first.
        total: Number of candidates that were predicted.
        needs: What it needs, if nothing fits (`bmburst.plan.search.remedy`).
    """
    best, tokens = shown[0], short(task.sequence, commas=True)
    of = (
        f" (a prompt of {short(task.shared_prompt, commas=True)}, {task.answers} answers)" if task.shared_prompt else ""
    )
    fits = best.memory.fits
    lines = [
        *([] if fits else [f"No configuration fits into memory: it needs {needs}.", ""]),
        f"{task.preset}, {tokens} tokens{of} x {task.batch} a step, {task.gpus} x {hardware.name} on "
        f"{task.nodes} node{'s' if task.nodes > 1 else ''}: {total} configurations, the best of each mesh and strategy",
        "",
        *comparison(shown),
        "",
        f"{'The best' if fits else 'The nearest to fitting'}: {best.candidate.name}{_why(shown)}",
        "",
        *time_lines(best),
        "",
        *memory_lines(best),
        *(["", command(best.candidate)] if fits else []),
    ]
    return "\n".join(lines)


def by_numbers(shown: Sequence[Prediction]) -> list[Prediction]:
    """Return the predictions in the order of the numbers that the table shows: seconds, for those that fit, then GiB.

    `shown` is in the order of preference, which also weighs memory among ways that are almost as fast.
    """
    return sorted(
        shown, key=lambda each: (not each.memory.fits, each.seconds if each.memory.fits else each.memory.total)
    )


def _why(shown: Sequence[Prediction]) -> str:
    """Return why the best is not the first line of the table, or nothing."""
    best, first = shown[0], by_numbers(shown)[0]
    if best is first or not best.memory.fits:
        return ""
    slower = best.seconds / first.seconds - 1
    return f" ({slower:.2%} slower than the first, which is below the error of the prediction)"


def comparison(shown: Sequence[Prediction]) -> list[str]:
    """Return the table of predictions, line by line."""
    head = ("step s", "tokens/s/GPU", "MFU", "GiB", "")
    rows = [head] + [
        (
            f"{each.seconds:.3g}" if each.seconds < 1000 else f"{each.seconds:,.0f}",
            f"{each.tokens_per_second:,.0f}",
            f"{each.utilisation:.1%}",
            gib(each.memory.total),
            each.candidate.name + ("" if each.memory.fits else "   does not fit"),
        )
        for each in by_numbers(shown)
    ]
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines: the last column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([*(f"{word:>{width}}" for word, width in zip(row[:-1], widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]


def time_lines(prediction: Prediction) -> list[str]:
    """Return the parts of a step's time, line by line."""
    parts = asdict(prediction.time)
    lines = [f"time of a step: {prediction.seconds:.4g} s, {prediction.kernel_utilisation:.1%} of the peak with "]
    lines[0] += "attention's backward at 2.5 times its forward"
    for name, seconds in parts.items():
        if seconds:
            lines.append(f"  {PARTS[name]:24} {seconds:10.4g} s  {seconds / prediction.seconds:6.1%}")
    return lines


def memory_lines(prediction: Prediction) -> list[str]:
    """Return the memory at the peak, line by line."""
    memory = prediction.memory
    lines = [
        f"peak memory of a GPU: {gib(memory.total)} of {gib(memory.capacity)} GiB, "
        f"{gib(memory.allocated)} in torch's allocator, at: {memory.moment}"
    ]
    for name, nbytes in {**memory.lines, **memory.outside}.items():
        lines.append(f"  {name:29} {gib(nbytes):>8} GiB")
    others = (f"{name} {gib(nbytes)}" for name, nbytes in memory.moments.items() if name != memory.moment)
    lines.append(enumerated("GiB in torch's allocator at other moments", others, 120))
    if memory.host:
        used, most = gib(memory.in_host), gib(memory.host_capacity)
        lines.append(f"memory of a host: {used} of {most} GiB that it has for this")
        lines += [f"  {name:29} {gib(nbytes):>8} GiB" for name, nbytes in memory.host.items()]
    return lines


def as_json(task: Task, hardware: Hardware, found: Sequence[Prediction]) -> dict[str, Any]:
    """Return the predictions as plain data for JSON, in bytes and seconds."""
    names = ["preset", "sequence", "gpus", "nodes", "batch", "micro_batch", "dtype", "state", "loss_chunk", "mlp_chunk"]
    question = {name: getattr(task, name) for name in names}
    return {"task": question, "hardware": hardware.name, "ways": [_way(each) for each in found]}


def _way(prediction: Prediction) -> dict[str, Any]:
    way, memory = prediction.candidate, prediction.memory
    return {
        "name": way.name,
        "mesh": {"pipe": way.pipe, "data": way.data, "sequence": way.sequence, "tensor": way.tensor},
        "attention": {"heads": way.ulysses_degree, "outer": way.outer, "groups": way.groups},
        "recompute": way.recompute,
        "zero": way.zero,
        "zero_ranks": way.shards,
        "offload": way.offload.value,
        "seconds": prediction.seconds,
        "parts": asdict(prediction.time),
        "tokens_per_second_per_gpu": prediction.tokens_per_second,
        "mfu": prediction.utilisation,
        "mfu_attention_backward_2.5": prediction.kernel_utilisation,
        "memory": {
            "fits": memory.fits,
            "peak": memory.total,
            "allocated": memory.allocated,
            "capacity": memory.capacity,
            "moment": memory.moment,
            "moments": dict(memory.moments),
            "lines": dict(memory.lines),
            "outside": dict(memory.outside),
            "host": dict(memory.host),
        },
        "command": command(way),
    }


def generation_report(task: GenerationTask, hardware: Hardware, found: Sequence[Generation], gpus: int) -> str:
    """Return the report: the task, a table by number of GPUs, and time, memory and command for `gpus` GPUs.

    Args:
        task: The task.
        hardware: The machine.
        found: The predictions, by number of GPUs.
        gpus: The requested number of GPUs.
    """
    asked = next(each for each in found if each.gpus == gpus)
    prompts = f"{short(task.prompt, commas=True)} tokens x {task.batch}"
    lines = [
        f"{task.preset}, prompts of {prompts}, {task.new_tokens:,} new tokens, {task.dtype}, {hardware.name}",
        "",
        *_generation_table(found),
        "",
        f"{gpus} GPU{'s' if gpus > 1 else ''}, cache by {asked.split.name}: first token {asked.first_token:.3g} s, "
        f"bound {asked.first_token_bound:.3g}; {asked.token * 1e3:.3g} ms a token, bound {asked.token_bound * 1e3:.3g}",
        f"memory of a GPU: {gib(asked.memory)} of {gib(asked.available)} GiB",
    ]
    for name, nbytes in (("weights", asked.weights), ("cache", asked.cache), ("working", asked.working)):
        lines.append(f"  {name:8} {gib(nbytes):>8} GiB")
    longest = f"the longest prompt and answer that fit: {asked.longest:,} tokens"
    lines += [longest if asked.longest else "the model does not fit"]
    if asked.fits:
        return "\n".join([*lines, "", asked.command])
    first = "It does not fit into memory: use more GPUs, a shorter prompt or a smaller model."
    return "\n".join([first, "", *lines])


def _generation_table(found: Sequence[Generation]) -> list[str]:
    head = ("GPUs", "first token s", "ms a token", "tokens/s", "GiB", "longest", "cache")
    rows = [head] + [
        (
            str(each.gpus),
            f"{each.first_token:.3g}" if each.first_token < 1000 else f"{each.first_token:,.0f}",
            f"{each.token * 1e3:.3g}",
            f"{each.task.batch / each.token:,.0f}",
            gib(each.memory),
            f"{each.longest:,}",
            f"{each.split.name if each.gpus > 1 else 'whole'}" + ("" if each.fits else "   does not fit"),
        )
        for each in found
    ]
    return _aligned(rows)


def generation_json(task: GenerationTask, hardware: Hardware, found: Sequence[Generation]) -> dict[str, Any]:
    """Return the predictions as plain data for JSON, in bytes and seconds."""
    question = {name: getattr(task, name) for name in ("preset", "prompt", "new_tokens", "batch", "dtype")}
    return {"task": question, "hardware": hardware.name, "ways": [_generation_way(each) for each in found]}


def _generation_way(each: Generation) -> dict[str, Any]:
    names = ("gpus", "first_token", "first_token_bound", "token", "token_bound", "fits", "longest", "command")
    memory = {name: getattr(each, name) for name in ("weights", "cache", "working", "available")}
    way = {name: getattr(each, name) for name in names}
    split = {"name": each.split.name, "head_groups": each.split.head_groups, "token_groups": each.split.token_groups}
    return way | {"tokens_per_second": each.task.batch / each.token, "cache": split, "memory": memory}


_COLOURS = {
    "attention": "#2166ac",
    "matmul": "#4393c3",
    "elementwise": "#92c5de",
    "recompute": "#d9d9d9",
    "attention_communication": "#b2182b",
    "zero": "#d6604d",
    "tensor": "#f4a582",
    "offload": "#762a83",
    "pipeline": "#9970ab",
    "optimizer": "#8c510a",
    "host": "#636363",
}


_LETTERS = 66  # most characters of a line above a bar


def draw_predictions(shown: Sequence[Prediction], path: Path) -> None:
    """Draw predictions as bars, in the order of the table.

    Args:
        shown: The predictions to draw, the best first.
        path: PNG file to write.

    Raises:
        UserError: The file cannot be written.
    """
    task, shown = shown[0].candidate.task, by_numbers(shown)
    figure = blank_picture(4.8, 1.6 + 0.72 * len(shown))
    axes = figure.subplots()
    _draw_times(axes, shown)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    hardware, tokens = shown[0].hardware.name, short(task.sequence, commas=True)
    where = f"{task.preset}, {tokens} tokens x {task.batch}, {task.gpus} x {hardware}"
    figure.suptitle(f"Predicted time of a step\n{where}", fontsize=10)
    with explained_write("--output", path):
        save_picture(figure, path)


def _draw_times(axes: Any, shown: Sequence[Prediction]) -> None:
    """Draw a bar for each prediction, with its name above and utilisation and memory to the right."""
    starts = [0.0] * len(shown)
    for part, colour in _COLOURS.items():
        widths = [asdict(each.time)[part] for each in shown]
        if any(widths):
            axes.barh(range(len(shown)), widths, left=starts, height=0.3, color=colour, label=PARTS[part])
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for row, each in enumerate(shown):
        memory = f"{each.memory.total / GIB:.0f} GiB" + ("" if each.memory.fits else ": too much")
        axes.text(each.seconds, row, f" {each.utilisation:.0%}, {memory}", va="center", fontsize=8)
        name = "\n".join(textwrap.wrap(each.candidate.name, _LETTERS))
        axes.text(0.01, row - 0.18, name, transform=axes.get_yaxis_transform(), fontsize=8, in_layout=False)
    axes.set_yticks([])
    axes.set_ylim(len(shown) - 0.5, -0.7)
    axes.set_xlim(0, 1.35 * max(each.seconds for each in shown))
    axes.set_xlabel("seconds; right of a bar: MFU, GiB of a GPU")
    axes.grid(axis="x", alpha=0.3)
