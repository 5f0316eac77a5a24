"""Sessions: one text that grows by turns, its prompts prefilled and its answers decoded from one KV cache."""

import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from bmburst.errors import UserError
from bmburst.inference.batch import Batch, Engine
from bmburst.inference.sampling import GenerationOptions, Sampler


class Session:
    """One text that grows: prompts by `prefill`, answers by `generate`, in turns. Every rank calls the same methods.

    Args:
        engine: The model.
        max_tokens: Tokens that the session has room for, prompts and answers.
    """

    def __init__(self, engine: Engine, max_tokens: int) -> None:
        self._start(Batch(engine, engine.new_cache(1, max_tokens)), ())

    def _start(self, batch: Batch, pending: tuple[int, ...]) -> None:
        self._batch, self._pending = batch, pending

    @property
    def length(self) -> int:
        """Tokens of the text so far."""
        return self._batch.cache.lengths[0] + len(self._pending)

    @property
    def max_tokens(self) -> int:
        """Tokens that the session has room for."""
        return self._batch.cache.length

    def prefill(self, ids: Sequence[int], on_tokens: Callable[[int], object] = lambda _: None) -> None:
        """Append tokens: the first prompt, or a further turn behind what was generated.

        Args:
            ids: Token ids, at least one.
            on_tokens: Called with the number of tokens of each chunk that was computed.

        Raises:
            UserError: There is no token, one is out of range, or the session has no room.
        """
        self._batch.engine.comm.decided(lambda: (None, f"prefill\ntokens {self._checked(ids)}"))
        self._batch.prefill([[*self._pending, *ids]], on_tokens)
        self._pending = ()

    def generate(self, options: GenerationOptions) -> Iterator[int]:
        """Yield the tokens that follow, until one of `options.eos_ids`, which is yielded too, or `max_new_tokens`.

        The text grows by what was yielded. A caller may stop early.

        Raises:
            UserError: Nothing was prefilled since the last answer, or the session has no room for `max_new_tokens`.
        """
        batch, cache = self._batch, self._batch.cache
        if batch.logits is None:
            raise UserError("nothing to go on from: the text has no new tokens\nfix: session.prefill(ids) first")
        cache.require_room(0, options.max_new_tokens)
        config = batch.engine.weights.config
        sampler = Sampler(options, [(0, 0)], config.vocab_size, batch.engine.weights.device)
        before = cache.lengths[0]
        count = 0
        for tokens in batch.decode(sampler, options.max_new_tokens):
            token = int(tokens[0])
            count += 1
            self._pending = (token,) if cache.lengths[0] - before < count else ()
            yield token
            if token in options.eos_ids:
                return

    def fork(self) -> "Session":
        """Return a session with a copy of this text, which goes on by itself."""
        other = object.__new__(Session)
        other._start(self._batch.copies(1), self._pending)
        return other

    def _checked(self, ids: Sequence[int]) -> str:
        from bmburst.inference.prompts import require_ids

        require_ids(ids, self._batch.engine.weights.config.vocab_size)
        return " ".join(map(str, ids[:8])) + f" ... {hash(tuple(ids))}"
