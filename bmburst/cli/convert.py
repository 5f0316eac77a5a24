"""`bmburst convert`: converts a model directory to the format of Hugging Face, bmburst or ModelCenter."""

import argparse
import math
import sys
from pathlib import Path

HELP = "Convert weights between Hugging Face, bmburst and ModelCenter."


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Convert the weights, configuration and tokenizer of a LLaMA, Mistral, Qwen2, Qwen3 or MiniCPM model between "
        "the formats of Hugging Face, bmburst and ModelCenter. Values are copied unchanged, piece by piece, so the "
        "model need not fit into memory. Converting back gives the same values and the same config.json."
    )
    parser.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="directory of a Hugging Face or ModelCenter model, a checkpoint of bmburst, or a run folder (its newest "
        "checkpoint)",
    )
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="directory to create")
    parser.add_argument(
        "--to",
        required=True,
        metavar="FAMILY",
        help="output format: huggingface; bmburst (the same files, for --init-from); model-center (pytorch_model.pt; "
        "LLaMA and MiniCPM only)",
    )
    parser.add_argument(
        "--merge", action="store_true", help="SOURCE is a LoRA adapter: add it to the weights of --base"
    )
    parser.add_argument(
        "--base", type=Path, default=None, metavar="DIR", help="with --merge: the model (default: as SOURCE names it)"
    )
    parser.add_argument(
        "--dtype", default=None, metavar="TYPE", help="float32, float16 or bfloat16 (default: as in SOURCE)"
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        default=None,
        metavar="PATH",
        help="tokenizer.json, or directory of a tokenizer's files, to copy (default: those in SOURCE)",
    )
    parser.add_argument(
        "--part-size",
        type=float,
        default=5.0,
        metavar="GB",
        help="size above which safetensors are split into several files (default: 5)",
    )


def run(args: argparse.Namespace) -> int:
    """Convert, and print a summary of the output."""
    from tqdm import tqdm

    from bmburst.checkpoint.files import verified, warn
    from bmburst.convert.conversion import convert
    from bmburst.errors import UserError

    if not 0 < args.part_size < math.inf:
        raise UserError(
            f"--part-size {args.part_size:g}\nallowed: gigabytes above 0\nfix: --part-size 5, or leave it out"
        )
    source = verified(args.source, warn)
    with tqdm(desc="converting", unit="B", unit_scale=True, disable=None) as bar:
        done = convert(
            source,
            args.output,
            to=args.to,
            dtype=args.dtype,
            part_bytes=int(args.part_size * 10**9),
            tokenizer=args.tokenizer,
            on_bytes=bar.update,
            on_total=bar.reset,
            is_verified=True,
            merge=args.merge,
            base=None if args.base is None else verified(args.base, warn),
        )
    print(f"{args.output}: {done.tensors} tensors, {done.nbytes:,} bytes, from {source} ({done.family})")
    if done.tokenizer_elsewhere:
        print(
            f"the tokenizer {done.tokenizer_elsewhere} is outside of {source} and was not copied; "
            "give --tokenizer PATH to copy it",
            file=sys.stderr,
        )
    return 0
