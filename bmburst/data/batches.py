"""Batches of samples: their order in training and evaluation, and the rows of each data rank."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from bmburst.data.dealing import Balance, contiguous, deal_samples, slowest
from bmburst.errors import UserError
from bmburst_ops import IGNORE_INDEX

Ids = npt.NDArray[np.int64]


class Sequences(Protocol):
    """Interface of samples of one length: `PackedSequences`, `WholeDocuments` or `Mixture`."""

    sequence_length: int
    held_out_fraction: float
    pack: str

    @property
    def eos_id(self) -> int:
        """The end-of-document id, also used for padding."""

    @property
    def fingerprint(self) -> str:
        """Equal only for the same data."""

    def __len__(self) -> int:
        """Return the number of samples of an epoch."""

    def labels_in(self, index: int) -> int:
        """Return the number of positions of a sample before the padding."""

    def counted_in(self, index: int) -> int:
        """Return the number of labels of a sample that count in the loss."""

    def text_bytes(self, index: int) -> int:
        """Return the number of bytes of text that these labels encode."""

    def documents(self, index: int) -> tuple[int, ...] | None:
        """Return the number of inputs of each document of a sample; None if a sample is one text."""

    def parents(self, index: int) -> tuple[int, ...] | None:
        """Return the parent of each of these documents, -1 for none; None if no documents share a prompt."""

    def pairs(self, index: int, places: range) -> tuple[Ids, Ids]:
        """Return inputs and labels of a sample at positions before the padding, each int64 `[len(places)]`."""

    @property
    def weighted(self) -> bool:
        """Whether labels have weights other than 1."""

    def weights(self, index: int, places: range) -> npt.NDArray[np.float64]:
        """Return the weights of a sample's labels at positions before the padding, `[len(places)]`."""

    def drawn(self, position: int, seed: int) -> int:
        """Return the index of the sample at a position of the infinite training order."""

    def evaluated(self, count: int | None = None) -> Sequence[int]:
        """Return the samples of an evaluation in order, at most `count`."""

    def prompt(self, most: int) -> list[int]:
        """Return the prompt of a generated sample, at most `most` tokens."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Indices of the samples of one step on one data rank. Tokens are read from the file only when requested.

    Attributes:
        sequences: The data set.
        taken: Samples of all data ranks, in the order in which they are drawn.
        places: The place in the step's order of each row of this rank; a place after `taken` is a row of padding.
        balance: How equal the predicted costs of the data ranks are; None if they are not known, or of one rank.
    """

    sequences: Sequences
    taken: tuple[int, ...]
    places: tuple[int, ...]
    balance: Balance | None = field(default=None, compare=False)

    def __len__(self) -> int:
        """Return this rank's number of rows."""
        return len(self.places)

    @property
    def rows(self) -> tuple[int | None, ...]:
        """Samples of this rank; None is a row of padding."""
        return tuple(map(self._row, range(len(self))))

    @property
    def label_count(self) -> int:
        """Number of labels that count in the loss, over all data ranks."""
        return sum(map(self.sequences.counted_in, self.taken))

    @property
    def text_bytes(self) -> int:
        """Bytes of text that the labels of all data ranks encode."""
        return sum(map(self.sequences.text_bytes, self.taken))

    @property
    def documents(self) -> tuple[tuple[int, ...], ...] | None:
        """Number of inputs of each document of each row, without padding; None for pack "stream".

        A row of padding has one document of one token.
        """
        if self.sequences.pack == "stream":
            return None
        return tuple((1,) if row is None else self.sequences.documents(row) or () for row in self.rows)

    @property
    def parents(self) -> tuple[tuple[int, ...] | None, ...]:
        """For each row the parents of its documents as in `bmburst.Tree`; None if no documents share a prompt."""
        return tuple(None if row is None else self.sequences.parents(row) for row in self.rows)

    def read(self, row: int, places: range) -> tuple[Ids, Ids]:
        """Return inputs and labels of a row at given positions, each int64 `[len(places)]`; only these are read.

        In padding, the input is the end-of-document id and the label `IGNORE_INDEX`.

        Args:
            row: Index among this rank's rows.
            places: Positions in the sequence, ascending and below `sequence_length`.
        """
        inputs = np.full(len(places), self.sequences.eos_id, np.int64)
        labels = np.full(len(places), IGNORE_INDEX, np.int64)
        index, real = self._real(row, places)
        if real:
            inputs[: len(real)], labels[: len(real)] = self.sequences.pairs(index, real)
        return inputs, labels

    @property
    def weighted(self) -> bool:
        """Whether labels have weights, equal on all data ranks."""
        return self.sequences.weighted

    def weights(self, row: int, places: range) -> npt.NDArray[np.float64]:
        """Return the weights of a row's labels at given positions, `[len(places)]`; 0 in padding. See `read`."""
        found = np.zeros(len(places))
        index, real = self._real(row, places)
        if real:
            found[: len(real)] = self.sequences.weights(index, real)
        return found

    def _real(self, row: int, places: range) -> tuple[int, range]:
        """Return the sample of a row, and the positions before its padding; none in a row of padding."""
        if (index := self._row(row)) is None:
            return 0, range(0)
        return index, range(places.start, min(places.stop, self.sequences.labels_in(index)), places.step)

    def whole(self) -> tuple[Ids, Ids]:
        """Return inputs and labels of all rows, each int64 `[rows, sequence_length]`."""
        places = range(self.sequences.sequence_length)
        inputs, labels = zip(*(self.read(row, places) for row in range(len(self))), strict=True)
        return np.stack(inputs), np.stack(labels)

    def _row(self, row: int) -> int | None:
        place = self.places[row]
        return self.taken[place] if place < len(self.taken) else None


STATE_VERSION = 1


class Batches:
    """An infinite iterator over batches: in each step, the `batch_size / data_parallel` samples of this rank.

    Each epoch has a new random order, determined by (seed, epoch). A step takes the next `batch_size` samples, also
    across the end of an epoch. Each data rank gets an equal share: with `cost`, shares are dealt by predicted cost
    (`deal_samples`), else data rank r gets the r-th. So a step trains on the same samples with any number of data
    ranks, and all ranks of a sequence group, which have the same `data_rank`, get the same samples.

    Args:
        sequences: The data set.
        batch_size: Sequences per step, over all data ranks.
        seed: Seed of the order.
        data_rank: Index of this rank's data group, in [0, data_parallel).
        data_parallel: Number of data groups.
        total: Number of samples after which there are no more; the last step has what is left, and its other rows are
            padding. None: no end.
        cost: Returns the predicted cost of a sample, the same on all ranks, in any unit; None: samples cost the same.
        micro_batch_size: Samples that a data rank computes at once.

    Attributes:
        sequences: As above.
        samples: Number of samples that all ranks together have taken since the start of training.
        text_bytes: Bytes of text that the labels of the last batch encode, over all data ranks; 0 before the first.
        balance: How equal the data ranks' costs of the last batch are; None before the first, or if it is not known.

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
        total: int | None = None,
        cost: Callable[[int], float] | None = None,
        micro_batch_size: int = 1,
    ) -> None:
        local_batch_size(batch_size, data_rank, data_parallel)
        self.total = total
        self.sequences = sequences
        self._batch_size = batch_size
        self._seed = seed
        self._rank, self._ranks, self._together = data_rank, data_parallel, micro_batch_size
        # A batch is looked up three times: prefetched, loaded, and counted.
        self._cost = None if cost is None or data_parallel == 1 else lru_cache(2 * batch_size)(cost)
        self.samples = 0
        self.text_bytes = 0
        self.balance: Balance | None = None

    def __iter__(self) -> "Batches":
        """Return itself: there is one position in the data."""
        return self

    def __next__(self) -> Samples:
        """Return this rank's samples of the next step, and advance by one step."""
        samples = self.coming()
        self.samples += len(samples.taken)
        self.text_bytes, self.balance = samples.text_bytes, samples.balance
        return samples

    def coming(self, steps: int = 0) -> Samples:
        """Return the samples that `next` would return after `steps` further steps, without advancing."""
        first = self.samples + steps * self._batch_size
        stop = first + self._batch_size
        stop = stop if self.total is None else max(min(stop, self.total), first)
        taken = tuple(self.sequences.drawn(at, self._seed) for at in range(first, stop))
        drawn = contiguous(self._batch_size, self._ranks)
        if self._cost is None or not taken:
            return Samples(self.sequences, taken, drawn[self._rank])
        costs = list(map(self._cost, taken))
        costs += [min(costs)] * (self._batch_size - len(costs))  # rows of padding
        dealt = deal_samples(costs, self._ranks, self._together)
        balance = Balance(*(slowest(costs, shares, self._together) for shares in (dealt, drawn)))
        return Samples(self.sequences, taken, dealt[self._rank], balance)

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self.samples // len(self.sequences)

    def state_dict(self) -> dict[str, int | float | str]:
        """Return the position and the identity of data and order; plain values, the same on every rank."""
        return {"version": STATE_VERSION, "samples": self.samples, **self._order_of()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue at the position of `state`; the number of data ranks and the batch size may differ.

        Raises:
            UserError: `state` has another corpus, sequence length, seed or held-out fraction, or is not valid.
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
                    "fix: give the same data, by --data PATH if they have moved, and the same settings; or start from "
                    "the weights alone with --init-from"
                )
        self.samples = samples

    def _order_of(self) -> dict[str, int | float | str]:
        return {
            "corpus": self.sequences.fingerprint,
            "sequence_length": self.sequences.sequence_length,
            "held_out_fraction": self.sequences.held_out_fraction,
            "seed": self._seed,
        }


def local_batch_size(batch_size: int, data_rank: int, data_parallel: int) -> int:
    """Return the number of sequences of a batch on each data rank.

    Raises:
        UserError: `batch_size` is not a positive multiple of `data_parallel`, or `data_rank` is out of range.
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
    sequences: Sequences, *, batch_size: int = 1, limit: int | None = None, data_rank: int = 0, data_parallel: int = 1
) -> Iterator[Samples]:
    """Return an iterator over the samples in order; a partial sample, padded, is the last one.

    Every data rank gets the same number of batches with the same number of rows; rows after the last sample are
    padding.

    Args:
        sequences: Usually the "held_out" split of a corpus, or "all" of a file.
        batch_size: Sequences per step, over all data ranks.
        limit: Maximum number of sequences; None: all.
        data_rank: Index of this rank's data group, in [0, data_parallel).
        data_parallel: Number of data groups.

    Raises:
        UserError: `batch_size` is not a positive multiple of `data_parallel`, or `limit` is less than 1.
    """
    local = local_batch_size(batch_size, data_rank, data_parallel)
    if limit is not None and limit < 1:
        raise UserError(f"limit is {limit}\nallowed: at least 1 sequence\nfix: limit=None evaluates all sequences")
    order = sequences.evaluated(limit)

    def step(first: int) -> Samples:
        taken = tuple(order[first : first + batch_size])
        return Samples(sequences, taken, tuple(range(data_rank * local, (data_rank + 1) * local)))

    return map(step, range(0, len(order), batch_size))
