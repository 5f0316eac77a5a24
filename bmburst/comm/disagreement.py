"""Encodes the signatures that ranks compare in a fixed number of bytes, and writes the error if they differ.

A signature is the name of a call, then one line for each value that must be equal: `burst_attention`, `mask causal`,
... Only lines that differ are shown.
"""

import hashlib
import re
from itertools import zip_longest

NBYTES = 512
"""Bytes of an encoded text."""

_CAPS = (NBYTES, 192, 96, 48, 24)  # limits of a line in bytes; the first limit with which all lines fit is used
_SHOWN, _FACT, _TAIL = 200, 80, 20  # characters of a rank's line, of one value, and of its end
_GAP = "..."

_SAME_CALLS = "make the same calls in the same order on every rank, none of them under an if on the rank"
_ONE_BATCH = (
    "ranks that share a sequence need the same batch: a sampler by data-parallel rank "
    "(num_replicas=mesh.shape.data, rank=mesh.data_rank), or a mesh with fewer sequence ranks"
)
_GRADIENT = "call it under the same grad mode, with the same inputs that require a gradient, on every rank"
_EQUAL = "pass the same value on every rank"
_FIXES = (
    (
        re.compile(r"#[0-9a-f]{8}$|^documents "),
        _ONE_BATCH,
    ),  # values of a batch: a digest (`checks.contents`), documents
    (re.compile(r"\d\[\d|shape \["), f"equal shapes and dtypes; {_ONE_BATCH}"),
    (re.compile(r"with(out)? gradient$"), _GRADIENT),
)
"""The fix for a line that differs, by a pattern of the line; the first match is used."""


def disagreement(signatures: list[str]) -> str | None:
    """Return three lines on the first rank whose signature is not rank 0's, with the fix, or None if all are equal."""
    if len(set(signatures)) < 2:
        return None
    first = signatures[0]
    rank, other = next((rank, text) for rank, text in enumerate(signatures) if text != first)
    return (
        f"the ranks of the group disagree; fix: {_fix(first, other)}\n"
        f"rank 0: {_told(first, other)}\nrank {rank}: {_told(other, first)}"
    )


def encoded(text: str) -> bytes:
    """Return the text in `NBYTES` bytes. A line that is too long ends in a digest, so that its end is compared too."""
    lines = [line.encode() for line in text.split("\n")]
    fitting = (data for cap in _CAPS if len(data := b"\n".join(_capped(line, cap) for line in lines)) <= NBYTES)
    return next(fitting, _capped(text.encode(), NBYTES)).ljust(NBYTES, b"\0")


def decoded(data: bytes) -> str:
    """Return the encoded text; long lines remain shortened."""
    return data.rstrip(b"\0").decode(errors="replace")


def _capped(data: bytes, cap: int) -> bytes:
    if len(data) <= cap:
        return data
    digest = f"{_GAP} #{hashlib.sha256(data).hexdigest()[:12]}".encode()
    return data[: cap - len(digest)] + digest


def _fix(mine: str, theirs: str) -> str:
    (call, *facts), (their_call, *others) = mine.split("\n"), theirs.split("\n")
    if call != their_call:
        return _SAME_CALLS
    differing = [a or b for a, b in zip_longest(facts, others, fillvalue="") if a != b]
    return next((fix for looks, fix in _FIXES for fact in differing if looks.search(fact)), _EQUAL)


def _told(mine: str, theirs: str) -> str:
    """Return the call, and the lines of `mine` that differ from `theirs`."""
    (call, *facts), (their_call, *others) = mine.split("\n"), theirs.split("\n")
    if call != their_call:
        return _end(call, _SHOWN)
    differing = [_brief(a, b) for a, b in zip_longest(facts, others, fillvalue="") if a != b]
    return _end(f"{call} {', '.join(differing)}", _SHOWN)


def _brief(mine: str, theirs: str) -> str:
    """Return a line. A long line is cut to the part from its first differing word on, and its end with the digest."""
    if len(mine) <= _FACT:
        return mine
    words, others = mine.split(" "), theirs.split(" ")
    same = next((i for i, (a, b) in enumerate(zip(words, others, strict=False)) if a != b), 0)
    text = " ".join([*words[:1], *([_GAP] if same > 1 else []), *words[max(same, 1) :]])
    return text if len(text) <= _FACT else f"{text[: _FACT - _TAIL]}{_GAP}{text[-_TAIL:]}"


def _end(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - len(_GAP)]}{_GAP}"
