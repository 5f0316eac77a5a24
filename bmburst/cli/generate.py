"""`bmburst generate`: answers prompts with a model, on one rank or on several ranks that share every prompt."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, TextIO

from bmburst.amounts import tokens
from bmburst.cli import any_text, leaves_errors_to_rank_0, ranks_to_start
from bmburst.errors import UserError
from bmburst.outputs import require_file

if TYPE_CHECKING:
    from bmburst.inference.generator import Generator, Source
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
    from bmburst.runtime.launch.spec import DEFAULT_HANG_TIMEOUT, DEFAULT_START_TIMEOUT

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
    if "RANK" in os.environ:
        return in_group(partial(_answer, args))
    if args.checkpoint is None:
        raise UserError("--checkpoint is missing\nfix: --checkpoint DIR, a directory of a model")
    from bmburst.checkpoint.files import VERIFIED
    from bmburst.cli.train import set_environment
    from bmburst.runtime.launch import LaunchSpec, launch

    nproc = ranks_to_start(args.nproc, fewest=1)
    limits = {"hang_timeout": args.hang_timeout, "start_timeout": args.start_timeout}
    spec = LaunchSpec(nproc=nproc, host_runtime=False, **limits)
    if nproc == 1:
        return _answer(args)
    request = _Request.of(args, nproc)  # refuse bad input before ranks start
    with set_environment({VERIFIED: str(request.source.directory)}):
        return launch(spec, ["-m", "bmburst", "generate", *_words(args)])


class _Request:
    """A parsed and checked command line: model, prompts and options. No weights are read yet."""

    def __init__(self, source: "Source", prompts: "list[Prompt]", options: "GenerationOptions") -> None:
        self.source, self.prompts, self.options = source, prompts, options

    @classmethod
    def of(cls, args: argparse.Namespace, ranks: int) -> "_Request":
        """Read and check the model directory, the prompts and the options.

        Raises:
            UserError: An option or a prompt cannot work.
        """
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
        return cls(source, prompts, options)


def _holds_answers(path: Path) -> bool:
    """Return whether a file may be replaced: it is empty or holds answers of an earlier run."""
    with path.open("rb") as file:
        line = file.readline()
    try:
        return not line or "prompt_tokens" in json.loads(line)
    except (ValueError, TypeError):
        return False


def _words(args: argparse.Namespace) -> list[str]:
    """Return the options that repeat this request, for the command of the ranks."""
    words: list[str] = []
    for name, value in vars(args).items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words += [option] * value
        elif value is not None:
            for each in value if isinstance(value, list) else (value,):
                words.append(f"{option}={each}")
    return words


def in_group(work: Callable[[], int]) -> int:
    """Run `work` with torch.distributed initialized, and return its exit status.

    If `work` raises a UserError that rank 0 prints, this returns 2 on the other ranks.

    Raises:
        UserError: `work` raised it, and this rank prints it.
    """
    import torch
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else None
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device)
    try:
        return work()
    except UserError:
        if leaves_errors_to_rank_0():
            return 2
        raise
    finally:
        dist.destroy_process_group()


def _answer(args: argparse.Namespace) -> int:
    from bmburst.comm.groups import communicator
    from bmburst.inference.generator import Generator, require_room

    comm = communicator(None)
    request = _Request.of(args, comm.size)
    if len(request.prompts) == 1:
        length = len(request.prompts[0])
        require_room(request.source, comm, args.cache, args.dtype, args.chunk_tokens, length, request.options)
    screen = _Screen(args, request, is_main=comm.rank == 0)
    if comm.rank == 0:
        length = max(map(len, request.prompts)) + request.options.max_new_tokens
        note_length(length, request.source.weights.config.max_position_embeddings)
        _note_ignored(request.source.directory, args.max_new_tokens)
    with progress_bar("reading weights", request.source.nbytes(args.dtype), "B", is_main=comm.rank == 0) as read:
        generator = Generator(
            request.source, cache=args.cache, dtype=args.dtype, chunk_tokens=args.chunk_tokens, on_bytes=read
        )
    answers = screen.run(generator)
    return 2 if any(answer.finish == "refused" for answer in answers) else 0


def note_length(length: int, most: int) -> None:
    """Print a note on standard error if a text of `length` tokens is longer than the model's limit `most`."""
    if length > most:
        print(
            f"note: up to {length:,} tokens, but the model was made for {most:,} (max_position_embeddings): "
            "answers beyond that may be useless",
            file=sys.stderr,
        )


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


@contextmanager
def progress_bar(title: str, total: int, unit: str, *, is_main: bool) -> Iterator[Callable[[int], object]]:
    """Show a progress bar on rank 0's terminal while the block runs, and yield the function that advances it."""
    from tqdm import tqdm

    with tqdm(
        desc=title, total=total, unit=unit, unit_scale=True, disable=None if is_main else True, leave=False
    ) as bar:
        yield bar.update


class _Screen:
    """Prints and writes the answers on rank 0. The other ranks print nothing."""

    def __init__(self, args: argparse.Namespace, request: _Request, *, is_main: bool) -> None:
        self._args, self._request, self._is_main = args, request, is_main
        self._streams = args.stream and is_main
        self._answers: dict[int, list[Answer]] = {}
        self._written = 0
        self._file: TextIO | None = None

    def run(self, generator: "Generator") -> "list[Answer]":
        """Answer the prompts and show the answers."""
        from bmburst.inference.answering import Progress

        request, output = self._request, self._args.output
        total = sum(map(len, request.prompts))
        with ExitStack() as stack:
            if output is not None and self._is_main:
                self._file = stack.enter_context(output.open("w", encoding="utf-8"))
            computed = stack.enter_context(progress_bar("prefill", total, " tokens", is_main=self._is_main))
            progress = Progress(tokens=computed, text=self._text, answer=self._answer)
            answers = generator.generate(request.prompts, request.options, progress=progress)
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
            if found[0].finish != "refused" and len(found) < self._request.options.num_samples:
                return
            for each in found:
                self._show(each)
            self._written += 1

    def _show(self, answer: "Answer") -> None:
        if self._file is not None:
            self._file.write(answer.to_json() + "\n")
            self._file.flush()
        elif not self._streams:
            is_text = self._args.prompts is None and answer.text is not None
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
