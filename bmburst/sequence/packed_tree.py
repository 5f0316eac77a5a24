"""Rows of tokens packed as prefix trees, so that a prefix of several rows is stored and computed once."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bmburst.amounts import array_of, whole_number
from bmburst.errors import UserError
from bmburst.schedule.tree import Tree, first_positions
from bmburst_ops.pattern import IntArray

LEAST_SAVED = 256
"""Tokens that a shared node must save. A level of a tree needs another kernel call and a merge for each layer."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedTree:
    """Rows that share prefixes, as one sequence.

    A token and its label are stored together: the last token of a prompt has several next tokens, one for each answer,
    so it is the first token of each answer's node.

    Attributes:
        tokens: Input tokens, int64 `[length]`.
        labels: The next token of each input token in its rows, int64 `[length]`.
        positions: The position of each token in its rows, int64 `[length]`: for rotary embeddings.
        mask: The mask of the attention calls.
        paths: For each row, the places of its input tokens in the sequence, int64 `[tokens of the row - 1]`.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    mask: Tree
    paths: tuple[Tensor, ...]

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return len(self.tokens)

    def rows(self, values: Tensor, dim: int = -1) -> list[Tensor]:
        """Return the values of each row; differentiable, the gradients of rows that share a token are added.

        Args:
            values: A value of each token of the sequence, `[..., length, ...]`, for example log-probabilities of
                `labels`.
            dim: The dimension of the tokens.

        Returns:
            For each row `[..., tokens of the row - 1, ...]`.
        """
        return [values.index_select(dim, path.to(values.device)) for path in self.paths]

    def sum_rows(self, values: Sequence[Tensor | float]) -> Tensor:
        """Return the sum over the rows of a value for each token, float32 `[length]`.

        A loss that is linear in the log-probabilities needs one weight for each token: the sum of its rows' weights.

        Args:
            values: For each row a number, or a value of each of its labels, `[tokens of the row - 1]`.

        Raises:
            UserError: The number of values differs from the rows.
        """
        if len(values) != len(self.paths):
            raise UserError(
                f"got values of {len(values)} rows, but the tree has {len(self.paths)}\nfix: one for each row"
            )
        total = torch.zeros(self.length, dtype=torch.float32)
        for i, (path, value) in enumerate(zip(self.paths, values, strict=True)):
            row = torch.as_tensor(value, dtype=torch.float32)
            if row.shape not in ((), path.shape):
                raise UserError(
                    f"row {i} has {len(path)} labels, but values of shape {list(row.shape)}\n"
                    "fix: a number, or one value for each label: one fewer than the row's tokens"
                )
            total[path] += row
        return total


def pack_tree(rows: Sequence[Any], *, least_saved: int = LEAST_SAVED, max_depth: int = 64) -> PackedTree:
    """Pack rows of tokens as prefix trees. Row losses and gradients equal those of the rows one by one, for any loss.

    Rows need not be sorted, and may repeat each other or be a prefix of another. Rows without a common first token
    become trees of their own, one after another.

    Args:
        rows: For each row its tokens, prompt and answer: any sequence of numbers, or a tensor `[tokens]`, 2 tokens or
            more.
        least_saved: A prefix is shared if this saves as many tokens or more: its tokens times the rows' branches after
            it, less one. Shorter ones are copied to each branch.
        max_depth: The most levels of the tree; deeper prefixes are copied. A level needs a kernel call in each layer.

    Raises:
        UserError: There is no row, a row has fewer than 2 tokens or a negative one, or an option is below its minimum.
    """
    least, depth = whole_number("least_saved", least_saved, 1), whole_number("max_depth", max_depth, 1)
    read = [_tokens_of(i, row) for i, row in enumerate(rows)]
    if not read:
        raise UserError("pack_tree got no rows\nfix: give the tokens of at least one row")
    # Big-endian bytes sort as the numbers do; a row sorts directly before the rows that it is a prefix of.
    order = sorted(range(len(read)), key=lambda i: read[i].astype(">i8").tobytes())
    shared = [_common_pairs(read[a], read[b]) for a, b in pairwise(order)]
    leaves = [k for k, i in enumerate(order) if k == len(shared) or shared[k] < len(read[i]) - 1]
    nodes = _nodes(read, order, shared, leaves, least, depth)
    mask = Tree([node.parent for node in nodes], [node.stop - node.start for node in nodes])
    edges = np.concatenate([[0], np.cumsum(mask.lengths)])
    tokens, labels = (
        np.concatenate([read[node.row][node.start + shift : node.stop + shift] for node in nodes]) for shift in (0, 1)
    )
    positions = np.arange(len(tokens)) - np.repeat(edges[:-1] - first_positions(mask), mask.lengths)
    paths: dict[int, IntArray] = {}
    for number, node in enumerate(nodes):
        if node.is_leaf:
            paths[node.row] = _path(nodes, edges, number)
    ends = dict(zip(order, (order[leaves[np.searchsorted(leaves, k)]] for k in range(len(order))), strict=True))
    return PackedTree(
        tokens=torch.from_numpy(tokens),
        labels=torch.from_numpy(labels),
        positions=torch.from_numpy(positions),
        mask=mask,
        paths=tuple(torch.from_numpy(paths[ends[i]][: len(row) - 1].copy()) for i, row in enumerate(read)),
    )


class _Node(NamedTuple):
    """Tokens `start` to `stop` of a row and of all rows below; `start` is the first position in the row."""

    parent: int
    row: int
    start: int
    stop: int
    is_leaf: bool


def _tokens_of(number: int, row: Any) -> IntArray:
    """Return the tokens of a row.

    Raises:
        UserError: They are not whole numbers from 0 on, or fewer than 2.
    """
    tokens = array_of(f"row {number}", row)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or len(tokens) < 2 or (tokens < 0).any():
        raise UserError(
            f"row {number} is {tokens.dtype} of shape {list(tokens.shape)}\n"
            "allowed: at least 2 token ids from 0 on, as a list of int or a 1-D int tensor\n"
            "fix: give prompt and answer as one row; a label is the token after an input token"
        )
    return tokens.astype(np.int64)


def _common_pairs(a: IntArray, b: IntArray) -> int:
    """Return how many pairs of an input and its label two rows have in common at their beginning."""
    most = min(len(a), len(b))
    apart = np.flatnonzero(a[:most] != b[:most])
    return max(0, (int(apart[0]) if len(apart) else most) - 1)


def _nodes(
    rows: Sequence[IntArray], order: Sequence[int], shared: Sequence[int], leaves: Sequence[int], least: int, depth: int
) -> list[_Node]:
    """Return the nodes in depth-first order, children in the order of their first row.

    Args:
        rows: The tokens of each row.
        order: The rows sorted by their tokens.
        shared: The common pairs of each sorted row and the next.
        leaves: Indices into `order` of the rows that are no prefix of another.
        least: See `pack_tree`.
        depth: Likewise.
    """
    # Between neighbouring leaves, the rows that are left out are prefixes of the later one.
    common = [min(shared[a:b]) for a, b in pairwise(leaves)]
    nodes: list[_Node] = []

    def first_row(branch: tuple[int, int]) -> int:
        return min(order[leaves[k]] for k in range(*branch))

    # Leaves begin to end, the node above them, the position where they begin, and the level of their node.
    todo = [(0, len(leaves), -1, 0, 0)]
    while todo:
        begin, end, parent, start, level = todo.pop()
        if end - begin == 1:
            row = order[leaves[begin]]
            nodes.append(_Node(parent, row, start, len(rows[row]) - 1, True))
            continue
        stop = min(common[begin : end - 1])
        cuts = [begin, *(k + 1 for k in range(begin, end - 1) if common[k] == stop), end]
        if level + 1 >= depth:
            cuts = list(range(begin, end + 1))
        elif (stop - start) * (len(cuts) - 2) >= least:
            nodes.append(_Node(parent, order[leaves[begin]], start, stop, False))
            parent, start, level = len(nodes) - 1, stop, level + 1
        branches = sorted(pairwise(cuts), key=first_row, reverse=True)
        todo += [(*branch, parent, start, level) for branch in branches]
    return nodes


def _path(nodes: Sequence[_Node], edges: IntArray, leaf: int) -> IntArray:
    """Return the places of the tokens of a leaf and its ancestors, in the order of their positions."""
    found, node = [], leaf
    while node >= 0:
        found.append(np.arange(edges[node], edges[node + 1]))
        node = nodes[node].parent
    return np.concatenate(found[::-1])
