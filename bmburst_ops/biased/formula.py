"""The bias and mask formula of CPM-Live's attention: integers per token, row of the bias table per pair, visibility.

Vectors of integers per token travel with the keys, instead of bias and mask matrices. This module is the definition,
for any block of queries and keys; `triton_bias` computes the same in kernels. The bucket of each distance is
computed here once, as a vector that both look up, so kernels need no logarithm.

Source: CPM-Live (github.com/OpenBMB/CPM-Live), cpm_live/layers/position_embedding.py, models/bee.py and models/ant.py.
"""

import math
from dataclasses import dataclass, fields
from functools import lru_cache

import torch
from torch import Tensor

from bmburst_ops.dtypes import name_of
from bmburst_ops.errors import KernelError

PADDING = -1
"""Span of a padding token: it sees no token, and no token sees it."""
IN_CONTEXT = 1
"""The relation of tokens of different samples."""

_SHAPE = "[batch, tokens]"


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Six integers per token, each an int32 vector `[batch, tokens]`, all on one device.

    Attributes:
        position: Position in the whole sequence, for distances and the causal order.
        segment: For a key, its column in the query's row of relations.
        row: For a query, the start of its row in the relations of its batch.
        sample: Queries of sample 0 see all samples of their span, other queries only their own sample.
        span: Tokens of different spans never see each other; below 0: `PADDING`.
        context: Not 0: visible to every token that may see its sample, and itself sees only context tokens.

    Raises:
        KernelError: Shapes, dtypes or devices are wrong.
    """

    position: Tensor
    segment: Tensor
    row: Tensor
    sample: Tensor
    span: Tensor
    context: Tensor

    def __post_init__(self) -> None:
        for field in fields(self):
            vector = getattr(self, field.name)
            if not isinstance(vector, Tensor):
                raise KernelError(
                    f"{field.name} must be a tensor, got {type(vector).__name__}\nallowed: int32 {_SHAPE}\n"
                    "fix: pass a tensor"
                )
            if vector.dtype != torch.int32 or vector.dim() != 2 or vector.shape != self.position.shape:
                raise KernelError(
                    f"{field.name} must be int32 {list(self.position.shape)}, {_SHAPE} as position, "
                    f"got {name_of(vector.dtype)} {list(vector.shape)}\nfix: one number a token"
                )
            if vector.device != self.position.device:
                raise KernelError(
                    f"{field.name} is on {vector.device}, but position on {self.position.device}\nfix: move all to one"
                )

    @property
    def shape(self) -> torch.Size:
        """Batch and tokens."""
        return self.position.shape

    @property
    def device(self) -> torch.device:
        """The device of the vectors."""
        return self.position.device

    def packed(self) -> Tensor:
        """Return all vectors as one tensor, `[6, batch, tokens]`, for communication and kernels."""
        return torch.stack(vectors_of(self))

    @classmethod
    def unpacked(cls, packed: Tensor) -> "Tokens":
        """Return the vectors of `packed`."""
        return cls(*packed.unbind(0))

    def part(self, tokens: slice) -> "Tokens":
        """Return the vectors of some tokens."""
        return Tokens(*(vector[:, tokens] for vector in vectors_of(self)))


def vectors_of(tokens: Tokens) -> tuple[Tensor, ...]:
    """Return the vectors in the order of `packed`."""
    return tuple(getattr(tokens, field.name) for field in fields(tokens))


def bee_tokens(
    position: Tensor,
    segment: Tensor,
    num_segments: Tensor,
    segment_rel_offset: Tensor,
    sample_ids: Tensor,
    span: Tensor,
    context: Tensor,
    length: Tensor,
) -> Tokens:
    """Return the vectors of CPM-Bee's tokens. Arguments have CPM-Bee's names, and are integers or bool.

    All but `length` are `[batch, tokens]`. The relation of two segments is at
    `segment_q * num_segments_q + segment_rel_offset_q + segment_k`.

    Args:
        position: Position in the whole sequence.
        segment: Node of the sample's tree.
        num_segments: Number of nodes in that tree.
        segment_rel_offset: Start of the tree's relations in those of the batch.
        sample_ids: 0 for the sample that is learned, other numbers for its examples.
        span: Index of the packed instance.
        context: Whether the token is given, not predicted.
        length: `[batch]`: positions from this one on are padding.
    """
    row = segment * num_segments + segment_rel_offset
    span = torch.where(position < length[:, None], span, PADDING)
    return _as_int32(position, segment, row, sample_ids, span, context)


def ant_tokens(
    position: Tensor, segment: Tensor, span: Tensor, context: Tensor, is_real: Tensor, num_segments: int
) -> Tokens:
    """Return the vectors of CPM-Ant's tokens; each `[batch, tokens]` of integers or bool.

    Args:
        position: Index in the whole sequence; CPM-Ant's bias does not use the model's `position`.
        segment: Kind of segment.
        span: Index of the packed instance.
        context: Whether the token is given, not predicted.
        is_real: Whether the token is not padding; padding is on the left.
        num_segments: Number of kinds of segments.
    """
    span = torch.where(is_real, span, PADDING)
    return _as_int32(position, segment, segment * num_segments, torch.zeros_like(segment), span, context)


def _as_int32(*vectors: Tensor) -> Tokens:
    return Tokens(*(vector.to(torch.int32) for vector in vectors))


@dataclass(frozen=True, kw_only=True, slots=True)
class RelativeBias:
    """The layout of a bias table: rows for distances, then rows for relations between segments.

    A query and a key of the same sample have the relation at the query's row and the key's segment; those of different
    samples have `IN_CONTEXT`. For relation 0 the distance determines the row; relation n is row `num_buckets + n - 1`.

    Attributes:
        num_buckets: Number of rows for distances.
        num_relations: Number of rows for relations.
        max_distance: Distances from this one on share a row.
        bidirectional: Whether half of the rows are for keys after the query. If not, such keys count as distance 0.

    Raises:
        KernelError: A value is not a whole number or not a bool, there are too few buckets, or `max_distance` is within
            the distances that have their own row.
    """

    num_buckets: int
    num_relations: int
    max_distance: int
    bidirectional: bool = True

    def __post_init__(self) -> None:
        for name in ("num_buckets", "num_relations", "max_distance"):
            _require_int(name, getattr(self, name))
        if not isinstance(self.bidirectional, bool):
            raise KernelError(
                f"bidirectional must be a bool, got {self.bidirectional!r}\nallowed: True or False\n"
                "fix: pass one of them"
            )
        if self.num_buckets < (4 if self.bidirectional else 2) or self.num_relations < 1:
            raise KernelError(
                f"num_buckets {self.num_buckets} and {self.num_relations} relations are too few\n"
                "allowed: 4 buckets (2 if not bidirectional) and 1 relation, or more\n"
                "fix: pass what the model was made with"
            )
        if self.max_distance <= self.max_exact:
            raise KernelError(
                f"max_distance {self.max_distance} must be above {self.max_exact}, of {self.num_buckets} buckets those "
                f"that hold one distance each\nallowed: {self.max_exact + 1} and more, or fewer buckets\n"
                "fix: pass what the model was made with"
            )

    @property
    def rows(self) -> int:
        """Number of rows of the table."""
        return self.num_buckets + self.num_relations

    @property
    def one_way(self) -> int:
        """Number of buckets for distances of one direction."""
        return self.num_buckets // 2 if self.bidirectional else self.num_buckets

    @property
    def max_exact(self) -> int:
        """The smallest distance that shares its bucket with others."""
        return self.one_way // 2

    def distances(self, device: torch.device) -> Tensor:
        """Return the bucket of each distance `key - query`, int32 `[2 * max_distance + 1]`, from -max_distance on."""
        return _distances(self, device)

    def buckets(self, queries: Tokens, keys: Tokens, relations: Tensor) -> Tensor:
        """Return the row of the table for each pair, int64 `[batch, queries, keys]`; arbitrary for masked pairs.

        Args:
            queries: Vectors of the queries.
            keys: Vectors of the keys.
            relations: int32 `[batch or 1, entries]`: all rows of relations of a batch, concatenated.
        """
        is_same = queries.sample[:, :, None] == keys.sample[:, None]
        places = queries.row[:, :, None].long() + keys.segment[:, None]
        asked = (is_same & visible(queries, keys)).expand_as(places)
        found = relations.expand(len(places), -1).gather(1, torch.where(asked, places, 0).flatten(1)).view_as(places)
        relation = torch.where(asked, found.long(), IN_CONTEXT)
        ahead = (keys.position[:, None] - queries.position[:, :, None]).clamp(-self.max_distance, self.max_distance)
        near = self.distances(relations.device)[ahead.long() + self.max_distance].long()
        return torch.where(relation == 0, near, relation - 1 + self.num_buckets)


def visible(queries: Tokens, keys: Tokens) -> Tensor:
    """Return which queries see which keys, bool `[batch, queries, keys]`."""
    span = queries.span[:, :, None]
    of_span = (span == keys.span[:, None]) & (span >= 0)
    sample = queries.sample[:, :, None]
    of_sample = (sample == 0) | (sample == keys.sample[:, None])
    is_before = keys.position[:, None] <= queries.position[:, :, None]
    is_open = (keys.context != 0)[:, None] | ((queries.context == 0)[:, :, None] & is_before)
    return of_span & of_sample & is_open


def bee_bias(*, num_buckets: int, num_segment_buckets: int, max_distance: int) -> RelativeBias:
    """Return CPM-Bee's bias. Its relations differ by batch: `segment_rel`."""
    return RelativeBias(num_buckets=num_buckets, num_relations=num_segment_buckets, max_distance=max_distance)


def ant_bias(*, num_buckets: int, num_segments: int, max_distance: int, bidirectional: bool) -> RelativeBias:
    """Return CPM-Ant's bias. Its relations are always `ant_relations`."""
    _require_int("num_segments", num_segments)
    return RelativeBias(
        num_buckets=num_buckets, num_relations=num_segments**2, max_distance=max_distance, bidirectional=bidirectional
    )


def ant_relations(num_segments: int, device: torch.device) -> Tensor:
    """Return CPM-Ant's relations, int32 `[1, num_segments ** 2]`: one per pair of segments, and 0 within a segment."""
    relations = torch.arange(1, num_segments**2 + 1, dtype=torch.int32, device=device)
    relations[:: num_segments + 1] = 0
    return relations[None]


def _require_int(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise KernelError(
            f"{name} must be a whole number, got {value!r}\nallowed: what the model was made with\nfix: pass an int"
        )


@lru_cache(maxsize=64)
def _distances(bias: RelativeBias, device: torch.device) -> Tensor:
    """Return the buckets: exact up to `max_exact`, then logarithmic; rounded in fp32, as in CPM-Live."""
    ahead = torch.arange(-bias.max_distance, bias.max_distance + 1)
    far = ahead.abs() if bias.bidirectional else -ahead.clamp(max=0)
    scale = math.log(bias.max_distance / bias.max_exact)
    logs = torch.log(far.clamp(min=bias.max_exact).float() / bias.max_exact) / scale
    shared = bias.max_exact + (logs * (bias.one_way - bias.max_exact)).to(torch.int32)
    buckets = torch.where(far < bias.max_exact, far, shared.clamp(max=bias.one_way - 1))
    if bias.bidirectional:
        buckets = buckets + (ahead > 0) * bias.one_way
    return buckets.to(device, torch.int32)
