"""`bmburst eval`: resolves the configuration, starts the ranks, and evaluates in each of them."""

import argparse
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bmburst.checkpoint.files import VERIFIED
from bmburst.cli import leaves_errors_to_rank_0, ranks_to_start
from bmburst.cli.passkey import (
    add_passkey_options,
    refuse_passkey_options,
    require_outputs,
    run_passkey,
    write_evaluation,
)
from bmburst.cli.train import set_environment
from bmburst.config import add_options, build_config, given_options, option_name, read_layer, to_dict
from bmburst.errors import UserError
from bmburst.train.config import EvalConfig
from bmburst.train.resolve import check_sources, hold_records

if TYPE_CHECKING:
    from bmburst.train.evaluate import PositionBin
    from bmburst.train.objective import Measurement

HELP = (
    "Evaluate a checkpoint on held-out text: loss, bits per byte and perplexity, also by position; or on whether it "
    "finds a pass key in a long text."
)
_SHORT: Mapping[str, str] = {}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add an option for every field of EvalConfig."""
    parser.usage = (
        "bmburst eval --checkpoint DIR --data FILE [--sequence-length N] [--by-position] [--FIELD VALUE ...]\n"
        "       bmburst eval --checkpoint DIR --passkey --lengths 4K,...,1M [--depths 0,.25,.5,.75,1] [--samples N]"
    )
    add_options(parser, EvalConfig, short=_SHORT, titles={"": "evaluation"})
    add_passkey_options(parser)


def run(args: argparse.Namespace) -> int:
    """Evaluate, and return the exit status.

    Raises:
        UserError: An option cannot work.
    """
    if args.passkey:
        return run_passkey(args)
    try:
        refuse_passkey_options(args)
        config = resolve_options(args, world_size=int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else None)
    except UserError:
        if leaves_errors_to_rank_0():
            return 2
        raise
    if "RANK" in os.environ:
        from bmburst.train.evaluate import evaluate_checkpoint

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

    # Imported here because it imports torch, which the help does not need.
    from bmburst.train.evaluate import check_inputs

    directory = check_inputs(config)

    from bmburst.runtime.launch import LaunchSpec, launch

    options = [
        word
        for name, value in to_dict(config).items()
        if value is not None
        for word in (option_name(name, _SHORT), str(value))
    ]
    spec = LaunchSpec(nproc=config.nproc or 1, hang_timeout=config.hang_timeout, start_timeout=config.start_timeout)
    with set_environment({VERIFIED: str(directory)}):
        return launch(spec, ["-m", "bmburst", "eval", *options])


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
            "allowed: a checkpoint, a run folder, or a directory of a Hugging Face LLaMA\n"
            "fix: correct the path of --checkpoint"
        )
    check_sources(config.data, config.text_field)
    if hold_records(config.data, config.text_field):
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
