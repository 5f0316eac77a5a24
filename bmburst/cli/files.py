"""Writes the files that a run reads: token files (`bmburst data`) and weights (`bmburst convert`)."""

import argparse
import math
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from bmburst.amounts import tokens
from bmburst.cli.program import Command
from bmburst.config import add_options, from_dict, given_options
from bmburst.errors import UserError
from bmburst.outputs import require_own
from bmburst.record_format import RecordFormat

if TYPE_CHECKING:
    from bmburst.data import Text

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
        "array of documents, all of these compressed too, .parquet files, directories (searched recursively), "
        "folders that `save_to_disk` of the package datasets wrote, or 'stdlib' for the source files of Python's "
        "standard library. Documents with messages, or with prompt and completion, are records to fine-tune on: the "
        "token file then also says which tokens are answers",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="token file to write; not needed with --show")
    parser.add_argument(
        "--show",
        type=int,
        metavar="N",
        help="print the first N samples as the model gets them, with learned text in {+ +}, on a terminal in green",
    )
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="NAME",
        help="'bytes', a tokenizer.json, a directory that has one, or the name of a Hugging Face tokenizer "
        "(default: bytes)",
    )
    parser.add_argument(
        "--chat-template",
        type=Path,
        metavar="NAME|FILE",
        help="chat template of messages: chatml, gemma, llama2, llama3, or a jinja file (default: the tokenizer's)",
    )
    parser.add_argument(
        "--max-tokens", type=tokens, metavar="N", help="leave out records of more tokens (default: keep all)"
    )
    add_options(parser, RecordFormat(), short={}, titles={"": "names in lines and records"})


def run_data(args: argparse.Namespace) -> int:
    """Write the token file, and print a summary of it."""
    from bmburst.data import Text, require_messages, tokenize, unused_names
    from bmburst.data.chat import RecordEncoder
    from bmburst.data.mixture import read_mixture
    from bmburst.data.records import hold_records
    from bmburst.data.report import LengthReport, notes_of, notes_on_ends
    from bmburst.data.sources import find_sources
    from bmburst.data.token_file import is_token_file
    from bmburst.data.tokenizer import load_tokenizer

    for path in args.input:
        if read_mixture(path) is not None:
            raise UserError(
                f"{path} is a mixture of data, and its shares are those of a run\nallowed: the sources in it\n"
                f"fix: bmburst train --data {path}; or bmburst data for each source, and a mixture of the token files"
            )
    skipped: list[str] = []
    tokenizer, files = load_tokenizer(args.tokenizer), find_sources(args.input, skipped.append)
    form = from_dict(RecordFormat, given_options(args, RecordFormat))
    has_records = hold_records(files, form)
    encoder = RecordEncoder(tokenizer, args.chat_template, form.learned_roles) if has_records else None
    text, lengths = Text(tokenizer, files, encoder, form), LengthReport(args.max_tokens)
    for_records = args.max_tokens is not None or args.chat_template is not None
    if (for_records and encoder is None) or unused_names(text, form):
        raise UserError(
            f"{args.input[0]} holds text, and --max-tokens, --chat-template and names of columns are for records, "
            "--text-field for rows of JSONL\n"
            "allowed: JSONL of messages, of prompt and completion, or of text\nfix: correct or leave the option out"
        )
    require_messages(args.input[0], [(text, form)])
    if args.output is None and args.show is None:
        raise UserError("neither --output nor --show is given\nfix: --output FILE, or --show 3 to see three samples")
    if args.show is not None:
        if args.show < 1:
            raise UserError(f"--show {args.show}\nallowed: at least 1\nfix: --show 3")
        _show(text, args.show)
        if args.output is None:
            return 0
    require_own("--output", args.output, "a token file", is_token_file)
    try:
        file = tokenize(text, args.output, progress=True, on_skip=skipped.append, keep=lengths.keep)
    except UserError:
        lengths.require()
        raise
    finally:
        for line in skipped:
            print(f"left out: {line}", file=sys.stderr)
    documents = f"{file.document_count:,} document{'s' * (file.document_count != 1)}"
    print(
        f"{file.path}: {documents}, {file.token_count:,} tokens of '{file.tokenizer_name}' "
        f"({file.tokens.dtype.name}), {file.text_bytes:,} bytes of {'text' if file.loss_mask is None else 'answers'}"
    )
    if encoder is not None:
        print(lengths.text())
    for line in (*notes_of(file), *notes_on_ends(file, tokenizer)):
        print(line)
    return 0


def _show(text: "Text", count: int) -> None:
    """Print the first samples of a text, with their special tokens, and what is learned marked."""
    import numpy as np

    from bmburst.data import samples_of
    from bmburst.data.report import TERMINAL, Shown, sample
    from bmburst.data.token_writer import Masked

    marks, is_empty = TERMINAL if sys.stdout.isatty() else Shown(), True
    for name, made in islice(samples_of(text), count):
        is_empty = False
        if not isinstance(made, Masked):
            ids = np.append(text.tokenizer.encode(made), text.tokenizer.eos_id)
            print(sample(name, ids, np.ones(len(ids), bool), text.tokenizer, marks))
            continue
        at, whole = 0, [(len(made.ids), 0)]
        for number, (length, _) in enumerate(made.documents or whole):
            title = name
            if made.documents:
                title += f", {('chosen', 'rejected')[number] if made.is_pair else f'answer {number + 1}'}"
            if made.weight != 1:
                title += f", weight {made.weight:g}"
            part = slice(at, at + length)
            print(sample(title, made.ids[part], made.answers[part], text.tokenizer, marks))
            at += length
    if is_empty:
        raise UserError("the data are empty: no record is left\nfix: give files with records of a weight above 0")


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
