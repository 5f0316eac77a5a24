"""Cross-attention in one piece, written as its definition, and its run over ranks."""

from functools import lru_cache

import numpy as np
import torch

import bmburst
from bmburst.schedule.layout import padded_layout, real_positions
from bmburst.schedule.mask import make_mask
from tests.attention.oracle import reference


def visible(mask, queries, keys):
    """Return whether query i sees key j, bool `[queries, keys]`."""
    mask = make_mask(mask)
    query, key = np.arange(queries)[:, None], np.arange(keys)[None]
    last = query + keys - queries
    if isinstance(mask, bmburst.Documents):
        of_query, of_key = (np.repeat(np.arange(len(n)), n) for n in (mask.lengths, mask.key_lengths))
        seen = of_query[:, None] == of_key[None]
        if mask.causal:
            each = zip(mask.lengths, mask.key_lengths, _edges(mask), strict=True)
            last = np.concatenate([np.arange(n) + m - n + before for n, m, before in each])
            seen &= key <= last[:, None]
        return seen
    seen = np.ones((queries, keys), bool)
    if isinstance(mask, bmburst.SlidingWindow):
        seen = abs(last - key) < mask.tokens
    if isinstance(mask, bmburst.Causal) or getattr(mask, "causal", False):
        seen = seen & (key <= last)
    return seen


def _edges(mask):
    return [sum(mask.key_lengths[:i]) for i in range(len(mask.key_lengths))]


@lru_cache(maxsize=256)
def problem(queries, keys, heads, kv_heads, mask, dim=8, dtype=torch.float64, with_lse=True):
    """Return q, k, v, dO, dLSE in fp64, of values that `dtype` has, and out, lse, dq, dk, dv of the definition."""
    rng = torch.Generator().manual_seed(queries + 7 * keys)
    shapes = [(2, queries, heads, dim), *[(2, keys, kv_heads, dim)] * 2, (2, queries, heads, dim), (2, heads, queries)]
    drawn = (torch.randn(s, generator=rng, dtype=torch.float64) for s in shapes)
    whole = tuple(t.to(dtype).double() for t in drawn)
    return whole, reference(*whole[:4], visible(mask, queries, keys), whole[4] if with_lse else None)


def local(tensor, layout, rank, length, dim=1):
    """Return a rank's tokens, padding filled with numbers that must not count."""
    tensor = tensor.movedim(dim, 0)
    positions = real_positions(layout, rank, length)
    part = torch.full((layout.tokens, *tensor.shape[1:]), 1e3, dtype=tensor.dtype)
    part[: len(positions)] = tensor[torch.from_numpy(positions)]
    return part.movedim(0, dim).contiguous()


def layout_of(name, size, tokens, mask):
    """Return the smallest layout; of fewer tokens than ranks too."""
    return padded_layout(name, size, max(size, tokens), mask if name == "balanced" and tokens >= size else None)


def compare(comm, mask, layouts, lengths, heads, kv_heads, **options):
    """Attend over the ranks, and compare outputs and gradients with the definition."""
    queries, keys = lengths
    whole, expected = problem(queries, keys, heads, kv_heads, mask)
    ql, kl = (layout_of(name, comm.size, n, mask) for name, n in zip(layouts, lengths, strict=True))
    q = local(whole[0], ql, comm.rank, queries)
    k, v = (local(t, kl, comm.rank, keys) for t in whole[1:3])
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out, lse = bmburst.burst_attention(
        *inputs,
        mask=mask,
        layout=layouts[0],
        length=queries,
        key_layout=layouts[1],
        key_length=keys,
        group=comm,
        return_lse=True,
        **options,
    )
    grad, grad_lse = local(whole[3], ql, comm.rank, queries), local(whole[4], ql, comm.rank, queries, 2)
    sees = lse.isfinite()
    grads = torch.autograd.grad((out, lse), inputs, (grad, torch.where(sees, grad_lse, 0)))
    for name, got, want, layout, length in (
        ("out", out, expected[0], ql, queries),
        ("lse", lse.movedim(2, 1), expected[1].movedim(2, 1), ql, queries),
        ("dq", grads[0], expected[2], ql, queries),
        ("dk", grads[1], expected[3], kl, keys),
        ("dv", grads[2], expected[4], kl, keys),
    ):
        positions = torch.from_numpy(real_positions(layout, comm.rank, length))
        said = f"{name} of {mask} over {comm.size} ranks, {layouts}, {lengths}, {heads}/{kv_heads}, {options}"
        torch.testing.assert_close(
            got[:, : len(positions)], want[:, positions], rtol=1e-10, atol=1e-10, msg=lambda m, s=said: f"{s}: {m}"
        )
        padding = got[:, len(positions) :]
        assert (padding == (-torch.inf if name == "lse" else 0)).all(), said
