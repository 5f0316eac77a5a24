"""The tokens that end the answers of records: a model that learns them stops with them."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from bmburst.data.token_file import TokenFile
from bmburst.data.tokenizer import PromptTokenizer

_MOST = 1000  # documents that are looked at, evenly spread


@dataclass(frozen=True, slots=True)
class AnswerEnds:
    """How the answers of records end.

    Attributes:
        tokens: The special tokens that end answers; empty if fewer than half of the answers end with one. A special
            token that ends few answers may belong to their text, as `</think>` does, and would cut others short.
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
    opened = 0
    if file.loss_mask is None:
        return AnswerEnds()
    for document in range(0, file.document_count, -(-file.document_count // _MOST)):
        begin, end = (int(each) for each in file.document_offsets[document : document + 2])
        learned = np.flatnonzero(file.answers_in(range(begin, end)))[::-1] + begin
        tokens = (int(file.tokens[at]) for at in learned)
        last = next((token for token in tokens if token in tokenizer.special_ids or _has_text(token, tokenizer)), None)
        if last in tokenizer.special_ids:
            ends[last] += 1
        elif last is not None:
            opened += 1
    return AnswerEnds(frozenset(ends) if ends.total() >= opened else frozenset(), opened > 0)


def _has_text(token: int, tokenizer: PromptTokenizer) -> bool:
    return bool(tokenizer.decode_all([token]).strip())
