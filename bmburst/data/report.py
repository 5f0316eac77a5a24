"""What is in the data: records, tokens, lengths as a histogram, what is learned, and what is left out and why."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bmburst.data.answer_ends import answer_ends
from bmburst.data.token_file import TokenFile
from bmburst.data.token_writer import Masked
from bmburst.data.tokenizer import PromptTokenizer
from bmburst.data.whole_documents import record_sizes
from bmburst.errors import UserError

_BAR = 40  # characters of a histogram's longest bar
_ROWS = 8  # of a histogram before training
_COLUMNS = 12  # columns without effect that are named
_BLOCK = 1 << 22  # bytes of a loss mask at a time


class LengthReport:
    """Counts the lengths of records by powers of two.

    Args:
        most: Maximum tokens of a record; None: no limit.

    Raises:
        UserError: `most` is less than 2, so that no record could have an answer.
    """

    def __init__(self, most: int | None = None) -> None:
        if most is not None and most < 2:
            raise UserError(f"--max-tokens {most}\nallowed: at least 2 tokens\nfix: for example --max-tokens 4096")
        self._most = most
        self._kept: Counter[int] = Counter()
        self._left_out: Counter[int] = Counter()
        self._tokens = self._answers = self._shortest = self._longest = 0

    def keep(self, record: Masked) -> bool:
        """Count a record, and return whether it has at most `most` tokens; of several answers, whether each has."""
        is_group = record.documents and not record.is_pair
        length = max(tokens for tokens, _ in record.documents) if is_group else len(record.ids)
        self._shortest = min(self._shortest or length, length)
        if self._most is not None and length > self._most:
            self._left_out[length.bit_length()] += 1
            self._longest = max(self._longest, length)
            return False
        self._kept[length.bit_length()] += 1
        self._longest = max(self._longest, length)
        self._tokens += len(record.ids)
        self._answers += int(record.answers.sum())
        return True

    def require(self) -> None:
        """Raise UserError unless a record is left."""
        if not self._kept and self._left_out:
            raise UserError(
                f"no record is left: all {self._left_out.total():,} have more than --max-tokens {self._most} tokens\n"
                f"allowed: at least {self._shortest}, the length of the shortest\n"
                f"fix: --max-tokens {self._longest}, the length of the longest, keeps all"
            )

    def text(self) -> str:
        """Return the report: a line of totals and a histogram with a line per range of lengths, at most 80 columns."""
        kept, dropped = self._kept.total(), self._left_out.total()
        lines = [f"{kept:,} records, {self._answers:,} of {self._tokens:,} tokens are answers"]
        if dropped:
            lines.append(f"left out: {dropped:,} records of more than {self._most:,} tokens")
        return "\n".join([*lines, *_histogram(self._kept, self._left_out, "records")])


def notes_of(file: TokenFile) -> Iterator[str]:
    """Yield the lines about what is left out of a token file, has no effect in it, and stands in it several times."""
    for reason, count in file.notes.get("left_out", {}).items():
        yield f"left out: {_counted(count, 'records')}, {reason}"
    if columns := file.notes.get("columns"):
        more = f" and {len(columns) - _COLUMNS:,} more" if len(columns) > _COLUMNS else ""
        yield f"columns without effect: {', '.join(columns[:_COLUMNS])}{more}"
    if names := file.notes.get("names"):
        yield f"names without effect, which no message has: {', '.join(names)}"
    if echoes := file.notes.get("echoes"):
        what = "answers begin" if echoes != 1 else "answer begins"
        yield f"repeated: {echoes:,} {what} with the whole text of the prompt, which is then there twice"
    firsts = file.record_starts[:-1] if file.groups else slice(None, None, 1 + file.pairs)
    keys = np.sort(np.asarray(file.document_keys)[firsts])  # np.unique hashes, 15 times as long
    if repeats := int(np.count_nonzero(keys[1:] == keys[:-1])):
        what = "pairs" if file.pairs else "documents" if file.loss_mask is None else "records"
        yield f"repeated: {repeats:,} of {len(keys):,} {what} are copies of another"


def notes_on_ends(file: TokenFile, tokenizer: PromptTokenizer) -> Iterator[str]:
    """Yield a line if answers of a token file end with text, so that a model does not learn to end them."""
    if answer_ends(file, tokenizer).open:
        yield "some answers end without a special token: of them the model does not learn where to stop (docs/data.md)"


def described(
    name: str, file: TokenFile, sequence_length: int, pack: str = "documents", tokenizer: PromptTokenizer | None = None
) -> str:
    """Return the report on the data of a run: a line of totals, a histogram, and what is left out.

    Args:
        name: Name of the data.
        file: Its tokens.
        sequence_length: Tokens of a sequence; longer records are left out.
        pack: How records are packed.
        tokenizer: Its tokenizer; None: it is not there, and the ends of answers are not looked at.
    """
    of_records, sizes = file.loss_mask is not None, record_sizes(file, sequence_length, pack)
    what = "pairs" if file.pairs else "records" if of_records else "documents"
    learned = _learned(file)
    share = f"{learned:,} ({learned / file.token_count:.1%}) learned" if of_records else "all learned"
    lines = [f"{name}: {_counted(len(sizes), what)}, {file.token_count:,} tokens, {share}"]
    if file.weights is not None:
        weights = np.asarray(file.weights)
        lines.append(f"weights of records: {weights.min():g} to {weights.max():g}")
    too_long = sizes > sequence_length if of_records else np.zeros(len(sizes), bool)
    if count := int(too_long.sum()):
        tokens = int(sizes[too_long].sum())
        lines.append(
            f"left out: {_counted(count, what)} longer than sequence_length {sequence_length:,}, {tokens:,} tokens"
        )
    kept, dropped = (_by_power(sizes[chosen]) for chosen in (~too_long, too_long))
    lines += notes_of(file) if tokenizer is None else (*notes_of(file), *notes_on_ends(file, tokenizer))
    return "\n".join([*lines, *_histogram(kept, dropped, what, most=_ROWS)])


def _counted(number: int, what: str) -> str:
    """Return a number with its noun, which is given in the plural."""
    return f"{number:,} {what if number != 1 else what.removesuffix('s')}"


def _by_power(sizes: npt.NDArray[np.int64]) -> Counter[int]:
    """Return the number of lengths by their number of binary digits."""
    counts = np.bincount(np.frexp(sizes.astype(np.float64))[1]) if len(sizes) else np.zeros(0, np.int64)
    return Counter({bits: int(count) for bits, count in enumerate(counts) if count})


def _learned(file: TokenFile) -> int:
    if file.loss_mask is None:
        return file.token_count
    mask = file.loss_mask
    return sum(int(np.unpackbits(mask[at : at + _BLOCK]).sum(dtype=np.int64)) for at in range(0, len(mask), _BLOCK))


def _histogram(kept: Counter[int], left_out: Counter[int], what: str, most: int = 64) -> list[str]:
    """Return a line for each range of lengths, powers of two or, for more than `most` of them, of 4, 8, ..."""
    both = kept + left_out
    first, last = min(both, default=1), max(both, default=0)
    step = -(-(last - first + 1) // most)
    rows = [range(bits, min(bits + step, last + 1)) for bits in range(first, last + 1, step)]
    top = max((sum(both[bits] for bits in row) for row in rows), default=1)
    lines = [f"{'tokens':>17} {what:>9}"]
    for row in rows:
        count, used = (sum(counts[bits] for bits in row) for counts in (both, kept))
        full = -(-_BAR * used // top)
        empty = -(-_BAR * count // top) - full
        span = f"{1 << row[0] - 1:,}-{(1 << row[-1]) - 1:,}" if row[0] else "0"
        lines.append(f"{span:>17} {count:>9,} {'#' * full}{'.' * empty}".rstrip())
    if left_out:
        lines.append(f"{'.':>27} left out")
    return lines


class Shown(NamedTuple):
    """Marks around learned text."""

    begin: str = "{+"
    end: str = "+}"


_TEXT = 2000  # characters of a sample that are shown at each of its ends
TERMINAL = Shown("\033[1;32m", "\033[0m")
"""Green, for a terminal."""


def sample(
    name: str, ids: npt.NDArray[np.int64], learned: npt.NDArray[np.bool_], tokenizer: PromptTokenizer, marks: Shown
) -> str:
    """Return the text of a sample with its special tokens, in which what is learned is marked.

    Args:
        name: Its origin.
        ids: int64 `[tokens]`.
        learned: bool `[tokens]`.
        tokenizer: The tokenizer.
        marks: Marks around learned text.
    """
    edges = np.flatnonzero(np.diff(learned.astype(np.int8), prepend=-1, append=-1))
    parts = []
    for begin, end in pairwise(edges.tolist()):
        text = _cut(tokenizer.decode_all(ids[begin:end]))
        parts.append(f"{marks.begin}{text}{marks.end}" if learned[begin] else text)
    return f"--- {name}: {len(ids):,} tokens, {int(learned.sum()):,} learned\n{''.join(parts)}\n"


def _cut(text: str) -> str:
    if len(text) <= 2 * _TEXT:
        return text
    return f"{text[:_TEXT]} ... {len(text) - 2 * _TEXT:,} characters ... {text[-_TEXT:]}"
