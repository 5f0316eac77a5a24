"""Whole sequences that a test gives, in the place of samples that are read from a file."""

from typing import NamedTuple

from torch import Tensor

from bmburst.sequence import Ids, SequenceShard
from bmburst.train.loading import LocalBatch


class Given(NamedTuple):
    """Inputs and labels `[rows, tokens]`, and the documents of each row, if they are packed."""

    inputs: Tensor
    labels: Tensor
    documents: tuple[tuple[int, ...], ...] | None = None
    weighted: bool = False

    @property
    def parents(self) -> tuple[None, ...]:
        """No documents share a prompt."""
        return (None,) * len(self)

    def __len__(self) -> int:
        return len(self.inputs)

    def read(self, row: int, places: range) -> tuple[Ids, Ids]:
        at = list(places)
        return self.inputs[row, at].numpy(), self.labels[row, at].numpy()


def local(cut: SequenceShard, *whole, device="cpu") -> LocalBatch:
    """Return a rank's part of whole sequences."""
    batch = LocalBatch.read(cut, Given(*whole))
    return batch.to(device)
