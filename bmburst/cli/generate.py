"""`bmburst generate`: answers prompts with a model, on one rank or on several ranks that share every prompt."""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, TextIO

from bmburst.amounts import tokens
from bmburst.checkpoint.files import VERIFIED
from bmburst.cli.model import (
    add_model_options,
    load_generator,
    model_request,
    note_ignored,
    note_length,
    open_source,
    progress_bar,
    reopen_source,
    settle_ranks,
)
from bmburst.cli.program import any_text
from bmburst.config import hide_rare, option_name
from bmburst.errors import UserError
from bmburst.launch.beginning import Beginning
from bmburst.launch.handover import Request, run_command
from bmburst.launch.spec import LaunchSpec
from bmburst.outputs import explained_write, require_file

if TYPE_CHECKING:
    from bmburst.inference.generator import Generator
    from bmburst.inference.prompts import Answer, Prompt
    from bmburst.inference.sampling import GenerationOptions

HELP = (
    "Answer prompts with a model: a directory of Hugging Face, ModelCenter or bmburst. The tokens of a prompt and the "
    "KV cache are split over the ranks, so that prompts may be longer than one GPU holds."
)
_USAGE = (
    "bmburst generate --checkpoint DIR --prompt TEXT [OPTIONS]\n"
    "       bmburst generate --checkpoint DIR --prompt-file FILE [--nproc N] [--stream] [OPTIONS]\n"
    "       bmburst generate --checkpoint DIR --prompts FILE.jsonl --output FILE.jsonl [OPTIONS]\n"
    "       bmburst generate --help all"
)
_EPILOG = (
    "Sampling options have the names and meaning of transformers' generate. Their defaults come from the model's "
    "generation_config.json. A prompt of --prompts that is too long for the memory, or for which the model computes "
    "NaN, is refused in its own line of --output, and the others are answered. Exit status: 2 for bad input or a "
    "refused prompt, 130 after Ctrl-C."
)
_SAMPLING = (
    ("--max-new-tokens", tokens, "N", "largest number of new tokens in an answer (default: the model's, else 20)"),
    ("--temperature", float, "T", "divides the logits; 0: the most probable token (default: the model's, else 0)"),
    ("--top-k", int, "K", "sample from the K most probable tokens; 0: from all (default: the model's, else 50)"),
    ("--top-p", float, "P", "sample from the top tokens with total probability P (default: the model's, else 1)"),
    ("--min-p", float, "P", "sample from tokens with at least P times the largest probability (default: 0)"),
    ("--repetition-penalty", float, "F", "divides logits of tokens seen before (default: the model's, else 1)"),
    ("--seed", int, "N", "seed of the random numbers (default: 0)"),
    ("--num-samples", int, "N", "answers to each prompt (default: 1)"),
    ("--logprobs", int, "N", "write log-probabilities, of the new tokens and of the N most probable ones"),
)
_RARE = ("hang_timeout", "start_timeout", "cache", "chunk_tokens", "min_p", "repetition_penalty", "logprobs")
_OF_CHANCE = ("top_k", "top_p", "min_p", "seed")  # have an effect only where an answer is drawn


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.usage, parser.epilog = _USAGE, _EPILOG
    add = parser.add_argument
    add_model_options(parser)
    add("--prompt", action="append", type=any_text, metavar="TEXT", help="a prompt; several: --prompts")
    add("--prompt-file", type=Path, metavar="FILE", help="a UTF-8 file that is one prompt")
    add(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='file with a prompt a line: {"prompt": "..."}, {"tokens": [...]} or {"messages": [...]}, the '
        "last with tools and chat_template_kwargs if needed",
    )
    add("--output", type=Path, metavar="FILE", help="write a JSON line for each answer (default: print the answers)")
    add("--stream", action="store_true", help="print text as it is generated")
    add("--chat", action="store_true", help="format each prompt with the chat template, as a user message")
    for name, kind, metavar, text in _SAMPLING:
        add(name, type=kind, metavar=metavar, help=text)
    add(
        "--stop",
        action="append",
        type=any_text,
        metavar="TEXT",
        help="text that ends an answer; may be given several times",
    )
    hide_rare(parser, _RARE)


def run(args: argparse.Namespace) -> int:
    """Answer the prompts and return the exit status."""
    return run_command(
        __name__, partial(settle, args), lambda request: _answer(request, Beginning.of_process("checks and imports"))
    )


def run_rank(request: Request) -> int:
    """Answer the prompts in one rank, as `settle` has decided, and return the exit status."""
    os.environ[VERIFIED] = request["verified"]
    from bmburst.comm.groups import in_group

    beginning = Beginning.of_process("imports", before="checks")
    return in_group(partial(_answer, request, beginning))


@contextmanager
def settle(args: argparse.Namespace, world_size: int | None = None) -> Iterator[tuple[Request, LaunchSpec]]:
    """Read and check model, prompts and options, once. No weights are read yet."""
    ranks, spec = settle_ranks(args, world_size)
    from bmburst.inference.answering import TextStream
    from bmburst.inference.prompts import PromptEncoder, read_prompts
    from bmburst.inference.sampling import convert_option, generation_options

    source = open_source(args, ranks)
    given = {}
    for option in ("--stop", *(option for option, *_ in _SAMPLING)):
        name = option.removeprefix("--").replace("-", "_")
        if (value := getattr(args, name)) is not None:
            given[name] = convert_option(option, name, value)
    options = generation_options(source.defaults, **given)
    if options.is_greedy and (idle := [name for name in _OF_CHANCE if name in given]):
        option = option_name(idle[0], {})
        raise UserError(
            f"{option} has no effect with temperature 0, which takes the most probable token\n"
            f"allowed: a --temperature above 0\nfix: --temperature 1 too, or leave {option} out"
        )
    TextStream(source.tokenizer, options.stop)
    encoder = PromptEncoder(source.tokenizer, source.weights.config.vocab_size, chat=args.chat)
    texts = args.prompt or [None]
    if len(texts) > 1:
        raise UserError(
            f"--prompt is given {len(texts)} times\nallowed: one prompt\nfix: --prompts FILE.jsonl, a line for each"
        )
    prompts = read_prompts(encoder, prompt=texts[0], prompt_file=args.prompt_file, prompts=args.prompts)
    if args.output is not None:
        require_file("--output", args.output, "answers of bmburst generate", _holds_answers)
    if args.logprobs is not None and args.output is None and args.prompts is None:
        raise UserError(
            "--logprobs with an answer that is printed as text alone\n"
            "allowed: --output or --prompts, which write lines with them\nfix: --output FILE.jsonl too"
        )
    if args.stream and (len(prompts) > 1 or options.num_samples > 1):
        raise UserError(
            f"--stream with {len(prompts)} prompts and {options.num_samples} answers to each\n"
            "allowed: one prompt and one answer\nfix: --output FILE instead of --stream"
        )
    request = {
        **model_request(args, source, "output", "stream", "max_new_tokens"),
        "prompts": [{"tokens": prompt.tokens.tolist(), "source": prompt.source} for prompt in prompts],
        "are_lines": args.prompts is not None,
        "options": dataclasses.asdict(options),
    }
    yield request, spec


def _holds_answers(path: Path) -> bool:
    """Return whether a file may be replaced: it is empty or holds answers of an earlier run."""
    with path.open("rb") as file:
        line = file.readline()
    try:
        return not line or "prompt_tokens" in json.loads(line)
    except (ValueError, TypeError):
        return False


def _answer(request: Request, beginning: Beginning) -> int:
    import numpy as np

    from bmburst.comm.groups import communicator
    from bmburst.inference.generator import memory_beside_weights, too_long
    from bmburst.inference.prompts import Prompt
    from bmburst.inference.sampling import GenerationOptions

    beginning.end("ranks")
    comm = communicator(None)
    is_main = comm.rank == 0
    source = reopen_source(request)
    prompts = [Prompt(np.array(prompt["tokens"], dtype=np.int64), prompt["source"]) for prompt in request["prompts"]]
    options = GenerationOptions(**request["options"])
    length = max(map(len, prompts)) + options.max_new_tokens
    if len(prompts) == 1:
        room = memory_beside_weights(source, comm, request["cache"], request["dtype"], request["chunk_tokens"])
        if problem := too_long(*room, length, len(prompts[0]), options.num_samples):
            raise UserError(problem)
    screen = _AnswerPrinter(request, prompts, options, is_main=is_main)
    if is_main:
        note_length(length, source.weights.config.max_position_embeddings)
        note_ignored(source.defaults, request["max_new_tokens"])
    generator = load_generator(source, request, is_main=is_main)
    beginning.end("weights")
    if is_main:
        print(beginning.until("the model"), file=sys.stderr, flush=True)
    answers = screen.run(generator)
    return 2 if any(answer.finish == "refused" for answer in answers) else 0


class _AnswerPrinter:
    """Prints and writes the answers on rank 0. The other ranks print nothing."""

    def __init__(
        self, request: Request, prompts: "list[Prompt]", options: "GenerationOptions", *, is_main: bool
    ) -> None:
        self._prompts, self._options, self._is_main = prompts, options, is_main
        self._output = None if request["output"] is None else Path(request["output"])
        self._are_lines = request["are_lines"]
        self._streams = request["stream"] and is_main
        self._answers: dict[int, list[Answer]] = {}
        self._written = 0
        self._file: TextIO | None = None

    def run(self, generator: "Generator") -> "list[Answer]":
        """Answer the prompts and show the answers."""
        from bmburst.inference.answering import Progress

        total = sum(map(len, self._prompts))
        with ExitStack() as stack:
            if self._output is not None and self._is_main:
                self._file = self._output.open("w", encoding="utf-8")
                stack.callback(self._close, self._file)
            computed = stack.enter_context(progress_bar("prefill", total, " tokens", is_main=self._is_main))
            progress = Progress(tokens=computed, text=self._text, answer=self._answer)
            answers = generator.generate(self._prompts, self._options, progress=progress)
        if self._streams:
            print(flush=True)
        if self._is_main:
            _summarize(answers)
        return answers

    def _close(self, file: TextIO) -> None:
        assert self._output is not None
        with explained_write("--output", self._output):  # a network's disk may say only here that it is full
            file.close()

    def _text(self, prompt: int, sample: int, text: str) -> None:
        del prompt, sample
        if self._streams:
            print(_printable(text), end="", flush=True)

    def _answer(self, prompt: int, answer: "Answer") -> None:
        """Print answers in the order of their prompts, each as soon as all earlier ones are complete."""
        self._answers.setdefault(prompt, []).append(answer)
        if not self._is_main:
            return
        while found := self._answers.get(self._written):
            if found[0].finish != "refused" and len(found) < self._options.num_samples:
                return
            for each in found:
                self._show(each)
            self._written += 1

    def _show(self, answer: "Answer") -> None:
        if self._file is not None and self._output is not None:
            with explained_write("--output", self._output):
                self._file.write(answer.to_json() + "\n")
                self._file.flush()
        elif not self._streams:
            is_line = self._are_lines or answer.text is None
            print(_printable_json(answer.to_json()) if is_line else _printable(answer.text or ""), flush=True)


def _printable(text: str) -> str:
    """Return a text with escapes for the characters that the encoding of standard output lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _printable_json(line: str) -> str:
    """Return a line of JSON, in ASCII if the encoding of standard output lacks some of its characters."""
    return line if _printable(line) == line else json.dumps(json.loads(line))


def _summarize(answers: "list[Answer]") -> None:
    """Print a summary of the answers on standard error, in one line."""
    done = [answer for answer in answers if answer.finish != "refused"]
    words = [f"{len(done)} answers"] if len(done) != 1 else []
    if done:
        new = sum(len(answer.tokens) for answer in done)
        words.append(f"{sum(answer.prompt_tokens for answer in done):,} prompt tokens, {new:,} new tokens")
        firsts = [answer.first_token_seconds for answer in done if answer.first_token_seconds is not None]
        paces = [answer.seconds_per_token for answer in done if answer.seconds_per_token is not None]
        words.append(f"first token {median(firsts):.3g} s")
        if paces:
            words.append(f"then {1000 * median(paces):.3g} ms a token")
        words.append(f"peak {max(answer.peak_gib or 0.0 for answer in done):.3g} GiB a rank")
    if refused := [answer for answer in answers if answer.finish == "refused"]:
        words.append(f"{len(refused)} refused: {refused[0].reason}")
    print("; ".join(words), file=sys.stderr, flush=True)
