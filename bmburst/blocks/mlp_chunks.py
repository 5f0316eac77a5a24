"""How many tokens pass through an MLP at once: plain arithmetic, for the blocks and for the planner."""

AUTOMATIC_CHUNK = 16384
"""Tokens. Products run at full rate from a few thousand on, and of LLaMA-3-8B a chunk's tensors take 2.2 GiB; adding
its share of the weights' gradients reads and writes 1.3 GiB, 2 % of its products' time on an H200."""


def mlp_chunk(rows: int, wanted: int | None, *, recomputes: bool) -> int:
    """Return how many rows pass at once, as even as they can be; `rows` itself: all, and nothing is cut.

    Args:
        rows: Tokens of all sequences of a rank's batch, of all its tensor group.
        wanted: At most how many, as the user set it; 0: all. None: `AUTOMATIC_CHUNK` where the block is recomputed,
            which makes cutting free of products; else all, since backward would form gate and up again.
        recomputes: Whether backward computes the block again.
    """
    if wanted is None:
        wanted = AUTOMATIC_CHUNK if recomputes else rows
    parts = max(1, -(-rows // wanted)) if wanted else 1
    return max(1, -(-rows // parts))
