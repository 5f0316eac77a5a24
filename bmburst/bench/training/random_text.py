"""A token file of random ids, so that a step costs what any text would cost, whatever the vocabulary."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bmburst.data.sources import Document
from bmburst.data.token_writer import write_token_file

_DOCUMENTS = 32
_MORE = 1.25  # tokens over those of a sequence: a part is held out


def write_random_tokens(path: Path, *, tokens: int, vocab_size: int) -> None:
    """Write a token file that has one training sequence of so many tokens, or more.

    Args:
        path: Where.
        tokens: Of a sequence.
        vocab_size: Ids are drawn evenly from all but the last, which ends a document.
    """
    each = int(tokens * _MORE) // _DOCUMENTS + 8
    documents = (Document(name=str(n), pieces=(f"document {n}",)) for n in range(_DOCUMENTS))
    write_token_file(path, documents, _Random(vocab_size, each))


class _Random:
    """A tokenizer that makes random ids of any text."""

    name = identity = "random"

    def __init__(self, vocab_size: int, each: int) -> None:
        self.vocab_size, self.eos_id = vocab_size, vocab_size - 1
        self._each, self._generator = each, np.random.default_rng(0)

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Return random ids."""
        del text
        return self._generator.integers(0, self.eos_id, self._each, np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Return random ids for each."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        """Return nothing: they stand for no text."""
        del ids
        return ""
