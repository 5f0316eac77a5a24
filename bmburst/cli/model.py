"""Options of commands that answer with a model, and a note about what they do not apply."""

import argparse
import sys
from pathlib import Path

from bmburst.amounts import tokens


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which model answers, and how it is split over ranks."""
    from bmburst.launch.spec import DEFAULT_HANG_TIMEOUT, DEFAULT_START_TIMEOUT

    add = parser.add_argument
    add("--checkpoint", type=Path, metavar="DIR", help="model directory, checkpoint, or run folder (its newest one)")
    add("--adapter", type=Path, metavar="DIR", help="LoRA adapter to merge into the weights as they are read")
    add(
        "--tokenizer",
        metavar="NAME",
        help="'bytes', a tokenizer.json, a directory that has one, or the name of a Hugging Face tokenizer (default: "
        "the model's; a model without one takes and gives token ids)",
    )
    add("--dtype", default="auto", metavar="TYPE", help="float32, bfloat16, float16 or auto: as stored (default: auto)")
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
    add(
        "--hang-timeout",
        type=float,
        metavar="SECONDS",
        default=DEFAULT_HANG_TIMEOUT,
        help=f"time without a token of a rank after which the run ends; 0: never (default: {DEFAULT_HANG_TIMEOUT:g})",
    )
    add(
        "--start-timeout",
        type=float,
        metavar="SECONDS",
        help=f"time until a rank's first token (default: {DEFAULT_START_TIMEOUT:g}, or --hang-timeout)",
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
