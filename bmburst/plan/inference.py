"""Predicts inference: its memory, lower bounds of prefill and of decoding, and the times of generation on some GPUs.

Imports no torch. The overhead of kernels was measured on H200s.
"""

import shlex
from bisect import bisect_left
from dataclasses import dataclass

from bmburst.amounts import MOST, short_text
from bmburst.blocks.config import LlamaConfig
from bmburst.blocks.dtypes import ITEMSIZE
from bmburst.errors import UserError, require_known
from bmburst.plan.candidates import MOST_GPUS, Candidate, Task
from bmburst.plan.counts import (
    BLOCK_NORMS,
    CURRENT,
    WIDE,
    block_matrices,
    causal_pairs,
    projections,
    table,
)
from bmburst.plan.ways import with_attention_choice
from bmburst.schedule.cache_split import CacheSplit
from bmburst.schedule.cost import AttentionCost
from bmburst.schedule.hardware import Hardware

MLP_TOKENS = 16384
"""Number of a rank's tokens that an MLP computes at once in prefill."""
TOKENS_OF_RANK = 65536
"""Default number of tokens per rank in a chunk of prefill."""
RESERVE = 0.04
"""Fraction of a device that is reserved for torch, libraries, CUDA graphs and fragmentation."""
SHORT_STEP = 128
"""Tokens to whose multiples short prompts are padded; each of these lengths has a CUDA graph."""
_MOST_SHORT = 2048  # tokens
_SHORT_FLOPS = 9e11  # products of a layer that take an H200 about as long as its host launches its kernels: 1.3 ms
_GRAPHS = 0.0125  # fraction of a GPU's memory that graphs may keep: less than a third of `RESERVE`
_SPARE = 1.25  # of the temporary memory of a graph: the allocator rounds


@dataclass(frozen=True, kw_only=True, slots=True)
class InferenceMemory:
    """Bytes that one rank needs to generate text.

    Attributes:
        config: The model.
        split: How the KV cache is sharded over the ranks.
        itemsize: Bytes per element of weights and KV cache.
        chunk_tokens: Most tokens of a prefill chunk, over all ranks.
    """

    config: LlamaConfig
    split: CacheSplit
    itemsize: int
    chunk_tokens: int

    @property
    def weights(self) -> int:
        """Bytes of the weights; every rank holds all of them."""
        return self.config.num_parameters * self.itemsize

    def cache(self, sequences: int, length: int) -> int:
        """Return the bytes of the KV cache of `sequences` sequences with a capacity of `length` tokens each."""
        config = self.config
        return self.split.nbytes(config.num_layers, sequences, length, config.head_dim, self.itemsize)

    def prefill(self, tokens: int) -> int:
        """Return the bytes of activations in prefill of `tokens` tokens, at most one chunk at a time.

        These are two residual streams and a norm; q, k, v before and after a norm of queries and keys (without one, the
        rotary embedding is in place) and after the exchange, and likewise the output; gate, up and their product for
        the tokens that an MLP computes at once.
        """
        config, ranks = self.config, self.split.ranks
        rows = -(-min(tokens, self.chunk_tokens) // ranks)
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        moved = 2 * (query + 2 * kv) + 3 * query if ranks > 1 else (query + 2 * kv) + 2 * query
        stream = 4 * config.hidden_size * self.itemsize
        attention = moved * self.itemsize + 2 * config.num_heads * WIDE
        mlp = min(rows, MLP_TOKENS) * 3 * config.intermediate_size * self.itemsize
        return rows * (stream + attention) + mlp

    def decode(self, sequences: int) -> int:
        """Return the bytes of activations in a step of decoding: several copies of the logits, and sampling."""
        return sequences * self.config.vocab_size * WIDE * 8

    def working(self, sequences: int, length: int) -> int:
        """Return the most bytes of activations, in prefill or in a step of decoding."""
        return max(self.prefill(sequences * length), self.decode(sequences))

    def total(self, sequences: int, length: int) -> int:
        """Return all bytes for `sequences` sequences of `length` tokens, prompt and answer."""
        return self.weights + self.cache(sequences, length) + self.working(sequences, length)

    def answers(self, count: int, length: int) -> int:
        """Return all bytes for `count` answers to one prompt of `length` tokens, prompt and answer.

        The prompt is computed once, and its cache is there until it has been copied for every answer.
        """
        caches = count + 1 if count > 1 else 1
        return self.weights + self.cache(caches, length) + max(self.prefill(length), self.decode(count))

    def most_answers(self, available: float, length: int) -> int:
        """Return how many answers to one prompt fit in `available` bytes; 0 if none does."""
        return bisect_left(range(1, 1 << 40), True, key=lambda count: self.answers(count, length) > available)

    def longest(self, available: float, sequences: int = 1) -> int:
        """Return the longest length at which `sequences` sequences fit in `available` bytes; 0 if none fits."""
        return bisect_left(range(1, 1 << 40), True, key=lambda length: self.total(sequences, length) > available)


@dataclass(frozen=True, slots=True)
class ShortPromptLimits:
    """Prompts that run as CUDA graphs. The ranks of a node divide those of more than `SHORT_STEP` tokens.

    Attributes:
        memory: The memory of a GPU that computes a prompt alone.
        ranks: Ranks that divide a prompt and its cache.
        most: Most tokens of a prompt, a multiple of `SHORT_STEP * ranks`: a GPU takes about as long as its host, or
            graphs keep as much memory as they may. 0: no prompt runs as a graph.
    """

    memory: InferenceMemory
    ranks: int
    most: int

    @classmethod
    def of(cls, config: LlamaConfig, itemsize: int, device: float, ranks: int = 1) -> "ShortPromptLimits":
        """Return the short prompts of a model.

        Args:
            config: The model.
            itemsize: Bytes per element of its weights.
            device: Bytes of a GPU.
            ranks: See the attributes.
        """
        split = CacheSplit.choose("auto", 1, 0, config.num_heads, config.num_kv_heads)
        memory = InferenceMemory(config=config, split=split, itemsize=itemsize, chunk_tokens=_MOST_SHORT)
        scaling = config.rope_scaling
        is_dynamic = scaling is not None and scaling.kind == "dynamic"  # it depends on the length of the prompt
        is_graph = itemsize == ITEMSIZE["bfloat16"] and not is_dynamic  # FlashAttention-4 has no fp32
        most = min(_MOST_SHORT, int(_SHORT_FLOPS / (2 * block_matrices(config)))) if is_graph else 0
        step = SHORT_STEP * ranks
        found = cls(memory, ranks, most // SHORT_STEP * step)
        while found.nbytes > _GRAPHS * device:
            found = cls(memory, ranks, found.most - step)
        return found

    @property
    def temporary(self) -> int:
        """Bytes of temporary memory that the graphs share."""
        return int(_SPARE * self.memory.prefill(self.most // self.ranks))

    @property
    def nbytes(self) -> float:
        """Bytes that a GPU keeps: a rank's part of a cache, keys and values of a layer, and temporary memory."""
        if not self.most:
            return 0.0
        cache, ranks = self.memory.cache(1, self.most), self.ranks
        gathered = cache / self.memory.config.num_layers * (1 + 1 / ranks) if ranks > 1 else 0.0
        return cache / ranks + gathered + self.temporary


def dividing_ranks(tokens: int, ranks: int) -> int:
    """Return how many of the ranks of a node divide a short prompt: all of them, or each computes the whole one."""
    return ranks if tokens > SHORT_STEP else 1


def chunk_of(chunk_tokens: int | None, ranks: int, name: str = "chunk_tokens") -> int:
    """Return the tokens of a prefill chunk over all ranks.

    Args:
        chunk_tokens: The requested number; None: `TOKENS_OF_RANK` per rank.
        ranks: Number of ranks that share a prompt.
        name: Name of the option, for the message.

    Raises:
        UserError: `chunk_tokens` is not a whole number above 0.
    """
    if chunk_tokens is None:
        return TOKENS_OF_RANK * ranks
    require_tokens(name, chunk_tokens, 65536)
    return chunk_tokens


def require_tokens(name: str, value: object, example: int) -> None:
    """Check a number of tokens.

    Args:
        name: Name of the option, for the message.
        value: The number.
        example: A possible number, for the message.

    Raises:
        UserError: It is not a whole number above 0, or is above `MOST`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
        raise UserError(
            f"{name} {short_text(value)}\nallowed: at least 1 token, and at most {MOST:,}\nfix: for example {example}"
        )


def usable(free: float, device: float) -> float:
    """Return the bytes of a device's free memory that inference may use.

    Args:
        free: Free bytes.
        device: All bytes of the device; a fraction of them is reserved.
    """
    return max(0.0, free - RESERVE * device)


READ_RATIO = 4.8 / 3.8
"""Peak memory bandwidth divided by that of kernels that read and write (`Hardware.memory_bandwidth`), on an H200."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InferenceWork:
    """The least computation and memory traffic of inference, for any implementation.

    Attributes:
        config: The model.
        batch: Number of sequences.
        itemsize: Bytes per element of weights and KV cache.
        is_causal: Whether attention over the prompt has a causal mask.
    """

    config: LlamaConfig
    batch: int = 1
    itemsize: int = 2
    is_causal: bool = True

    def products(self, tokens: int) -> float:
        """Return the FLOPs of products with the weights of all blocks, for prompts of `tokens` tokens each."""
        config = self.config
        return 2.0 * config.num_layers * block_matrices(config) * self.batch * tokens

    def attention(self, tokens: int) -> float:
        """Return the FLOPs of attention in all layers, for prompts of `tokens` tokens each."""
        config = self.config
        pairs = causal_pairs([tokens], config.sliding_window) if self.is_causal else float(tokens) ** 2
        return 4.0 * pairs * config.num_heads * config.head_dim * config.num_layers * self.batch

    def elementwise(self, tokens: int) -> float:
        """Return the memory traffic of norms, stream, rotary embedding, activation and cache, for such prompts."""
        config = self.config
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        each = (BLOCK_NORMS * CURRENT.norm_forward + CURRENT.stream_forward) * config.hidden_size
        each += CURRENT.rotary * (query + kv) + CURRENT.swiglu_forward * config.intermediate_size
        copied = 2 * 2 * kv  # keys and values, read and written
        return config.num_layers * self.batch * tokens * (each * self.itemsize / 2 + copied * self.itemsize)

    def prefill_bound(self, tokens: int, ranks: int, hardware: Hardware) -> float:
        """Return a lower bound of the seconds of prefill on `ranks` GPUs: the work at the rates of long kernels.

        The head does not count: it computes only one token of each prompt.
        """
        seconds = self.attention(tokens) / hardware.attention_forward + self.products(tokens) / hardware.matmul
        return (seconds + hardware.memory_seconds(self.elementwise(tokens))) / ranks

    def weight_bytes(self) -> float:
        """Return the bytes of weights that are read per token: blocks and head."""
        config = self.config
        return float(self.itemsize * (config.num_layers * block_matrices(config) + table(config)))

    def cache_bytes(self, length: int) -> float:
        """Return the bytes of keys and values that one token per sequence reads, with `length` tokens cached."""
        config = self.config
        seen = length if config.sliding_window is None else min(length, config.sliding_window)
        return 2.0 * config.num_layers * config.num_kv_heads * config.head_dim * seen * self.batch * self.itemsize

    def decode_bound(self, length: int, ranks: int, hardware: Hardware) -> float:
        """Return a lower bound of the seconds of one token per sequence: all reads at the peak memory bandwidth."""
        return (self.weight_bytes() + self.cache_bytes(length)) / ranks / read_bandwidth(hardware)


def read_bandwidth(hardware: Hardware) -> float:
    """Return the memory bandwidth of a GPU in bytes per second, for a kernel that only reads."""
    return READ_RATIO * hardware.memory_bandwidth


_READ = 0.9  # fraction of the memory bandwidth that products and attention of decoding reach: llama-3-8b on an H200
_LAYER = 1.1e-3 / 32  # seconds of the small kernels of a layer, in addition to its memory traffic: the same run
_LAYER_OF_ONE = 4.7e-4 / 32  # for one sequence, whose products are of `bmburst_ops.gemv`
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
        for name, value in (
            ("sequence-length", self.prompt),
            ("max-new-tokens", self.new_tokens),
            ("batch-size", self.batch),
        ):
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
        raise UserError(f"--nproc {gpus}\nallowed: 1 to {MOST_GPUS}\nfix: for example --nproc 2")
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
        working=memory.working(task.batch, task.length),
        available=available,
        longest=memory.longest(available, task.batch),
    )


def counts(gpus: int) -> tuple[int, ...]:
    """Return the numbers of GPUs to show: powers of two up to `gpus`, at least up to 8, and `gpus` itself."""
    powers = {1 << n for n in range(gpus.bit_length())}
    return tuple(sorted({*_FEW, *powers, gpus}))


def _first_token(task: GenerationTask, split: CacheSplit, hardware: Hardware) -> float:
    """Return the seconds of prefill and of one head. A short prompt does not wait for the host."""
    work = task.work
    head = work.itemsize * table(task.model) / split.ranks / (_READ * read_bandwidth(hardware))
    short = ShortPromptLimits.of(task.model, work.itemsize, hardware.memory, split.ranks)
    if task.batch == 1 and task.prompt <= short.most:
        return _short_prefill(task, short, hardware) + head
    return max(_prefill(task, split, hardware)) + head


def _short_prefill(task: GenerationTask, short: ShortPromptLimits, hardware: Hardware) -> float:
    """Return the seconds of a short prompt: those of one GPU, divided, and an all-gather in each layer."""
    model, work, ranks = task.model, task.work, dividing_ranks(task.prompt, short.ranks)
    attention = model.num_layers * _attention_cost(task, short.memory.split, hardware).forward.total
    products = hardware.matmul_seconds(work.products(task.prompt) / ranks, -(-task.prompt // ranks))
    elementwise = hardware.memory_seconds(work.elementwise(task.prompt))
    moved = 2.0 * model.num_kv_heads * model.head_dim * task.prompt * work.itemsize * (1 - 1 / ranks)
    gathers = hardware.collective_host + moved / hardware.collective_bandwidth if ranks > 1 else 0.0
    return (attention + elementwise) / ranks + products + model.num_layers * gathers


def _prefill(task: GenerationTask, split: CacheSplit, hardware: Hardware) -> tuple[float, float]:
    """Return the seconds of a GPU, for attention, products and elementwise operations, and those of its host."""
    model, work, gpus = task.model, task.work, split.ranks
    cost = _attention_cost(task, split, hardware)
    attention = model.num_layers * task.batch * cost.forward.total
    rows = min(TOKENS_OF_RANK, -(-task.batch * task.prompt // gpus))
    products = hardware.matmul_seconds(work.products(task.prompt) / gpus, rows)
    elementwise = hardware.memory_seconds(work.elementwise(task.prompt) / gpus)
    chunks = -(-task.batch * task.prompt // (TOKENS_OF_RANK * gpus))
    host = chunks * model.num_layers * (hardware.layer_host * _FORWARD + cost.launch)
    return attention + products + elementwise, host


def _attention_cost(task: GenerationTask, split: CacheSplit, hardware: Hardware) -> AttentionCost:
    """Return the cost of attention of a prompt in one layer, over the ranks of a split."""
    gpus = split.ranks
    alone = Candidate(
        task=Task(model=task.model, sequence=max(task.prompt, gpus), gpus=gpus, dtype=task.dtype)  # type: ignore[arg-type]
    )
    return with_attention_choice(alone, *split.strategy, hardware).attention_cost(hardware)


def _token(task: GenerationTask, split: CacheSplit, length: int, hardware: Hardware) -> float:
    """Return the seconds per token: memory reads of a rank, small kernels, and all-reduces over the ranks."""
    model, work, ranks = task.model, task.work, split.ranks
    shared = (block_matrices(model) - projections(model)) * model.num_layers + table(model)
    # Ranks of a head group that shard tokens all compute the group's queries, keys and values.
    weights = work.itemsize * (shared / ranks + model.num_layers * projections(model) / split.head_groups)
    seconds = (weights + work.cache_bytes(length) / ranks) / (_READ * read_bandwidth(hardware))
    seconds += model.num_layers * (_LAYER_OF_ONE if work.batch == 1 else _LAYER)
    if ranks > 1:
        seconds += 2 * model.num_layers * _ADD_UP + hardware.nccl_latency
    if split.token_groups > 1:
        seconds += model.num_layers * hardware.nccl_latency  # partial results are gathered
    return seconds
