"""Filler text of tests of long context: sentences without meaning, of an exact number of tokens."""

import numpy as np

from bmburst.data.tokenizer import PromptTokenizer, TokenIds

SENTENCES = (
    *(" The grass is green.", " The sky is blue.", " The sun is yellow.", " Here we go.", " There and back again."),
)


class Filler:
    """Makes filler, and the tokens of texts that follow filler.

    Args:
        tokenizer: Tokenizer of the model.

    Attributes:
        start: The special tokens at the start of a text.
    """

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._tokenizer, self._context = tokenizer, "".join(SENTENCES)
        plain, whole = (tokenizer.encode_prompt(self._context, add_special_tokens=added) for added in (False, True))
        self.start = whole[: _offset(whole, plain)]
        sentences = [self.piece(sentence) for sentence in SENTENCES]
        self._unit = np.concatenate(sentences)
        self._ends = np.cumsum([len(each) for each in sentences])

    def piece(self, text: str) -> TokenIds:
        """Return the tokens of a text that follows filler."""
        before, whole = (self._tokenizer.encode(each) for each in (self._context, self._context + text))
        is_prefix = len(before) < len(whole) and np.array_equal(whole[: len(before)], before)
        return whole[len(before) :] if is_prefix else self._tokenizer.encode(text)

    def text(self, room: int) -> tuple[TokenIds, TokenIds]:
        """Return `room` tokens of filler that end with a whole sentence, and the places between its sentences."""
        unit = len(self._unit)
        units = -(-room // unit)
        cut = units * unit - room  # tokens cut from the start
        ends = (np.arange(units)[:, None] * unit + self._ends).reshape(-1) - cut
        return np.tile(self._unit, units)[cut:], np.concatenate([[0], ends[ends > 0]])


def _offset(whole: TokenIds, plain: TokenIds) -> int:
    """Return the index where `plain` begins in `whole`, after the special tokens at the start of a text."""
    for offset in range(len(whole) - len(plain) + 1):
        if np.array_equal(whole[offset : offset + len(plain)], plain):
            return offset
    return 0
