"""Answers of a model: streamed text, a batch of prompts with timing and memory, and a sample of a model in training."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from bmburst.amounts import GIB, require_function
from bmburst.comm.communicator import gather_objects
from bmburst.data.tokenizer import PromptTokenizer, Tokenizer
from bmburst.errors import UserError
from bmburst.inference.prompts import Answer, Finish, Prompt, TokenLogprob
from bmburst.inference.sampling import GenerationOptions, Sampled, Sampler, SamplerRow
from bmburst.inference.session import Engine, GenerationBatch
from bmburst.inference.weights import GatheredWeights, ModelWeights, ResidentWeights
from bmburst.launch.watchdog import beat
from bmburst.memory import peak_resident_bytes
from bmburst.mesh import Mesh

if TYPE_CHECKING:
    from bmburst.blocks.model import Llama

_TEMPERATURE = 0.7  # of a sample in training
_UNKNOWN = "\ufffd"  # decoders replace invalid UTF-8 by it, also the bytes of an incomplete character
_UNFINISHED = 3  # maximum bytes of an incomplete character; a token has at least one byte


class TextStream:
    """Text of one row of a batch, returned as soon as no later token can change it.

    Bytes of an incomplete character, and text that may be the start of a stop string, are held back. The cost of a
    token does not depend on the number of tokens before it.

    The concatenated pieces equal `tokenizer.decode` of all tokens, cut before the stop string, with one exception. If a
    run of byte tokens (`<0xE4>`) is not valid UTF-8 as a whole, or encodes U+FFFD itself, `tokenizers` replaces every
    byte of the run; here the characters that were already returned stay.

    Args:
        tokenizer: The tokenizer; None: no text.
        stop: Strings that end the text.

    Raises:
        UserError: There are stop strings but no tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str] = ()) -> None:
        if tokenizer is None and stop:
            raise UserError(
                f"stop: {stop[0]!r} cannot be found in the answer: the model comes without a tokenizer\n"
                "allowed: stop strings with a tokenizer\nfix: add tokenizer.json to its directory, or leave stop out"
            )
        self._pieces: list[str] = []
        self._decoder = None if tokenizer is None else _Decoder(tokenizer)
        self._finder = _StopFinder(tuple(stop))

    @property
    def text(self) -> str | None:
        """All text returned so far; None without a tokenizer."""
        return None if self._decoder is None else "".join(self._pieces)

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found, or None. No text is returned after it."""
        return self._finder.found

    def push(self, token: int) -> str:
        """Append the next token and return the text that is now final, which may be empty."""
        if self._decoder is None or self.stop_string is not None:
            return ""
        return self._given(self._finder.push(self._decoder.push(token)))

    def finish(self) -> str:
        """Return the text that was held back. Do not push tokens afterwards."""
        if self._decoder is None or self.stop_string is not None:
            return ""
        return self._given(self._finder.push(self._decoder.finish()) + self._finder.finish())

    def _given(self, text: str) -> str:
        if text:
            self._pieces.append(text)
        return text


class _Decoder:
    """Decodes a window of the last tokens, and returns the characters that were added.

    The window is context (tokens whose text was returned) followed by pending tokens. It starts at the start of a
    character, except within bytes that are not UTF-8. The context is two pieces of text, because decoders drop a
    leading space: a single piece may decode to an empty string.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._window: list[int] = []
        self._text = ""  # text of the window
        self._before = ""  # its prefix that was returned
        self._older = self._context = 0  # number of tokens of the first piece of context, and of both pieces

    def push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        if text == self._text and self._is_silent(token):
            self._window.pop()
            return ""
        if not text.endswith(_UNKNOWN):
            return self._all(text)
        pending = self._window[self._context :]
        held = _trailing(text)
        if held > _trailing(self._decode(pending)):
            # Byte tokens: if the run ends in an incomplete character, all of it decodes to U+FFFD.
            if len(pending) <= _UNFINISHED:
                self._text = text
                return ""
            text = self._without_context()
        elif not text.startswith(self._before):
            text = self._without_context()
        held = min(_trailing(text), _UNFINISHED)
        if len(pending) <= _UNFINISHED:
            return self._show(text, len(text) - held)
        # More tokens than an incomplete character can have: the first of them are invalid bytes.
        window = pending[-_UNFINISHED:]
        after = self._decode(window)
        held = min(held, _trailing(after))
        piece = self._show(text, len(text) - held)
        self._window, self._text = window, after
        self._older = self._context = 0
        self._before = after[: len(after) - held]
        return piece

    def finish(self) -> str:
        return self._all(self._decode(self._window))

    def _all(self, text: str) -> str:
        """Return all new text of the window; its pending tokens become context."""
        if not text.startswith(self._before):
            text = self._without_context()
        piece = text[len(self._before) :]
        if piece:
            del self._window[: self._older]
            self._older = self._context - self._older
            text = self._decode(self._window)
        self._context = len(self._window)
        self._before = self._text = text
        return piece

    def _show(self, text: str, end: int) -> str:
        piece = text[len(self._before) : end]
        self._text = text
        self._before += piece
        return piece

    def _without_context(self) -> str:
        """Drop the context, whose text was changed by later tokens, and return the text of the pending tokens."""
        del self._window[: self._context]
        self._older, self._context, self._before = 0, 0, ""
        return self._decode(self._window)

    def _is_silent(self, token: int) -> bool:
        """Return whether a token never has text, such as a special token."""
        return self._decode([token]) == "" and self._decode([token, token]) == ""


class _StopFinder:
    """Cuts streamed text before the stop string that ends first, also if it spans several pieces."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        if not self._stop or not text:
            return text
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.found = min(found)
            self._held = ""
            return text[:start]
        end = len(text) - max(_overlap(text, stop) for stop in self._stop)
        self._held = text[end:]
        return text[:end]

    def finish(self) -> str:
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of the text that is a proper prefix of the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def _trailing(text: str) -> int:
    """Return the number of U+FFFD at the end of the text."""
    return len(text) - len(text.rstrip(_UNKNOWN))


@dataclass(slots=True)
class Progress:
    """Callbacks during generation, called on every rank.

    Attributes:
        tokens: Called with the number of prompt tokens of each computed chunk.
        text: Called with prompt index, sample index and new text of an answer, as soon as there is new text.
        answer: Called with prompt index and answer, when it is complete.

    Raises:
        UserError: One is not a function.
    """

    tokens: Callable[[int], object] = field(default=lambda _: None)
    text: Callable[[int, int, str], object] = field(default=lambda *_: None)
    answer: Callable[[int, Answer], object] = field(default=lambda *_: None)

    def __post_init__(self) -> None:
        for name in ("tokens", "text", "answer"):
            require_function(f"progress.{name}", getattr(self, name))


class Answering:
    """Computes the answers of one batch of prompts."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: PromptTokenizer | None,
        prompts: Mapping[int, Prompt],
        options: GenerationOptions,
        progress: Progress,
    ) -> None:
        self._engine, self._options, self._progress = engine, options, progress
        self._prompts = prompts
        self._rows = [
            _Row(SamplerRow(index, sample, prompt.tokens), tokenizer, options)
            for index, prompt in prompts.items()
            for sample in range(options.num_samples)
        ]

    def run(self, *, is_first: bool) -> dict[int, list[Answer]]:
        """Return the answers of each prompt.

        Args:
            is_first: Whether no batch came before. If all prompts of the first one have NaN logits, the model is at
                fault, and an error is raised; otherwise such prompts are refused.

        Raises:
            UserError: See `is_first`.
        """
        engine, options, device = self._engine, self._options, self._engine.weights.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        begin = time.perf_counter()
        length = max(map(len, self._prompts.values())) + options.max_new_tokens
        batch = GenerationBatch(engine, engine.new_cache(len(self._prompts), length))

        def computed(tokens: int) -> None:
            beat()
            self._progress.tokens(tokens)

        batch.prefill([prompt.tokens.tolist() for prompt in self._prompts.values()], computed)
        answers = self._refuse(batch, is_first)
        if len(answers) == len(self._prompts):
            return answers
        if options.num_samples > 1:
            batch = batch.copies(options.num_samples)
        sampler = Sampler(options, [row.sampled for row in self._rows], engine.weights.config.vocab_size, device)
        for chosen in batch.decode(sampler, options.max_new_tokens):
            seconds = time.perf_counter() - begin
            beat()
            for i, row in enumerate(self._rows):
                if row.growing.finish is None:
                    text = row.take(chosen, i, seconds)
                    if text:
                        self._progress.text(row.sampled.prompt, row.sampled.sample, text)
            if all(row.growing.finish is not None for row in self._rows):
                break
        peak = max(gather_objects(engine.comm, peak_gib(device)))
        for row in self._rows:
            if row.growing.finish != "refused":
                answer = row.answer(peak)
                answers.setdefault(row.sampled.prompt, []).append(answer)
                self._progress.answer(row.sampled.prompt, answer)
        return answers

    def _refuse(self, batch: GenerationBatch, is_first: bool) -> dict[int, list[Answer]]:
        """Return the answers of the prompts whose logits are NaN; see `run`. Their rows are computed, but not read."""
        indices = list(self._prompts)
        bad = [indices[sequence] for sequence in batch.not_numbers()]
        if is_first and len(bad) == len(indices):
            raise batch.nan_error
        for row in self._rows:
            if row.sampled.prompt in bad:
                row.growing.finish = "refused"
        answers = {index: [Answer.refused(self._prompts[index], str(batch.nan_error))] for index in bad}
        for index, (answer,) in answers.items():
            self._progress.answer(index, answer)
        return answers


class GrowingAnswer:
    """An answer in progress: its tokens, its text, and why it ended.

    Args:
        tokenizer: The tokenizer; None: no text.
        options: The options of the answer: its stop strings, its end-of-text ids and its largest length.

    Attributes:
        tokens: The tokens so far.
        finish: As in `Answer`; None before the end.
    """

    def __init__(self, tokenizer: PromptTokenizer | None, options: GenerationOptions) -> None:
        self._text, self._options = TextStream(tokenizer, options.stop), options
        self.tokens: list[int] = []
        self.finish: Finish | None = None

    @property
    def text(self) -> str | None:
        """See `TextStream.text`."""
        return self._text.text

    def push(self, token: int) -> str:
        """Append the next token and return the text that no later token can change."""
        self.tokens.append(token)
        if token in self._options.eos_ids:
            self.finish = "eos"
            return self._text.finish()
        text = self._text.push(token)
        if self._text.stop_string is not None:
            self.finish = "stop"
        elif len(self.tokens) == self._options.max_new_tokens:
            self.finish = "length"
            text += self._text.finish()
            if self._text.stop_string is not None:
                self.finish = "stop"
        return text


class _Row:
    """One row of the batch."""

    def __init__(self, sampled: SamplerRow, tokenizer: PromptTokenizer | None, options: GenerationOptions) -> None:
        self.sampled, self.growing, self._options = sampled, GrowingAnswer(tokenizer, options), options
        self._logprobs: list[TokenLogprob] = []
        self._first = self._last = 0.0

    def take(self, chosen: Sampled, row: int, seconds: float) -> str:
        """Append the next token and return the text that no later token can change."""
        token = int(chosen.tokens[row])
        self._last = seconds
        if not self.growing.tokens:
            self._first = seconds
        if chosen.logprobs is not None and chosen.top_ids is not None and chosen.top_logprobs is not None:
            top = zip(chosen.top_ids[row].tolist(), chosen.top_logprobs[row].tolist(), strict=True)
            self._logprobs.append(TokenLogprob(token, float(chosen.logprobs[row]), tuple(top)))
        return self.growing.push(token)

    def answer(self, peak: float) -> Answer:
        """Return the answer, once it is finished."""
        growing = self.growing
        assert growing.finish is not None
        count = len(growing.tokens)
        return Answer(
            prompt_tokens=len(self.sampled.tokens),
            tokens=tuple(growing.tokens),
            text=growing.text,
            finish=growing.finish,
            first_token_seconds=self._first,
            seconds_per_token=(self._last - self._first) / (count - 1) if count > 1 else None,
            peak_gib=peak,
            logprobs=tuple(self._logprobs) if self._options.logprobs is not None else None,
            sample=self.sampled.sample if self._options.num_samples > 1 else None,
        )


def peak_gib(device: torch.device) -> float:
    """Return this rank's peak memory in GiB: of the GPU since the last reset, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return peak_resident_bytes() / GIB


def generate(
    model: "Llama",
    mesh: Mesh,
    prompt: list[int],
    count: int,
    tokenizer: Tokenizer,
    seed: int,
    show: Callable[[str], object] = lambda _: None,
) -> list[int]:
    """Return `count` sampled token ids that follow `prompt`; every rank calls it and gets the same ids.

    Args:
        model: The model, sharded over all ranks.
        mesh: The ranks; each sequence group computes the same text.
        prompt: At least one token.
        count: Number of tokens to generate.
        tokenizer: Only ids below its vocab_size are sampled, because a model's vocabulary may be padded.
        seed: Seed of the sampling.
        show: Called with each piece of text as soon as it is generated.
    """
    weights: ModelWeights = GatheredWeights(model)
    if weights.device.type == "cpu":  # the model is small, and gathering it takes longer than computing a token
        weights = ResidentWeights.of(model)
    engine = Engine.over(weights, mesh.sequence)
    batch = GenerationBatch(engine, engine.new_cache(1, len(prompt) + count))
    batch.prefill([prompt])
    ids, text = [], TextStream(tokenizer)
    for chosen in batch.decode(_Drawing(tokenizer.vocab_size, seed), count):
        ids.append(int(chosen.tokens.item()))
        show(text.push(ids[-1]))
        beat()
    show(text.finish())
    return ids


class _Drawing:
    """Samples tokens at a fixed temperature, on the host."""

    def __init__(self, allowed: int, seed: int) -> None:
        self._allowed, self._generator = allowed, torch.Generator().manual_seed(seed)

    def step(self, logits: torch.Tensor) -> Sampled:
        """Sample the next token of each row; see `bmburst.inference.session.Chooser`."""
        # multinomial raises on NaN; with nan_to_num, a diverged model samples at random.
        known = logits[:, : self._allowed].float().cpu().nan_to_num()
        drawn = torch.multinomial(torch.softmax(known / _TEMPERATURE, 1), 1, generator=self._generator)
        return Sampled(drawn[:, 0].to(logits.device))
