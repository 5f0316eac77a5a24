"""`Generator`: generates answers to prompts, in batches that fit into the memory of the ranks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bmburst.amounts import bytes_text, digest, require_function
from bmburst.attention.api import resolve_group
from bmburst.blocks.config import LlamaConfig
from bmburst.blocks.dtypes import DTYPE_NAMES, dtype_of
from bmburst.checkpoint.adapter import is_adapter_directory, open_merged
from bmburst.checkpoint.files import own_tokenizer, verified, warn
from bmburst.checkpoint.hugging_face import Weights, open_weights
from bmburst.comm.checks import CheckedCommunicator, contents
from bmburst.comm.communicator import gather_objects
from bmburst.data.tokenizer import PromptTokenizer, load_tokenizer, other_files
from bmburst.errors import UserError, hub_fix, require_known
from bmburst.inference.answering import Answering, Progress, TextStream
from bmburst.inference.prompts import Answer, Messages, Prompt, PromptEncoder, require_list
from bmburst.inference.sampling import GenerationOptions, generation_options, given_options, names_ends
from bmburst.inference.session import MOST_SEQUENCES, Engine, Ids, Session
from bmburst.inference.weights import GatheredWeights, ModelWeights, ResidentWeights
from bmburst.memory import available_bytes
from bmburst.mesh import Mesh
from bmburst.plan.inference import RESERVE, InferenceMemory, chunk_of, require_tokens, usable
from bmburst.schedule.cache_split import CacheSplit
from bmburst_ops.flash import NAMES

if TYPE_CHECKING:
    from bmburst.blocks.model import Llama

DTYPES = ("auto", *DTYPE_NAMES)


@dataclass(frozen=True, eq=False, slots=True)
class Source:
    """An opened model directory.

    Attributes:
        directory: Directory of the weights.
        defaults: Directory of the generation_config.json that gives the defaults of generation: that of the adapter,
            if it has one that names the tokens that end an answer.
        weights: The weights, read on demand.
        tokenizer: The model's tokenizer, or the one given in its place; None if there is none.
    """

    directory: Path
    defaults: Path
    weights: Weights
    tokenizer: PromptTokenizer | None

    @classmethod
    def open(cls, given: Path, adapter: Path | None = None, tokenizer: str | None = None) -> "Source":
        """Open the directory of a Hugging Face or ModelCenter model, a checkpoint of bmburst, or a run folder.

        Args:
            given: The directory. An adapter's directory opens the base model that it names, with the adapter merged.
            adapter: Directory, checkpoint or run folder of a LoRA adapter, merged into the weights when they are read.
            tokenizer: Name of a tokenizer in place of the model's, see `load_tokenizer`.

        Raises:
            UserError: The directory does not exist, contains no complete checkpoint or model, or its family is unknown;
                or there is no such tokenizer.
        """
        if given.is_file():
            raise UserError(
                f"{given} is a file, no directory\nfix: give the directory of a model, a checkpoint or a run"
            )
        if not given.is_dir():
            raise UserError(
                f"no directory {given}\n"
                f"fix: give a directory of a Hugging Face, ModelCenter or bmburst model{hub_fix(given)}"
            )
        directory = verified(given, warn)
        places = [directory]
        if adapter is not None:
            places = [verified(adapter, warn), directory]
            weights = open_merged(places[0], directory, "--checkpoint DIR")
        elif is_adapter_directory(directory):
            weights = open_merged(directory, None, "--checkpoint DIR --adapter ADAPTER")
            places = [directory, weights.directory]
        else:
            weights = open_weights(directory)
        name = own_tokenizer(*places) if tokenizer is None else tokenizer
        if tokenizer is None and name is not None and other_files(Path(name)):
            name = None  # token ids need no tokenizer
        defaults = next(filter(names_ends, places[:-1]), places[-1])
        return cls(places[-1], defaults, weights, None if name is None else load_tokenizer(name))

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of inference; for "auto" the stored dtype of the first query projection.

        Raises:
            UserError: The name is unknown.
        """
        require_known("dtype", name, DTYPES)
        if name != "auto":
            return dtype_of(name)
        first = next(name for name in self.weights.places if name.endswith("q_proj.weight"))
        return self.weights.dtype_of(first)

    def nbytes(self, dtype: str) -> int:
        """Return the bytes of the weights in the dtype of inference."""
        return self.weights.config.num_parameters * self.dtype(dtype).itemsize


class Generator:
    """Generates answers to prompts on the ranks of a group, each of which holds a shard of the KV cache.

    Every rank creates it with the same arguments and calls the same methods. All ranks return the same answers.

    Example:
        >>> generator = bmburst.Generator("path/to/model")
        >>> (answer,) = generator.generate(["Once upon a time"], max_new_tokens=64)

    Args:
        model: Directory of a Hugging Face model of `bmburst.blocks.families` or of a ModelCenter LLaMA, a checkpoint
            of bmburst, or a run folder; or a `Llama` in training, whose weights are then gathered for every token.
        mesh: Each prompt is sharded over its sequence group. Default: that of the current mesh, else all ranks of
            BMTrain or torch.distributed, else this process alone.
        cache: How the KV cache is sharded: by "heads" or by "tokens"; "auto": by heads if the ranks divide the heads.
        dtype: "float32", "bfloat16", "float16", or "auto": the stored dtype of the weights.
        chunk_tokens: Chunk size of prefill in tokens, over all ranks. Default: 64K per rank.
        kernel: Attention kernel of prefill; see `burst_attention`.
        on_bytes: Called with the number of bytes of weights read since the last call.

    Raises:
        UserError: There is no such model, an argument has a wrong type or an unknown name, ranks have different
            arguments, the cache cannot be sharded this way, or the weights do not fit in memory.
    """

    def __init__(
        self,
        model: "str | Path | Source | Llama",
        *,
        mesh: Mesh | None = None,
        cache: str = "auto",
        dtype: str = "auto",
        chunk_tokens: int | None = None,
        kernel: str = "auto",
        on_bytes: Callable[[int], object] = lambda _: None,
    ) -> None:
        if mesh is not None and not isinstance(mesh, Mesh):
            raise UserError(
                f"mesh must be a bmburst.Mesh or None, got {type(mesh).__name__}\n"
                "fix: bmburst.Mesh.over_process_group(), after init_process_group"
            )
        comm = resolve_group(None) if mesh is None else mesh.sequence
        with comm.checking():  # before weights are read and gathered
            model = comm.decided(partial(_opened, model, comm, cache, dtype, chunk_tokens, kernel, on_bytes))
        self._defaults: Path | None = None
        self.tokenizer: PromptTokenizer | None = None
        weights: ModelWeights
        if isinstance(model, Source):
            self._defaults, self.tokenizer = model.defaults, model.tokenizer
            self.memory, self._available = memory_beside_weights(model, comm, cache, dtype, chunk_tokens)
            weights = ResidentWeights.read(model.weights, model.dtype(dtype), device_of_rank(comm), on_bytes)
        else:
            weights = GatheredWeights(model)
            self.memory = inference_memory(weights.config, comm, cache, weights.dtype, chunk_tokens)
            self._available = available_memory(comm, weights.device) + self.memory.weights
        self.config = weights.config
        self._engine = Engine.over(weights, comm, cache, chunk_tokens, kernel)

    def options(self, **given: Any) -> GenerationOptions:
        """Return generation options: the given ones, and defaults from the model's generation_config.json.

        Raises:
            UserError: An option is unknown or out of range.
        """
        return generation_options(self._defaults, **given)

    def why_too_long(self, prompt: int, new_tokens: int) -> str | None:
        """Return why a prompt and answer of these lengths (tokens) do not fit in memory, or None. Same on all ranks.

        Raises:
            UserError: A length is not a whole number above 0.
        """
        require_tokens("prompt", prompt, 4096)
        require_tokens("new_tokens", new_tokens, 64)
        return too_long(self.memory, self._available, prompt + new_tokens, prompt)

    def session(self, max_tokens: int) -> Session:
        """Return an empty session with a KV cache for `max_tokens` tokens of prompts and answers.

        Raises:
            UserError: The cache does not fit in memory (the message contains the maximum length), or ranks have
                different `max_tokens`.
        """

        def decide() -> tuple[None, str]:
            require_tokens("max_tokens", max_tokens, 4096)
            if problem := too_long(self.memory, self._available, max_tokens):
                raise UserError(problem)
            return None, f"session\nmax_tokens {max_tokens}"

        with self._engine.comm.checking():
            self._engine.comm.decided(decide)
        return Session(self._engine, max_tokens, self.options)

    def encoder(self, *, chat: bool = False) -> PromptEncoder:
        """Return an encoder of text, token ids and messages to prompts of this model; `chat`: see `PromptEncoder`."""
        return PromptEncoder(self.tokenizer, self.config.vocab_size, chat=chat)

    def generate(
        self,
        prompts: Sequence["str | Ids | Messages | Prompt"],
        options: GenerationOptions | None = None,
        *,
        chat: bool = False,
        progress: Progress | None = None,
        **given: Any,
    ) -> list[Answer]:
        """Return an answer to each prompt, or `num_samples` of them, in order.

        Prompts can have different lengths; batches are chosen to fit in memory. Answers do not depend on the other
        prompts: greedy answers are equal up to rounding, and each prompt has its own random numbers.

        Args:
            prompts: Texts, token ids or messages; the same on every rank.
            options: Generation options. Default: `options(**given)`. Give either these or `given`.
            chat: Whether a text is a user message to which the chat template is applied.
            progress: Callbacks during generation.
            given: Fields of `GenerationOptions`.

        Returns:
            The answers. If a prompt is too long for the memory, or its logits are NaN, `finish` is "refused" and
            `reason` is set.

        Raises:
            UserError: There is no prompt, a prompt is empty or has an invalid token, ranks have different prompts, an
                option is invalid, the only prompt is too long, or the logits of all prompts of the first batch are NaN.
        """
        comm = self._engine.comm
        with comm.checking():
            read, options, progress = comm.decided(partial(self._read, prompts, options, given, chat, progress))
        answers: dict[int, list[Answer]] = {}
        fitting = []
        for index, prompt in enumerate(read):
            length = len(prompt) + options.max_new_tokens
            problem = too_long(self.memory, self._available, length, len(prompt), options.num_samples)
            if problem and len(read) == 1:
                raise UserError(problem)
            if problem:
                answers[index] = [Answer.refused(prompt, problem)]
                progress.answer(index, answers[index][0])
            else:
                fitting.append(index)
        for group in self._groups(read, fitting, options):
            batch = Answering(self._engine, self.tokenizer, {i: read[i] for i in group}, options, progress)
            answers |= batch.run(is_first=group[0] == fitting[0])
        return [answer for index in range(len(read)) for answer in answers[index]]

    def _read(
        self,
        prompts: Sequence["str | Ids | Messages | Prompt"],
        options: GenerationOptions | None,
        given: Mapping[str, Any],
        chat: bool,
        progress: Progress | None,
    ) -> tuple[tuple[list[Prompt], GenerationOptions, Progress], str]:
        options = given_options(options, given, self.options)
        if not isinstance(progress, Progress | None):
            raise UserError(
                f"progress must be a Progress, got {type(progress).__name__}\n"
                "fix: bmburst.inference.answering.Progress(text=...), or leave it out"
            )
        require_list(prompts)
        TextStream(self.tokenizer, options.stop)  # raises if there are stop strings but no tokenizer
        encoder = self.encoder(chat=chat)
        read = [
            each if isinstance(each, Prompt) else encoder.encode(each, f"prompt {index + 1}")
            for index, each in enumerate(prompts)
        ]
        return (read, options, progress or Progress()), f"generate\nprompts {_checksum(read)}\noptions {options}"

    def _groups(
        self, prompts: Sequence[Prompt], fitting: Sequence[int], options: GenerationOptions
    ) -> Iterator[list[int]]:
        """Yield the prompts of each batch: as many consecutive prompts as fit."""
        group: list[int] = []
        for index in fitting:
            longest = max(len(prompts[i]) for i in [*group, index]) + options.max_new_tokens
            rows = (len(group) + 1) * options.num_samples
            is_full = rows > MOST_SEQUENCES or self.memory.total(rows, longest) > self._available
            if group and (is_full or options.num_samples > 1):
                yield group
                group = []
            group.append(index)
        if group:
            yield group


def _opened(
    model: Any,
    comm: CheckedCommunicator,
    cache: str,
    dtype: str,
    chunk_tokens: int | None,
    kernel: str,
    on_bytes: object,
) -> "tuple[Source | Llama, str]":
    """Check the arguments of `Generator`; return the opened model, and what must be equal on every rank."""
    require_function("on_bytes", on_bytes)
    require_known("kernel", kernel, NAMES)
    if isinstance(model, str | Path):
        model = Source.open(Path(model))
    config = model.weights.config if isinstance(model, Source) else getattr(model, "config", None)
    if not isinstance(config, LlamaConfig):
        raise UserError(
            f"a {type(model).__name__} is no model for Generator\nallowed: a model's directory, or a bmburst Llama\n"
            "fix: save the model (save_pretrained), and give the directory"
        )
    kind = model.dtype(dtype) if isinstance(model, Source) else torch.float32  # of another model, any will do here
    inference_memory(config, comm, cache, kind, chunk_tokens)  # raises for cache and chunk_tokens
    told = f"Generator\n{config}\ncache {cache}\ndtype {kind}\nchunk_tokens {chunk_tokens}\nkernel {kernel}"
    if comm.size > 1 and isinstance(model, Source):  # hosts may have other files under the same name
        told += f"\nweights {digest(np.array(model.weights.sample()))}"
    return model, told


def device_of_rank(comm: CheckedCommunicator) -> torch.device:
    """Return the device of a rank of a group. A single rank uses the current GPU if there is one."""
    if comm.size > 1 or not torch.cuda.is_available():
        return comm.device
    return torch.device("cuda", torch.cuda.current_device())


def inference_memory(
    config: LlamaConfig, comm: CheckedCommunicator, cache: str, dtype: torch.dtype, chunk_tokens: int | None
) -> InferenceMemory:
    """Return the memory requirements of a model on this rank of a group.

    Raises:
        UserError: The cache cannot be sharded this way, or a chunk has no token.
    """
    return InferenceMemory(
        config=config,
        split=CacheSplit.choose(cache, comm.size, comm.rank, config.num_heads, config.num_kv_heads),
        itemsize=dtype.itemsize,
        chunk_tokens=chunk_of(chunk_tokens, comm.size),
    )


def available_memory(comm: CheckedCommunicator, device: torch.device) -> float:
    """Return the bytes available on the device of every rank of a group (their minimum). Blocks the host."""
    if device.type == "cuda":
        free, whole = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        mine = usable(free + kept, whole)
    else:
        mine = usable((available_bytes() or 2**40) / comm.size, 0)
    return float(min(gather_objects(comm, mine)))


def too_long(
    memory: InferenceMemory, available: float, length: int, prompt: int | None = None, answers: int = 1
) -> str | None:
    """Return why a sequence, or several answers to one prompt, do not fit in memory, or None.

    Args:
        memory: Memory requirements of the model.
        available: Available bytes of a rank.
        length: Tokens of prompt and answer.
        prompt: Tokens of the prompt, for the message.
        answers: Answers to the prompt that are computed together.
    """
    if memory.total(1, length) <= available:
        if answers == 1 or memory.answers(answers, length) <= available:
            return None
        return (
            f"{answers:,} answers to a prompt, of {length:,} tokens each with the prompt, need "
            f"{bytes_text(memory.answers(answers, length))} of a rank's memory, {bytes_text(available)} are free\n"
            f"allowed: at most {memory.most_answers(available, length):,} answers\n"
            "fix: fewer answers (--num-samples), fewer new tokens, or more ranks (--nproc)"
        )
    asked = f"a prompt of {prompt:,} tokens and {length - prompt:,} new ones" if prompt else f"{length:,} tokens"
    return (
        f"{asked} need {bytes_text(memory.total(1, length))} of a rank's memory, {bytes_text(available)} are free "
        f"({RESERVE:.0%} of a GPU are kept in reserve)\n"
        f"allowed: at most {memory.longest(available):,} tokens, prompt and answer\n"
        "fix: a shorter prompt, fewer new tokens, or more ranks (--nproc)"
    )


def memory_beside_weights(
    source: Source, comm: CheckedCommunicator, cache: str, dtype: str, chunk_tokens: int | None
) -> tuple[InferenceMemory, float]:
    """Return the memory requirements of a model and the available bytes of a rank, before weights are read.

    Every rank of the group must call it. The other arguments are those of `Generator`.

    Raises:
        UserError: Not even one token fits beside the weights, or see `inference_memory`.
    """
    memory = inference_memory(source.weights.config, comm, cache, source.dtype(dtype), chunk_tokens)
    available = available_memory(comm, device_of_rank(comm))
    if memory.total(1, 1) > available:
        raise UserError(
            f"the weights take {bytes_text(memory.weights)} of each rank's memory, {bytes_text(available)} are free "
            f"({RESERVE:.0%} of a GPU are kept in reserve)\n"
            "allowed: weights that fit a rank with some cache\nfix: --dtype bfloat16, or a device with more memory"
        )
    return memory, available


def _checksum(prompts: Sequence[Prompt]) -> str:
    lengths = np.array([len(prompt) for prompt in prompts], np.int64)
    return f"{len(prompts)} {contents(torch.from_numpy(np.concatenate([lengths, *(each.tokens for each in prompts)])))}"
