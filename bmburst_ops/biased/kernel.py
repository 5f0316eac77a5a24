"""What a biased attention kernel takes and returns: one block of queries and keys on one device.

`Pairs` are the inputs that all layers of a batch share: tokens, relations and the bias formula.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from bmburst_ops.biased.formula import RelativeBias, Tokens
from bmburst_ops.errors import KernelError
from bmburst_ops.flash.kernel import Partial
from bmburst_ops.flash.memory import DeviceVectors, vectors_of_stream


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
        """Return the tensors of that name, computed by `make()` on first use, ready for the current stream."""
        found = self._made.get(name)
        if found is None:
            found = self._made[name] = vectors_of_stream(make())
        return found.here()


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """What a kernel must know beside q, k, v and the bias table.

    What kernels find out of it is kept here: layers that are given the same value share it, forward and backward. So
    the tensors must stay as they are.

    Attributes:
        formula: Which row of the table a query and a key have.
        relations: int32 `[batch or 1, entries]`; see `RelativeBias.buckets`.
        queries: What the queries are.
        keys: What the keys are.
        once: What was found.

    Raises:
        KernelError: Shapes, dtypes or devices do not fit each other. What is in the vectors is not looked at: see
            `require_relations`.
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
        """Where everything is."""
        return self.relations.device

    def packed(self) -> tuple[Tensor, Tensor]:
        """Return the vectors of queries and of keys as kernels read them, `Tokens.packed`."""
        if self.queries is self.keys:
            (packed,) = self.once.get("packed", lambda: (self.queries.packed(),))
            return packed, packed
        queries, keys = self.once.get("packed", lambda: (self.queries.packed(), self.keys.packed()))
        return queries, keys

    def lookup(self) -> tuple[Any, ...]:
        """Return how kernels look a bias up: relations, their stride of samples, how many there are, distances, the
        largest of them, rows for distances, and all rows.
        """
        formula = self.formula
        relations, distances = self.once.get(
            "lookup", lambda: (self.relations.contiguous(), formula.distances(self.device))
        )
        stride = relations.shape[1] if relations.shape[0] > 1 else 0
        numbers = (formula.max_distance, formula.num_buckets, formula.rows)
        return relations, stride, relations.shape[1], distances, *numbers


def require_relations(pairs: Pairs) -> None:
    """Check that pairs of one sample find a relation, and that it is one that the table has. The host waits.

    Raises:
        KernelError: Some do not.
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
        """Return them in the dtypes of q, k, v and the table."""
        return BiasedGradients(*(grad.to(x.dtype) for grad, x in zip(self, like, strict=True)))


class BiasedKernel(Protocol):
    """Attention of a block of queries to a block of keys with its log-sum-exp, forward and backward.

    Scores are `q k^T * scale + table[bucket]`, of pairs that see each other; see `formula`. A query that sees none has
    an output of zero, a log-sum-exp of `-inf` and gradients of zero; so has a key that no query sees. The same call
    gives the same bits each time.
    """

    name: str

    def refusal(self, q: Tensor) -> str | None:
        """Return why the kernel cannot take such inputs on this machine, as a phrase; None if it can."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, pairs: Pairs, *, scale: float) -> Partial:
        """Return the block's output, in q's dtype or wider, and its log-sum-exp, in fp32 or wider.

        Args:
            q: Queries, `[batch, queries, heads, head_dim]`, any strides.
            k: Keys, `[batch, keys, heads, head_dim]`.
            v: Values, shaped as k.
            table: The bias table, `[pairs.formula.rows, heads]`, any float dtype.
            pairs: What queries and keys are, and how the table is looked up.
            scale: Factor on the products, above 0.
        """
        ...

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        table: Tensor,
        pairs: Pairs,
        *,
        scale: float,
        rounded: bool = False,
    ) -> BiasedGradients:
        """Return the block's gradients, in fp32 or wider.

        Args:
            grad_out: dO of the whole attention, shaped as q.
            q: Queries.
            k: Keys.
            v: Values.
            lse: Global log-sum-exp `[batch, heads, queries]`, over all keys and not only the block's.
            delta: Global rowsum(dO * O), shaped as lse.
            table: As in forward.
            pairs: As in forward.
            scale: Factor on the products, above 0.
            rounded: Whether gradients have the dtypes of what they are of: where the block is the whole attention.
        """
        ...


def require_inputs(q: Tensor, k: Tensor, v: Tensor, table: Tensor, pairs: Pairs) -> None:
    """Check shapes, dtypes and devices.

    Raises:
        KernelError: They do not fit each other.
    """
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
        got = f"{str(table.dtype).removeprefix('torch.')} {list(table.shape)}"
        raise KernelError(
            f"the bias table must be float {[rows, q.shape[2]]}, [rows, heads], got {got}\n"
            "fix: the table of the module whose formula it is, with as many heads as q"
        )
    devices = {t.device for t in (q, k, v, table, pairs)}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise KernelError(f"everything must be on one device, got {names}\nfix: move all to that of q")
