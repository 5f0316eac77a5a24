"""What a biased attention asks of each token: vectors that travel with the keys, in place of matrices."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from bmburst_ops.errors import KernelError

PADDING = -1
"""The span of a token that is none: it sees nothing and nothing sees it."""

_SHAPE = "[batch, tokens]"


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Six integers of each token, int32 `[batch, tokens]` each, on one device.

    Attributes:
        position: In the whole sequence: distances and what is before a token are counted by it.
        segment: Which column of a query's row of relations a key is looked up in.
        row: Where a query's row begins in the relations of its batch.
        sample: Queries of sample 0 see every sample of their span, the others their own.
        span: Tokens of different spans never see each other; below 0: `PADDING`.
        context: Not 0: every token that may see the sample sees it, and it sees nothing that is not context.

    Raises:
        KernelError: Shapes, dtypes or devices are others.
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
                    f"got {str(vector.dtype).removeprefix('torch.')} {list(vector.shape)}\nfix: one number a token"
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
        """Where the vectors are."""
        return self.position.device

    def packed(self) -> Tensor:
        """Return all vectors as one tensor, `[6, batch, tokens]`: it travels, and kernels read it."""
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
    """Return the vectors of CPM-Bee's tokens, by its own names; each `[batch, tokens]` of integers or bool.

    A pair of its segments is looked up at `segment_q * num_segments_q + segment_rel_offset_q + segment_k`.

    Args:
        position: In the whole sequence.
        segment: Node of the sample's tree.
        num_segments: Nodes of that tree.
        segment_rel_offset: Where the tree's relations begin in the batch's.
        sample_ids: 0 for the sample that is learned, others for its examples.
        span: Which packed instance.
        context: Whether the token is given, not predicted.
        length: `[batch]`: positions from there on are padding.
    """
    row = segment * num_segments + segment_rel_offset
    span = torch.where(position < length[:, None], span, PADDING)
    return _as_int32(position, segment, row, sample_ids, span, context)


def ant_tokens(
    position: Tensor, segment: Tensor, span: Tensor, context: Tensor, is_real: Tensor, num_segments: int
) -> Tokens:
    """Return the vectors of CPM-Ant's tokens; each `[batch, tokens]` of integers or bool.

    Args:
        position: Place in the whole sequence: the model's own `position` is not what its bias looks at.
        segment: Kind of segment.
        span: Which packed instance.
        context: Whether the token is given.
        is_real: Whether the token is one; padding stands on the left.
        num_segments: Kinds of segments.
    """
    span = torch.where(is_real, span, PADDING)
    return _as_int32(position, segment, segment * num_segments, torch.zeros_like(segment), span, context)


def _as_int32(*vectors: Tensor) -> Tokens:
    return Tokens(*(vector.to(torch.int32) for vector in vectors))
