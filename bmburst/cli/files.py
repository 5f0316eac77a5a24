"""`bmburst data` and `bmburst convert`: write the files that a run reads, token files and weights in another format."""

import argparse
import math
import sys
from pathlib import Path

from bmburst.amounts import tokens
from bmburst.cli import Command
from bmburst.errors import UserError

_DATA_HELP = "Tokenize text files, JSONL and directories into one token file."
_CONVERT_HELP = "Convert weights between Hugging Face, bmburst and ModelCenter."


def configure_data(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `bmburst data`."""
    parser.description = (
        "Tokenize text into a memory-mapped token file for `bmburst train --data FILE` and `bmburst eval --data FILE`."
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="text files (one document each), .jsonl and .ndjson files (one document a line), .json files with an "
        "array of documents, directories (searched recursively), folders that `save_to_disk` of the package datasets "
        "wrote, or 'stdlib' for the source files of Python's standard library. Documents with messages, or with prompt "
        "and completion, are records to fine-tune on: the token file then also says which tokens are answers",
    )
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="token file to write")
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="NAME",
        help="'bytes', a tokenizer.json, a directory that has one, or the name of a Hugging Face tokenizer "
        "(default: bytes)",
    )
    parser.add_argument(
        "--text-field",
        default="text",
        metavar="FIELD",
        help="field of a JSONL line that holds the text (default: text)",
    )
    parser.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="jinja file with the chat template of messages (default: the tokenizer's)",
    )
    parser.add_argument(
        "--max-tokens", type=tokens, metavar="N", help="leave out records of more tokens (default: keep all)"
    )


def run_data(args: argparse.Namespace) -> int:
    """Write the token file, and print a summary of it."""
    from bmburst.data import LengthReport, Text, tokenize
    from bmburst.data.chat import RecordEncoder
    from bmburst.data.records import hold_records
    from bmburst.data.sources import find_sources, left_out
    from bmburst.data.token_file import is_token_file
    from bmburst.data.tokenizer import load_tokenizer
    from bmburst.outputs import require_own

    tokenizer, files = load_tokenizer(args.tokenizer), find_sources(args.input)
    encoder = RecordEncoder(tokenizer, args.chat_template) if hold_records(files, args.text_field) else None
    text, lengths = Text(tokenizer, files, encoder), LengthReport(args.max_tokens)
    if encoder is None and (args.max_tokens is not None or args.chat_template is not None):
        raise UserError(
            f"{args.input[0]} holds text, and --max-tokens and --chat-template are for records\n"
            "allowed: JSONL of messages, or of prompt and completion\nfix: leave the option out"
        )
    require_own("--output", args.output, "a token file", is_token_file)
    for line in left_out(args.input):
        print(f"left out: {line}", file=sys.stderr)
    skipped: list[str] = []
    try:
        file = tokenize(
            text,
            args.output,
            text_field=args.text_field,
            progress=True,
            on_skip=skipped.append,
            keep=lengths.keep,
        )
    except UserError:
        lengths.require()
        raise
    for line in skipped:
        print(f"left out: {line}", file=sys.stderr)
    print(
        f"{file.path}: {file.document_count:,} documents, {file.token_count:,} tokens of '{file.tokenizer_name}' "
        f"({file.tokens.dtype.name}), {file.text_bytes:,} bytes of text"
    )
    if encoder is not None:
        print(lengths.text())
    return 0


def configure_convert(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `bmburst convert`."""
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


def run_convert(args: argparse.Namespace) -> int:
    """Convert, and print a summary of the output."""
    from tqdm import tqdm

    from bmburst.checkpoint.conversion import convert
    from bmburst.checkpoint.files import verified, warn

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


COMMANDS = {
    "data": Command(_DATA_HELP, configure_data, run_data),
    "convert": Command(_CONVERT_HELP, configure_convert, run_convert),
}
