"""In what parts a block computes: tokens of an MLP and heads of attention at once. Imports no torch."""

AUTOMATIC_CHUNK = 16384
"""Tokens. Products run at full rate from a few thousand on, and of LLaMA-3-8B a chunk's tensors take 2.2 GiB; adding
its share of the weights' gradients reads and writes 1.3 GiB, 2 % of its products' time on an H200."""


def mlp_chunk(rows: int, wanted: int | None, *, recomputes: bool) -> int:
    """Return how many rows an MLP computes at once, in chunks of nearly equal size; `rows` itself for no chunks.

    Args:
        rows: Tokens of all sequences of a rank's batch, over its tensor group.
        wanted: Largest chunk, as the user set it; 0: all rows. None: `AUTOMATIC_CHUNK` where the block is recomputed,
            since chunks then cost no further products; else all, since backward would recompute gate and up.
        recomputes: Whether backward recomputes the block.
    """
    if wanted is None:
        wanted = AUTOMATIC_CHUNK if recomputes else rows
    parts = max(1, -(-rows // wanted)) if wanted else 1
    return max(1, -(-rows // parts))


GROUP_ROWS = 1 << 21
"""Query rows, tokens times heads, that attention is given at once. Every part reads the stream for its projections.
On an H200, llama-3-8b at 128K tokens, 8 parts cost 1.3 % of a step. There 2 parts need 1 GiB more."""


def kv_heads_at_once(kv_heads: int, query_rows: int, ranks: int = 1) -> int:
    """Return with how many KV heads, and their query heads, a recomputed block attends at a time.

    The last time there may be fewer. Over ranks it is a multiple of their number, so that they can exchange these heads
    as they can exchange all; where there is no such multiple, all attend at once.

    Args:
        kv_heads: KV heads of the block.
        query_rows: Tokens of a rank times query heads. As long as they are few, all heads attend at once. Each part has
            half of `GROUP_ROWS` or more.
        ranks: Ranks that share a sequence.
    """
    shares = 1 if kv_heads % ranks else kv_heads // ranks
    parts = max(1, min(shares, query_rows // GROUP_ROWS))
    return kv_heads // shares * (shares // parts)
