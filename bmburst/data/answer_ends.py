"""The tokens that end the answers of records: a model that learns them stops with them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bmburst.data.token_file import TokenFile
from bmburst.data.tokenizer import PromptTokenizer

_MOST = 1000  # documents that are looked at, evenly spread


@dataclass(frozen=True, slots=True)
class AnswerEnds:
    """How the answers of records end.

    Attributes:
        tokens: The special tokens that end answers; empty if fewer than half of the answers end with one. Tokens that
            text follows in other answers, such as `</think>`, would cut these short: they count only if there are no
            others.
        open: Whether some answers end without a special token.
    """

    tokens: frozenset[int] = frozenset()
    open: bool = False


def answer_ends(file: TokenFile, tokenizer: PromptTokenizer) -> AnswerEnds:
    """Return how the last answers of a file's records end; text has no answers.

    White space that is learned after the token does not count, nor does a record that learns nothing else.

    Args:
        file: The token file. Of many documents, a thousand are looked at.
        tokenizer: Its tokenizer.
    """
    ends: Counter[int] = Counter()
    inside: set[int] = set()
    opened = 0
    if file.loss_mask is None:
        return AnswerEnds()
    for document in range(0, file.document_count, -(-file.document_count // _MOST)):
        begin, end = (int(each) for each in file.document_offsets[document : document + 2])
        learned = np.flatnonzero(file.answers_in(range(begin, end))) + begin
        tokens = file.tokens[learned]
        inside.update(_inside(learned, tokens, tokenizer))
        backward = map(int, reversed(tokens))
        last = next(
            (token for token in backward if token in tokenizer.special_ids or _has_text(token, tokenizer)), None
        )
        if last in tokenizer.special_ids:
            ends[last] += 1
        elif last is not None:
            opened += 1
    found = frozenset(ends) - inside or frozenset(ends)
    return AnswerEnds(found if ends.total() >= opened else frozenset(), opened > 0)


def _inside(places: NDArray[Any], tokens: NDArray[Any], tokenizer: PromptTokenizer) -> Iterator[int]:
    """Yield the special tokens that text follows in the same answer, of learned tokens and their places."""
    is_special = np.isin(tokens, list(tokenizer.special_ids))
    for at in np.flatnonzero(is_special):
        for after in range(at + 1, len(tokens)):
            if places[after] != places[after - 1] + 1 or is_special[after]:  # another answer
                break
            if _has_text(int(tokens[after]), tokenizer):
                yield int(tokens[at])
                break


def _has_text(token: int, tokenizer: PromptTokenizer) -> bool:
    return bool(tokenizer.decode_all([token]).strip())
