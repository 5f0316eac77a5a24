"""Passkey retrieval: measures whether a model finds a number that one sentence of a long text gives."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bmburst.amounts import short, tokens
from bmburst.data.tokenizer import PromptTokenizer, TokenIds
from bmburst.errors import UserError
from bmburst.inference.answering import Progress
from bmburst.inference.filler import Filler
from bmburst.inference.generator import Generator
from bmburst.inference.prompts import Answer, Prompt, PromptEncoder
from bmburst.outputs import blank_picture, save_picture

KEY = " The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = " What is the pass key? The pass key is"
FORMAT = "bmburst-passkey-1"
_SPARE_TOKENS = 8  # tokens of an answer beyond the digits: a space, a quotation mark, the end of the number
_ELLIPSES = ("...", "\u2026")
_REFUSED = "#bbbbbb"
_INCHES = 0.75  # size of a cell in the image
_DARK = 0.15  # shares below it, and as near to 1, have dark colours
_COLUMNS = 9  # columns of a table, which is then 8 + 9 * 8 characters wide
_FORMS = 10**6  # depths are rounded to multiples of 1 / _FORMS; equal ones have the same keys


@dataclass(frozen=True, kw_only=True, slots=True)
class PasskeyTest:
    """Settings of a passkey test. The prompts depend only on these values and the tokenizer.

    Attributes:
        lengths: Lengths of the prompts in tokens, ascending.
        depths: Positions of the sentence with the number: 0 is the start of the text, 1 the end.
        samples: Number of prompts per length and depth.
        digits: Number of digits of a key.
        seed: Seed of the keys.
        with_key: Whether the text contains the sentence. Without it a right answer is chance.

    Raises:
        UserError: A value is out of bounds.
    """

    lengths: tuple[int, ...]
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples: int = 5
    digits: int = 5
    seed: int = 0
    with_key: bool = True

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise UserError(
                f"lengths {self.lengths}\nallowed: at least one length, of 1 token or more\nfix: 4K,...,64K"
            )
        if not self.depths or not all(0 <= depth <= 1 for depth in self.depths):
            raise UserError(f"depths {_listed(self.depths)}\nallowed: numbers from 0 to 1\nfix: 0,.25,.5,.75,1")
        for name, least, most in (("samples", 1, 10**6), ("digits", 1, 18), ("seed", 0, 2**63)):
            if not least <= getattr(self, name) <= most:
                raise UserError(f"{name} {getattr(self, name)}\nallowed: {least} to {most}\nfix: --{name} {least + 4}")
        for name in ("lengths", "depths"):
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise UserError(f"{name} {_listed(getattr(self, name))}\nallowed: each once\nfix: leave out the second")

    @property
    def total_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(self.lengths) * len(self.depths) * self.samples

    def key(self, length: int, depth: float, sample: int) -> str:
        """Return the digits of a prompt's key. They do not depend on the other lengths and depths of the test."""
        random = np.random.default_rng([self.seed, length, round(depth * _FORMS), sample])
        return str(random.integers(10 ** (self.digits - 1), 10**self.digits))


@dataclass(frozen=True, kw_only=True, slots=True)
class PasskeyCell:
    """Answers of a model at one length and depth.

    Attributes:
        length: Number of tokens of each prompt.
        depth: Depth of the sentence with the number.
        right: Number of answers with the digits of the key.
        asked: Number of prompts that were answered; 0 if the length was refused.
        answers: For each prompt: `key`, `answer` (text), `right`.
        refused: Reason why the length was refused; None if it was measured.
    """

    length: int
    depth: float
    right: int = 0
    asked: int = 0
    answers: tuple[dict[str, Any], ...] = ()
    refused: str | None = None


class PasskeyPrompts:
    """Builds prompts with an exact number of tokens: filler, the sentence with the number, and the question at the end.

    Each piece is tokenized in the context of preceding text, and the pieces are concatenated as tokens. The sentence is
    placed between two sentences of filler, as near to its depth as possible.

    Args:
        tokenizer: Tokenizer of the model.
        test: Settings of the test.
        encoder: Checks that tokens are in the model's vocabulary.

    Raises:
        UserError: A length is shorter than the sentence and the question, or the tokenizer is not the model's.
    """

    def __init__(self, tokenizer: PromptTokenizer, test: PasskeyTest, encoder: PromptEncoder) -> None:
        self._test, self._encoder, self._filler = test, encoder, Filler(tokenizer)
        self._question = self._filler.piece(QUESTION)
        least = max(len(self._fixed(test.key(length, depth, 0))) for length in test.lengths for depth in test.depths)
        require_room(test.lengths, least, "the question")
        self.prompt(min(test.lengths), test.depths[0], 0)  # refuses tokens outside the model's vocabulary

    def prompt(self, length: int, depth: float, sample: int) -> tuple[Prompt, str]:
        """Return a prompt of `length` tokens, and the digits of the right answer."""
        key = self._test.key(length, depth, sample)
        sentence = self._filler.piece(KEY.format(key=key)) if self._test.with_key else np.zeros(0, np.int64)
        room = max(length - len(self._filler.start) - len(sentence) - len(self._question), 0)
        filler, ends = self._filler.text(room)
        place = int(ends[np.abs(ends - depth * room).argmin()])
        ids = np.concatenate([self._filler.start, filler[:place], sentence, filler[place:], self._question])
        source = f"passkey {short(length)} at depth {depth:g}"
        assert len(ids) == length, (len(ids), length)
        return self._encoder.ids(ids, source), key

    def new_tokens(self, length: int, depth: float, sample: int) -> int:
        """Return the largest number of tokens of an answer."""
        return len(self._filler.piece(f" {self._test.key(length, depth, sample)}")) + _SPARE_TOKENS

    def _fixed(self, key: str) -> TokenIds:
        return np.concatenate([self._filler.start, self._filler.piece(KEY.format(key=key)), self._question])


def measure(
    generator: Generator, prompts: PasskeyPrompts, test: PasskeyTest, length: int, on_tokens: Callable[[int], object]
) -> list[PasskeyCell]:
    """Return a cell for each depth at one length. Every rank must call it and gets the same cells.

    Args:
        generator: Generator of the model. Decoding is greedy for any generation_config.json.
        prompts: Prompts of the same test.
        test: Settings of the test.
        length: One of its lengths.
        on_tokens: Called with the number of prompt tokens computed since the last call.
    """
    asked = [(depth, sample) for depth in test.depths for sample in range(test.samples)]
    new = max(prompts.new_tokens(length, *each) for each in asked)
    if problem := generator.why_too_long(length, new):
        reason = "; ".join(problem.splitlines()[:2])
        on_tokens(length * len(asked))
        return [PasskeyCell(length=length, depth=depth, refused=reason) for depth in test.depths]
    made = [prompts.prompt(length, *each) for each in asked]
    options = generator.options(max_new_tokens=new, temperature=0.0, repetition_penalty=1.0, num_samples=1)
    answers = generator.generate([prompt for prompt, _ in made], options, progress=Progress(tokens=on_tokens))
    judged = [_judged(key, answer) for (_, key), answer in zip(made, answers, strict=True)]
    cells = []
    for row, depth in enumerate(test.depths):
        own = tuple(judged[row * test.samples : (row + 1) * test.samples])
        right = sum(each["right"] for each in own)
        cells.append(PasskeyCell(length=length, depth=depth, right=right, asked=len(own), answers=own))
    return cells


def _judged(key: str, answer: Answer) -> dict[str, Any]:
    """Compare the first number of an answer with the key."""
    text = answer.text or ""
    number = re.search(r"[0-9]+", text)
    return {"key": key, "answer": text, "right": number is not None and number[0] == key}


def to_json(
    results: Mapping[str, Sequence[PasskeyCell]], settings: Mapping[str, Any], test: PasskeyTest
) -> dict[str, Any]:
    """Return the contents of the JSON file: the cells of the one checkpoint. `settings` are those beside the test's."""
    ((model, cells),) = results.items()
    return {
        "format": FORMAT,
        "model": model,
        "settings": {**asdict(test), **settings},
        "cells": [asdict(cell) for cell in cells],
    }


def table(results: Mapping[str, Sequence[PasskeyCell]], test: PasskeyTest) -> str:
    """Return a table of right answers out of all, one line per length, in blocks of at most 80 columns."""
    (cells,) = results.values()
    found, depths = {(cell.length, cell.depth): cell for cell in cells}, sorted(test.depths)
    blocks = []
    for first in range(0, len(depths), _COLUMNS):
        some = depths[first : first + _COLUMNS]
        lines = ["  tokens" + "".join(f"{f'@{depth:.4g}':>8}" for depth in some)]
        for length in test.lengths:
            words = "".join(f"{_words_of(found[length, depth]):>8}" for depth in some)
            lines.append(f"{short(length):>8}{words}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def draw(results: Mapping[str, Sequence[PasskeyCell]], test: PasskeyTest, path: Path) -> None:
    """Plot the share of right answers over length and depth, gray where refused; OSError if it cannot be written."""
    ((model, cells),) = results.items()
    lengths, depths = test.lengths, sorted(test.depths)
    found = {(cell.length, cell.depth): cell for cell in cells}
    figure = blank_picture(2.8 + _INCHES * max(len(lengths), 4), 1.6 + _INCHES * max(len(depths), 2))
    axes = figure.subplots()
    shares = [[_share(found[length, depth]) for length in lengths] for depth in depths]
    image = axes.imshow(shares, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    axes.set_facecolor(_REFUSED)
    for row, depth in enumerate(depths):
        for column, length in enumerate(lengths):
            share = shares[row][column]
            ink = "white" if share < _DARK or share > 1 - _DARK else "black"  # of a refused length: black on gray
            axes.text(column, row, _words_of(found[length, depth]), ha="center", va="center", fontsize=8, color=ink)
    axes.set_xticks(range(len(lengths)), [short(length, commas=True) for length in lengths], rotation=30)
    axes.set_yticks(range(len(depths)), [f"{depth:.4g}" for depth in depths])
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("depth of the pass key")
    axes.set_title(f"passkey retrieval, {Path(model).name}", fontsize=10)
    figure.colorbar(image, ax=axes, label="exact matches")
    save_picture(figure, path)


def _words_of(cell: PasskeyCell) -> str:
    """Return the text of a cell, for example "4/5"."""
    return "refused" if cell.refused is not None else f"{cell.right}/{cell.asked}"


def _share(cell: PasskeyCell) -> float:
    return cell.right / cell.asked if cell.asked else float("nan")


def read_lengths(text: str) -> tuple[int, ...]:
    """Parse lengths such as `4K,...,1M` or `4K,6K,8K`; `...` means the powers of two in between.

    Raises:
        UserError: A word is not a length, or `...` is not between a smaller and a larger length.
    """
    words = [word.strip() for word in text.split(",")]
    refusal = UserError(
        f"--lengths {text}\nallowed: numbers of tokens, ascending, with ... for the powers of two between two of them\n"
        "fix: --lengths 4K,...,64K"
    )
    found: list[int] = []
    between = False
    for word in words:
        if word in _ELLIPSES:
            if not found or between:
                raise refusal
            between = True
            continue
        try:
            length = tokens(word)
        except ValueError:
            raise refusal from None
        if length <= (found[-1] if found else 0):
            raise refusal
        if between:
            powers = (1 << exponent for exponent in range(found[-1].bit_length(), length.bit_length()))
            found += [power for power in powers if power < length]
        found.append(length)
        between = False
    if between:
        raise refusal
    return tuple(found)


def read_depths(text: str) -> tuple[float, ...]:
    """Parse depths such as `0,.25,.5`; UserError unless they are numbers from 0 to 1."""
    try:
        found = tuple(float(word) for word in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 <= depth <= 1 for depth in found):
        raise UserError(f"--depths {text}\nallowed: numbers from 0 to 1, with commas\nfix: --depths 0,.25,.5,.75,1")
    return found


def require_room(lengths: Sequence[int], least: int, what: str) -> None:
    """Raise UserError unless each length has the tokens that `what`, the text of a test, needs with its tokenizer."""
    if min(lengths) < least:
        raise UserError(
            f"lengths: {min(lengths)} tokens are too few for {what}\n"
            f"allowed: at least {least} tokens with this tokenizer\nfix: --lengths {-(-least // 64) * 64} or more"
        )


def _listed(values: Sequence[float]) -> str:
    return ",".join(f"{value:.12g}" for value in values)
