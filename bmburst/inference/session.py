"""Runs a model on the sequences of one KV cache: prefill, then decoding, on GPUs by CUDA graphs.

`GenerationBatch` is a batch of sequences, `Session` one text that grows in turns.
"""

import copy
import dataclasses
import hashlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from bmburst.amounts import require_function
from bmburst.comm.checks import CheckedCommunicator, contents
from bmburst.comm.transports import AddUp, small_sums
from bmburst.data.tokenizer import TokenIds
from bmburst.errors import UserError, not_a_number
from bmburst.inference.cache import Decoder, KVCache
from bmburst.inference.prefill import Prefill
from bmburst.inference.prompts import PromptEncoder
from bmburst.inference.replay import Replay, result_of
from bmburst.inference.sampling import GenerationOptions, Sampled, Sampler, SamplerRow, given_options
from bmburst.inference.weights import ModelWeights
from bmburst.plan.inference import chunk_of, require_tokens
from bmburst.schedule.cache_split import CacheSplit

MOST_SEQUENCES = 64
"""Maximum number of sequences of a batch."""
Ids = Sequence[int] | TokenIds


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Engine:
    """A model that is ready to run, on one rank.

    Attributes:
        weights: The model.
        comm: The ranks that share each sequence.
        split: How the cache is sharded over them.
        chunk_tokens: Tokens that prefill computes at once, over all ranks.
        add_up: See `Decoder`.
        prefill: A `Prefill`, or what is called like one.
    """

    weights: ModelWeights
    comm: CheckedCommunicator
    split: CacheSplit
    chunk_tokens: int
    add_up: AddUp
    prefill: Callable[..., Tensor]

    @classmethod
    def over(
        cls,
        weights: ModelWeights,
        comm: CheckedCommunicator,
        cache: str = "auto",
        chunk_tokens: int | None = None,
        kernel: str = "auto",
    ) -> "Engine":
        """Return the engine of a model over a group of ranks.

        Args:
            weights: The model.
            comm: The ranks that share each sequence; each has the whole weights.
            cache: One of `bmburst.schedule.cache_split.CACHES`.
            chunk_tokens: See the attributes. Default: 64K per rank.
            kernel: Attention kernel of prefill; see `burst_attention`.

        Raises:
            UserError: The cache cannot be sharded this way, or a chunk has no token.
        """
        config = weights.config
        split = CacheSplit.choose(cache, comm.size, comm.rank, config.num_heads, config.num_kv_heads)
        return cls(
            weights=weights,
            comm=comm,
            split=split,
            chunk_tokens=chunk_of(chunk_tokens, comm.size),
            add_up=small_sums(comm, MOST_SEQUENCES * config.hidden_size, weights.dtype),
            prefill=Prefill(weights, comm, kernel),
        )

    def new_cache(self, sequences: int, length: int) -> KVCache:
        """Return an empty cache on this rank's device."""
        weights = self.weights
        return KVCache(weights.config, self.split, sequences, length, weights.dtype, weights.device)


class GenerationBatch:
    """Sequences of one cache that are prefilled and decoded together. Every rank calls the same methods.

    Args:
        engine: The model.
        cache: The cache.
    """

    def __init__(self, engine: Engine, cache: KVCache) -> None:
        self.engine, self.cache = engine, cache
        self._decoder = Decoder(engine.weights, engine.comm, cache, engine.add_up)
        self._steps = _Steps(self._decoder)
        self.logits: Tensor | None = None
        """Next logits, `[sequences, vocab_size]`, fp32 or wider; None before `prefill` and after `decode`."""

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]], on_tokens: Callable[[int], object] = lambda _: None) -> None:
        """Append tokens to every sequence.

        Args:
            prompts: At least one token for each sequence.
            on_tokens: See `Prefill`.

        Raises:
            UserError: The cache has no room for them; raised before any computation.
        """
        for sequence, tokens in enumerate(prompts):
            self.cache.require_room(sequence, len(tokens))
        prompts, logits = self._aligned(prompts)
        if any(len(tokens) for tokens in prompts):
            chunk = self.engine.chunk_tokens
            hidden = self.engine.prefill(self.cache, dict(enumerate(prompts)), chunk, on_tokens)
            logits = result_of(self._decoder.logits(hidden))
        self.logits = logits  # only now: an exception leaves none behind a part of a prompt

    def _aligned(self, prompts: Sequence[Sequence[int]]) -> tuple[Sequence[Sequence[int]], Tensor | None]:
        """Decode the first tokens until the length is a multiple of the token groups, where a prefill can start.

        Returns:
            The tokens that are left, and the logits behind the last decoded one; None: there was nothing to decode.
        """
        groups, logits = self.engine.split.token_groups, None
        if not any(length % groups for length in self.cache.lengths):
            return prompts, logits
        if len(prompts) > 1:
            raise UserError(
                "with a cache split by tokens, several sequences take one prompt each\nfix: one session per sequence"
            )
        (tokens,) = prompts
        early, whole = -self.cache.lengths[0] % groups, self.cache.lengths[0] + len(tokens)
        for token in tokens[:early]:
            logits = self._decoder.step(torch.tensor([token], device=self.engine.weights.device), whole)
        return [tokens[early:]], logits

    def not_numbers(self) -> list[int]:
        """Return the sequences with a NaN in the logits of `prefill`; waits for the device. All ranks return the same.

        Their error is `nan_error`.
        """
        return [] if self.logits is None else self.logits.isnan().any(1).nonzero()[:, 0].tolist()

    @property
    def nan_error(self) -> UserError:
        """The error for `not_numbers`."""
        return not_a_number("the model's logits are", self.engine.weights.dtype)

    def copies(self, count: int) -> "GenerationBatch":
        """Return a batch of `count` copies of the only sequence of this batch."""
        other = GenerationBatch(self.engine, self.cache.copied(0, count))
        other.logits = None if self.logits is None else self.logits.repeat(count, 1)
        return other

    @torch.no_grad()
    def decode(self, chooser: "Chooser", steps: int) -> Iterator[Sampled]:
        """Yield the chosen tokens of all sequences, on the host, at most `steps` times.

        The first tokens are yielded before the next step is launched, since launching it can take the host tens of
        milliseconds. From then on the device is one step ahead of the host: while the caller uses a token, the next one
        is computed. A caller may stop at any token. A yielded token is in the cache, unless it is the first or the
        last.

        Args:
            chooser: Chooses tokens.
            steps: Maximum number of tokens per sequence, at least 1.
        """
        assert self.logits is not None, "prefill comes first"
        chosen = chooser.step(self.logits)
        self.logits = None
        yield _to_host(chosen)()
        if steps > 1:
            chosen = chooser.step(self._steps.advance(chosen.tokens))
        for step in range(2, steps + 1):
            read = _to_host(chosen)
            if step < steps:
                chosen = chooser.step(self._steps.advance(chosen.tokens))
            yield read()


class Chooser(Protocol):
    """Interface for choosing tokens, implemented by `Sampler`."""

    def step(self, logits: Tensor) -> Sampled:
        """Choose the next token of each row of `[rows, vocab_size]`."""
        ...


def _to_host(chosen: Sampled) -> Callable[[], Sampled]:
    """Start to copy the chosen tokens to the host; return a function that waits for the copy and returns them."""
    if not chosen.tokens.is_cuda:
        return lambda: chosen
    copies = {}
    for part in dataclasses.fields(chosen):
        tensor = getattr(chosen, part.name)
        if tensor is not None:
            copies[part.name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copies[part.name].copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> Sampled:
        copied.synchronize()
        return Sampled(**copies)

    return read


class _Steps:
    """Decoding steps. On GPUs they are CUDA graphs, which last as long as the cache: further turns replay them."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._tokens: Tensor | None = None
        self._replay: Replay | None = None

    def advance(self, tokens: Tensor) -> Tensor:
        """Append tokens and return the next logits, in a tensor that the next call may overwrite."""
        if not self._decoder.is_capturable:
            return self._decoder.step(tokens)
        self._decoder.before_step()
        if self._tokens is None or self._replay is None:
            self._tokens = tokens.clone()
            self._replay = Replay(partial(self._decoder.compute, self._tokens))
        else:
            self._tokens.copy_(tokens)
        logits = self._replay()
        self._decoder.after_step()
        return logits


class Session:
    """One text that grows in turns: `prefill` appends prompts, `generate` answers. Every rank calls the same methods.

    Example:
        >>> session = generator.session(max_tokens=4096)
        >>> session.prefill(prompt_ids)
        >>> answer = list(session.generate(max_new_tokens=64))
        >>> session.prefill(next_prompt_ids)

    Args:
        engine: The model.
        max_tokens: Maximum tokens of all prompts and answers. The cache is allocated at once.
        options: Returns `GenerationOptions` for the keyword arguments of `generate`.
    """

    def __init__(self, engine: Engine, max_tokens: int, options: Callable[..., GenerationOptions]) -> None:
        require_tokens("max_tokens", max_tokens, 4096)
        self._batch, self._options = GenerationBatch(engine, engine.new_cache(1, max_tokens)), options
        self._tokens: list[int] = []
        self._digest = hashlib.blake2b(digest_size=8)  # of the tokens; comparing these would take longer at each turn
        self._answer: object = None  # the latest; older iterators raise, since their tokens would be appended after it
        self._encoder = PromptEncoder(None, engine.weights.config.vocab_size)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The text so far: prompts and answers."""
        return tuple(self._tokens)

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of all prompts and answers."""
        return self._batch.cache.length

    def prefill(self, ids: Ids, on_tokens: Callable[[int], object] = lambda _: None) -> None:
        """Append tokens: the first prompt, or a further turn after an answer.

        Args:
            ids: Token ids, at least one, the same on every rank.
            on_tokens: Called with the number of tokens of each computed chunk.

        Raises:
            UserError: There is no token, a token is out of range, ranks have different tokens, or there is no room.
        """
        comm = self._batch.engine.comm
        with comm.checking():
            turn = comm.decided(lambda: self._checked(ids, on_tokens))
        self._answer = self._batch.logits = None
        self._batch.prefill([turn], on_tokens)
        self._append(turn[len(turn) - len(ids) :])

    def generate(self, options: GenerationOptions | None = None, **given: Any) -> Iterator[int]:
        """Yield new tokens until one of `eos_ids`, which is yielded too, or until there are `max_new_tokens`.

        Yielded tokens are appended to the text. A caller may stop at any token, for example at a stop string; those of
        the model's generation_config.json are not looked for.

        Args:
            options: Generation options. Default: the model's own, changed by `given`. Give either these or `given`.
            given: Fields of `GenerationOptions`, except `stop`, `num_samples` and `logprobs`.

        Raises:
            UserError: No prompt was prefilled since the last answer, an option is invalid, ranks have different options
                or texts, or there is no room for `max_new_tokens`. The iterator raises it if the session has continued
                after this answer, or if the logits are NaN.
        """
        comm = self._batch.engine.comm
        with comm.checking():
            options = comm.decided(lambda: self._decided(options, given))
        self._answer = answer = object()
        return self._generate(options, answer)

    def _decided(self, options: GenerationOptions | None, given: Mapping[str, Any]) -> tuple[GenerationOptions, str]:
        options = given_options(options, given, self._options)
        if options.num_samples > 1 or options.logprobs is not None or "stop" in given:
            name = "stop" if "stop" in given else "num_samples" if options.num_samples > 1 else "logprobs"
            raise UserError(
                f"a session yields the tokens of one answer, without {name}\n"
                f"allowed: the other options\nfix: leave {name} out, or Generator.generate"
            )
        if self._batch.logits is None:
            raise UserError("the text ends with an answer\nfix: append a prompt first, session.prefill(ids)")
        self._batch.cache.require_room(0, options.max_new_tokens)
        return options, f"session.generate\noptions {options}\ntext {self._digest.hexdigest()}"

    def _generate(self, options: GenerationOptions, answer: object) -> Iterator[int]:
        self._require_newest(answer)
        if self._batch.not_numbers():
            raise self._batch.nan_error
        weights = self._batch.engine.weights
        row = SamplerRow(0, 0, self._tokens)
        sampler = Sampler(options, [row], weights.config.vocab_size, weights.device)
        for chosen in self._batch.decode(sampler, options.max_new_tokens):
            token = int(chosen.tokens[0])
            self._append([token])
            yield token
            if token in options.eos_ids:
                return
            self._require_newest(answer)

    def _append(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens
        self._digest.update(array("q", tokens).tobytes())

    def _require_newest(self, answer: object) -> None:
        if answer is not self._answer:
            raise UserError("the session has continued after this answer\nfix: call session.generate() again")

    def keep(self, tokens: int) -> int:
        """Cut the text to its first tokens, whose cache is kept, and return their number: at most `tokens`.

        It is less than `tokens` if the cache is split by tokens (a prompt then starts at a multiple of the groups), and
        0 with dynamic rotary scaling, where cached keys depend on the length of the whole text. A session that an
        exception has interrupted can be used again after this call.

        Args:
            tokens: From 0 to the number of tokens of the text, the same on every rank.

        Raises:
            UserError: It is outside of these bounds, or ranks have different numbers.
        """
        engine, cache = self._batch.engine, self._batch.cache

        def decide() -> tuple[int, str]:
            if isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 <= tokens <= len(self._tokens):
                raise UserError(
                    f"tokens to keep: {tokens!r}\nallowed: 0 to {len(self._tokens)}, the tokens of the text\n"
                    "fix: session.keep(0) to start anew"
                )
            return tokens, f"session.keep\ntokens {tokens}"

        with engine.comm.checking():
            kept = min(engine.comm.decided(decide), cache.lengths[0])
        scaling = engine.weights.config.rope_scaling
        kept -= kept % engine.split.token_groups
        kept = 0 if scaling is not None and scaling.kind == "dynamic" else kept
        self._answer = self._batch.logits = None
        cache.cut(0, kept)
        text, self._tokens, self._digest = self._tokens[:kept], [], hashlib.blake2b(digest_size=8)
        self._append(text)
        return kept

    def fork(self) -> "Session":
        """Return an independent session with a copy of the text and its cache."""
        other = copy.copy(self)
        other._batch, other._tokens, other._digest = self._batch.copies(1), list(self._tokens), self._digest.copy()
        return other

    def _checked(self, ids: Ids, on_tokens: object) -> tuple[list[int], str]:
        """Return the tokens to prefill: those of the text that are not yet cached, then the given ones."""
        require_function("on_tokens", on_tokens)
        if self._batch.cache.lengths[0] > len(self._tokens):
            raise UserError(
                "an exception has interrupted this session, and its cache holds tokens that are not in its text\n"
                "fix: session.keep(0), then prefill the whole text again"
            )
        new = self._encoder.ids(ids, "prefill").tokens
        pending = self._tokens[self._batch.cache.lengths[0] :]
        self._batch.cache.require_room(0, len(pending) + len(new))
        return [*pending, *new.tolist()], f"prefill\ntokens {len(new)}\nids {contents(torch.tensor(new))}"
