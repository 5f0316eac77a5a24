"""Rows of tokens packed as prefix trees, so that a prefix of several rows is stored and computed once."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bmburst.amounts import array_of, as_whole, short_text, whole_number
from bmburst.attention.options import require_dense, require_numbers, require_own_memory
from bmburst.comm.checks import contents
from bmburst.errors import UserError
from bmburst.schedule.documents import edges_of
from bmburst.schedule.tree import Tree
from bmburst_ops import IGNORE_INDEX
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
        labels: The next token of each input token in its rows, int64 `[length]`; `IGNORE_INDEX` where it counts in no
            row.
        positions: The position of each token in its rows, int64 `[length]`: for rotary embeddings.
        mask: The mask of the attention calls.
        paths: For each row, the places of its input tokens in the sequence, int64 `[tokens of the row - 1]`.
        counted: For each row, which of its labels count, bool `[tokens of the row - 1]`.

    Raises:
        UserError: Sizes or dtypes do not fit each other, or the fields are not those of rows packed under this mask.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    mask: Tree
    paths: tuple[Tensor, ...]
    counted: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        tensors = {name: getattr(self, name) for name in ("tokens", "labels", "positions")}
        paths, counted = _listed("paths", self.paths), _listed("counted", self.counted)
        are_tensors = all(isinstance(each, Tensor) for each in (*tensors.values(), *paths, *counted))
        if not isinstance(self.mask, Tree) or not are_tensors:
            raise _unfit("fields of a packed tree are not tensors and a bmburst.Tree")
        for each in (*tensors.values(), *paths, *counted):
            require_dense("fields of a packed tree", each)
            require_numbers("fields of a packed tree", each)
        sizes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        wrong = next((name for name, shape in sizes.items() if shape != [self.mask.length]), None)
        if wrong is not None:
            raise _unfit(
                f"{wrong} of a packed tree have shape {sizes[wrong]}, but the lengths of its nodes sum to "
                f"{self.mask.length}"
            )
        if not paths or [path.shape for path in paths] != [row.shape for row in counted]:
            raise _unfit("paths and counted of a packed tree have no row, or differ in shape")
        whole = [each.dtype == torch.int64 for each in (*tensors.values(), *paths)]
        flat = [path.dim() == 1 and len(path) > 0 for path in paths]
        if not all([*whole, *flat, *(row.dtype == torch.bool for row in counted)]):
            raise _unfit("fields of a packed tree are not 1-D tensors of int64, or of bool for counted")
        self._require_rows()

    def _require_rows(self) -> None:
        """Check that tokens, labels and positions are those of rows that lie in the tree as the mask has it.

        Raises:
            UserError: They are not: the values of a row would be those of other tokens.
        """
        tokens, labels, positions = (each.cpu().numpy() for each in (self.tokens, self.labels, self.positions))
        edges, parents = edges_of(self.mask.lengths), self.mask.parents
        if (positions != _positions(self.mask)).any():
            raise _unfit("positions of a packed tree are not those of its mask")
        if tokens.min() < 0 or ((labels < 0) & (labels != IGNORE_INDEX)).any():
            raise _unfit(f"a packed tree has a token below 0, or a label below 0 that is not {IGNORE_INDEX}")
        # A label is the next token of its node; at the end of a node, the first token of each child.
        ends = [edges[parent + 1] - 1 for parent in parents]
        has_next = np.ones(self.length, bool)
        has_next[edges[1:] - 1] = False
        inside = (labels != np.roll(tokens, -1)) & has_next & (labels != IGNORE_INDEX)
        at_ends = labels[ends]
        across = (at_ends != tokens[edges[:-1]]) & (at_ends != IGNORE_INDEX) & (np.asarray(parents) >= 0)
        if inside.any() or across.any():
            raise _unfit("a label of a packed tree is not the token that follows in its rows")
        for number, (path, counts) in enumerate(zip(self.paths, self.counted, strict=True)):
            places, last = path.cpu().numpy(), int(path[-1])
            node = int(np.searchsorted(edges, last, side="right")) - 1
            is_row = 0 <= last < self.length
            if not is_row or not np.array_equal(places, _path(parents, edges, node)[: positions[last] + 1]):
                raise _unfit(f"the path of row {number} of a packed tree is not that of a row under its mask")
            if (labels[places][counts.cpu().numpy()] == IGNORE_INDEX).any():
                raise _unfit(f"row {number} of a packed tree counts a label that is {IGNORE_INDEX}")

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return len(self.tokens)

    @property
    def counts(self) -> Tensor:
        """In how many rows each label counts, int64 `[length]`."""
        return self.sum_rows(self.counted).long()

    def rows(self, values: Tensor, dim: int = -1) -> list[Tensor]:
        """Return the values of each row; differentiable, the gradients of rows that share a token are added.

        Args:
            values: A value of each token of the sequence, `[..., length, ...]`, for example log-probabilities of
                `labels`.
            dim: The dimension of the tokens.

        Returns:
            For each row `[..., tokens of the row - 1, ...]`.

        Raises:
            UserError: The values are not those of all tokens, or torch cannot pick values of their dtype.
        """
        if isinstance(values, Tensor):
            require_dense("values", values)
            require_own_memory("values", values)
            require_numbers("values", values)
        along = as_whole(dim)
        is_dim = isinstance(values, Tensor) and along is not None and -values.dim() <= along < values.dim()
        if not is_dim or values.shape[dim] != self.length:
            got = f"shape {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise UserError(
                f"values of a packed tree of {self.length} tokens have {got}\n"
                f"allowed: a tensor with {self.length} values in dimension {dim!r}\n"
                "fix: one value for each token of the tree; Part.whole or bmburst.unshard joins those of all ranks"
            )
        with _refused_dtype(values):
            return [values.index_select(dim, path.to(values.device)) for path in self.paths]

    def counted_rows(self, values: Tensor) -> list[Tensor]:
        """Return the values of each row as `rows` does, 0 where the row's label does not count.

        Args:
            values: A value of each token of the sequence, `[length]`.

        Raises:
            UserError: As `rows`.
        """
        both = zip(self.rows(values), self.counted, strict=True)
        with _refused_dtype(values):
            return [row.masked_fill(~counts.to(row.device), 0) for row, counts in both]

    def sum_rows(self, values: Sequence[Tensor | float]) -> Tensor:
        """Return the sum over the rows of a value for each token, float32 `[length]`.

        A loss that is linear in the log-probabilities needs one weight for each token: the sum of its rows' weights.

        Args:
            values: For each row a number, or a value of each of its labels, `[tokens of the row - 1]`.

        Raises:
            UserError: The number of values differs from the rows, or a value is no number.
        """
        values = _listed("values", values)
        if len(values) != len(self.paths):
            raise UserError(
                f"got values of {len(values)} rows, but the tree has {len(self.paths)}\nfix: one for each row"
            )
        total = torch.zeros(self.length, dtype=torch.float32)
        for i, (path, value) in enumerate(zip(self.paths, values, strict=True)):
            row = _numbers_of(i, value)
            if row.shape not in ((), path.shape):
                raise UserError(
                    f"row {i} has {len(path)} labels, but values of shape {list(row.shape)}\n"
                    "fix: a number, or one value for each label: one fewer than the row's tokens"
                )
            total[path] += row
        return total


def pack_tree(
    rows: Sequence[Any], labels: Sequence[Any] | None = None, *, least_saved: int = LEAST_SAVED, max_depth: int = 64
) -> PackedTree:
    """Pack rows of tokens as prefix trees. Row losses and gradients equal those of the rows one by one, for any loss.

    Rows need not be sorted, and may repeat each other or be a prefix of another. Rows without a common first token
    become trees of their own, one after another.

    Args:
        rows: For each row its tokens, prompt and answer: any sequence of numbers, or a tensor `[tokens]`, 2 tokens or
            more.
        labels: For each row its labels, `[tokens of the row]`, as in transformers: the row's own tokens, not shifted,
            and `IGNORE_INDEX` (-100) where there is no loss. The first one has no effect. Default: all tokens. Rows may
            share a token whose label counts in one of them only.
        least_saved: A prefix is shared if this saves as many tokens or more: its tokens times the rows' branches after
            it, less one. Shorter ones are copied to each branch.
        max_depth: The most levels of the tree; deeper prefixes are copied. A level needs a kernel call in each layer.

    Raises:
        UserError: There is no row, a row has fewer than 2 tokens or a negative one, labels are not those of the rows,
            or an option is below its minimum.
    """
    least, depth = whole_number("least_saved", least_saved, 1), whole_number("max_depth", max_depth, 1)
    read = [_tokens_of(i, row) for i, row in enumerate(_listed("rows", rows))]
    if not read:
        raise UserError("pack_tree got no rows\nfix: give the tokens of at least one row")
    counted = _counted(read, labels)
    # Big-endian bytes sort as the numbers do; a row sorts directly before the rows that it is a prefix of.
    order = sorted(range(len(read)), key=lambda i: read[i].astype(">i8").tobytes())
    shared = [_common_pairs(read[a], read[b]) for a, b in pairwise(order)]
    leaves = [k for k, i in enumerate(order) if k == len(shared) or shared[k] < len(read[i]) - 1]
    nodes = _nodes(read, order, shared, leaves, least, depth)
    mask = Tree([node.parent for node in nodes], [node.stop - node.start for node in nodes])
    edges = edges_of(mask.lengths)
    tokens, following = (
        np.concatenate([read[node.row][node.start + shift : node.stop + shift] for node in nodes]) for shift in (0, 1)
    )
    paths: dict[int, IntArray] = {}
    for number, node in enumerate(nodes):
        if node.is_leaf:
            paths[node.row] = _path(mask.parents, edges, number)
    # A row that is a prefix of others ends inside the path of a leaf.
    ends = dict(zip(order, (order[leaves[np.searchsorted(leaves, k)]] for k in range(len(order))), strict=True))
    of_rows = [paths[ends[i]][: len(row) - 1].copy() for i, row in enumerate(read)]
    unused = np.ones(len(tokens), bool)
    for path, own in zip(of_rows, counted, strict=True):
        unused[path[own]] = False
    return PackedTree(
        tokens=torch.from_numpy(tokens),
        labels=torch.from_numpy(np.where(unused, IGNORE_INDEX, following)),
        positions=torch.from_numpy(_positions(mask)),
        mask=mask,
        paths=tuple(map(torch.from_numpy, of_rows)),
        counted=tuple(map(torch.from_numpy, counted)),
    )


def require_tree(packed: object) -> None:
    """Raise UserError unless a value is a packed tree."""
    if not isinstance(packed, PackedTree):
        what = "a bmburst.Tree, which has no tokens" if isinstance(packed, Tree) else type(packed).__name__
        raise UserError(f"tree must be rows packed as trees, got {what}\nfix: bmburst.pack_tree(rows)")


def tree_facts(packed: PackedTree) -> str:
    """Describe what must be equal for a packed tree on all ranks."""
    of_rows = torch.cat([torch.stack(pair) for pair in zip(packed.paths, packed.counted, strict=True)], 1)
    tensors = {"tokens": packed.tokens, "labels": packed.labels, "rows": of_rows}
    sizes = torch.tensor([len(path) for path in packed.paths])
    told = [f"{name} {contents(tensor)}" for name, tensor in {**tensors, "tokens of the rows": sizes}.items()]
    return "\n".join([f"tree {packed.mask}", *told])


def _positions(mask: Tree) -> IntArray:
    """Return the position of each token in its rows, `[length]`."""
    found: IntArray = np.arange(mask.length) - np.repeat(mask.position_offsets, mask.lengths)
    return found


def _unfit(problem: str) -> UserError:
    return UserError(f"{problem}\nfix: bmburst.pack_tree(rows) makes all fields")


class _Node(NamedTuple):
    """Tokens `start` to `stop` of a row and of all rows below; `start` is the first position in the row."""

    parent: int
    row: int
    start: int
    stop: int
    is_leaf: bool


def _listed(name: str, values: object) -> list[Any]:
    """Return what an argument has for each row; UserError unless it is a sequence."""
    try:
        return list(values)  # type: ignore[call-overload,no-any-return]  # it raises then
    except (TypeError, RuntimeError):  # also of a tensor without dimensions, or of a nested one
        raise UserError(
            f"{name} must be a list with an entry for each row, got {type(values).__name__}\nfix: pass one"
        ) from None


@contextmanager
def _refused_dtype(values: Tensor) -> Iterator[None]:
    """Refuse a dtype for which torch lacks an operation, such as float8."""
    try:
        yield
    except NotImplementedError:
        raise UserError(
            f"values of a packed tree are {values.dtype}, of which torch cannot pick some\n"
            "allowed: for example float32, bfloat16, int64 or bool\nfix: values.float()"
        ) from None


def _numbers_of(number: int, value: object) -> Tensor:
    """Return the values of a row in float32; UserError unless they are numbers."""
    try:
        if isinstance(value, Tensor):
            require_dense("values", value)
        return torch.as_tensor(value, dtype=torch.float32, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise UserError(
            f"row {number} has values {short_text(value)}\nallowed: a number, or one for each label\n"
            "fix: a list of floats, or a tensor on this machine"
        ) from None


def _tokens_of(number: int, row: Any) -> IntArray:
    """Return the tokens of a row; UserError unless they are two or more whole numbers from 0 on."""
    tokens = array_of(f"row {number}", row)
    is_list = tokens.ndim == 1 and tokens.dtype.kind in "iu" and len(tokens) >= 2
    if not is_list or (tokens.astype(np.int64) < 0).any():  # also of uint64 above int64
        raise UserError(
            f"row {number} is {tokens.dtype} of shape {list(tokens.shape)}\n"
            "allowed: at least 2 token ids from 0 on, as a list of int or a 1-D int tensor\n"
            "fix: give prompt and answer as one row; a label is the token after an input token"
        )
    return tokens.astype(np.int64)


def _counted(rows: Sequence[IntArray], labels: Sequence[Any] | None) -> list[NDArray[np.bool_]]:
    """Return which labels of each row count, `[tokens of the row - 1]`.

    Raises:
        UserError: There are not as many labels as tokens, or a label is another token.
    """
    if labels is None:
        return [np.ones(len(row) - 1, bool) for row in rows]
    labels = _listed("labels", labels)
    if len(labels) != len(rows):
        raise UserError(f"got labels of {len(labels)} rows for {len(rows)} rows\nfix: labels of each row")
    found = []
    for i, (row, given) in enumerate(zip(rows, labels, strict=True)):
        own = array_of(f"labels of row {i}", given)
        if own.shape != row.shape or own.dtype.kind not in "iu":
            raise UserError(
                f"row {i} has {len(row)} tokens, but labels {own.dtype} of shape {list(own.shape)}\n"
                f"allowed: the token ids of the row, or {IGNORE_INDEX} for no loss\n"
                "fix: one label for each token, not shifted"
            )
        wrong = np.flatnonzero((own != row) & (own != IGNORE_INDEX))
        if len(wrong) and wrong[-1] > 0:
            place = int(wrong[-1])
            raise UserError(
                f"label {place} of row {i} is {int(own[place])}, but the token there is {int(row[place])}\n"
                f"allowed: the row's own tokens, or {IGNORE_INDEX} for no loss\nfix: labels that are not shifted"
            )
        found.append(own[1:] != IGNORE_INDEX)
    return found


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


def _path(parents: Sequence[int], edges: IntArray, leaf: int) -> IntArray:
    """Return the places of the tokens of a leaf and its ancestors, in the order of their positions."""
    found, node = [], leaf
    while node >= 0:
        found.append(np.arange(edges[node], edges[node + 1]))
        node = parents[node]
    return np.concatenate(found[::-1])
