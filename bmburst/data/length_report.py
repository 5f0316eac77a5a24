"""Filters records by their length, and reports the lengths as a histogram of text."""

from collections import Counter

from bmburst.data.token_writer import Masked
from bmburst.errors import UserError

_BAR = 40


class LengthReport:
    """Counts the lengths of records by powers of two.

    Args:
        most: Tokens of the longest record that is kept; None keeps all.

    Raises:
        UserError: `most` is less than 2, of which one could be an answer.
    """

    def __init__(self, most: int | None = None) -> None:
        if most is not None and most < 2:
            raise UserError(f"--max-tokens {most}\nallowed: at least 2 tokens\nfix: for example --max-tokens 4096")
        self._most = most
        self._kept: Counter[int] = Counter()
        self._left_out: Counter[int] = Counter()
        self._tokens = self._answers = self._shortest = self._longest = 0

    def keep(self, record: Masked) -> bool:
        """Count a record, and return whether it is short enough."""
        length = len(record.ids)
        self._shortest = min(self._shortest or length, length)
        if self._most is not None and length > self._most:
            self._left_out[length.bit_length()] += 1
            self._longest = max(self._longest, length)
            return False
        self._kept[length.bit_length()] += 1
        self._longest = max(self._longest, length)
        self._tokens += length
        self._answers += int(record.answers.sum())
        return True

    def require(self) -> None:
        """Check that a record is left.

        Raises:
            UserError: All are too long.
        """
        if not self._kept and self._left_out:
            raise UserError(
                f"no record is left: all {self._left_out.total():,} have more than --max-tokens {self._most} tokens\n"
                f"allowed: at least {self._shortest}, the length of the shortest\n"
                f"fix: --max-tokens {self._longest}, the length of the longest, keeps all"
            )

    def text(self) -> str:
        """Return a line of sums and a line for each length, at most 80 columns wide."""
        kept, dropped = self._kept.total(), self._left_out.total()
        lines = [f"{kept:,} records, {self._answers:,} of {self._tokens:,} tokens are answers"]
        if dropped:
            lines.append(f"left out: {dropped:,} records of more than {self._most:,} tokens")
        both = self._kept + self._left_out
        top = max(both.values(), default=1)
        lines.append(f"{'tokens':>17} {'records':>9}")
        for bits in range(min(both, default=1), max(both, default=0) + 1):
            full = -(-_BAR * self._kept[bits] // top)
            empty = -(-_BAR * both[bits] // top) - full
            span = f"{1 << bits - 1:,}-{(1 << bits) - 1:,}"
            lines.append(f"{span:>17} {both[bits]:>9,} {'#' * full}{'.' * empty}".rstrip())
        if dropped:
            lines.append(f"{'.':>27} left out")
        return "\n".join(lines)
