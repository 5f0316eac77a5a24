"""`bmburst eval`: resolves the options, starts the ranks, and evaluates in each of them, on text or with --passkey."""

import argparse
import contextlib
import dataclasses
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bmburst.amounts import tokens
from bmburst.checkpoint.files import VERIFIED
from bmburst.cli.long_context import measure, request_of, require_outputs, write_evaluation
from bmburst.cli.program import ranks_to_start
from bmburst.config import (
    add_options,
    build_config,
    from_dict,
    given_options,
    hide_rare,
    option_name,
    read_layer,
    to_dict,
)
from bmburst.errors import UserError, hub_fix, no_directory
from bmburst.launch.handover import Request, run_command
from bmburst.launch.spec import LaunchSpec
from bmburst.record_format import RecordFormat
from bmburst.train.config import EvalConfig
from bmburst.train.sources import check_sources

if TYPE_CHECKING:
    from bmburst.train.evaluate import PositionBin
    from bmburst.train.metrics import Measurement

HELP = (
    "Evaluate a checkpoint on held-out text: loss, bits per byte and perplexity, also by position; or on whether it "
    "finds a pass key in a long text, or solves tasks over it."
)
_WITH_PASSKEY = ("checkpoint", "adapter", "tokenizer", "dtype", "hang_timeout", "start_timeout", "output", "nproc")
_SHARED_OPTIONS = ("lengths", "samples", "seed", "cache", "chunk_tokens")
_PASSKEY_OPTIONS = (*_SHARED_OPTIONS, "depths", "digits", "without_key")
_TASKS_OPTIONS = (*_SHARED_OPTIONS, "compare")
_RARE = (
    *(declared.name for declared in dataclasses.fields(RecordFormat)),
    *("hang_timeout", "start_timeout", "digits", "seed", "cache", "chunk_tokens", "without_key"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add an option for every field of EvalConfig."""
    parser.usage = (
        "bmburst eval --checkpoint DIR --data FILE [--sequence-length N] [--by-position] [--FIELD VALUE ...]\n"
        "       bmburst eval --checkpoint DIR --passkey --lengths 4K,...,1M [--depths 0,.25,.5,.75,1] [--samples N]\n"
        "       bmburst eval --checkpoint DIR [--compare DIR ...] --tasks all --lengths 4K,...,128K [--samples N]\n"
        "       bmburst eval --help all"
    )
    add_options(parser, EvalConfig, short={}, titles={"": "evaluation"})
    _add_passkey_options(parser)
    hide_rare(parser, _RARE)


def run(args: argparse.Namespace) -> int:
    """Evaluate, and return the exit status: 2 if a length of --passkey does not fit into memory."""
    has_test = args.passkey or args.tasks is not None  # on one rank it needs neither BMTrain nor a group
    return run_command(__name__, partial(settle, args), measure if has_test else None)


@contextlib.contextmanager
def settle(args: argparse.Namespace, world_size: int | None = None) -> Iterator[tuple[Request, LaunchSpec]]:
    """Decide and check the whole evaluation, once."""
    generates = args.passkey or args.tasks is not None
    if generates:
        config, values = _shared(args)
        request = request_of(args, config, values, world_size or ranks_to_start(config.nproc))
    else:
        _refuse_passkey_options(args)
        config = resolve_options(args, world_size)
        # Imported here because it imports torch, which the help does not need.
        from bmburst.train.evaluate import check_inputs

        model = check_inputs(config)
        request = {
            "config": to_dict(config),
            "verified": str(model.directory),
            "tokenizer": model.tokenizer,
            "model": to_dict(model.config),
        }
    yield (
        request,
        LaunchSpec(
            nproc=world_size or config.nproc or ranks_to_start(None),
            host_runtime=not generates,
            hang_timeout=config.hang_timeout,
            start_timeout=config.start_timeout,
        ),
    )


def run_rank(request: Request) -> int:
    """Evaluate in one rank, as `settle` has decided, and return the exit status."""
    os.environ[VERIFIED] = request["verified"]
    if "test" in request:
        from bmburst.comm.groups import in_group

        return in_group(partial(measure, request))
    from bmburst.blocks.config import LlamaConfig
    from bmburst.train.evaluate import EvaluatedModel, evaluate_checkpoint

    config = from_dict(EvalConfig, request["config"], "request")
    shape = from_dict(LlamaConfig, request["model"], "request")
    model = EvaluatedModel(Path(request["verified"]), request["tokenizer"], shape)
    measured, bins = evaluate_checkpoint(config, model)
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
            f"checkpoint {config.checkpoint}: {no_directory(config.checkpoint)}\n"
            "allowed: a checkpoint, a run folder, or the directory of a Hugging Face model\n"
            f"fix: correct the path of --checkpoint{hub_fix(config.checkpoint)}"
        )
    check_sources(config.data, config)
    from bmburst.data import are_records
    from bmburst.data.mixture import sources_of

    if any(are_records(each.path, each.form(config)) for each in sources_of(config.data)):
        values = {"pack": "documents", **values}
    if config.by_position:
        _outputs(config)
    elif config.output is not None:
        raise UserError(
            f"--output {config.output} has no effect\nallowed: with --by-position, --passkey or --tasks\n"
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
    add("--compare", type=Path, nargs="+", metavar="DIR", help="further checkpoints for the table, with --tasks")
    add("--lengths", metavar="N,...", help="tokens of the prompts; 4K,...,1M: with the powers of two between")
    add("--depths", metavar="D,...", help="places of the sentence, from 0 to 1 (default: 0,.25,.5,.75,1)")
    add("--samples", type=int, metavar="N", help="prompts of each length and depth (default: 5), or task (10)")
    add("--digits", type=int, metavar="N", help="digits of a number (default: 5)")
    add("--seed", type=int, metavar="N", help="seed of the numbers (default: 0)")
    add("--without-key", action="store_true", default=None, help="leave the sentence out: a right answer is chance")
    add("--cache", metavar="SPLIT", help="split of the KV cache; see bmburst generate (default: auto)")
    add("--chunk-tokens", type=tokens, metavar="N", help="tokens computed at once; see bmburst generate")


def _refuse_passkey_options(args: argparse.Namespace) -> None:
    """Raise UserError for options of --passkey or --tasks without these, or of the other of both."""
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
