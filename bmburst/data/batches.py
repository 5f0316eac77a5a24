"""Batches of samples: their order in training and evaluation, and the rows that each data rank reads."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from bmburst.errors import UserError
from bmburst_ops.constants import IGNORE_INDEX

Ids = npt.NDArray[np.int64]


class Sequences(Protocol):
    """Samples of one length to train on or to evaluate: `PackedSequences`, `WholeDocuments` or `Mixture`."""

    sequence_length: int
    held_out_fraction: float
    pack: str

    @property
    def eos_id(self) -> int:
        """The id of padding."""

    @property
    def fingerprint(self) -> str:
        """Equal for the same data alone."""

    def __len__(self) -> int:
        """Return how many samples an epoch has."""

    def labels_in(self, index: int) -> int:
        """Return how many places of a sample are real; what lies behind them is padding."""

    def counted_in(self, index: int) -> int:
        """Return how many labels of a sample count in the loss."""

    def text_bytes(self, index: int) -> int:
        """Return how many bytes of text these labels stand for."""

    def documents(self, index: int) -> tuple[int, ...] | None:
        """Return how many inputs each document of a sample has; None where a sample is one text."""

    def pairs(self, index: int, places: range) -> tuple[Ids, Ids]:
        """Return inputs and labels of a sample at some real places."""

    def drawn(self, position: int, seed: int) -> int:
        """Return which sample stands at a position of the endless order of training."""

    def evaluated(self, count: int | None = None) -> Sequence[int]:
        """Return the samples of an evaluation in order, at most `count`."""

    def prompt(self, most: int) -> list[int]:
        """Return the tokens of a prompt for a sample of what a model writes."""


@dataclass(frozen=True, slots=True)
class Samples:
    """What one data rank takes in a step, by number. Tokens are read from the file only as far as they are asked for.

    Attributes:
        sequences: Where the samples come from.
        taken: The samples of all data ranks, in order.
        rows: This rank's; None is a row without text.
    """

    sequences: Sequences
    taken: tuple[int, ...]
    rows: tuple[int | None, ...]

    def __len__(self) -> int:
        """Return this rank's number of rows."""
        return len(self.rows)

    @property
    def label_count(self) -> int:
        """Labels that count, over all data ranks."""
        return sum(map(self.sequences.counted_in, self.taken))

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
        inputs = np.full(len(places), self.sequences.eos_id, np.int64)
        labels = np.full(len(places), IGNORE_INDEX, np.int64)
        if index is None:
            return inputs, labels
        stop = min(places.stop, self.sequences.labels_in(index))
        if real := range(places.start, stop, places.step):
            inputs[: len(real)], labels[: len(real)] = self.sequences.pairs(index, real)
        return inputs, labels

    def whole(self) -> tuple[Ids, Ids]:
        """Return inputs and labels of all rows, each int64 `[rows, sequence_length]`."""
        places = range(self.sequences.sequence_length)
        inputs, labels = zip(*(self.read(row, places) for row in range(len(self))), strict=True)
        return np.stack(inputs), np.stack(labels)


STATE_VERSION = 1


class Batches:
    """An endless iterator over batches: the `batch_size / data_parallel` samples of this rank in each step.

    Samples come in a new random order every epoch, chosen by (seed, epoch); one step takes the next `batch_size` of
    them, across the end of an epoch too. Data rank r gets the r-th equal share of them, so that a step trains on the
    same samples with any number of data ranks, and every rank of a sequence group, which has the same `data_rank`,
    gets the same ones.

    Args:
        sequences: Where samples come from.
        batch_size: Sequences a step, over all data ranks.
        seed: Chooses the order.
        data_rank: This rank's data group, in [0, data_parallel).
        data_parallel: How many data groups there are.

    Attributes:
        samples: How many samples all ranks together have taken since the beginning of training.
        text_bytes: Bytes of text that the labels of the last batch stand for, over all data ranks; 0 before the first.

    Raises:
        UserError: `batch_size` is not a positive multiple of `data_parallel`.
    """

    def __init__(
        self,
        sequences: Sequences,
        *,
        batch_size: int,
        seed: int,
        data_rank: int = 0,
        data_parallel: int = 1,
    ) -> None:
        self._local = local_batch_size(batch_size, data_rank, data_parallel)
        self._sequences = sequences
        self._batch_size = batch_size
        self._seed = seed
        self._first = data_rank * self._local
        self.samples = 0
        self.text_bytes = 0

    def __iter__(self) -> "Batches":
        """Return itself: there is one position in the data."""
        return self

    def __next__(self) -> Samples:
        """Return this rank's part of the next step's samples, and move on by one step."""
        samples = self.coming()
        self.samples += self._batch_size
        self.text_bytes = samples.text_bytes
        return samples

    def coming(self, steps: int = 0) -> Samples:
        """Return what `next` will, or will after some more steps, and stay where it is."""
        first = self.samples + steps * self._batch_size
        taken = tuple(self._sequences.drawn(first + i, self._seed) for i in range(self._batch_size))
        return Samples(self._sequences, taken, taken[self._first : self._first + self._local])

    @property
    def epoch(self) -> int:
        """How many times every sample has been taken."""
        return self.samples // len(self._sequences)

    def state_dict(self) -> dict[str, int | float | str]:
        """Return the position and what it is a position in; plain values, the same on every rank."""
        return {"version": STATE_VERSION, "samples": self.samples, **self._order_of()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on where the iterator that gave `state` was, with any number of data ranks and any batch size.

        Raises:
            UserError: `state` is of another corpus, length, seed or held-out part, or is not such a state.
        """
        samples = state.get("samples")
        if state.get("version") != STATE_VERSION or not isinstance(samples, int) or samples < 0:
            raise UserError(
                f"the saved position in the training data is not valid: {dict(state)!r:.80}\n"
                f"allowed: what state_dict() returns, format version {STATE_VERSION}\n"
                "fix: resume from another checkpoint"
            )
        for name, value in self._order_of().items():
            if state.get(name) != value:
                raise UserError(
                    f"the data differ from those of the checkpoint: {name} was {state.get(name)}, is {value}\n"
                    "fix: give the same data and settings, or start from the weights alone with --init-from"
                )
        self.samples = samples

    def _order_of(self) -> dict[str, int | float | str]:
        return {
            "corpus": self._sequences.fingerprint,
            "sequence_length": self._sequences.sequence_length,
            "held_out_fraction": self._sequences.held_out_fraction,
            "seed": self._seed,
        }


def local_batch_size(batch_size: int, data_rank: int, data_parallel: int) -> int:
    """Return a data rank's share of a batch.

    Raises:
        UserError: It has no equal share, or there is no such rank.
    """
    if data_parallel < 1 or not 0 <= data_rank < data_parallel:
        raise UserError(
            f"data_rank is {data_rank} and data_parallel is {data_parallel}\n"
            "allowed: data_parallel at least 1, data_rank from 0 to data_parallel - 1\n"
            "fix: pass mesh.data_rank and mesh.shape.data of a bmburst.Mesh"
        )
    if batch_size < 1 or batch_size % data_parallel:
        below = batch_size // data_parallel * data_parallel
        nearest = [str(size) for size in (below, below + data_parallel) if size > 0] or [str(data_parallel)]
        raise UserError(
            f"batch_size {batch_size} cannot be split evenly over {data_parallel} data ranks\n"
            f"allowed: positive multiples of {data_parallel}; it counts the sequences of all ranks\n"
            f"fix: give {' or '.join(nearest)}"
        )
    return batch_size // data_parallel


def evaluation_batches(
    sequences: Sequences,
    *,
    batch_size: int = 1,
    limit: int | None = None,
    data_rank: int = 0,
    data_parallel: int = 1,
) -> Iterator[Samples]:
    """Return an iterator over the samples in order, the partial one, padded, at the end.

    Every data rank gets the same number of batches of as many rows; rows beyond the last sample are without text.

    Args:
        sequences: Usually the "held_out" part of a corpus, or "all" of a file.
        batch_size: Sequences a step, over all data ranks.
        limit: Stop after that many sequences; None takes all.
        data_rank: This rank's data group, in [0, data_parallel).
        data_parallel: How many data groups there are.

    Raises:
        UserError: `batch_size` is not a positive multiple of `data_parallel`, or `limit` is less than 1.
    """
    local = local_batch_size(batch_size, data_rank, data_parallel)
    if limit is not None and limit < 1:
        raise UserError(f"limit is {limit}\nallowed: at least 1 sequence\nfix: limit=None evaluates all sequences")
    order = sequences.evaluated(limit)

    def step(first: int) -> Samples:
        taken = tuple(order[first : first + batch_size])
        mine = taken[data_rank * local : (data_rank + 1) * local]
        return Samples(sequences, taken, mine + (None,) * (local - len(mine)))

    return map(step, range(0, len(order), batch_size))
