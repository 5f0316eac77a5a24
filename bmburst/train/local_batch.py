"""This rank's part of a batch of sequences, and its token losses."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from bmburst.mesh import Mesh
from bmburst.schedule.documents import Documents
from bmburst.sequence import Ids, SequenceShard


def causal_cut(mesh: Mesh, length: int, layout: str) -> SequenceShard:
    """Return this rank's part of sequences in which a token sees what is before it.

    Raises:
        UserError: The layout is unknown, or there are fewer tokens than ranks that share a sequence.
    """
    return SequenceShard.cut(length, layout=layout, size=mesh.shape.sequence, rank=mesh.sequence_rank, mask="causal")


class Rows(Protocol):
    """Sequences that are read a part at a time, as `bmburst.data.Samples`."""

    @property
    def documents(self) -> tuple[tuple[int, ...], ...] | None:
        """Tokens of each document of each row; what lies behind them is padding. None: a row is one text."""

    def __len__(self) -> int:
        """Return how many rows there are."""

    def read(self, row: int, places: range) -> tuple[Ids, Ids]:
        """Return inputs and labels of a row at some places; `IGNORE_INDEX` is no label."""


@dataclass(frozen=True, slots=True)
class LocalBatch:
    """What the model is given of some sequences on one rank.

    Attributes:
        ids: int64 `[3, rows, local_tokens]`: tokens, labels, and positions, which count from 0 in each document.
        length: Real tokens of each whole sequence.
        masks: The documents of each row, of which a token sees only its own; None where a row is one text.
    """

    ids: Tensor
    length: int
    masks: tuple[Documents, ...] | None

    @classmethod
    def read(cls, cut: SequenceShard, rows: Rows) -> "LocalBatch":
        """Return this rank's part of sequences, on the CPU. No more of them is read.

        Raises:
            UserError: The documents do not fit the sequences.
        """
        documents = rows.documents
        masks = None if documents is None else tuple(map(Documents, documents))
        of_rows = masks or (None,) * len(rows)
        parts = [cut.read(partial(rows.read, row), mask) for row, mask in enumerate(of_rows)]
        return cls(torch.from_numpy(np.stack(parts, 1)), cut.length, masks)

    @property
    def labels(self) -> Tensor:
        """This rank's labels, `[rows, local_tokens]`; `IGNORE_INDEX` where there is no loss."""
        return self.ids[1]

    @property
    def texts(self) -> list[tuple[int, ...]]:
        """Of each row, the tokens of each text in it."""
        return [mask.lengths for mask in self.masks] if self.masks else [(self.length,)] * len(self.labels)

    def on(self, ids: Tensor) -> "LocalBatch":
        """Return the same with its numbers in another place."""
        return replace(self, ids=ids)

    def micro_batches(self, size: int) -> Iterator["LocalBatch"]:
        """Yield `size` rows at a time."""
        for first in range(0, self.ids.shape[1], size):
            rows = slice(first, first + size)
            yield replace(self, ids=self.ids[:, rows], masks=self.masks and self.masks[rows])


if TYPE_CHECKING:
    from bmburst.blocks.model import Llama


def token_losses(model: "Llama", batch: LocalBatch) -> Tensor:
    """Return the sum of the token losses of this rank's part of sequences, in nats.

    Args:
        model: On all ranks.
        batch: Of this rank, on its device; every rank has its part of the same sequences.

    Raises:
        UserError: Layout "balanced" gets several sequences with documents.
    """
    tokens, labels, positions = batch.ids
    if batch.masks is None:
        return model.loss(tokens, positions, labels, batch.length)
    mask = batch.masks[0] if len(batch.masks) == 1 else batch.masks
    return model.loss(tokens, positions, labels, None, mask)  # the masks know how many are real
