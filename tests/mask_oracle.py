"""Masks as their definition says them, pair by pair, and masks drawn at random."""

import numpy as np

from bmburst.schedule.documents import Documents, PrefixLM
from bmburst.schedule.mask import BlockSparse, Causal, Full, Intersection, SlidingWindow
from bmburst.schedule.tree import Tree

KINDS = ("full", "causal", "window", "documents", "prefix", "prefixes", "blocks", "both")


def visible(mask, length):
    """Return whether query i sees key j, bool `[length, length]`, from what the docstrings of the masks say."""
    query, key = np.arange(length)[:, None], np.arange(length)[None]
    seen = np.ones((length, length), dtype=bool)
    if isinstance(mask, Intersection):
        for part in mask.masks:
            seen &= visible(part, length)
    elif isinstance(mask, SlidingWindow):
        seen = abs(query - key) < mask.tokens
    elif isinstance(mask, Documents):
        seen = _same(mask.lengths)
    elif isinstance(mask, PrefixLM):
        lengths = (length,) if mask.lengths is None else mask.lengths
        in_prefix = [i < prefix for n, prefix in zip(lengths, mask.prefix_lengths, strict=True) for i in range(n)]
        seen = _same(lengths) & (np.array(in_prefix)[None] | (key <= query))
    elif isinstance(mask, BlockSparse):
        block = [i // mask.block_size for i in range(length)]
        seen = np.array(mask.block_map)[block][:, block]
    elif isinstance(mask, Tree):
        seen = _ancestors(mask) & (key <= query)
    else:
        assert isinstance(mask, Causal | Full)
    if isinstance(mask, Causal) or getattr(mask, "causal", False):
        seen = seen & (key <= query)
    assert seen.shape == (length, length)
    return seen


def _same(lengths):
    document = np.array([i for i, n in enumerate(lengths) for _ in range(n)])
    return document[:, None] == document[None]


def _ancestors(tree):
    """Return whether the key's node is the query's node or above it, by following parents."""
    node = [i for i, n in enumerate(tree.lengths) for _ in range(n)]
    above = np.zeros((len(tree.parents),) * 2, dtype=bool)
    for i in range(len(tree.parents)):
        at = i
        while at >= 0:
            above[i, at] = True
            at = tree.parents[at]
    return above[node][:, node]


def random_mask(rng, length, kinds=KINDS):
    """Return a mask for `length` tokens: any kind, and of each kind what is rare; `rng` is a `random.Random`."""
    kind, causal = rng.choice(kinds), rng.random() < 0.5
    if kind == "full":
        return Full()
    if kind == "causal":
        return Causal()
    if kind == "window":
        return SlidingWindow(rng.choice((1, 2, rng.randint(1, length + 2))), causal)
    if kind == "documents":
        return Documents(random_lengths(rng, length), causal)
    if kind == "prefix":
        return PrefixLM(rng.choice((0, length, length + 3, rng.randint(0, length))))  # it may be all of the sequence
    if kind == "prefixes":
        lengths = random_lengths(rng, length)
        return PrefixLM([rng.choice((0, n, rng.randint(0, n))) for n in lengths], lengths)
    if kind == "blocks":
        return _random_blocks(rng, length, causal)
    simple = [k for k in KINDS if k != "both"]
    first = random_mask(rng, length, simple)
    return first & random_mask(rng, length, [k for k in simple if k != "blocks" or first.blocks is None])


def random_lengths(rng, length):
    """Return lengths of documents that add up to `length`: one, many, or all of a single token."""
    draw = rng.choice((lambda: 1, lambda: length, lambda: rng.choice((1, 1, 2, 3, 5, 17)), lambda: rng.randint(1, 40)))
    lengths, left = [], length
    while left:
        lengths.append(min(draw(), left))
        left -= lengths[-1]
    rng.shuffle(lengths)
    return lengths


def _random_blocks(rng, length, causal):
    """Return blocks, the last of which the end may cut off; few, most, or all of them on."""
    size = rng.choice((1, 2, 3, 5, 8, length, length + 1))
    blocks, share = -(-length // size), rng.choice((0.1, 0.4, 0.8, 1.0))
    return BlockSparse([[rng.random() < share for _ in range(blocks)] for _ in range(blocks)], size, causal)


def random_tree(rng, length):
    """Return a tree for `length` tokens of up to five levels; often a few nodes, a single root or no branch."""
    lengths, path, parents = random_lengths(rng, length), [], []
    deepest = rng.randint(1, 5)
    for node in range(len(lengths)):
        path = path[: rng.randint(0, min(len(path), deepest - 1))]
        parents.append(path[-1] if path else -1)
        path.append(node)
    return Tree(parents, lengths)
