"""Attention of new tokens to the cached ones of all token groups: queries travel, keys and values stay.

Outputs travel along with the queries and are merged by their log-sum-exp (pass-Q of arXiv:2411.01783).
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bmburst.attention.call import AttentionCall
from bmburst.attention.local import local_forward
from bmburst.schedule.cache_split import CacheSplit
from bmburst.schedule.mask import Causal, SlidingWindow
from bmburst.schedule.tiles import Span, Tile, make_tiles
from bmburst_ops.flash import Partial
from bmburst_ops.merge import accumulation_dtype, merge_partials_


def striped_tiles(split: CacheSplit, queries: Span, length: int, source: int, window: int | None) -> tuple[Tile, ...]:
    """Return the work between the queries of a token group and the cached tokens of this rank's token group.

    Args:
        split: How tokens are dealt to token groups.
        queries: Positions of all groups' queries.
        length: Keys below this position count.
        source: The queries' token group.
        window: Tokens that a query sees, its own included; None: all.
    """
    groups = split.token_groups
    mask = Causal() if window is None else SlidingWindow(window)
    keys = np.arange(split.token_group, length, groups)
    return make_tiles(mask, queries.stop, np.arange(queries.start + source, queries.stop, groups), keys)


def merge_earlier(
    call: AttentionCall,
    token_group: int,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tiles: Sequence[Sequence[Tile]],
    into: Partial,
) -> None:
    """Merge attention of new queries to the cached tokens of all token groups: queries visit every group.

    Args:
        call: The attention over one rank of each token group; its kernel and scale count.
        token_group: This rank's.
        q: This rank's new queries, `[batch, tokens, heads, head_dim]`, as many as every other rank's.
        keys: This rank's cached keys, `[batch, cached, kv_heads, head_dim]`.
        values: As keys.
        tiles: Of each token group the work of its queries on this rank's cached tokens.
        into: Attention of `q` to the new tokens; overwritten by that to all tokens.
    """
    visiting = q.contiguous()
    out = torch.zeros(visiting.shape, dtype=accumulation_dtype(q.dtype), device=q.device)
    lse = torch.full_like(into.lse, -torch.inf, memory_format=torch.contiguous_format)
    for hop in range(len(tiles)):
        if hop:
            visiting, out, lse = call.comm.ring(visiting, out, lse).wait()
        work = tiles[(token_group - hop) % len(tiles)]
        merge_partials_(out, lse, *local_forward(call, visiting, keys, values, tiles=work))
    out, lse = call.comm.ring(out, lse).wait()
    merged = into.lse.contiguous()
    merge_partials_(into.out, merged, out, lse)
    into.lse.copy_(merged)
