"""Chunk sizes of a block: tokens that an MLP, and heads that attention, computes at once. Imports no torch."""

AUTOMATIC_CHUNK = 16384
"""Tokens. Matmuls run at full rate from a few thousand tokens on. For LLaMA-3-8B the tensors of a chunk take 2.2 GiB.
Accumulating its weight gradients moves 1.3 GiB, 2 % of the time of its matmuls on an H200."""


def mlp_chunk(rows: int, wanted: int | None, *, recomputes: bool) -> int:
    """Return the chunk size of an MLP in rows, such that chunks have nearly equal sizes; `rows`: no chunks.

    Args:
        rows: Tokens of all sequences of a rank's batch, over its tensor group.
        wanted: Largest chunk, as set by the user; 0: all rows. None: `AUTOMATIC_CHUNK` if the block is recomputed,
            because chunks then need no additional matmuls; else all, because backward would recompute gate and up.
        recomputes: Whether backward recomputes the block.
    """
    if wanted is None:
        wanted = AUTOMATIC_CHUNK if recomputes else rows
    parts = max(1, -(-rows // wanted)) if wanted else 1
    return max(1, -(-rows // parts))


GROUP_ROWS = 1 << 21
"""Query rows (tokens times heads) of one attention call. Each call reads the residual stream for its projections.
For llama-3-8b at 128K tokens on an H200, 8 calls cost 1.3 % of a step, and 2 calls need 1 GiB more memory."""


def kv_heads_at_once(kv_heads: int, query_rows: int, ranks: int = 1) -> int:
    """Return the number of KV heads (with their query heads) of one attention call in a recomputed block.

    The last call may have fewer heads. The number is a multiple of `ranks`, so that an all-to-all can exchange the
    heads of each call. If `ranks` does not divide `kv_heads`, one call computes all heads.

    Args:
        kv_heads: KV heads of the block.
        query_rows: Tokens of a rank times query heads. Below 2 `GROUP_ROWS`, one call computes all heads. Otherwise
            each call has at least half of `GROUP_ROWS`, except the last.
        ranks: Ranks that share a sequence.
    """
    shares = 1 if kv_heads % ranks else kv_heads // ranks
    parts = max(1, min(shares, query_rows // GROUP_ROWS))
    return kv_heads // shares * (shares // parts)
