"""`bmburst data`: tokenizes text files, JSONL and directories into a token file."""

import argparse
import sys
from pathlib import Path

HELP = "Tokenize text files, JSONL and directories into one token file."


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Tokenize text into a memory-mapped token file for `bmburst train --data FILE` and `bmburst eval --data FILE`."
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="text files (one document each), .jsonl and .ndjson files (one document a line), directories (searched "
        "recursively), or 'stdlib' for the source files of Python's standard library",
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


def run(args: argparse.Namespace) -> int:
    """Write the token file and print what it holds."""
    from bmburst.data.corpus import Text, tokenize
    from bmburst.data.sources import find_sources
    from bmburst.data.token_file import is_token_file
    from bmburst.data.tokenizer import load_tokenizer
    from bmburst.outputs import require_own

    skipped: list[str] = []
    text = Text(load_tokenizer(args.tokenizer), find_sources(args.input))
    require_own("--output", args.output, "a token file", is_token_file)
    file = tokenize(
        text,
        args.output,
        text_field=args.text_field,
        progress=True,
        on_skip=skipped.append,
    )
    for line in skipped:
        print(f"left out: {line}", file=sys.stderr)
    print(
        f"{file.path}: {file.document_count:,} documents, {file.token_count:,} tokens of '{file.tokenizer_name}' "
        f"({file.tokens.dtype.name}), {file.text_bytes:,} bytes of text"
    )
    return 0
