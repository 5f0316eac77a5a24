"""The inputs of biased attention that all layers of a batch share: tokens, relations and the bias formula."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bmburst_ops.biased.formula import RelativeBias
from bmburst_ops.biased.tokens import Tokens
from bmburst_ops.errors import KernelError
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
