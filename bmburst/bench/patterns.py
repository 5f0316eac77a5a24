"""The suite's masks as values: for `burst_attention` in global positions, for a kernel that has a whole sequence."""

from itertools import accumulate

from bmburst.bench.pairs import document_lengths, window_tokens
from bmburst.schedule.documents import Documents
from bmburst.schedule.mask import Mask, SlidingWindow, make_mask
from bmburst_ops.flash import CAUSAL, FULL, Band, Segments


def mask_of(name: str, tokens: int) -> Mask:
    """Return the mask of that name for a sequence of so many tokens."""
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
