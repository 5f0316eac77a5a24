"""`bmburst convert`: a model's directory of one family into another's."""

import argparse
import math
from pathlib import Path

HELP = "weights between Hugging Face, bmburst and ModelCenter"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Write the weights, configuration and tokenizer of a LLaMA, Mistral, Qwen2, Qwen3 or MiniCPM as another family "
        "of software keeps them. Numbers are copied as they are, piece by piece, so the model need not fit into "
        "memory. Converting back gives the same numbers and the same config.json."
    )
    parser.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="directory of a Hugging Face or ModelCenter model, a checkpoint of bmburst, or a run folder, of which the "
        "newest checkpoint is taken",
    )
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="directory to make")
    parser.add_argument(
        "--to",
        required=True,
        metavar="FAMILY",
        help="huggingface; bmburst (the same files, for --init-from); model-center (pytorch_model.pt; LLaMA and "
        "MiniCPM)",
    )
    parser.add_argument(
        "--dtype", default=None, metavar="TYPE", help="float32, float16 or bfloat16 (default: each tensor's own)"
    )
    parser.add_argument(
        "--part-size",
        type=float,
        default=5.0,
        metavar="GB",
        help="size above which safetensors are split into several files (default: 5)",
    )


def run(args: argparse.Namespace) -> int:
    """Convert, and say what was written."""
    from tqdm import tqdm

    from bmburst.convert.run import convert
    from bmburst.errors import UserError
    from bmburst.train.checkpoint_files import verified, warn

    if not 0 < args.part_size < math.inf:
        raise UserError(f"--part-size {args.part_size:g}\nallowed: gigabytes above 0, for example 5")
    source = verified(args.source, warn)
    with tqdm(desc="converting", unit="B", unit_scale=True, disable=None) as bar:
        done = convert(
            source,
            args.output,
            to=args.to,
            dtype=args.dtype,
            part_bytes=int(args.part_size * 10**9),
            on_bytes=bar.update,
            on_total=bar.reset,
            is_verified=True,
        )
    print(f"{args.output}: {done.tensors} tensors, {done.nbytes:,} bytes, from {source} ({done.family})")
    return 0
