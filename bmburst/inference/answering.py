"""Answers a batch of prompts: prefill, decoding, streamed text, and timing and memory of each answer."""

import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from bmburst.amounts import GIB
from bmburst.comm.protocol import gather_objects
from bmburst.data.tokenizer import PromptTokenizer
from bmburst.inference.batch import Engine, GenerationBatch
from bmburst.inference.prompts import Answer, Prompt, TokenLogprob
from bmburst.inference.sampling import GenerationOptions, Sampled, Sampler, SamplerRow
from bmburst.inference.text import TextStream
from bmburst.runtime.watchdog import beat


@dataclass(slots=True)
class Progress:
    """Callbacks during generation, called on every rank.

    Attributes:
        tokens: Called with the number of prompt tokens of each computed chunk.
        text: Called with prompt index, sample index and new text of an answer, as soon as there is new text.
        answer: Called with prompt index and answer, when it is complete.
    """

    tokens: Callable[[int], object] = field(default=lambda _: None)
    text: Callable[[int, int, str], object] = field(default=lambda *_: None)
    answer: Callable[[int, Answer], object] = field(default=lambda *_: None)


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
            _Row(SamplerRow(index, sample, prompt.tokens), TextStream(tokenizer, options.stop), options)
            for index, prompt in prompts.items()
            for sample in range(options.num_samples)
        ]

    def run(self) -> dict[int, list[Answer]]:
        """Return the answers of each prompt."""
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
        if options.num_samples > 1:
            batch = batch.copies(options.num_samples)
        sampler = Sampler(options, [row.sampled for row in self._rows], engine.weights.config.vocab_size, device)
        for chosen in batch.decode(sampler, options.max_new_tokens):
            seconds = time.perf_counter() - begin
            beat()
            for i, row in enumerate(self._rows):
                if row.finish is None:
                    text = row.take(chosen, i, seconds)
                    if text:
                        self._progress.text(row.sampled.prompt, row.sampled.sample, text)
            if all(row.finish is not None for row in self._rows):
                break
        peak = max(gather_objects(engine.comm, peak_gib(device)))
        answers: dict[int, list[Answer]] = {index: [] for index in self._prompts}
        for row in self._rows:
            index = row.sampled.prompt
            answers[index].append(row.answer(peak))
            self._progress.answer(index, answers[index][-1])
        return answers


class _Row:
    """An answer in progress: one row of the batch."""

    def __init__(self, sampled: SamplerRow, text: TextStream, options: GenerationOptions) -> None:
        self.sampled, self._text, self._options = sampled, text, options
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._first = self._last = 0.0
        self.finish: Literal["length", "stop", "eos"] | None = None

    def take(self, chosen: Sampled, row: int, seconds: float) -> str:
        """Append the next token and return the text that no later token can change."""
        token = int(chosen.tokens[row])
        self._last = seconds
        if not self._tokens:
            self._first = seconds
        self._tokens.append(token)
        if chosen.logprobs is not None and chosen.top_ids is not None and chosen.top_logprobs is not None:
            top = zip(chosen.top_ids[row].tolist(), chosen.top_logprobs[row].tolist(), strict=True)
            self._logprobs.append(TokenLogprob(token, float(chosen.logprobs[row]), tuple(top)))
        if token in self._options.eos_ids:
            self.finish = "eos"
            return self._text.finish()
        text = self._text.push(token)
        if self._text.stop_string is not None:
            self.finish = "stop"
        elif len(self._tokens) == self._options.max_new_tokens:
            self.finish = "length"
            text += self._text.finish()
            if self._text.stop_string is not None:
                self.finish = "stop"
        return text

    def answer(self, peak: float) -> Answer:
        """Return the answer, once it is finished."""
        assert self.finish is not None
        count = len(self._tokens)
        return Answer(
            prompt_tokens=len(self.sampled.tokens),
            tokens=tuple(self._tokens),
            text=self._text.text,
            finish=self.finish,
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
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
