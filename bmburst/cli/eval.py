"""`bmburst eval`: resolves the options, starts the ranks, and evaluates in each of them, on text or with --passkey."""

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bmburst.amounts import short, tokens
from bmburst.checkpoint.files import VERIFIED
from bmburst.cli import ranks_to_start
from bmburst.cli.eval_tasks import measure, no_tokenizer, require_outputs, tasks_request, write_evaluation
from bmburst.cli.progress import note_length, progress_bar
from bmburst.config import (
    add_options,
    build_config,
    given_options,
    option_name,
    read_layer,
    to_dict,
)
from bmburst.errors import UserError
from bmburst.launch.handover import Request, is_rank, run_here, run_joined_rank, run_on_ranks
from bmburst.launch.spec import LaunchSpec
from bmburst.train.config import EvalConfig
from bmburst.train.sources import check_sources, hold_records

if TYPE_CHECKING:
    from bmburst.inference.generator import Source
    from bmburst.inference.passkey import PasskeyCell, PasskeyPrompts, PasskeyTest
    from bmburst.train.evaluate import PositionBin
    from bmburst.train.objective import Measurement

HELP = (
    "Evaluate a checkpoint on held-out text: loss, bits per byte and perplexity, also by position; or on whether it "
    "finds a pass key in a long text, or solves tasks over it."
)
_SHORT: Mapping[str, str] = {}
_WITH_PASSKEY = ("checkpoint", "adapter", "tokenizer", "dtype", "hang_timeout", "start_timeout", "output", "nproc")
_SHARED_OPTIONS = ("lengths", "samples", "seed", "cache", "chunk_tokens")
_PASSKEY_OPTIONS = (*_SHARED_OPTIONS, "depths", "digits", "without_key")
_TASKS_OPTIONS = (*_SHARED_OPTIONS, "compare")
_COLUMNS = 9  # columns of a table, which is then 8 + 9 * 8 characters wide


def configure(parser: argparse.ArgumentParser) -> None:
    """Add an option for every field of EvalConfig."""
    parser.usage = (
        "bmburst eval --checkpoint DIR --data FILE [--sequence-length N] [--by-position] [--FIELD VALUE ...]\n"
        "       bmburst eval --checkpoint DIR --passkey --lengths 4K,...,1M [--depths 0,.25,.5,.75,1] [--samples N]\n"
        "       bmburst eval --checkpoint DIR [--compare DIR ...] --tasks all --lengths 4K,...,128K [--samples N]"
    )
    add_options(parser, EvalConfig, short=_SHORT, titles={"": "evaluation"})
    _add_passkey_options(parser)


def run(args: argparse.Namespace) -> int:
    """Evaluate, and return the exit status: 2 if a length of --passkey does not fit into memory.

    Raises:
        UserError: An option cannot work.
    """
    if is_rank():
        return run_joined_rank(__name__, partial(settle, args))
    with settle(args) as (request, spec):
        if "work" in request and spec.nproc == 1:  # needs neither BMTrain nor a group
            return run_here(_WORK[request["work"]], request)
        return run_on_ranks(__name__, request, spec)


@contextlib.contextmanager
def settle(args: argparse.Namespace, world_size: int | None = None) -> Iterator[tuple[Request, LaunchSpec]]:
    """Decide and check the whole evaluation, once.

    Args:
        args: The options.
        world_size: Number of ranks, if another launcher has started them.

    Yields:
        The request to the ranks, and how they are started and watched.

    Raises:
        UserError: An option cannot work.
    """
    generates = args.passkey or args.tasks is not None
    if generates:
        config, values = _shared(args)
        make = _passkey_request if args.passkey else tasks_request
        request = make(args, config, values, world_size or ranks_to_start(config.nproc))
    else:
        _refuse_passkey_options(args)
        config = resolve_options(args, world_size)
        # Imported here because it imports torch, which the help does not need.
        from bmburst.train.evaluate import check_inputs

        request = {"config": to_dict(config), "verified": str(check_inputs(config))}
    nproc = (config.nproc or ranks_to_start(None)) if world_size is None else 1
    yield (
        request,
        LaunchSpec(
            nproc=nproc,
            host_runtime=not generates,
            hang_timeout=config.hang_timeout,
            start_timeout=config.start_timeout,
        ),
    )


def run_rank(request: Request) -> int:
    """Evaluate in one rank, as `settle` has decided, and return the exit status."""
    os.environ[VERIFIED] = request["verified"]
    if "work" in request:
        from bmburst.comm.groups import in_group

        return in_group(partial(_WORK[request["work"]], request))
    from bmburst.train.evaluate import evaluate_checkpoint

    config = build_config(EvalConfig, read_layer(EvalConfig, request["config"], "request"))
    measured, bins = evaluate_checkpoint(config)
    if os.environ["RANK"] == "0":
        print(
            f"loss           {measured.loss:.4f} nats per token\n"
            f"bits per byte  {measured.bits_per_byte:.4f}\n"
            f"perplexity     {measured.perplexity:.4f}\n"
            f"tokens         {measured.tokens:,}"
        )
        if config.by_position:
            _write_positions(config, measured, bins)
    return 0


def _write_positions(config: EvalConfig, measured: "Measurement", bins: "list[PositionBin]") -> None:
    from bmburst.train.evaluate import draw_positions, table, to_json
    from bmburst.train.objective import perplexity

    path, picture = _outputs(config)
    write_evaluation(path, to_json(to_dict(config), dataclasses.asdict(measured), bins))
    draw_positions(bins, str(config.checkpoint), picture)
    print(f"\n{table(bins, perplexity)}\n{path}, {picture}")


def _outputs(config: EvalConfig) -> tuple[Path, Path]:
    return require_outputs(config.output, "by_position.json", "an evaluation by position", "bmburst-loss-by-position-")


def resolve_options(args: argparse.Namespace, world_size: int | None = None) -> EvalConfig:
    """Build the configuration from the options, including the number of ranks.

    Args:
        args: Parsed options.
        world_size: Number of ranks; None before they are started.

    Raises:
        UserError: A value is wrong, a file is missing, or a rank would have no token.
    """
    values = read_layer(EvalConfig, given_options(args, EvalConfig), "")
    config = build_config(EvalConfig, values)
    if not config.checkpoint.is_dir():
        raise UserError(
            f"checkpoint {config.checkpoint}: no such directory\n"
            "allowed: a checkpoint, a run folder, or the directory of a Hugging Face model\n"
            "fix: correct the path of --checkpoint"
        )
    check_sources(config.data, config.text_field, config)
    if hold_records(config.data, config.text_field, config):
        values = {"pack": "documents", **values}
    if config.by_position:
        _outputs(config)
    elif config.output is not None:
        raise UserError(
            f"--output {config.output} has no effect\nallowed: with --by-position or --passkey\n"
            "fix: add --by-position, or leave --output out"
        )
    nproc = world_size or ranks_to_start(config.nproc)
    if config.sequence_length < nproc:
        raise UserError(
            f"sequence_length {config.sequence_length} leaves some of {nproc} ranks without a token\n"
            f"allowed: at least {nproc}\nfix: a longer --sequence-length or a smaller --nproc"
        )
    return build_config(EvalConfig, {**values, "nproc": nproc})


def _add_passkey_options(parser: argparse.ArgumentParser) -> None:
    """Add --passkey, --tasks and the options that belong to them."""
    group = parser.add_argument_group(
        "long context",
        "These options above also apply: --checkpoint, --tokenizer, --dtype (default: as stored), --output, --nproc "
        "and the timeouts.",
    )
    add = group.add_argument
    add("--passkey", action="store_true", help="test whether the model finds a number in a long text; no --data")
    add(
        "--tasks",
        metavar="NAME,...",
        help="test tasks over long texts: needle, variables, aggregation, or all; no --data, --depths or --digits",
    )
    add("--compare", type=Path, nargs="+", metavar="DIR", help="with --tasks: further checkpoints for the table")
    add("--lengths", metavar="N,...", help="tokens of the prompts; 4K,...,1M: with the powers of two between")
    add("--depths", metavar="D,...", help="places of the sentence, from 0 to 1 (default: 0,.25,.5,.75,1)")
    add("--samples", type=int, metavar="N", help="prompts of each length and depth (default: 5), or task (10)")
    add("--digits", type=int, metavar="N", help="digits of a number (default: 5)")
    add("--seed", type=int, metavar="N", help="seed of the numbers (default: 0)")
    add("--without-key", action="store_true", default=None, help="leave the sentence out: a right answer is chance")
    add("--cache", metavar="SPLIT", help="split of the KV cache; see bmburst generate (default: auto)")
    add("--chunk-tokens", type=tokens, metavar="N", help="tokens computed at once; see bmburst generate")


def _refuse_passkey_options(args: argparse.Namespace) -> None:
    """Refuse options of --passkey or --tasks without these, or of the other of both.

    Raises:
        UserError: Such an option is given, or both are.
    """
    if args.passkey and args.tasks is not None:
        raise UserError("--passkey and --tasks given\nallowed: one of both\nfix: two evaluations")
    known = _PASSKEY_OPTIONS if args.passkey else _TASKS_OPTIONS if args.tasks is not None else ()
    for name in sorted({*_PASSKEY_OPTIONS, *_TASKS_OPTIONS} - {*known}):
        if getattr(args, name) is not None:
            option = option_name(name, {})
            owner = "--tasks" if name == "compare" else "--passkey" if name not in _SHARED_OPTIONS else ""
            owner = owner or "--passkey or --tasks"
            raise UserError(f"{option} is an option of {owner}\nfix: add {owner}, or leave {option} out")


def _shared(args: argparse.Namespace) -> tuple[EvalConfig, dict[str, Any]]:
    """Return the configuration of the options that --passkey and --tasks share with other evaluations, and the given.

    Raises:
        UserError: An option does not apply, or has a wrong value.
    """
    _refuse_passkey_options(args)
    given, kind = given_options(args, EvalConfig), "--passkey" if args.passkey else "--tasks"
    for name in given:
        if name not in _WITH_PASSKEY:
            option = option_name(name, {})
            raise UserError(f"{option} has no effect with {kind}, which makes its own text\nfix: leave {option} out")
    values = read_layer(EvalConfig, given, "")
    return build_config(EvalConfig, {"data": "none", **values}), values


def _passkey_request(args: argparse.Namespace, config: EvalConfig, values: Mapping[str, Any], ranks: int) -> Request:
    """Read and check the model directory and the options of --passkey. No weights are read yet.

    Raises:
        UserError: An option cannot work.
    """
    from bmburst.inference.passkey import PasskeyTest, read_depths, read_lengths
    from bmburst.plan.inference import chunk_of

    if args.lengths is None:
        raise UserError("--passkey needs --lengths\nfix: for example --lengths 4K,...,64K")
    choices: dict[str, Any] = {"lengths": read_lengths(args.lengths)}
    if args.depths is not None:
        choices["depths"] = read_depths(args.depths)
    choices |= {name: value for name in ("samples", "digits", "seed") if (value := getattr(args, name)) is not None}
    test = PasskeyTest(**choices, with_key=not args.without_key)
    chunk_of(args.chunk_tokens, ranks, "--chunk-tokens")
    output, _ = require_outputs(config.output, "passkey.json", "an evaluation of passkeys", "bmburst-passkey-")

    from bmburst.schedule.cache_split import CacheSplit

    source, _ = _open_passkeys(config, test)
    model = source.weights.config
    cache = args.cache or "auto"
    CacheSplit.choose(cache, ranks, 0, model.num_heads, model.num_kv_heads)
    return {
        "work": "passkey",
        "config": to_dict(config),
        "verified": str(source.directory),
        "test": dataclasses.asdict(test),
        "dtype": config.dtype if "dtype" in values else "auto",
        "cache": cache,
        "chunk_tokens": args.chunk_tokens,
        "output": str(output),
    }


def _open_passkeys(config: EvalConfig, test: "PasskeyTest") -> "tuple[Source, PasskeyPrompts]":
    """Open the model, and return it with the prompts of the test.

    Raises:
        UserError: There is no model or no tokenizer.
    """
    from bmburst.inference.generator import Source
    from bmburst.inference.passkey import PasskeyPrompts
    from bmburst.inference.prompts import PromptEncoder

    source = Source.open(config.checkpoint, config.adapter, config.tokenizer)
    if source.tokenizer is None:
        raise no_tokenizer(config.checkpoint, "--passkey")
    encoder = PromptEncoder(source.tokenizer, source.weights.config.vocab_size)
    return source, PasskeyPrompts(source.tokenizer, test, encoder)


def _measure_passkeys(request: Request) -> int:
    from bmburst.comm.groups import communicator
    from bmburst.inference.generator import Generator
    from bmburst.inference.passkey import PasskeyTest, draw_passkeys, measure_passkeys, to_json

    comm = communicator(None)
    is_main = comm.rank == 0
    config = build_config(EvalConfig, read_layer(EvalConfig, request["config"], "request"))
    choices: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in request["test"].items()
    }
    test = PasskeyTest(**choices)
    source, prompts = _open_passkeys(config, test)
    dtype, cache, output = request["dtype"], request["cache"], Path(request["output"])
    if is_main:
        note_length(max(test.lengths), source.weights.config.max_position_embeddings)
    with progress_bar("reading weights", source.nbytes(dtype), "B", is_main=is_main) as read:
        generator = Generator(source, cache=cache, dtype=dtype, chunk_tokens=request["chunk_tokens"], on_bytes=read)
    name = "" if source.tokenizer is None else source.tokenizer.name
    settings = {"ranks": comm.size, "dtype": dtype, "cache": cache, "tokenizer": name}
    cells: list[PasskeyCell] = []

    def measured(found: "Sequence[PasskeyCell]") -> None:
        """Write the results so far, because the longest lengths take hours."""
        cells.extend(found)
        if is_main:
            write_evaluation(output, to_json(str(config.checkpoint), settings, test, cells))

    total = sum(test.lengths) * len(test.depths) * test.samples
    with progress_bar("passkey", total, " tokens", is_main=is_main) as computed:
        measure_passkeys(generator, prompts, test, on_tokens=computed, on_length=measured)
    if is_main:
        picture = output.with_suffix(".png")
        draw_passkeys(cells, str(config.checkpoint), picture)
        print(_passkey_table(cells))
        reasons = {cell.length: cell.refused for cell in cells if cell.refused is not None}
        for length, reason in reasons.items():
            print(f"{short(length)} refused: {reason}", file=sys.stderr)
        print(f"{output}, {picture}", file=sys.stderr)
    return 2 if any(cell.refused is not None for cell in cells) else 0


def _passkey_table(cells: "Sequence[PasskeyCell]") -> str:
    """Return a table of right answers out of all, one line per length, in blocks of at most 80 columns."""
    from bmburst.inference.passkey import words_of

    lengths, depths = sorted({cell.length for cell in cells}), sorted({cell.depth for cell in cells})
    found = {(cell.length, cell.depth): cell for cell in cells}
    blocks = []
    for first in range(0, len(depths), _COLUMNS):
        some = depths[first : first + _COLUMNS]
        lines = ["  tokens" + "".join(f"{f'@{depth:.4g}':>8}" for depth in some)]
        for length in lengths:
            words = "".join(f"{words_of(found[length, depth]):>8}" for depth in some)
            lines.append(f"{short(length):>8}{words}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


_WORK: Mapping[str, Callable[[Request], int]] = {"passkey": _measure_passkeys, "tasks": measure}
