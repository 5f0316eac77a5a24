"""`bmburst eval --passkey` and `--tasks`: tests over long texts, and the files of an evaluation."""

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bmburst.amounts import short
from bmburst.checkpoint.files import VERIFIED
from bmburst.cli.model import load_generator, note_length, progress_bar, require_split
from bmburst.config import from_dict, read_json, to_dict, write_json
from bmburst.errors import UserError
from bmburst.launch.handover import Request
from bmburst.outputs import explained_write, is_picture, require_file
from bmburst.train.config import EvalConfig

if TYPE_CHECKING:
    from bmburst.inference.generator import Source
    from bmburst.inference.passkey import PasskeyPrompts, PasskeyTest
    from bmburst.inference.tasks import TaskPrompts, TaskTest

PASSKEY, TASKS = "passkey", "tasks"


def request_of(args: argparse.Namespace, config: EvalConfig, values: Mapping[str, Any], ranks: int) -> Request:
    """Read and check the checkpoints and the options of --passkey or --tasks. No weights are read yet.

    Args:
        args: The options.
        config: Those that all evaluations share.
        values: Those of them that are given.
        ranks: Number of ranks.

    Raises:
        UserError: An option cannot work.
    """
    kind, what, longest = (PASSKEY, "passkeys", "64K") if args.passkey else (TASKS, "tasks", "128K")
    if args.lengths is None:
        raise UserError(f"--{kind} needs --lengths\nfix: for example --lengths 4K,...,{longest}")
    test = _passkey_test(args) if args.passkey else _task_test(args)
    output, _ = require_outputs(config.output, f"{kind}.json", f"an evaluation of {what}", f"bmburst-{kind}-")
    cache, opened = args.cache or "auto", []
    for checkpoint in (config.checkpoint, *(args.compare or ())):
        source, _ = _open(checkpoint, config, test)
        require_split(source, cache, args.chunk_tokens, ranks)
        opened.append({"given": str(checkpoint), "verified": str(source.directory)})
    if len({each["given"] for each in opened}) < len(opened):
        raise UserError("--compare names a checkpoint twice\nallowed: each once\nfix: leave out the second")
    return {
        "test": {"kind": kind, **asdict(test)},
        "config": to_dict(config),
        "verified": opened[0]["verified"],
        "checkpoints": opened,
        "dtype": config.dtype if "dtype" in values else "auto",
        "cache": cache,
        "chunk_tokens": args.chunk_tokens,
        "output": str(output),
    }


def _passkey_test(args: argparse.Namespace) -> "PasskeyTest":
    from bmburst.inference.passkey import PasskeyTest, read_depths, read_lengths

    choices = _given(args, "samples", "digits", "seed")
    lengths = read_lengths(args.lengths)
    if args.depths is not None:
        choices["depths"] = read_depths(args.depths)
    return PasskeyTest(lengths=lengths, with_key=not args.without_key, **choices)


def _task_test(args: argparse.Namespace) -> "TaskTest":
    from bmburst.inference.passkey import read_lengths
    from bmburst.inference.tasks import TASKS, TaskTest

    names = TASKS if args.tasks == "all" else tuple(args.tasks.split(","))
    return TaskTest(tasks=names, lengths=read_lengths(args.lengths), **_given(args, "samples", "seed"))


def _given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def _open(
    checkpoint: Path, config: EvalConfig, test: "PasskeyTest | TaskTest"
) -> "tuple[Source, PasskeyPrompts | TaskPrompts]":
    """Open a model, and return it with the prompts of the test; UserError if there is none, or no tokenizer."""
    from bmburst.inference.generator import Source
    from bmburst.inference.passkey import PasskeyPrompts
    from bmburst.inference.prompts import PromptEncoder
    from bmburst.inference.tasks import TaskPrompts, TaskTest

    source = Source.open(checkpoint, config.adapter, config.tokenizer)
    if source.tokenizer is None:
        raise UserError(
            f"{checkpoint} comes without a tokenizer, and --{TASKS if isinstance(test, TaskTest) else PASSKEY} needs "
            "text\nallowed: a directory with tokenizer.json, or --tokenizer\n"
            "fix: --tokenizer bytes if the model was trained on bytes, else --tokenizer DIR"
        )
    encoder = PromptEncoder(source.tokenizer, source.weights.config.vocab_size)
    if isinstance(test, TaskTest):
        return source, TaskPrompts(source.tokenizer, test, encoder)
    return source, PasskeyPrompts(source.tokenizer, test, encoder)


def measure(request: Request) -> int:
    """Measure the test on the ranks of a request, and return the exit status: 2 if a length does not fit."""
    from bmburst.comm.groups import communicator
    from bmburst.inference import passkey, tasks

    comm = communicator(None)
    is_main = comm.rank == 0
    config = from_dict(EvalConfig, request["config"], "request")
    choices: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in request["test"].items()}
    name, output = str(choices.pop("kind")), Path(request["output"])
    kind: Any = passkey if name == PASSKEY else tasks  # modules with the same functions
    test = passkey.PasskeyTest(**choices) if name == PASSKEY else tasks.TaskTest(**choices)
    results: dict[str, list[Any]] = {}
    settings = {"ranks": comm.size, "dtype": request["dtype"], "cache": request["cache"]}
    for checkpoint in request["checkpoints"]:
        os.environ[VERIFIED] = checkpoint["verified"]
        source, prompts = _open(Path(checkpoint["given"]), config, test)
        settings["tokenizer"] = config.tokenizer if name == TASKS or source.tokenizer is None else source.tokenizer.name
        if is_main:
            note_length(max(test.lengths), source.weights.config.max_position_embeddings)
        generator = load_generator(source, request, is_main=is_main)
        cells = results.setdefault(checkpoint["given"], [])
        with progress_bar(name, test.total_tokens, " tokens", is_main=is_main) as computed:
            for length in test.lengths:
                cells += kind.measure(generator, prompts, test, length, computed)
                if is_main:  # after each length, because the longest take hours
                    write_evaluation(output, kind.to_json(results, settings, test))
        del generator
    every = [cell for cells in results.values() for cell in cells]
    if is_main:
        picture = output.with_suffix(".png")
        kind.draw(results, test, picture)
        print(kind.table(results, test))
        for length, reason in {cell.length: cell.refused for cell in every if cell.refused is not None}.items():
            print(f"{short(length)} refused: {reason}", file=sys.stderr)
        print(f"{output}, {picture}", file=sys.stderr)
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
    """Write the JSON file of an evaluation; UserError if it cannot be written."""
    with explained_write("--output", path):
        write_json(path, values)
