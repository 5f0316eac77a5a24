"""`bmburst data`: tokenizes text files, JSONL, data sets and directories into a token file."""

import argparse
import sys
from pathlib import Path

from bmburst.amounts import tokens
from bmburst.errors import UserError

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


def run(args: argparse.Namespace) -> int:
    """Write the token file, and print a summary of it."""
    from bmburst.data.chat import RecordEncoder
    from bmburst.data import LengthReport, Text, tokenize
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
