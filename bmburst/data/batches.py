"""Batches of samples: their order in training and evaluation, and the rows that each data rank reads."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bmburst.data.packing import PackedSequences
from bmburst.errors import UserError
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


_ROUNDS = 8
_MASK = (1 << 64) - 1


class Permutation:
    """A permutation of range(size), the same for the same key.

    A Feistel network permutes the numbers of 2b bits, for the smallest such range that holds `size`; a number that
    falls outside `size` goes through it again until it is inside ("cycle walking", Black and Rogaway 2002,
    doi:10.1007/3-540-45760-7_9). The range is less than four times `size`, so that takes less than four turns on
    average.

    Args:
        size: How many things there are, at least 1.
        key: What chooses the permutation; any numbers.
    """

    def __init__(self, size: int, *key: int) -> None:
        self._size = size
        self._half_bits = max(1, -(-(size - 1).bit_length() // 2))
        digest = hashlib.blake2b(repr((size, *key)).encode(), digest_size=8 * _ROUNDS // 2).digest()
        self._keys = [int.from_bytes(digest[i : i + 4], "little") for i in range(0, len(digest), 4)]

    def __call__(self, index: int) -> int:
        """Return where `index` goes.

        Raises:
            IndexError: `index` is not in range(size).
        """
        if not 0 <= index < self._size:
            raise IndexError(f"{index} is not in range({self._size})")
        while True:
            index = self._turn(index)
            if index < self._size:
                return index

    def _turn(self, value: int) -> int:
        mask = (1 << self._half_bits) - 1
        left, right = value >> self._half_bits, value & mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key << 32) & mask)
        return left << self._half_bits | right


def _mix(value: int) -> int:
    """Return 64 well-mixed bits: SplitMix64 (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


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
        sequences: PackedSequences,
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
        self._order: tuple[int, Permutation] | None = None  # of the epoch that was last asked for
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
        taken = tuple(self._sample(first + i) for i in range(self._batch_size))
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
            "corpus": self._sequences.token_file.fingerprint,
            "sequence_length": self._sequences.sequence_length,
            "held_out_fraction": self._sequences.held_out_fraction,
            "seed": self._seed,
        }

    def _sample(self, position: int) -> int:
        """Return which sample stands at `position` of the endless order."""
        epoch, index = divmod(position, len(self._sequences))
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, Permutation(len(self._sequences), self._seed, epoch)
        return self._order[1](index)


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
    sequences: PackedSequences,
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
    count = len(sequences) + (sequences.partial_labels > 0)
    count = count if limit is None else min(count, limit)

    def step(first: int) -> Samples:
        taken = tuple(range(first, min(first + batch_size, count)))
        mine = taken[data_rank * local : (data_rank + 1) * local]
        return Samples(sequences, taken, mine + (None,) * (local - len(mine)))

    return map(step, range(0, count, batch_size))
