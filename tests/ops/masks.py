"""Patterns as their definition says them, pair by pair, drawn at random; and attention under any mask, in fp64."""

import random
from functools import lru_cache

import numpy as np
import torch

from bmburst_ops.flash import Band, Cells, Segments
from tests.attention import oracle


def visible(pattern, queries, keys):
    """Which query sees which key, `[queries, keys]`, from the definition of the pattern alone."""
    mask = torch.zeros(queries, keys, dtype=torch.bool)
    if isinstance(pattern, Segments):
        for i in range(len(pattern.queries) - 1):
            (q0, q1), (k0, k1) = pattern.queries[i : i + 2], pattern.keys[i : i + 2]
            mask[q0:q1, k0:k1] = visible(pattern.band, q1 - q0, k1 - k0)
        return mask
    i, j = torch.arange(queries)[:, None], torch.arange(keys)
    if isinstance(pattern, Cells):
        start, stop, cells = (torch.from_numpy(x) for x in (pattern.start, pattern.stop, pattern.cells))
        a = sum((i[:, 0] >= edge).long() for edge in pattern.query_edges.tolist()) - 1
        b = sum((j >= edge).long() for edge in pattern.key_edges.tolist()) - 1
        return (j >= start[:, None]) & (j < stop[:, None]) & cells[a][:, b]
    far = j - (i + keys - queries)
    for bound, side in zip(pattern, (-far, far), strict=True):
        mask |= side > (queries + keys if bound is None else bound)
    return ~mask


def edges(rng, count, parts):
    """0, `parts - 1` places that may repeat, and the count."""
    return (0, *sorted(rng.randrange(count + 1) for _ in range(parts - 1)), count)


def a_band(rng, widest):
    return Band(*(rng.choice((None, 0, rng.randrange(widest), rng.randrange(widest))) for _ in "lr"))


def a_segments(rng, queries, keys, parts):
    return Segments(a_band(rng, max(2, keys // parts)), edges(rng, queries, parts), edges(rng, keys, parts))


def a_cells(rng, queries, keys, parts, density=0.5):
    start = np.array(sorted(rng.randrange(keys + 1) for _ in range(queries)))
    stop = np.maximum(start, np.array(sorted(rng.randrange(keys + 1) for _ in range(queries))))
    query_edges, key_edges = (np.array(edges(rng, count, parts)) for count in (queries, keys))
    cells = np.array([[rng.random() < density for _ in range(parts)] for _ in range(parts)])
    return Cells(start, stop, query_edges, key_edges, cells)


def blocks(rng, queries, keys, size, density):
    """Equal blocks of `size` tokens, all keys otherwise: what users write."""
    counts = [-(-count // size) for count in (queries, keys)]
    cells = np.array([[rng.random() < density for _ in range(counts[1])] for _ in range(counts[0])])
    query_edges, key_edges = (
        np.minimum(np.arange(n + 1) * size, count) for n, count in zip(counts, (queries, keys), strict=True)
    )
    return Cells(np.zeros(queries, int), np.full(queries, keys), query_edges, key_edges, cells)


@lru_cache(maxsize=4)
def some(seed, queries, keys, kinds=("window", "segments", "cells")):
    """A pattern of each kind, and of each kind what is rare: the same ones for each kernel."""
    rng, drawn = random.Random(seed), []
    if "window" in kinds:
        drawn += [a_band(rng, max(2, keys)), Band(rng.randrange(1, 4), 0), Band(rng.randrange(keys), None)]
    if "segments" in kinds:
        drawn += [a_segments(rng, queries, keys, parts) for parts in (2, 5, min(queries, keys))]
    if "cells" in kinds:
        drawn += [a_cells(rng, queries, keys, parts) for parts in (2, 5)]
    return tuple(drawn)


def attention(q, k, v, pattern, scale, softcap=None):
    """Output and log-sum-exp of the definition."""
    return oracle.attention(q, k, v, visible(pattern, q.shape[1], k.shape[1]), scale, softcap)
