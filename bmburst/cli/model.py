"""What commands that answer with a model share: options for it and its ranks, its loading, progress bars and notes."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bmburst.amounts import tokens
from bmburst.cli.program import add_time_limits, ranks_to_start
from bmburst.errors import UserError
from bmburst.launch.handover import Request
from bmburst.launch.spec import LaunchSpec

if TYPE_CHECKING:
    from bmburst.inference.generator import Generator, Source


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which model answers, and how it is split over ranks."""
    add = parser.add_argument
    add("--checkpoint", type=Path, metavar="DIR", help="model directory, checkpoint, or run folder (its newest one)")
    add("--adapter", type=Path, metavar="DIR", help="LoRA adapter to merge into the weights as they are read")
    add(
        "--tokenizer",
        metavar="NAME",
        help="tokenizer: 'bytes', a tokenizer.json, a directory that has one, or the name of a Hugging Face tokenizer "
        "(default: the model's; a model without one takes and gives token ids)",
    )
    add(
        "--dtype",
        default="auto",
        metavar="TYPE",
        help="type of weights: float32, bfloat16, float16, or auto, as stored (default: auto)",
    )
    add("--nproc", type=int, metavar="N", help="ranks that share every prompt (default: one a GPU, else 1)")
    add(
        "--cache",
        default="auto",
        metavar="SPLIT",
        help="split of the KV cache: heads, tokens, or auto: heads where the ranks can share them (default: auto)",
    )
    add(
        "--chunk-tokens",
        type=tokens,
        metavar="N",
        help="tokens of a prompt that are computed at once, over all ranks (default: 64K a rank)",
    )
    add_time_limits(parser, "token")


def settle_ranks(args: argparse.Namespace, world_size: int | None) -> tuple[int, LaunchSpec]:
    """Return the number of ranks, and how they are started and watched.

    Args:
        args: The options of `add_model_options`.
        world_size: Number of ranks, if another launcher has started them.

    Raises:
        UserError: --checkpoint is missing, there are fewer GPUs than ranks, or a limit of time is out of range.
    """
    if args.checkpoint is None:
        raise UserError("--checkpoint is missing\nfix: --checkpoint DIR, a directory of a model")
    ranks = world_size or ranks_to_start(args.nproc, fewest=1)
    spec = LaunchSpec(nproc=ranks, host_runtime=False, hang_timeout=args.hang_timeout, start_timeout=args.start_timeout)
    return ranks, spec


def open_source(args: argparse.Namespace, ranks: int) -> "Source":
    """Open the model of the options, no weights yet; UserError if there is none, or it cannot run on these ranks."""
    from bmburst.inference.generator import Source

    source = Source.open(args.checkpoint, args.adapter, args.tokenizer)
    source.dtype(args.dtype)
    require_split(source, args.cache, args.chunk_tokens, ranks)
    return source


def require_split(source: "Source", cache: str, chunk_tokens: int | None, ranks: int) -> None:
    """Raise UserError unless ranks can share the KV cache of a model, and a chunk of a prompt."""
    from bmburst.plan.inference import chunk_of
    from bmburst.schedule.cache_split import CacheSplit

    config = source.weights.config
    CacheSplit.choose(cache, ranks, 0, config.num_heads, config.num_kv_heads)
    chunk_of(chunk_tokens, ranks, "--chunk-tokens")


def model_request(args: argparse.Namespace, source: "Source", *names: str) -> dict[str, Any]:
    """Return what a rank needs to reopen and load the model of the options, and the options `names`."""
    of_model = ("checkpoint", "adapter", "tokenizer", "dtype", "cache", "chunk_tokens")
    values = {name: getattr(args, name) for name in (*of_model, *names)}
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
    return {**plain, "verified": str(source.directory)}


def reopen_source(request: Request) -> "Source":
    """Return the model of a request, in a rank, which `open_source` has checked."""
    from bmburst.inference.generator import Source

    adapter = None if request["adapter"] is None else Path(request["adapter"])
    return Source.open(Path(request["checkpoint"]), adapter, request["tokenizer"])


def load_generator(source: "Source", request: Request, *, is_main: bool) -> "Generator":
    """Read the weights of a model, split as a request asks, with a progress bar on rank 0."""
    from bmburst.inference.generator import Generator

    dtype = request["dtype"]
    options = {"cache": request["cache"], "dtype": dtype, "chunk_tokens": request["chunk_tokens"]}
    with progress_bar("reading weights", source.nbytes(dtype), "B", is_main=is_main) as read:
        return Generator(source, on_bytes=read, **options)


@contextmanager
def progress_bar(title: str, total: int, unit: str, *, is_main: bool) -> Iterator[Callable[[int], object]]:
    """Show a progress bar on rank 0's terminal while the block runs, and yield the function that advances it."""
    from tqdm import tqdm

    with tqdm(
        desc=title, total=total, unit=unit, unit_scale=True, disable=None if is_main else True, leave=False
    ) as bar:
        yield bar.update


def note_length(length: int, most: int) -> None:
    """Print a note on standard error if a text of `length` tokens is longer than the model's limit `most`."""
    if length > most:
        print(
            f"note: up to {length:,} tokens, but the model was made for {most:,} (max_position_embeddings): "
            "answers beyond that may be useless",
            file=sys.stderr,
        )


def note_ignored(directory: Path, max_new_tokens: int | None) -> None:
    """Print a note on standard error if the model asks for options of generation that are not applied."""
    from bmburst.data.tokenizer import GENERATION_CONFIG
    from bmburst.inference.sampling import ignored_options

    if names := ignored_options(directory, max_new_tokens):
        print(
            f"note: bmburst does not apply {', '.join(names)} of {directory / GENERATION_CONFIG}: answers can differ "
            "from those of transformers' generate",
            file=sys.stderr,
        )
