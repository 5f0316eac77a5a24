"""Measures a cell of the inference benchmark on a rank: times each token of answers, with random weights."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from benchmarks.attention.method import LocalKernel, Setting
from benchmarks.engine.job import RankRun
from benchmarks.engine.kinds import Row
from benchmarks.engine.machine import RankGroup
from benchmarks.engine.timing import record_timeline
from benchmarks.inference.cells import FULL, METHODS, NO_LAO, TRANSFORMERS, WARM_STEPS, WARM_TOKENS, InferenceCell
from benchmarks.inference.kind import timeline_title
from benchmarks.inference.peers import PeerPrefill, Transformers
from bmburst.amounts import GIB
from bmburst.attention.api import resolve_group
from bmburst.blocks.config import LlamaConfig
from bmburst.inference.prefill import Prefill
from bmburst.inference.sampling import Sampled
from bmburst.inference.session import Engine, GenerationBatch
from bmburst.inference.weights import ResidentWeights
from bmburst.launch import watchdog
from bmburst.schedule.hardware import hardware_of

_SKIPPED = 3  # excluded intervals after the first token: eager, capture of the CUDA graph, first replay
_KEPT_TOKENS = 8  # tokens of the first prompt's answer in a row
Answer = Callable[[Sequence[Sequence[int]], int], tuple[list[float], Tensor]]
"""`(prompts, new_tokens) -> (times, ids)`: seconds from the start to each token, and `[batch, new_tokens]` ids."""


class Greedy:
    """Chooses the most likely token; a `bmburst.inference.session.Chooser`."""

    def step(self, logits: Tensor) -> Sampled:
        """See `Chooser`."""
        return Sampled(logits.argmax(-1))


def random_weights(config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> ResidentWeights:
    """Return a model with random weights, the same on all ranks. Vectors (weights of norms) are 1."""
    weights = ResidentWeights(config, dtype, device)
    generator = torch.Generator(device).manual_seed(0)
    for place in weights.places().values():
        if place.ndim == 1:
            place.fill_(1.0)
        else:
            place.normal_(0.0, config.init_std, generator=generator)
    return weights


def random_prompts(cell: InferenceCell, tokens: int) -> list[list[int]]:
    """Return random token ids of the cell's batch of prompts, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    ids: list[list[int]] = torch.randint(0, cell.config.vocab_size, (cell.batch, tokens), generator=generator).tolist()
    return ids


class InferenceRun(RankRun[InferenceCell]):
    """See `RankRun`."""

    def prepare(self) -> None:
        """See `RankRun.prepare`."""
        group, name = RankGroup.world(self.device), self.job.kernel
        self.setting = Setting(group=group, kernel=LocalKernel(name), kernel_name=name)
        self.hardware = hardware_of(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else None
        self._model: tuple[str, str] | None = None
        self._weights: ResidentWeights | None = None
        self._engines: dict[str, Engine] = {}

    def refusal(self, cell: InferenceCell) -> str | None:
        """See `RankRun.refusal`: also refuses a cell if one answer takes longer than --cell-seconds."""
        reason = cell.refusal()
        if reason is None and self.hardware is not None:
            least = cell.seconds(self.hardware)
            if least > self.job.cell_seconds:
                return f"an answer takes {least:.0f} s at least, more than --cell-seconds {self.job.cell_seconds:g}"
        return reason

    def measure(self, cell: InferenceCell) -> Row:
        """See `RankRun.measure`.

        Times are those of the slowest rank, as medians over the answers.

        * `first_token_seconds`: from the prompt's ids on the host to the first new token on the host.
        * `token_milliseconds`: median of the intervals between later tokens, without the first few.
        * `peak_memory_gib`: peak of a rank, including memory outside torch's allocator; `allocated_gib`: peak of the
          allocator.
        * `bounds` of both times, and `ratios` of the times to them, if the rates of the GPU are known.
        """
        answer = self._answerer(cell)
        answer(random_prompts(cell, min(cell.tokens, WARM_TOKENS)), min(cell.new_tokens, WARM_STEPS))
        gc.collect()
        prompts = random_prompts(cell, cell.tokens)
        rounds: list[list[float]] = []
        left = self.job.cell_seconds
        while len(rounds) <= self.job.repeats:
            seconds, ids = self._round(answer, prompts, cell.new_tokens)
            rounds.append(seconds)
            left -= seconds[-1]
            if left < seconds[-1]:
                break
        # The first answer allocates memory and buffers.
        counted = rounds[1:] or rounds
        row = self._times(cell, counted) | {"tokens": ids[0, :_KEPT_TOKENS].tolist(), "rounds": len(counted)}
        row |= self._memory() | {"kernel": self.setting.kernel_name}
        if self.job.trace_folder is not None:
            title = timeline_title(cell)
            record_timeline(
                lambda: answer(prompts, WARM_STEPS), self.job.trace_folder, cell.key, title, self.setting.group
            )
        return row

    def _round(self, answer: Answer, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[list[float], Tensor]:
        watchdog.beat()
        self.setting.group.barrier()
        own, ids = answer(prompts, new_tokens)
        gc.collect()
        return [max(times) for times in zip(*self.from_all(own), strict=True)], ids

    def _times(self, cell: InferenceCell, rounds: Sequence[Sequence[float]]) -> Row:
        first = statistics.median(times[0] for times in rounds)
        spans = [[b - a for a, b in pairwise(times)] for times in rounds]
        each = statistics.median(span for own in spans for span in own[_SKIPPED:] or own)
        row: Row = {
            "first_token_seconds": first,
            "token_milliseconds": each * 1e3,
            "tokens_per_second": cell.batch / each,
        }
        if self.hardware is None or cell.dtype not in ("bfloat16", "float16"):  # the rates are for 16 bits
            return row
        work = cell.work
        prefill = work.prefill_bound(cell.tokens, cell.ranks, self.hardware)
        token = work.decode_bound(cell.tokens, cell.ranks, self.hardware)
        return row | {
            "bounds": {"first_token_seconds": prefill, "token_milliseconds": token * 1e3},
            "ratios": {"first_token_seconds": first / prefill, "token_milliseconds": each / token},
        }

    def _memory(self) -> Row:
        peak = self.gauge.peak()
        if peak is None:
            return {"peak_memory_gib": None, "allocated_gib": None}
        return {
            "peak_memory_gib": peak / GIB,
            "allocated_gib": max(self.from_all(torch.cuda.max_memory_allocated(self.device))) / GIB,
        }

    def _answerer(self, cell: InferenceCell) -> Answer:
        weights = self._weights_of(cell)
        if cell.method == TRANSFORMERS:
            return Transformers(weights).answer
        engine = self._engine_of(cell, weights)

        def answer(prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[list[float], Tensor]:
            length = len(prompts[0])
            begun = time.perf_counter()
            batch = GenerationBatch(engine, engine.new_cache(len(prompts), length + new_tokens))
            batch.prefill(prompts, lambda _: watchdog.beat())
            times, ids = [], []
            for chosen in batch.decode(Greedy(), new_tokens):
                times.append(time.perf_counter() - begun)
                ids.append(chosen.tokens.clone())
            return times, torch.stack(ids, 1)

        return answer

    def _weights_of(self, cell: InferenceCell) -> ResidentWeights:
        """Return the weights of the cell's model. Cells of one model share them; one model is in memory at a time."""
        model = cell.model, cell.dtype
        if self._weights is None or self._model != model:
            self._engines, self._weights, self._model = {}, None, None
            self.gauge.clear()
            self._weights = random_weights(cell.config, getattr(torch, cell.dtype), self.device)
            self._model = model
        return self._weights

    def _engine_of(self, cell: InferenceCell, weights: ResidentWeights) -> Engine:
        method = METHODS[cell.method]
        if method.cache not in self._engines:
            name = self.setting.kernel_name
            self._engines[method.cache] = Engine.over(weights, resolve_group(None), method.cache, kernel=name)
        engine = self._engines[method.cache]
        if method.peer:
            return replace(engine, prefill=PeerPrefill(cell, weights, self.setting, engine.split))
        if cell.method != NO_LAO and cell.mask != FULL:
            return engine
        kernel = "reference" if cell.method == NO_LAO else self.setting.kernel_name
        engine = replace(engine, prefill=Prefill(weights, engine.comm, kernel, is_causal=cell.mask != FULL))
        if cell.mask == FULL:  # each query needs all keys, so the prompt is a single chunk
            return replace(engine, chunk_tokens=max(cell.tokens, engine.chunk_tokens))
        return engine
