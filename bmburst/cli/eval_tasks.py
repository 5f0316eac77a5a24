"""`bmburst eval --tasks`: tasks over long texts for one checkpoint or several, and the files of an evaluation."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bmburst.amounts import short
from bmburst.checkpoint.files import VERIFIED
from bmburst.cli.progress import note_length, progress_bar
from bmburst.config import build_config, read_json, read_layer, to_dict, write_json
from bmburst.errors import UserError
from bmburst.launch.handover import Request
from bmburst.outputs import is_picture, require_file
from bmburst.train.config import EvalConfig

if TYPE_CHECKING:
    from bmburst.inference.generator import Source
    from bmburst.inference.tasks import TaskCell, TaskPrompts, TaskTest


def tasks_request(args: argparse.Namespace, config: EvalConfig, values: Mapping[str, Any], ranks: int) -> Request:
    """Read and check the checkpoints and the options of --tasks. No weights are read yet.

    Args:
        args: The options.
        config: Those that all evaluations share.
        values: Those of them that are given.
        ranks: Number of ranks.

    Raises:
        UserError: An option cannot work.
    """
    from bmburst.inference.passkey import read_lengths
    from bmburst.inference.tasks import TASKS, TaskTest
    from bmburst.plan.inference import chunk_of
    from bmburst.schedule.cache_split import CacheSplit

    if args.lengths is None:
        raise UserError("--tasks needs --lengths\nfix: for example --lengths 4K,...,128K")
    names = TASKS if args.tasks == "all" else tuple(args.tasks.split(","))
    choices = {name: value for name in ("samples", "seed") if (value := getattr(args, name)) is not None}
    test = TaskTest(tasks=names, lengths=read_lengths(args.lengths), **choices)
    chunk_of(args.chunk_tokens, ranks, "--chunk-tokens")
    output, _ = require_outputs(config.output, "tasks.json", "an evaluation of tasks", "bmburst-tasks-")
    cache, opened = args.cache or "auto", []
    for checkpoint in (config.checkpoint, *(args.compare or ())):
        source, _ = _open(checkpoint, config, test)
        model = source.weights.config
        CacheSplit.choose(cache, ranks, 0, model.num_heads, model.num_kv_heads)
        opened.append({"given": str(checkpoint), "verified": str(source.directory)})
    if len({each["given"] for each in opened}) < len(opened):
        raise UserError("--compare names a checkpoint twice\nallowed: each once\nfix: leave out the second")
    return {
        "work": "tasks",
        "config": to_dict(config),
        "verified": opened[0]["verified"],
        "checkpoints": opened,
        "tasks": asdict(test),
        "dtype": config.dtype if "dtype" in values else "auto",
        "cache": cache,
        "chunk_tokens": args.chunk_tokens,
        "output": str(output),
    }


def _open(checkpoint: Path, config: EvalConfig, test: "TaskTest") -> "tuple[Source, TaskPrompts]":
    """Open a model, and return it with the prompts of the test.

    Raises:
        UserError: There is no model or no tokenizer.
    """
    from bmburst.inference.generator import Source
    from bmburst.inference.prompts import PromptEncoder
    from bmburst.inference.tasks import TaskPrompts

    source = Source.open(checkpoint, config.adapter, config.tokenizer)
    if source.tokenizer is None:
        raise no_tokenizer(checkpoint, "--tasks")
    encoder = PromptEncoder(source.tokenizer, source.weights.config.vocab_size)
    return source, TaskPrompts(source.tokenizer, test, encoder)


def no_tokenizer(checkpoint: Path, option: str) -> UserError:
    """Return the error for a model without a tokenizer, which an evaluation with text needs."""
    return UserError(
        f"{checkpoint} comes without a tokenizer, and {option} needs text\n"
        "allowed: a directory with tokenizer.json, or --tokenizer\n"
        "fix: --tokenizer bytes if the model was trained on bytes, else --tokenizer DIR"
    )


def measure(request: Request) -> int:
    """Measure the tasks on the ranks of a request, and return the exit status: 2 if a length does not fit."""
    from bmburst.comm.groups import communicator
    from bmburst.inference.generator import Generator
    from bmburst.inference.tasks import TaskTest, draw, measure_tasks, table, to_json

    comm = communicator(None)
    is_main = comm.rank == 0
    config = build_config(EvalConfig, read_layer(EvalConfig, request["config"], "request"))
    choices: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in request["tasks"].items()}
    test = TaskTest(**choices)
    dtype, cache, output = request["dtype"], request["cache"], Path(request["output"])
    results: dict[str, list[TaskCell]] = {}
    settings = {"ranks": comm.size, "dtype": dtype, "cache": cache, "tokenizer": config.tokenizer}
    for checkpoint in request["checkpoints"]:
        os.environ[VERIFIED] = checkpoint["verified"]
        source, prompts = _open(Path(checkpoint["given"]), config, test)
        if is_main:
            note_length(max(test.lengths), source.weights.config.max_position_embeddings)
        with progress_bar("reading weights", source.nbytes(dtype), "B", is_main=is_main) as read:
            generator = Generator(source, cache=cache, dtype=dtype, chunk_tokens=request["chunk_tokens"], on_bytes=read)
        cells = results.setdefault(checkpoint["given"], [])

        def measured(found: "Sequence[TaskCell]", cells: "list[TaskCell]" = cells) -> None:
            """Write the results so far, because the longest lengths take hours."""
            cells.extend(found)
            if is_main:
                write_evaluation(output, to_json(results, settings, test))

        total = sum(test.lengths) * len(test.tasks) * test.samples
        with progress_bar("tasks", total, " tokens", is_main=is_main) as computed:
            measure_tasks(generator, prompts, test, on_tokens=computed, on_length=measured)
        del generator
    every = [cell for cells in results.values() for cell in cells]
    if is_main:
        draw(results, test.tasks, output.with_suffix(".png"))
        print(table(results, test.tasks))
        for length, reason in {cell.length: cell.refused for cell in every if cell.refused is not None}.items():
            print(f"{short(length)} refused: {reason}", file=sys.stderr)
        print(f"{output}, {output.with_suffix('.png')}", file=sys.stderr)
    return 2 if any(cell.refused is not None for cell in every) else 0


def require_outputs(given: Path | None, default: str, what: str, marked: str) -> tuple[Path, Path]:
    """Return the paths of an evaluation's JSON file and image, after checking that both can be written.

    Args:
        given: Value of --output; None uses `default` in the current folder.
        default: Default file name.
        what: Name of the output with its article, for messages.
        marked: Prefix of `format` in an existing JSON file that may be replaced.

    Raises:
        UserError: The path does not end with .json, cannot be written, or is a file of another kind.
    """
    path = given or Path(default)
    if path.suffix != ".json":
        raise UserError(f"--output {path}\nallowed: a file name that ends with .json\nfix: --output {default}")
    require_file("--output", path, what, lambda file: str(read_json(file).get("format")).startswith(marked))
    picture = path.with_suffix(".png")
    require_file("--output", picture, "a picture of bmburst", is_picture)
    return path, picture


def write_evaluation(path: Path, values: Mapping[str, Any]) -> None:
    """Write the JSON file of an evaluation.

    Raises:
        UserError: The file cannot be written.
    """
    try:
        write_json(path, values)
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written: {error.strerror}\nfix: give another file") from None
