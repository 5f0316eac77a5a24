"""The interface of biased attention kernels, `BiasedKernel`, and its definition in plain torch.

A kernel computes one block of queries and keys on one device. `Pairs` holds the inputs that all layers of a batch
share: tokens, relations and the bias formula.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from bmburst_ops.biased.formula import RelativeBias, Tokens, visible
from bmburst_ops.dtypes import name_of
from bmburst_ops.errors import KernelError
from bmburst_ops.flash.inputs import DeviceVectors, vectors_of_stream
from bmburst_ops.flash.kernel import BackwardInputs, Partial, finite
from bmburst_ops.merge import accumulation_dtype, merge_partials_

_TILE = 256


class DerivedTensors:
    """A cache of derived tensors by name. Each is computed on first use and freed with this object.

    A stream other than the one that computed a tensor waits for it; the host does not. Copies start empty.
    """

    def __init__(self) -> None:
        self._made: dict[Hashable, DeviceVectors] = {}

    def __reduce__(self) -> tuple[type["DerivedTensors"], tuple[()]]:
        """Copy and pickle as an empty cache, because CUDA streams cannot be copied."""
        return DerivedTensors, ()

    def get(self, name: Hashable, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return the tensors named `name`, computed by `make()` on first use, ready for the current stream."""
        found = self._made.get(name)
        if found is None:
            found = self._made[name] = vectors_of_stream(make())
        return found.here()


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Inputs of a kernel besides q, k, v and the bias table.

    Tensors that kernels derive from them are cached here, and shared by forward and backward of all layers that get the
    same object. So the tensors must not be changed.

    Attributes:
        formula: Defines the row of the table for a query and a key.
        relations: int32 `[batch or 1, entries]`; see `RelativeBias.buckets`.
        queries: Vectors of the queries.
        keys: Vectors of the keys.
        once: The cache.

    Raises:
        KernelError: Shapes, dtypes or devices do not fit each other. Values are not checked: see `require_relations`.
    """

    formula: RelativeBias
    relations: Tensor
    queries: Tokens
    keys: Tokens
    once: DerivedTensors = field(default_factory=DerivedTensors, init=False, repr=False)

    def __post_init__(self) -> None:
        relations, batch = self.relations, self.queries.shape[0]
        if not isinstance(relations, Tensor) or relations.layout != torch.strided:
            raise KernelError(
                f"relations must be a dense tensor, got {type(relations).__name__}\nallowed: int32\n"
                "fix: pass a dense tensor"
            )
        if relations.dtype != torch.int32 or relations.dim() != 2 or relations.shape[0] not in (1, batch):
            raise KernelError(
                f"relations must be int32 [{batch} or 1, entries], got {relations.dtype} {list(relations.shape)}\n"
                "fix: those of each sample of the batch, or one row for all"
            )
        if self.keys.shape[0] != batch:
            raise KernelError(
                f"keys of {self.keys.shape[0]} samples for queries of {batch}\nfix: those of the same batch"
            )
        devices = {t.device for t in (relations, self.queries, self.keys)}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise KernelError(f"relations, queries and keys must be on one device, got {names}\nfix: move all to one")

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.relations.device

    def packed(self) -> tuple[Tensor, Tensor]:
        """Return the packed vectors of queries and of keys; see `Tokens.packed`."""
        if self.queries is self.keys:
            (packed,) = self.once.get("packed", lambda: (self.queries.packed(),))
            return packed, packed
        queries, keys = self.once.get("packed", lambda: (self.queries.packed(), self.keys.packed()))
        return queries, keys

    def lookup(self) -> tuple[Any, ...]:
        """Return the arguments of bias lookups in kernels: relations, their batch stride, their number, distances, the
        largest distance, the number of rows for distances, and the number of all rows.
        """
        formula = self.formula
        relations, distances = self.once.get(
            "lookup", lambda: (self.relations.contiguous(), formula.distances(self.device))
        )
        stride = relations.shape[1] if relations.shape[0] > 1 else 0
        numbers = (formula.max_distance, formula.num_buckets, formula.rows)
        return relations, stride, relations.shape[1], distances, *numbers


def require_relations(pairs: Pairs) -> None:
    """Check that all pairs of one sample have a relation, and that the table has it. This synchronizes with the device.

    Raises:
        KernelError: A relation is missing or not in the table.
    """
    relations, queries, keys = pairs.relations, pairs.queries, pairs.keys
    bad = (relations < 0) | (relations > pairs.formula.num_relations)
    if bool(bad.any()):
        raise KernelError(
            f"relation {int(relations[bad][0])} is none of the table's\n"
            f"allowed: 0 to {pairs.formula.num_relations}\nfix: pass relations of the model whose table it is"
        )
    first = torch.where(queries.span >= 0, queries.row, 0)
    if bool((first < 0).any()) or bool((first >= relations.shape[1]).any()):
        raise KernelError(
            f"rows of relations begin from {int(first.min())} to {int(first.max())}, but there are "
            f"{relations.shape[1]} entries\n"
            "allowed: rows that the relations have\nfix: pass the rows of these relations"
        )
    segment = torch.where(keys.span >= 0, keys.segment, 0)
    if bool((segment < 0).any()):
        raise KernelError(
            f"segment {int(segment.min())} is below 0\nallowed: 0 and more, but for padding\n"
            "fix: number segments from 0"
        )


class BiasedGradients(NamedTuple):
    """Gradients of one block, shaped as q, k, v and the table."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor

    def rounded(self, *like: Tensor) -> "BiasedGradients":
        """Return the gradients in the dtypes of q, k, v and the table."""
        return BiasedGradients(*(grad.to(x.dtype) for grad, x in zip(self, like, strict=True)))


class BiasedKernel(Protocol):
    """Attention of a block of queries to a block of keys with its log-sum-exp, forward and backward.

    Scores are `q k^T * scale + table[bucket]` for visible pairs; see `formula`. A query that sees no key has an output
    of zero, a log-sum-exp of `-inf` and a gradient of zero. A key that no query sees has a gradient of zero. Results
    are bitwise reproducible.
    """

    name: str

    def refusal(self, q: Tensor) -> str | None:
        """Return why the kernel does not support such inputs on this machine, as a phrase; None if it does."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, pairs: Pairs, *, scale: float) -> Partial:
        """Return the block's output, in q's dtype or wider, and its log-sum-exp, in fp32 or wider.

        Args:
            q: Queries, `[batch, queries, heads, head_dim]`, any strides.
            k: Keys, `[batch, keys, heads, head_dim]`.
            v: Values, shaped as k.
            table: The bias table, `[pairs.formula.rows, heads]`, any float dtype.
            pairs: Vectors of queries and keys, and the formula.
            scale: Factor on the products, above 0.
        """
        ...

    def backward(
        self, given: BackwardInputs, table: Tensor, pairs: Pairs, *, scale: float, rounded: bool = False
    ) -> BiasedGradients:
        """Return the block's gradients, in fp32 or wider.

        Args:
            given: The block's inputs, and the statistics of the whole attention for its queries.
            table: As in forward.
            pairs: As in forward.
            scale: Factor on the products, above 0.
            rounded: Whether gradients have the dtypes of their inputs; for a block that is the whole attention.
        """
        ...


def require_inputs(q: Tensor, k: Tensor, v: Tensor, table: Tensor, pairs: Pairs) -> None:
    """Raise KernelError unless shapes, dtypes and devices of the inputs fit each other."""
    for name, tensor in (("q", q), ("k", k), ("v", v), ("the bias table", table)):
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            got = f"one of layout {tensor.layout}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise KernelError(
                f"{name} must be a dense tensor, got {got}\nallowed: torch tensors of torch.strided\nfix: pass one"
            )
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]):
        raise KernelError(
            f"q, k and v must be [batch, tokens, heads, head_dim] with as many heads each, got {list(q.shape)}, "
            f"{list(k.shape)} and {list(v.shape)}\nfix: unflatten heads; repeat shared keys and values for each head"
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point() or q.element_size() < 2:
        raise KernelError(
            f"q, k and v must share one floating-point dtype, got {q.dtype}, {k.dtype} and {v.dtype}\n"
            "allowed: float16, bfloat16, float32 and float64\nfix: convert them to one of these"
        )
    for name, tokens, matrix in (("queries", pairs.queries, q), ("keys", pairs.keys, k)):
        if tokens.shape != matrix.shape[:2]:
            raise KernelError(
                f"vectors of {list(tokens.shape)} {name} for {list(matrix.shape[:2])}, [batch, tokens]\n"
                "fix: the vectors of the same tokens, as many to each sample"
            )
    rows = pairs.formula.rows
    if table.shape != (rows, q.shape[2]) or not table.is_floating_point() or table.element_size() < 2:
        got = f"{name_of(table.dtype)} {list(table.shape)}"
        raise KernelError(
            f"the bias table must be float {[rows, q.shape[2]]}, [rows, heads], got {got}\n"
            "fix: the table of the module whose formula it is, with as many heads as q"
        )
    devices = {t.device for t in (q, k, v, table, pairs)}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise KernelError(f"everything must be on one device, got {names}\nfix: move all to that of q")


class BiasedReferenceKernel:
    """`BiasedKernel` in plain torch, computed in fp32 or wider.

    Args:
        tile: Queries and keys that are scored at once, so that memory does not grow with either.
    """

    name = "reference"

    def __init__(self, tile: int = _TILE) -> None:
        self._tile = tile

    def refusal(self, q: Tensor) -> str | None:
        """See `BiasedKernel.refusal`: it supports all inputs."""
        del q
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, pairs: Pairs, *, scale: float) -> Partial:
        """See `BiasedKernel.forward`."""
        require_inputs(q, k, v, table, pairs)
        dtype = accumulation_dtype(q.dtype)
        out = torch.zeros(q.shape, dtype=dtype, device=q.device)
        lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=dtype)
        for tile in _tiles(q, k, table, pairs, scale, self._tile):
            part_lse = tile.scores.logsumexp(-1)
            weights = torch.exp(tile.scores - finite(part_lse)[..., None])
            part = _product(weights, v[:, tile.keys].to(dtype), tile.seen)
            merge_partials_(out[:, tile.queries], lse[:, :, tile.queries], part, part_lse)
        return Partial(out.to(q.dtype), lse)

    def backward(
        self, given: BackwardInputs, table: Tensor, pairs: Pairs, *, scale: float, rounded: bool = False
    ) -> BiasedGradients:
        """See `BiasedKernel.backward`. P = exp(S - lse), dS = P * (dO V^T - delta); dS is also the bias's gradient."""
        grad_out, q, k, v, lse, delta = given
        require_inputs(q, k, v, table, pairs)
        dtype = accumulation_dtype(q.dtype)
        grad_q, grad_k, grad_v = (torch.zeros(t.shape, dtype=dtype, device=t.device) for t in (q, k, v))
        grad_table = torch.zeros(table.shape, dtype=torch.float64, device=q.device)
        for tile in _tiles(q, k, table, pairs, scale, self._tile):
            rows, columns = tile.queries, tile.keys
            row_lse, row_delta = (t[:, :, rows].to(dtype)[..., None] for t in (lse, delta))
            weights = torch.exp(tile.scores - finite(row_lse)).masked_fill_(~tile.seen, 0.0)
            grads = grad_out[:, rows].to(dtype)
            grad_v[:, columns] += _product(weights.mT, grads, tile.seen.mT)
            inner = torch.einsum("bqhd,bkhd->bhqk", grads, v[:, columns].to(dtype))
            grad_scores = (weights * (inner - row_delta)).masked_fill_(~tile.seen, 0.0)
            grad_q[:, rows] += _product(grad_scores, k[:, columns].to(dtype), tile.seen) * scale
            grad_k[:, columns] += _product(grad_scores.mT, q[:, rows].to(dtype), tile.seen.mT) * scale
            _add_by_bucket(grad_table, tile.buckets, grad_scores)
        found = BiasedGradients(grad_q, grad_k, grad_v, grad_table.to(accumulation_dtype(table.dtype)))
        return found.rounded(q, k, v, table) if rounded else found


class _Tile(NamedTuple):
    """A tile of queries and keys with a visible pair.

    `scores` are `[batch, heads, queries, keys]`, `-inf` for masked pairs; `buckets` are `[batch, queries, keys]`;
    `seen` is the mask, `[batch, 1, queries, keys]`.
    """

    queries: slice
    keys: slice
    scores: Tensor
    buckets: Tensor
    seen: Tensor


def _tiles(q: Tensor, k: Tensor, table: Tensor, pairs: Pairs, scale: float, size: int) -> Iterator[_Tile]:
    """Yield the tiles in which any query sees any key."""
    dtype = accumulation_dtype(q.dtype)
    table = table.to(dtype)
    for rows in _cuts(q.shape[1], size):
        of_rows = pairs.queries.part(rows)
        for columns in _cuts(k.shape[1], size):
            of_columns = pairs.keys.part(columns)
            seen = visible(of_rows, of_columns)[:, None]
            if not bool(seen.any()):
                continue
            buckets = pairs.formula.buckets(of_rows, of_columns, pairs.relations)
            scores = torch.einsum("bqhd,bkhd->bhqk", q[:, rows].to(dtype), k[:, columns].to(dtype)) * scale
            scores += table[buckets].permute(0, 3, 1, 2)
            yield _Tile(rows, columns, scores.masked_fill_(~seen, -torch.inf), buckets, seen)


def _product(weights: Tensor, rows: Tensor, seen: Tensor) -> Tensor:
    """Return `[batch, queries, heads, head_dim]`, weights `[batch, heads, queries, keys]` times rows.

    A weight of 0 times NaN is NaN. So non-finite elements of `rows` `[batch, keys, heads, head_dim]` are left out of
    the product, and then make NaN only the results that see them.
    """
    lost = ~rows.isfinite()
    if not bool(lost.any()):
        return torch.einsum("bhqk,bkhd->bqhd", weights, rows)
    found = torch.einsum("bhqk,bkhd->bqhd", weights, rows.masked_fill(lost, 0.0))
    sees_lost = torch.einsum("bhqk,bkhd->bqhd", seen.to(rows.dtype).expand_as(weights), lost.to(rows.dtype)) > 0
    return found.masked_fill(sees_lost, torch.nan)


def _cuts(count: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


def _add_by_bucket(total: Tensor, buckets: Tensor, values: Tensor) -> None:
    """Add `values` `[batch, heads, queries, keys]` to the rows of `total` `[rows, heads]` given by `buckets`
    `[batch, queries, keys]`, always in the same order.
    """
    heads = total.shape[1]
    places = buckets[:, None] * heads + torch.arange(heads, device=total.device)[:, None, None]
    flat, added = total.view(-1), values.to(total.dtype).flatten()
    if total.is_cuda:
        flat.index_put_((places.flatten(),), added, accumulate=True)  # sorts; the order of index_add_ is undefined
    else:
        flat.index_add_(0, places.flatten(), added)  # sequential
