"""`Session`: multi-turn generation. Prompts and answers of all turns share one KV cache."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from bmburst.comm.checks import contents
from bmburst.data.tokenizer import TokenIds
from bmburst.errors import UserError
from bmburst.inference.batch import Engine, GenerationBatch
from bmburst.inference.prompts import PromptEncoder
from bmburst.inference.sampling import GenerationOptions, Sampler, SamplerRow

Ids = Sequence[int] | TokenIds


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
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise UserError(f"max_tokens {max_tokens!r}\nallowed: at least 1 token\nfix: for example 4096")
        self._batch, self._options = GenerationBatch(engine, engine.new_cache(1, max_tokens)), options
        self._tokens: list[int] = []
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
            turn = comm.decided(lambda: self._checked(ids))
        self._answer = None
        self._batch.prefill([turn], on_tokens)
        self._tokens += turn[len(turn) - len(ids) :]

    def generate(self, options: GenerationOptions | None = None, **given: Any) -> Iterator[int]:
        """Yield new tokens until one of `eos_ids`, which is yielded too, or until there are `max_new_tokens`.

        Yielded tokens are appended to the text. A caller may stop at any token, for example at a stop string.

        Args:
            options: Generation options. Default: the model's own, changed by `given`.
            given: Fields of `GenerationOptions`.

        Raises:
            UserError: No prompt was prefilled since the last answer, an option is invalid, or there is no room for
                `max_new_tokens`. The iterator raises it if the session has continued after this answer.
        """
        options = options or self._options(**given)
        batch = self._batch
        if batch.logits is None:
            raise UserError("the text ends with an answer\nfix: append a prompt first, session.prefill(ids)")
        batch.cache.require_room(0, options.max_new_tokens)
        self._answer = answer = object()
        return self._generate(options, answer)

    def _generate(self, options: GenerationOptions, answer: object) -> Iterator[int]:
        self._require_newest(answer)
        weights = self._batch.engine.weights
        row = SamplerRow(0, 0, self._tokens)
        sampler = Sampler(options, [row], weights.config.vocab_size, weights.device)
        for chosen in self._batch.decode(sampler, options.max_new_tokens):
            token = int(chosen.tokens[0])
            self._tokens.append(token)
            yield token
            if token in options.eos_ids:
                return
            self._require_newest(answer)

    def _require_newest(self, answer: object) -> None:
        if answer is not self._answer:
            raise UserError("the session has continued after this answer\nfix: call session.generate() again")

    def fork(self) -> "Session":
        """Return an independent session with a copy of the text and its cache."""
        other = copy.copy(self)
        other._batch, other._tokens = self._batch.copies(1), list(self._tokens)
        return other

    def _checked(self, ids: Ids) -> tuple[list[int], str]:
        """Return the tokens to prefill: those of the text that are not yet cached, then the given ones."""
        new = self._encoder.ids(ids, "prefill").tokens
        pending = self._tokens[self._batch.cache.lengths[0] :]
        self._batch.cache.require_room(0, len(pending) + len(new))
        return [*pending, *new.tolist()], f"prefill\ntokens {len(new)}\nids {contents(torch.tensor(new))}"
