"""Predicts generation: time to first token, time per token, memory and the longest length. Imports no torch.

Lower bounds and memory come from `bmburst.plan.inference`. The overhead of kernels was measured on H200s.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bmburst.amounts import GIB, short
from bmburst.blocks.config import LlamaConfig
from bmburst.errors import UserError, require_known
from bmburst.plan.candidates import MOST_GPUS, Candidate, Task
from bmburst.plan.counts import ITEMSIZE, block_matrices, table
from bmburst.plan.inference import TOKENS_OF_RANK, InferenceMemory, InferenceWork, read_bandwidth, usable
from bmburst.plan.ways import with_attention_choice
from bmburst.schedule.cache_split import CacheSplit
from bmburst.schedule.hardware import Hardware

_READ = 0.9  # fraction of the memory bandwidth that products and attention of decoding reach: llama-3-8b on an H200
_LAYER = 1.5e-3 / 32  # seconds of the small kernels of a layer, in addition to its memory traffic: the same run
_FORWARD = 1 / 3  # forward's share of the host time of a block (`Hardware.layer_host`): assumed
_ADD_UP = 1e-5  # seconds of an all-reduce of one token by peer memory: a barrier of 5 us, measured, and a sum
_FEW = (1, 2, 4, 8)  # GPUs that are always shown


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationTask:
    """Prompts to answer.

    Attributes:
        model: The model's configuration.
        preset: Its name.
        prompt: Tokens of each prompt.
        new_tokens: Tokens of each answer.
        batch: Number of prompts at once.
        dtype: dtype of weights and KV cache.

    Raises:
        UserError: A value is out of range.
    """

    model: LlamaConfig
    preset: str
    prompt: int
    new_tokens: int = 64
    batch: int = 1
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name, value in (("seq", self.prompt), ("new-tokens", self.new_tokens), ("batch", self.batch)):
            if value < 1:
                raise UserError(f"--{name} {value}\nallowed: at least 1\nfix: for example --{name} 64")
        require_known("dtype", self.dtype, ITEMSIZE)

    @property
    def length(self) -> int:
        """Tokens of a prompt and its answer."""
        return self.prompt + self.new_tokens

    @property
    def work(self) -> InferenceWork:
        """The least computation and memory traffic of the task."""
        return InferenceWork(config=self.model, batch=self.batch, itemsize=ITEMSIZE[self.dtype])


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """The prediction for a task on some GPUs of one node.

    Attributes:
        task: The task.
        gpus: Number of GPUs that share every prompt.
        split: How the KV cache is sharded, for the first rank.
        first_token: Seconds from the prompt to the first new token.
        first_token_bound: Lower bound of the seconds of prefill.
        token: Seconds per later token of all answers, in the middle of the answer.
        token_bound: Lower bound of `token`.
        weights: Bytes of weights on a GPU.
        cache: Bytes of the KV cache on a GPU.
        working: Bytes of other tensors in prefill or in a step of decoding.
        available: Bytes of a GPU that inference may use.
        longest: Most tokens of prompt and answer that fit; 0 if not even one fits.
    """

    task: GenerationTask
    gpus: int
    split: CacheSplit
    first_token: float
    first_token_bound: float
    token: float
    token_bound: float
    weights: int
    cache: int
    working: int
    available: float
    longest: int

    @property
    def memory(self) -> int:
        """Bytes on a GPU at the peak."""
        return self.weights + self.cache + self.working

    @property
    def fits(self) -> bool:
        """Whether it fits into a GPU's memory."""
        return self.memory <= self.available

    @property
    def command(self) -> str:
        """The shell command that runs it."""
        words = ["bmburst", "generate", "--checkpoint", "DIR", "--prompt-file", "FILE", "--nproc", str(self.gpus)]
        words += ["--max-new-tokens", str(self.task.new_tokens), "--dtype", self.task.dtype]
        if self.gpus > 1:
            words += ["--cache", "tokens" if self.split.head_groups == 1 else "heads"]
        return shlex.join(words)


def predict_generation(task: GenerationTask, gpus: int, hardware: Hardware) -> Generation:
    """Return the prediction for a task on some GPUs of one node, with the cache split of `--cache auto`.

    Raises:
        UserError: There are too few or too many GPUs.
    """
    if not 1 <= gpus <= MOST_GPUS:
        raise UserError(f"--gpus {gpus}\nallowed: 1 to {MOST_GPUS}\nfix: for example --gpus 2")
    model, work = task.model, task.work
    split = CacheSplit.choose("auto", gpus, 0, model.num_heads, model.num_kv_heads)
    memory = InferenceMemory(
        config=model, split=split, itemsize=ITEMSIZE[task.dtype], chunk_tokens=TOKENS_OF_RANK * gpus
    )
    outside = hardware.reserved + (hardware.nccl_memory * gpus if gpus > 1 else 0.0)
    available = usable(hardware.memory - outside, hardware.memory)
    half = task.prompt + task.new_tokens // 2
    return Generation(
        task=task,
        gpus=gpus,
        split=split,
        first_token=_first_token(task, split, hardware),
        first_token_bound=work.prefill_bound(task.prompt, gpus, hardware),
        token=_token(task, split, half, hardware),
        token_bound=work.decode_bound(half, gpus, hardware),
        weights=memory.weights,
        cache=memory.cache(task.batch, task.length),
        working=memory.total(task.batch, task.length) - memory.weights - memory.cache(task.batch, task.length),
        available=available,
        longest=memory.longest(available, task.batch),
    )


def counts(gpus: int) -> tuple[int, ...]:
    """Return the numbers of GPUs to show: powers of two up to `gpus`, at least up to 8, and `gpus` itself."""
    powers = {1 << n for n in range(gpus.bit_length())}
    return tuple(sorted({*_FEW, *powers, gpus}))


def _first_token(task: GenerationTask, split: CacheSplit, hardware: Hardware) -> float:
    """Return the seconds of prefill: attention by the cost model, products, elementwise operations, and one head."""
    model, work, gpus = task.model, task.work, split.ranks
    alone = Candidate(
        task=Task(model=model, sequence=max(task.prompt, gpus), gpus=gpus, dtype=task.dtype)  # type: ignore[arg-type]
    )
    name, degree = "auto", None
    if gpus > 1:
        name = "heads" if split.token_groups == 1 else "ring" if split.head_groups == 1 else "heads+ring"
        degree = split.head_groups if name == "heads+ring" else None
    chosen = with_attention_choice(alone, name, degree, hardware)
    attention = model.num_layers * task.batch * chosen.attention_cost(hardware).forward.total
    rows = min(TOKENS_OF_RANK, -(-task.batch * task.prompt // gpus))
    products = hardware.matmul_seconds(work.products(task.prompt) / gpus, rows)
    elementwise = hardware.memory_seconds(work.elementwise(task.prompt) / gpus)
    head = work.itemsize * table(model) / gpus / (_READ * read_bandwidth(hardware))
    chunks = -(-task.batch * task.prompt // (TOKENS_OF_RANK * gpus))
    host = chunks * model.num_layers * hardware.layer_host * _FORWARD
    return max(attention + products + elementwise, host) + head


def _token(task: GenerationTask, split: CacheSplit, length: int, hardware: Hardware) -> float:
    """Return the seconds per token: memory reads of a rank, small kernels, and all-reduces over the ranks."""
    model, work, ranks = task.model, task.work, split.ranks
    query_key_value = model.hidden_size * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    shared = (block_matrices(model) - query_key_value) * model.num_layers + table(model)
    # Ranks of a head group that shard tokens all compute the group's queries, keys and values.
    weights = work.itemsize * (shared / ranks + model.num_layers * query_key_value / split.head_groups)
    seconds = (weights + work.cache_bytes(length) / ranks) / (_READ * read_bandwidth(hardware))
    seconds += model.num_layers * _LAYER
    if ranks > 1:
        seconds += 2 * model.num_layers * _ADD_UP + hardware.nccl_latency
    if split.token_groups > 1:
        seconds += model.num_layers * hardware.nccl_latency  # partial results are gathered
    return seconds


def generation_report(task: GenerationTask, hardware: Hardware, found: Sequence[Generation], gpus: int) -> str:
    """Return the report: the task, a table by number of GPUs, and time, memory and command for `gpus` GPUs.

    Args:
        task: The task.
        hardware: The machine.
        found: The predictions, by number of GPUs.
        gpus: The requested number of GPUs.
    """
    asked = next(each for each in found if each.gpus == gpus)
    prompts = f"{short(task.prompt, commas=True)} tokens x {task.batch}"
    lines = [
        f"{task.preset}, prompts of {prompts}, {task.new_tokens:,} new tokens, {task.dtype}, {hardware.name}",
        "",
        *_comparison(found),
        "",
        f"{gpus} GPU{'s' if gpus > 1 else ''}, cache by {asked.split.name}: first token {asked.first_token:.3g} s, "
        f"bound {asked.first_token_bound:.3g}; {asked.token * 1e3:.3g} ms a token, bound {asked.token_bound * 1e3:.3g}",
        f"memory of a GPU: {asked.memory / GIB:.1f} of {asked.available / GIB:.1f} GiB",
    ]
    for name, nbytes in (("weights", asked.weights), ("cache", asked.cache), ("working", asked.working)):
        lines.append(f"  {name:8} {nbytes / GIB:8.2f} GiB")
    longest = f"the longest prompt and answer that fit: {asked.longest:,} tokens"
    lines += [longest if asked.longest else "the model does not fit", ""]
    if asked.fits:
        return "\n".join([*lines, asked.command])
    return "\n".join([*lines, "It does not fit into memory: use more GPUs, a shorter prompt or a smaller model."])


def _comparison(found: Sequence[Generation]) -> list[str]:
    head = ("GPUs", "first token s", "ms a token", "tokens/s", "GiB", "longest", "cache")
    rows = [head] + [
        (
            str(each.gpus),
            f"{each.first_token:.3g}" if each.first_token < 1000 else f"{each.first_token:,.0f}",
            f"{each.token * 1e3:.3g}",
            f"{each.task.batch / each.token:,.0f}",
            f"{each.memory / GIB:.1f}",
            f"{each.longest:,}",
            f"{each.split.name if each.gpus > 1 else 'whole'}" + ("" if each.fits else "   does not fit"),
        )
        for each in found
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    return ["  ".join([*(f"{row[i]:>{widths[i]}}" for i in range(6)), row[6]]).rstrip() for row in rows]


def generation_json(task: GenerationTask, hardware: Hardware, found: Sequence[Generation]) -> dict[str, Any]:
    """Return the predictions as plain data for JSON, in bytes and seconds."""
    question = {name: getattr(task, name) for name in ("preset", "prompt", "new_tokens", "batch", "dtype")}
    return {"task": question, "hardware": hardware.name, "ways": [_way(each) for each in found]}


def _way(each: Generation) -> dict[str, Any]:
    names = ("gpus", "first_token", "first_token_bound", "token", "token_bound", "fits", "longest", "command")
    memory = {name: getattr(each, name) for name in ("weights", "cache", "working", "available")}
    way = {name: getattr(each, name) for name in names}
    split = {"name": each.split.name, "head_groups": each.split.head_groups, "token_groups": each.split.token_groups}
    return way | {"tokens_per_second": each.task.batch / each.token, "cache": split, "memory": memory}
