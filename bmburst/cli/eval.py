"""`bmburst eval`: resolves the configuration, starts the ranks, and evaluates in each of them."""

import argparse
import os
from collections.abc import Mapping

from bmburst.checkpoint.files import VERIFIED
from bmburst.cli import leaves_errors_to_rank_0, ranks_to_start
from bmburst.cli.train import rank_environment
from bmburst.config import add_options, build, given_options, option_name, read_layer, to_dict
from bmburst.errors import UserError
from bmburst.train.resolve import EvalConfig, check_data_path

HELP = "Evaluate a checkpoint on held-out text: loss, bits per byte and perplexity."
_SHORT: Mapping[str, str] = {}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add an option for every field of EvalConfig."""
    parser.usage = "bmburst eval --checkpoint DIR --data FILE [--sequence-length N] [--FIELD VALUE ...]"
    add_options(parser, EvalConfig, short=_SHORT, titles={"": "evaluation"})


def run(args: argparse.Namespace) -> int:
    """Evaluate, and return the exit status.

    Raises:
        UserError: Something given cannot work.
    """
    try:
        config = resolve_options(args, world_size=int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else None)
    except UserError:
        if leaves_errors_to_rank_0():
            return 2
        raise
    if "RANK" in os.environ:
        from bmburst.train.evaluate import run as evaluate

        measured = evaluate(config)
        if os.environ["RANK"] == "0":
            print(
                f"loss           {measured.loss:.4f} nats per token\n"
                f"bits per byte  {measured.bits_per_byte:.4f}\n"
                f"perplexity     {measured.perplexity:.4f}\n"
                f"tokens         {measured.tokens:,}"
            )
        return 0

    # Imported here because it imports torch, which the help does not need.
    from bmburst.train.evaluate import check

    directory = check(config)

    from bmburst.runtime.launch import LaunchSpec, launch

    options = [
        word
        for name, value in to_dict(config).items()
        if value is not None
        for word in (option_name(name, _SHORT), str(value))
    ]
    spec = LaunchSpec(nproc=config.nproc or 1, hang_timeout=config.hang_timeout, start_timeout=config.start_timeout)
    with rank_environment({VERIFIED: str(directory)}):
        return launch(spec, ["-m", "bmburst", "eval", *options])


def resolve_options(args: argparse.Namespace, world_size: int | None = None) -> EvalConfig:
    """Return the configuration that the options give, with its number of ranks.

    Args:
        args: Parsed options.
        world_size: Number of ranks; None before they are started.

    Raises:
        UserError: A value is wrong, a file is missing, or a rank would have no token.
    """
    values = read_layer(EvalConfig, given_options(args, EvalConfig), "")
    config = build(EvalConfig, values)
    if not config.checkpoint.is_dir():
        raise UserError(
            f"checkpoint {config.checkpoint}: no such directory\n"
            "allowed: a checkpoint, a run folder, or a directory of a Hugging Face LLaMA"
        )
    check_data_path(config.data, config.text_field)
    nproc = world_size or ranks_to_start(config.nproc)
    if config.sequence_length < nproc:
        raise UserError(
            f"sequence_length {config.sequence_length} leaves some of {nproc} ranks without a token\n"
            f"allowed: at least {nproc}\nfix: a longer --sequence-length or a smaller --nproc"
        )
    return build(EvalConfig, {**values, "nproc": nproc})
