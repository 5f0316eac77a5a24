"""How recurrences cut pieces into fragments that run at the same time: plain numbers, for kernels and the planner."""

import math
from itertools import pairwise
from types import MappingProxyType

CHUNK = 64
"""Tokens of a chunk of the Triton kernels."""
DELTA_KINDS = ("gated_delta", "kda")
"""Kinds of recurrences whose M is a matrix, of key_dim by key_dim for each head; that of the others is a number."""
_LEAST = 64 * CHUNK  # tokens of a fragment: shorter ones compute more summaries than they save
_COLUMNS = 64  # of a state in one program
PROGRAMS = MappingProxyType({"gated_delta": 2, "kda": 1, "decay": 2})
"""Programs of a multiprocessor at a time, by the kinds that have kernels."""


def fragment_tokens(kind: str, tokens: int, heads: int, value_dim: int, processors: float) -> int:
    """Return the usual tokens of a fragment, at least 4,096, so that about each multiprocessor has all its programs.

    On an H200, more fragments than that take longer: their summaries cost more than a scan by more programs saves.
    """
    fragments = PROGRAMS[kind] * processors // (heads * math.ceil(value_dim / _COLUMNS))
    return max(_LEAST, math.ceil(tokens / max(1, fragments)))


def fragments(edges: tuple[int, ...], tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the edges of all fragments in tokens, and the edges of the pieces in fragments.

    A piece has so many fragments that each has about `tokens` tokens: all but the last the same number of chunks.
    """
    found, by_piece = [0], [0]
    for begin, end in pairwise(edges):
        count = max(1, round((end - begin) / tokens))
        each = max(CHUNK, CHUNK * math.ceil((end - begin) / count / CHUNK))
        found += [*range(begin + each, end, each), end]
        by_piece.append(len(found) - 1)
    return tuple(found), tuple(by_piece)
