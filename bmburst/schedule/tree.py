"""Masks of prefix trees: several answers to one prompt, which is stored and computed once.

A tree is a sequence of nodes in depth-first order. A token sees all tokens of the ancestors of its node, and itself and
the earlier tokens of its own node. The keys that a query sees are several intervals, so a tree is not one mask in the
sense of `bmburst.schedule.mask`. It is the disjoint union of as many masks as the tree is deep: its levels.

- Level 0: the own node, a causal document for each node.
- Level d + 1: the ancestor of depth d. The queries below a node of depth d see the whole node, and no others see it.

Under each level a query sees one interval, and both of its ends do not decrease: in depth-first order the subtrees of
the nodes of one depth are disjoint intervals in ascending order. Partial results of the levels are merged like those of
a ring's steps. In backward, probabilities depend on the log-sum-exp over all levels, so gradients of the levels add up.
Imports no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bmburst.amounts import digest, whole_numbers
from bmburst.errors import UserError
from bmburst.schedule.documents import Documents, document_lengths, documents_at, edges_of
from bmburst.schedule.mask import Mask
from bmburst_ops.bounded_cache import bounded_cache
from bmburst_ops.pattern import IntArray, Need, VisibleRanges


@dataclass(frozen=True, slots=True, init=False)
class Tree(Mask):
    """Packed prefix trees: a query sees the ancestors of its node, itself, and the keys before it in its node.

    A tree with one node equals `Causal`. Trees without children equal `Documents`.

    Args:
        parents: The parent of each node, -1 for a root: any sequence of numbers, or a tensor `[nodes]`. Nodes are in
            depth-first order: the children of a node follow it, each with all of its own descendants.
        lengths: Tokens of each node, 1 or more, `[nodes]`.

    Raises:
        UserError: There is no node, a node has no token, the numbers of parents and lengths differ, a parent does not
            come before its child, or nodes are not in depth-first order.
    """

    digest: str
    parents: tuple[int, ...] = field(compare=False, repr=False)
    lengths: tuple[int, ...] = field(compare=False, repr=False)
    depths: tuple[int, ...] = field(compare=False, repr=False)

    def __init__(self, parents: Any, lengths: Any) -> None:
        tokens, above = document_lengths(lengths), tuple(whole_numbers("parents of nodes", parents))
        if len(above) != len(tokens):
            raise UserError(
                f"got {len(above)} parents for {len(tokens)} lengths\nfix: give both to each node; a root has parent -1"
            )
        object.__setattr__(self, "parents", above)
        object.__setattr__(self, "lengths", tokens)
        object.__setattr__(self, "depths", _depths(above))
        object.__setattr__(self, "digest", digest(np.asarray([above, tokens], np.int64)))

    @property
    def length(self) -> int:
        """See `Mask.length`."""
        return int(edges_of(self.lengths)[-1])

    @property
    def levels(self) -> tuple[Mask, ...]:
        """See `Mask.levels`."""
        return _levels(self)

    @property
    def starts(self) -> tuple[int, ...]:
        """See `Mask.starts`."""
        return tuple(edges_of(self.lengths)[:-1].tolist())

    @property
    def position_offsets(self) -> tuple[int, ...]:
        """See `Mask.position_offsets`: positions of a node continue those of its parent."""
        return tuple((edges_of(self.lengths)[:-1] - first_positions(self)).tolist())

    @property
    def leaves(self) -> tuple[int, ...]:
        """The nodes without children, ascending: each is the end of a row."""
        return tuple(sorted(set(range(len(self.parents))) - set(self.parents)))

    @property
    def tokens_below_ancestors(self) -> int:
        """Number of visible pairs of a query and a key in an ancestor of its node."""
        return int(np.dot(self.lengths, first_positions(self)))

    @property
    def needs(self) -> frozenset[Need]:
        """See `Mask.needs`."""
        return frozenset({"segments"})

    def _rows(self, positions: IntArray, length: int) -> VisibleRanges:
        """Return the smallest interval that contains the keys of all levels: from the start of the root to itself."""
        del length
        node, _, _ = documents_at(self.lengths, positions)
        return VisibleRanges(_facts(self).root_starts[node], positions + 1)

    def _seen(self, first: int, last: int, length: int) -> list[tuple[int, int]]:
        """Return the intervals: the ancestors of the first query's node, and what follows up to the last query.

        The other queries' ancestors are among these: a node before `first` whose subtree reaches a later query is an
        ancestor of `first` too.
        """
        del length
        edges = edges_of(self.lengths)
        (node,), (start,), _ = documents_at(self.lengths, np.array([first]))
        found, above = [(int(start), last + 1)], self.parents[node]
        while above >= 0:
            found.append((int(edges[above]), int(edges[above + 1])))
            above = self.parents[above]
        return found[::-1]

    def __str__(self) -> str:
        trees, nodes = self.parents.count(-1), len(self.parents)
        return f"{trees} trees of {nodes} nodes, {1 + max(self.depths)} levels, {self.length} tokens ({self.digest})"


@dataclass(frozen=True, slots=True)
class _Ancestors(Mask):
    """Level `depth + 1` of a tree: queries below a node of one depth see the whole node."""

    tree: Tree
    depth: int

    @property
    def starts(self) -> tuple[int, ...]:
        """See `Mask.starts`. A cut inside a subtree would need a further kernel call, so deeper nodes are left out."""
        edges = edges_of(self.tree.lengths)
        return tuple(int(start) for start, depth in zip(edges, self.tree.depths, strict=False) if depth <= self.depth)

    @property
    def needs(self) -> frozenset[Need]:
        """See `Mask.needs`."""
        return frozenset({"segments"})

    def _rows(self, positions: IntArray, length: int) -> VisibleRanges:
        del length
        node, _, _ = documents_at(self.tree.lengths, positions)
        start, stop = _ancestor_intervals(self.tree, self.depth)
        return VisibleRanges(start[node], stop[node])


@bounded_cache(maxsize=64)
def _levels(tree: Tree) -> tuple[Mask, ...]:
    """Return the levels. A layout asks for them once a chunk, and `Documents` checks all of its lengths."""
    return Documents(tree.lengths), *(_Ancestors(tree, depth) for depth in range(max(tree.depths)))


@dataclass(frozen=True, slots=True)
class _Facts:
    """Numbers of each node: the start of its root, and the position of its first token in its row."""

    root_starts: IntArray
    first_positions: IntArray


@bounded_cache(maxsize=64)
def _facts(tree: Tree) -> _Facts:
    edges = edges_of(tree.lengths)
    roots, firsts = edges[:-1].copy(), np.zeros(len(tree.parents), np.int64)
    for node, parent in enumerate(tree.parents):
        if parent >= 0:
            roots[node], firsts[node] = roots[parent], firsts[parent] + tree.lengths[parent]
    roots.setflags(write=False)
    firsts.setflags(write=False)
    return _Facts(roots, firsts)


def first_positions(tree: Tree) -> IntArray:
    """Return for each node the position of its first token in a row: the number of tokens of its ancestors."""
    return _facts(tree).first_positions


@bounded_cache(maxsize=64)
def _ancestor_intervals(tree: Tree, depth: int) -> tuple[IntArray, IntArray]:
    """Return for each node the interval of its ancestor of a depth.

    Nodes without such an ancestor get an empty interval where the last one before ends, so that both ends ascend.
    """
    edges, start, stop = edges_of(tree.lengths), *np.zeros((2, len(tree.parents)), np.int64)
    above = last = 0  # the latest node of the depth, and the end of the latest interval
    for node, own_depth in enumerate(tree.depths):
        if own_depth == depth:
            above = node
        if own_depth > depth:
            start[node], last = edges[above], edges[above + 1]
        else:
            start[node] = last
        stop[node] = last
    start.setflags(write=False)
    stop.setflags(write=False)
    return start, stop


def _depths(parents: Sequence[int]) -> tuple[int, ...]:
    """Return the depth of each node.

    Raises:
        UserError: A parent does not come before its child, or nodes are not in depth-first order.
    """
    path: list[int] = []  # the nodes from the root to the latest node
    depths = []
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            before = f", else a node before it, 0 to {node - 1}" if node else ": no node is before it"
            raise UserError(
                f"node {node} has parent {parent}\nallowed: -1 for a root{before}\n"
                "fix: put every parent before its children"
            )
        while path and path[-1] != parent:
            path.pop()
        if parent >= 0 and not path:
            raise UserError(
                f"node {node} has parent {parent}, but another subtree came in between\n"
                "allowed: depth-first order\nfix: put each node's children directly after it, with their descendants"
            )
        depths.append(len(path))
        path.append(node)
    return tuple(depths)
