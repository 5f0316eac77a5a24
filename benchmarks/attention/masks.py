"""The masks of the attention benchmark: packed documents, visible pairs, and the mask as a value."""

import math
import random
import statistics
from functools import lru_cache
from itertools import accumulate
from statistics import NormalDist
from typing import Any

from bmburst.schedule.documents import Documents
from bmburst.schedule.mask import Mask, SlidingWindow, make_mask
from bmburst_ops.pattern import CAUSAL, FULL, Band, Segments

WINDOW = 4096  # tokens that a query sees under the mask "window"
MEDIAN, SIGMA = 2048, 1.3  # of the log-normal distribution that lengths of documents are drawn from
SHORTEST = 16
SEED = 0
_PART = 16  # of short sequences, window and median are this part


def window_tokens(tokens: int) -> int:
    """Return the last tokens that a query sees of a sequence, itself included: 4,096, of less than 64K a 16th."""
    return max(1, min(WINDOW, tokens // _PART))


def median_tokens(tokens: int) -> int:
    """Return the median of the distribution of lengths: 2,048, of less than 32K tokens in all a 16th, at least 16."""
    return max(SHORTEST, min(MEDIAN, tokens // _PART))


@lru_cache(maxsize=64)
def document_lengths(tokens: int) -> tuple[int, ...]:
    """Return the lengths of the documents that are packed into a sequence, the same wherever they are drawn.

    Log-normal with the median of `median_tokens` and sigma 1.3, of 16 tokens to `tokens`: long-tailed, as corpora are.
    They are drawn until the sequence is full; the last one is cut off there, and where less than 16 tokens would be
    left behind it, it takes them.
    """
    generator, normal = random.Random(SEED), NormalDist(math.log(median_tokens(tokens)), SIGMA)
    lengths, left = [], tokens
    while left:
        # By the inverse of its distribution: `random` is the only stream that Python keeps the same in all versions.
        length = min(left, max(SHORTEST, round(math.exp(normal.inv_cdf(generator.random())))))
        lengths.append(left if left - length < SHORTEST else length)
        left -= lengths[-1]
    return tuple(lengths)


def visible_pairs(mask: str, tokens: int) -> float:
    """Return the pairs of a query and a key that it sees.

    Under a causal mask, half of all: the diagonal is left out, as publications do.
    """
    if mask == "documents":
        return float(sum(n * (n + 1) // 2 for n in document_lengths(tokens)))
    if mask == "window":
        seen = window_tokens(tokens)
        return float(tokens * seen - seen * (seen - 1) // 2)
    return float(tokens**2) * (0.5 if mask == "causal" else 1.0)


def facts(mask: str, tokens: int) -> dict[str, Any]:
    """Return what a row says of the mask beyond its name; nothing of causal and full."""
    if mask == "documents":
        lengths = document_lengths(tokens)
        found = {"number": len(lengths), "median": statistics.median(lengths), "longest": max(lengths)}
        return {"documents": found | {"drawn_median": median_tokens(tokens), "sigma": SIGMA, "seed": SEED}}
    return {"window": window_tokens(tokens)} if mask == "window" else {}


def mask_of(name: str, tokens: int) -> Mask:
    """Return the mask of that name for `burst_attention`, in global positions of a sequence of so many tokens."""
    if name == "documents":
        return Documents(document_lengths(tokens))
    return SlidingWindow(window_tokens(tokens)) if name == "window" else make_mask(name)


def pattern_of(name: str, tokens: int) -> Band | Segments:
    """Return the same for one kernel call on all queries and keys."""
    if name == "documents":
        edges = tuple(accumulate(document_lengths(tokens), initial=0))
        return Segments(CAUSAL, edges, edges)
    if name == "window":
        return Band(window_tokens(tokens) - 1, 0)
    return CAUSAL if name == "causal" else FULL
