"""`bmburst eval`: resolves the options, starts the ranks, and evaluates in each of them, on text or with --passkey."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bmburst.amounts import short, tokens
from bmburst.checkpoint.files import VERIFIED
from bmburst.cli import leaves_errors_to_rank_0, ranks_to_start
from bmburst.cli.generate import in_group, note_length, progress_bar
from bmburst.cli.train import set_environment
from bmburst.config import (
    add_options,
    build_config,
    given_options,
    option_name,
    read_json,
    read_layer,
    to_dict,
    write_json,
)
from bmburst.errors import UserError
from bmburst.outputs import is_picture, require_file
from bmburst.train.config import EvalConfig
from bmburst.train.resolve import check_sources, hold_records

if TYPE_CHECKING:
    from bmburst.inference.generator import Source
    from bmburst.inference.passkey import PasskeyCell, PasskeyPrompts, PasskeyTest
    from bmburst.train.evaluate import PositionBin
    from bmburst.train.objective import Measurement

HELP = (
    "Evaluate a checkpoint on held-out text: loss, bits per byte and perplexity, also by position; or on whether it "
    "finds a pass key in a long text."
)
_SHORT: Mapping[str, str] = {}
_WITH_PASSKEY = ("checkpoint", "adapter", "tokenizer", "dtype", "hang_timeout", "start_timeout", "output", "nproc")
_PASSKEY_OPTIONS = ("lengths", "depths", "samples", "digits", "seed", "without_key", "cache", "chunk_tokens")
_COLUMNS = 9  # columns of a table, which is then 8 + 9 * 8 characters wide


def configure(parser: argparse.ArgumentParser) -> None:
    """Add an option for every field of EvalConfig."""
    parser.usage = (
        "bmburst eval --checkpoint DIR --data FILE [--sequence-length N] [--by-position] [--FIELD VALUE ...]\n"
        "       bmburst eval --checkpoint DIR --passkey --lengths 4K,...,1M [--depths 0,.25,.5,.75,1] [--samples N]"
    )
    add_options(parser, EvalConfig, short=_SHORT, titles={"": "evaluation"})
    _add_passkey_options(parser)


def run(args: argparse.Namespace) -> int:
    """Evaluate, and return the exit status.

    Raises:
        UserError: An option cannot work.
    """
    if args.passkey:
        return _run_passkey(args)
    try:
        _refuse_passkey_options(args)
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
    _write_evaluation(path, to_json(to_dict(config), dataclasses.asdict(measured), bins))
    draw_positions(bins, str(config.checkpoint), picture)
    print(f"\n{table(bins, perplexity)}\n{path}, {picture}")


def _outputs(config: EvalConfig) -> tuple[Path, Path]:
    return _require_outputs(config.output, "by_position.json", "an evaluation by position", "bmburst-loss-by-position-")


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


def _add_passkey_options(parser: argparse.ArgumentParser) -> None:
    """Add --passkey and the options that belong to it."""
    group = parser.add_argument_group(
        "passkey",
        "These options above also apply: --checkpoint, --tokenizer, --dtype (default: as stored), --output, --nproc "
        "and the timeouts.",
    )
    add = group.add_argument
    add("--passkey", action="store_true", help="test whether the model finds a number in a long text; no --data")
    add("--lengths", metavar="N,...", help="tokens of the prompts; 4K,...,1M: with the powers of two between")
    add("--depths", metavar="D,...", help="places of the sentence, from 0 to 1 (default: 0,.25,.5,.75,1)")
    add("--samples", type=int, metavar="N", help="prompts of each length and depth (default: 5)")
    add("--digits", type=int, metavar="N", help="digits of a number (default: 5)")
    add("--seed", type=int, metavar="N", help="seed of the numbers (default: 0)")
    add("--without-key", action="store_true", default=None, help="leave the sentence out: a right answer is chance")
    add("--cache", metavar="SPLIT", help="split of the KV cache; see bmburst generate (default: auto)")
    add("--chunk-tokens", type=tokens, metavar="N", help="tokens computed at once; see bmburst generate")


def _refuse_passkey_options(args: argparse.Namespace) -> None:
    """Refuse options that need --passkey if it is not given.

    Raises:
        UserError: Such an option is given.
    """
    for name in _PASSKEY_OPTIONS:
        if getattr(args, name) is not None:
            option = option_name(name, {})
            raise UserError(f"{option} is an option of --passkey\nfix: add --passkey, or leave {option} out")


def _run_passkey(args: argparse.Namespace) -> int:
    """Measure, and return the exit status: 2 if a length does not fit into memory.

    Raises:
        UserError: An option cannot work.
    """
    if "RANK" in os.environ:
        return in_group(partial(_measure_passkeys, args))
    config, _ = _shared(args)
    nproc = ranks_to_start(config.nproc)
    if nproc == 1:
        return _measure_passkeys(args)
    request = _Request.of(args, nproc)  # refuse bad input before ranks start
    from bmburst.runtime.launch import LaunchSpec, launch

    spec = LaunchSpec(
        nproc=nproc, host_runtime=False, hang_timeout=config.hang_timeout, start_timeout=config.start_timeout
    )
    with set_environment({VERIFIED: str(request.source.directory)}):
        return launch(spec, ["-m", "bmburst", "eval", *_words(args)])


def _shared(args: argparse.Namespace) -> tuple[EvalConfig, dict[str, Any]]:
    """Return the configuration of the options that --passkey shares with evaluation on text, and the given ones.

    Raises:
        UserError: An option does not apply, or has a wrong value.
    """
    given = given_options(args, EvalConfig)
    for name in given:
        if name not in _WITH_PASSKEY:
            option = option_name(name, {})
            raise UserError(f"{option} has no effect with --passkey, which makes its own text\nfix: leave {option} out")
    values = read_layer(EvalConfig, given, "")
    return build_config(EvalConfig, {"data": "none", **values}), values


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Request:
    """A parsed and checked command line. No weights are read yet."""

    checkpoint: Path
    source: "Source"
    test: "PasskeyTest"
    prompts: "PasskeyPrompts"
    dtype: str
    cache: str
    chunk_tokens: int | None
    output: Path

    @classmethod
    def of(cls, args: argparse.Namespace, ranks: int) -> "_Request":
        """Read and check the model directory and the options.

        Raises:
            UserError: An option cannot work.
        """
        config, values = _shared(args)
        from bmburst.inference.passkey import PasskeyPrompts, PasskeyTest, read_depths, read_lengths
        from bmburst.plan.inference import chunk_of

        if args.lengths is None:
            raise UserError("--passkey needs --lengths\nfix: for example --lengths 4K,...,64K")
        choices: dict[str, Any] = {"lengths": read_lengths(args.lengths)}
        if args.depths is not None:
            choices["depths"] = read_depths(args.depths)
        choices |= {name: value for name in ("samples", "digits", "seed") if (value := getattr(args, name)) is not None}
        test = PasskeyTest(**choices, with_key=not args.without_key)
        chunk_of(args.chunk_tokens, ranks, "--chunk-tokens")
        output, _ = _require_outputs(config.output, "passkey.json", "an evaluation of passkeys", "bmburst-passkey-")

        from bmburst.inference.generator import Source
        from bmburst.inference.prompts import PromptEncoder
        from bmburst.schedule.cache_split import CacheSplit

        source = Source.open(config.checkpoint, config.adapter, config.tokenizer)
        if source.tokenizer is None:
            raise UserError(
                f"{config.checkpoint} comes without a tokenizer, and --passkey needs text\n"
                "allowed: a directory with tokenizer.json, or --tokenizer\n"
                "fix: --tokenizer bytes if the model was trained on bytes, else --tokenizer DIR"
            )
        model = source.weights.config
        cache = args.cache or "auto"
        CacheSplit.choose(cache, ranks, 0, model.num_heads, model.num_kv_heads)
        encoder = PromptEncoder(source.tokenizer, model.vocab_size)
        return cls(
            checkpoint=config.checkpoint,
            source=source,
            test=test,
            prompts=PasskeyPrompts(source.tokenizer, test, encoder),
            dtype=config.dtype if "dtype" in values else "auto",
            cache=cache,
            chunk_tokens=args.chunk_tokens,
            output=output,
        )


def _require_outputs(given: Path | None, default: str, what: str, marked: str) -> tuple[Path, Path]:
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


def _words(args: argparse.Namespace) -> list[str]:
    """Return the options that repeat this request, for the command of the ranks."""
    words = ["--passkey"]
    for name, value in given_options(args, EvalConfig).items():
        words.append(f"{option_name(name, {})}={value}")
    for name in _PASSKEY_OPTIONS:
        value = getattr(args, name)
        if value is not None:
            words.append(option_name(name, {}) + ("" if value is True else f"={value}"))
    return words


def _measure_passkeys(args: argparse.Namespace) -> int:
    from bmburst.comm.groups import communicator
    from bmburst.inference.generator import Generator
    from bmburst.inference.passkey import draw_passkeys, measure_passkeys, to_json

    comm = communicator(None)
    is_main = comm.rank == 0
    request = _Request.of(args, comm.size)
    test = request.test
    if is_main:
        note_length(max(test.lengths), request.source.weights.config.max_position_embeddings)
    with progress_bar("reading weights", request.source.nbytes(request.dtype), "B", is_main=is_main) as read:
        generator = Generator(
            request.source,
            cache=request.cache,
            dtype=request.dtype,
            chunk_tokens=request.chunk_tokens,
            on_bytes=read,
        )
    name = "" if request.source.tokenizer is None else request.source.tokenizer.name
    settings = {"ranks": comm.size, "dtype": request.dtype, "cache": request.cache, "tokenizer": name}
    cells: list[PasskeyCell] = []

    def measured(found: "Sequence[PasskeyCell]") -> None:
        """Write the results so far, because the longest lengths take hours."""
        cells.extend(found)
        if is_main:
            _write_evaluation(request.output, to_json(str(request.checkpoint), settings, test, cells))

    total = sum(test.lengths) * len(test.depths) * test.samples
    with progress_bar("passkey", total, " tokens", is_main=is_main) as computed:
        measure_passkeys(generator, request.prompts, test, on_tokens=computed, on_length=measured)
    if is_main:
        picture = request.output.with_suffix(".png")
        draw_passkeys(cells, str(request.checkpoint), picture)
        print(_passkey_table(cells))
        reasons = {cell.length: cell.refused for cell in cells if cell.refused is not None}
        for length, reason in reasons.items():
            print(f"{short(length)} refused: {reason}", file=sys.stderr)
        print(f"{request.output}, {picture}", file=sys.stderr)
    return 2 if any(cell.refused is not None for cell in cells) else 0


def _write_evaluation(path: Path, values: Mapping[str, Any]) -> None:
    """Write the JSON file of an evaluation.

    Raises:
        UserError: The file cannot be written.
    """
    try:
        write_json(path, values)
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written: {error.strerror}\nfix: give another file") from None


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
