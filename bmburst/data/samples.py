"""The samples of a step: which they are, and their tokens when somebody asks for them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bmburst.data.packing import PackedSequences
from bmburst_ops.constants import IGNORE_INDEX

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Samples:
    """What one data rank takes in a step, by number. Tokens are read from the file only as far as they are asked for.

    Attributes:
        sequences: Where the samples come from.
        taken: The samples of all data ranks, in order.
        rows: This rank's; None is a row without text.
    """

    sequences: PackedSequences
    taken: tuple[int, ...]
    rows: tuple[int | None, ...]

    def __len__(self) -> int:
        """Return this rank's number of rows."""
        return len(self.rows)

    @property
    def label_count(self) -> int:
        """Labels that count, over all data ranks."""
        return sum(map(self.sequences.labels_in, self.taken))

    @property
    def text_bytes(self) -> int:
        """Bytes of text that the labels of all data ranks stand for."""
        return sum(map(self.sequences.text_bytes, self.taken))

    @property
    def documents(self) -> tuple[tuple[int, ...], ...] | None:
        """Inputs of each document of each row, padding left out, or None where the sequences are streams.

        A row without text has one of a single token.
        """
        if self.sequences.pack == "stream":
            return None
        return tuple((1,) if row is None else self.sequences.documents(row) or () for row in self.rows)

    def read(self, row: int, places: range) -> tuple[Ids, Ids]:
        """Return inputs and labels of a row at some places, each int64 `[len(places)]`; nothing else is read.

        Where there is no text, the input is the end-of-document id and the label `IGNORE_INDEX`.

        Args:
            row: Which of this rank's.
            places: Positions in the sequence, ascending and below `sequence_length`.
        """
        index = self.rows[row]
        inputs = np.full(len(places), self.sequences.token_file.eos_id, np.int64)
        labels = np.full(len(places), IGNORE_INDEX, np.int64)
        if index is None:
            return inputs, labels
        first, step = places.start, places.step
        stop = min(places.stop, self.sequences.labels_in(index))
        real = len(range(first, stop, step))
        if real and step == 1:  # a label is the next input: one read does for both
            ids = self.sequences.read(index, range(first, stop + 1))
            inputs[:real], labels[:real] = ids[:-1], ids[1:]
        elif real:
            inputs[:real] = self.sequences.read(index, range(first, stop, step))
            labels[:real] = self.sequences.read(index, range(first + 1, stop + 1, step))
        return inputs, labels

    def whole(self) -> tuple[Ids, Ids]:
        """Return inputs and labels of all rows, each int64 `[rows, sequence_length]`."""
        places = range(self.sequences.sequence_length)
        inputs, labels = zip(*(self.read(row, places) for row in range(len(self))), strict=True)
        return np.stack(inputs), np.stack(labels)
