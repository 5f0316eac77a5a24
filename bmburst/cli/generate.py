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
from bmburst.cli import any_text, ranks_to_start
from bmburst.cli.progress import note_length, progress_bar
from bmburst.errors import UserError
from bmburst.launch.handover import Request, is_rank, run_joined_rank, run_on_ranks
from bmburst.launch.spec import LaunchSpec
from bmburst.outputs import require_file

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
    "       bmburst generate --checkpoint DIR --prompts FILE.jsonl --output FILE.jsonl [OPTIONS]"
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


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    from bmburst.launch.spec import DEFAULT_HANG_TIMEOUT, DEFAULT_START_TIMEOUT

    parser.usage, parser.epilog = _USAGE, _EPILOG
    add = parser.add_argument
    add("--checkpoint", type=Path, metavar="DIR", help="model directory, checkpoint, or run folder (its newest one)")
    add("--adapter", type=Path, metavar="DIR", help="LoRA adapter to merge into the weights as they are read")
    add(
        "--tokenizer",
        metavar="NAME",
        help="'bytes', a tokenizer.json, a directory that has one, or the name of a Hugging Face tokenizer (default: "
        "the model's; a model without one takes and gives token ids)",
    )
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


def run(args: argparse.Namespace) -> int:
    """Answer the prompts and return the exit status.

    Raises:
        UserError: An option or a prompt cannot work.
    """
    if is_rank():
        return run_joined_rank(__name__, partial(settle, args))
    with settle(args) as (request, spec):
        if spec.nproc == 1:  # needs no group
            return _answer(request)
        return run_on_ranks(__name__, request, spec)


def run_rank(request: Request) -> int:
    """Answer the prompts in one rank, as `settle` has decided, and return the exit status."""
    os.environ[VERIFIED] = request["verified"]
    from bmburst.comm.groups import in_group

    return in_group(partial(_answer, request))


@contextmanager
def settle(args: argparse.Namespace, world_size: int | None = None) -> Iterator[tuple[Request, LaunchSpec]]:
    """Read and check model, prompts and options, once. No weights are read yet.

    Args:
        args: The options.
        world_size: Number of ranks, if another launcher has started them.

    Yields:
        The request to the ranks, and how they are started and watched.

    Raises:
        UserError: An option or a prompt cannot work.
    """
    if args.checkpoint is None:
        raise UserError("--checkpoint is missing\nfix: --checkpoint DIR, a directory of a model")
    ranks = world_size or ranks_to_start(args.nproc, fewest=1)
    spec = LaunchSpec(
        nproc=ranks if world_size is None else 1,
        host_runtime=False,
        hang_timeout=args.hang_timeout,
        start_timeout=args.start_timeout,
    )
    from bmburst.inference.answering import TextStream
    from bmburst.inference.generator import Source
    from bmburst.inference.prompts import PromptEncoder, read_prompts
    from bmburst.inference.sampling import convert_option, generation_options
    from bmburst.plan.inference import chunk_of
    from bmburst.schedule.cache_split import CacheSplit

    source = Source.open(args.checkpoint, args.adapter, args.tokenizer)
    config = source.weights.config
    source.dtype(args.dtype)
    CacheSplit.choose(args.cache, ranks, 0, config.num_heads, config.num_kv_heads)
    given = {}
    for option in ("--stop", *(option for option, *_ in _SAMPLING)):
        name = option.removeprefix("--").replace("-", "_")
        if (value := getattr(args, name)) is not None:
            given[name] = convert_option(option, name, value)
    options = generation_options(source.directory, **given)
    TextStream(source.tokenizer, options.stop)
    encoder = PromptEncoder(source.tokenizer, config.vocab_size, chat=args.chat)
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
    chunk_of(args.chunk_tokens, ranks, "--chunk-tokens")
    names = (
        "checkpoint",
        "adapter",
        "tokenizer",
        "dtype",
        "cache",
        "chunk_tokens",
        "output",
        "stream",
        "max_new_tokens",
    )
    request = {
        **{name: str(value) if isinstance(value := getattr(args, name), Path) else value for name in names},
        "verified": str(source.directory),
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


def _answer(request: Request) -> int:
    import numpy as np

    from bmburst.comm.groups import communicator
    from bmburst.inference.generator import Generator, Source, require_room
    from bmburst.inference.prompts import Prompt
    from bmburst.inference.sampling import GenerationOptions

    comm = communicator(None)
    is_main = comm.rank == 0
    adapter = None if request["adapter"] is None else Path(request["adapter"])
    source = Source.open(Path(request["checkpoint"]), adapter, request["tokenizer"])
    prompts = [Prompt(np.array(prompt["tokens"], dtype=np.int64), prompt["source"]) for prompt in request["prompts"]]
    options = GenerationOptions(**request["options"])
    cache, dtype, chunk_tokens = request["cache"], request["dtype"], request["chunk_tokens"]
    if len(prompts) == 1:
        require_room(source, comm, cache, dtype, chunk_tokens, len(prompts[0]), options)
    screen = _Screen(request, prompts, options, is_main=is_main)
    if is_main:
        length = max(map(len, prompts)) + options.max_new_tokens
        note_length(length, source.weights.config.max_position_embeddings)
        _note_ignored(source.directory, request["max_new_tokens"])
    with progress_bar("reading weights", source.nbytes(dtype), "B", is_main=is_main) as read:
        generator = Generator(source, cache=cache, dtype=dtype, chunk_tokens=chunk_tokens, on_bytes=read)
    answers = screen.run(generator)
    return 2 if any(answer.finish == "refused" for answer in answers) else 0


def _note_ignored(directory: Path, max_new_tokens: int | None) -> None:
    """Print a note on standard error if the model asks for options of generation that are not applied."""
    from bmburst.data.tokenizer import GENERATION_CONFIG
    from bmburst.inference.sampling import ignored_options

    if names := ignored_options(directory, max_new_tokens):
        print(
            f"note: bmburst does not apply {', '.join(names)} of {directory / GENERATION_CONFIG}: answers can differ "
            "from those of transformers' generate",
            file=sys.stderr,
        )


class _Screen:
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
                self._file = stack.enter_context(self._output.open("w", encoding="utf-8"))
            computed = stack.enter_context(progress_bar("prefill", total, " tokens", is_main=self._is_main))
            progress = Progress(tokens=computed, text=self._text, answer=self._answer)
            answers = generator.generate(self._prompts, self._options, progress=progress)
        if self._streams:
            print(flush=True)
        if self._is_main:
            _summarize(answers)
        return answers

    def _text(self, prompt: int, sample: int, text: str) -> None:
        del prompt, sample
        if self._streams:
            sys.stdout.write(text)
            sys.stdout.flush()

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
        if self._file is not None:
            self._file.write(answer.to_json() + "\n")
            self._file.flush()
        elif not self._streams:
            is_text = not self._are_lines and answer.text is not None
            print(answer.text if is_text else answer.to_json(), flush=True)


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
