"""The tokens that end the answers of records: a model that learns them stops with them."""

import numpy as np

from bmburst.data.token_file import TokenFile
from bmburst.data.tokenizer import PromptTokenizer

_MOST = 1000  # documents that are looked at, evenly spread


def answer_ends(file: TokenFile, tokenizer: PromptTokenizer) -> frozenset[int] | None:
    """Return the special tokens that end the last answers of a file's records; None if some end without one.

    White space that is learned after the token does not count. Text has no answers.

    Args:
        file: The token file. Of many documents, a thousand are looked at.
        tokenizer: Its tokenizer.
    """
    found: set[int] = set()
    if file.loss_mask is None:
        return frozenset()
    for document in range(0, file.document_count, -(-file.document_count // _MOST)):
        begin, end = (int(each) for each in file.document_offsets[document : document + 2])
        learned = np.flatnonzero(file.answers_in(range(begin, end)))[::-1] + begin
        tokens = (int(file.tokens[at]) for at in learned)
        last = next((token for token in tokens if token in tokenizer.special_ids or _has_text(token, tokenizer)), None)
        if last not in tokenizer.special_ids:
            return None
        found.add(last)
    return frozenset(found)


def _has_text(token: int, tokenizer: PromptTokenizer) -> bool:
    return bool(tokenizer.decode_all([token]).strip())
