"""Packs whole records into sequences for fine-tuning: no record is cut, and only answers have a loss."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bmburst.data.packing import HELD_OUT_FRACTION, PackedSequences, PartOfCorpus, held_out_documents
from bmburst.data.token_file import TokenFile
from bmburst.errors import UserError
from bmburst_ops import IGNORE_INDEX

Ids = npt.NDArray[np.int64]


def pack_sequences(token_file: TokenFile, **options: Any) -> "PackedSequences | WholeDocuments":
    """Return `WholeDocuments` for a token file with a loss mask (records), else `PackedSequences` (text).

    Args:
        token_file: The file.
        options: Keyword arguments of `PackedSequences`, which `WholeDocuments` accepts too.
    """
    return (PackedSequences if token_file.loss_mask is None else WholeDocuments)(token_file, **options)


class WholeDocuments(PartOfCorpus):
    """Whole records of one split of a corpus, packed into sequences.

    Records longer than a sequence are left out. The others are placed from the longest to the shortest, each into the
    sequence where it leaves the least room (best fit decreasing, Johnson 1973); the rest of a sequence is padding. The
    label of an input is the next token of its record, if that token is part of an answer. The samples depend only on
    the file, not on the number of ranks. A preference pair is one record: its two documents are in one sequence, the
    chosen one first.

    Args:
        token_file: A token file with a loss mask.
        split: "train", "held_out" or "all".
        sequence_length: S, tokens per sequence.
        held_out_fraction: Fraction of the corpus's tokens that is never trained on, in [0, 1); "all" ignores it.
        pack: "stream": tokens attend to all earlier records of the sequence; "documents": only to their own document.

    Attributes:
        left_out: Number of records of the split that are longer than a sequence.

    Raises:
        UserError: A value is out of range, or no record is left.
    """

    def __init__(
        self,
        token_file: TokenFile,
        *,
        split: str,
        sequence_length: int,
        held_out_fraction: float = HELD_OUT_FRACTION,
        pack: str = "stream",
    ) -> None:
        super().__init__(token_file, split, sequence_length, held_out_fraction, pack)
        self._each = 2 if token_file.pairs else 1  # documents of a record
        sizes = np.diff(token_file.document_offsets[:: self._each])
        part = np.ones(len(sizes), bool)
        if split == "held_out" or (split == "train" and held_out_fraction):
            held = held_out_documents(token_file, held_out_fraction)[:: self._each]  # a pair's documents have one key
            part = held if split == "held_out" else ~held
        taken = np.flatnonzero(part & (sizes <= sequence_length))
        self.left_out = int(part.sum()) - len(taken)
        if not len(taken) and split != "held_out":  # an evaluation may be empty
            what = "record to train on" if split == "train" else "record"
            raise UserError(
                f"data {token_file.path}: no {what} is left, all {self.left_out} are longer than "
                f"sequence_length {sequence_length}\nallowed: at least {int(sizes[part].min(initial=2**62))} tokens, "
                f"the shortest record\nfix: --sequence-length {_round(int(sizes[part].max(initial=1)))}, as the longest"
            )
        self._records, self._ends = _best_fit(taken, sizes, sequence_length)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._ends)

    def records(self, index: int) -> Ids:
        """Return the indices in the file of the records of sample `index`, int64 `[records]`.

        Raises:
            IndexError: There is no such sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"no sample {index} among {len(self)}")
        return self._records[int(self._ends[index - 1]) if index else 0 : int(self._ends[index])]

    def labels_in(self, index: int) -> int:
        """Return the number of tokens of sample `index`, without padding."""
        return sum(stop - start for start, stop in self._ranges(index))

    def counted_in(self, index: int) -> int:
        """Return the number of labels of sample `index` that count in the loss."""
        return sum(int(self.token_file.answers_in(range(start + 1, stop)).sum()) for start, stop in self._ranges(index))

    def text_bytes(self, index: int) -> int:
        """Return the number of bytes of text of the answers in sample `index`."""
        return sum(self.token_file.bytes_between(*each) for each in self._ranges(index))

    def documents(self, index: int) -> tuple[int, ...] | None:
        """Return the number of tokens of each document of sample `index`, in order; None for pack "stream"."""
        return None if self.pack == "stream" else tuple(stop - start for start, stop in self._ranges(index))

    def pairs(self, index: int, places: range) -> tuple[Ids, Ids]:
        """Return inputs and labels of sample `index` at positions without padding, each int64 `[len(places)]`.

        A label is `IGNORE_INDEX` if the next token is not part of an answer, or there is none. Only these tokens are
        read.
        """
        inputs, labels = np.empty(len(places), np.int64), np.full(len(places), IGNORE_INDEX, np.int64)
        before = filled = 0
        for start, stop in self._ranges(index):
            skip = max(-(-(before - places.start) // places.step), 0)  # index of the first position in this document
            first = places.start + skip * places.step - before + start
            inside = range(first, min(stop, places.stop - before + start), places.step)
            before += stop - start
            if not inside:
                continue
            count = len(inside)
            inputs[filled : filled + count] = self.token_file.tokens[inside.start : inside.stop : inside.step]
            following = range(inside.start + 1, min(inside.stop, stop - 1) + 1, inside.step)
            answers = self.token_file.answers_in(following)
            wanted = self.token_file.tokens[following.start : following.stop : following.step].astype(np.int64)
            labels[filled : filled + len(following)] = np.where(answers, wanted, IGNORE_INDEX)
            filled += count
        return inputs, labels

    @property
    def weighted(self) -> bool:
        """Whether records have weights."""
        return self.token_file.weights is not None

    def weights(self, index: int, places: range) -> npt.NDArray[np.float64]:
        """Return the weights of the labels of sample `index` at positions without padding, `[len(places)]`."""
        if self.token_file.weights is None:
            return np.ones(len(places))
        records = self.records(index)
        offsets = self.token_file.document_offsets
        ends = np.cumsum(offsets[records + 1] - offsets[records])
        at = np.searchsorted(ends, np.arange(places.start, places.stop, places.step), side="right")
        found: npt.NDArray[np.float64] = self.token_file.weights[records[at]]
        return found

    def evaluated(self, count: int | None = None) -> Sequence[int]:
        """Return the samples of an evaluation in order, at most `count`."""
        return range(len(self))[:count]

    def prompt(self, most: int) -> list[int]:
        """Return the last `most` tokens before the first answer of a record: the prompt of a generated sample."""
        if not len(self):
            return [self.eos_id]
        start, stop = next(iter(self._ranges(0)))
        first = start + int(np.argmax(self.token_file.answers_in(range(start, stop))))
        return [int(each) for each in self.token_file.tokens[max(start, first - most) : first]]

    def _ranges(self, index: int) -> list[tuple[int, int]]:
        offsets = self.token_file.document_offsets
        documents = (self.records(index)[:, None] * self._each + np.arange(self._each)).flat
        return [(int(offsets[each]), int(offsets[each + 1])) for each in documents]


def _best_fit(taken: Ids, sizes: Ids, length: int) -> tuple[Ids, Ids]:
    """Return the records sorted by sequence, and the end of each sequence in this order."""
    order = taken[np.argsort(-sizes[taken], kind="stable")]
    rooms: list[int] = []  # distinct free sizes of the sequences, ascending
    with_room: dict[int, list[int]] = {}
    of = np.empty(len(order), np.int64)
    count = 0
    for place, size in enumerate(sizes[order].tolist()):
        at = bisect_left(rooms, size)
        if at < len(rooms):
            room = rooms[at]
            sequence = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        else:
            room, sequence, count = length, count, count + 1
        of[place] = sequence
        if left := room - size:
            if left not in with_room:
                insort(rooms, left)
            with_room.setdefault(left, []).append(sequence)
    together = np.argsort(of, kind="stable")
    return order[together], np.cumsum(np.bincount(of, minlength=count))


def _round(tokens: int) -> int:
    """Return a number of tokens rounded up to a multiple of 64."""
    return -(-tokens // 64) * 64
