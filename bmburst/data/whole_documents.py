"""Packs whole records into sequences for fine-tuning: no record is cut, and only answers have a loss."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from bmburst.data.packing import PackedSequences, PartOfCorpus, held_out_documents
from bmburst.data.token_file import TokenFile
from bmburst.errors import UserError
from bmburst_ops import IGNORE_INDEX

Ids = npt.NDArray[np.int64]
LEAST_SHARED = 32
"""Tokens that a shared prompt must save. Shorter ones are copied, since each node is a segment of its own in
kernels. The number is not measured."""


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

    With pack "trees", the documents of a record share their prompt: the tokens that all begin with, up to the one
    before the first answer. It is stored once, as the parent of the documents' other tokens. No label of it counts, so
    every label that counts is in the sequence as often as in the file.

    Args:
        token_file: A token file with a loss mask.
        split: "train", "held_out" or "all".
        sequence_length: S, tokens per sequence.
        held_out_fraction: Fraction of the corpus's tokens that is never trained on, in [0, 1); "all" ignores it.
        pack: "stream": tokens attend to all earlier records of the sequence; "documents": only to their own document;
            "trees": likewise, and documents of a record share their prompt.

    Attributes:
        left_out: Number of records of the split that are longer than a sequence.

    Raises:
        UserError: A value is out of range, or no record is left.
    """

    def _find_samples(self) -> None:
        token_file, sequence_length = self.token_file, self.sequence_length
        in_part = np.ones(token_file.document_count, bool)
        if self.split == "held_out" or (self.split == "train" and self.held_out_fraction):
            held = held_out_documents(token_file, self.held_out_fraction)  # documents of a record have one key
            in_part = held if self.split == "held_out" else ~held
        self._units = _units(token_file, in_part, sequence_length, shares=self.pack == "trees")
        sizes, part = self._units.sizes(token_file.document_offsets), in_part[self._units.first]
        taken = np.flatnonzero(part & (sizes <= sequence_length))
        self.left_out = int(part.sum()) - len(taken)
        if not len(taken) and self.split != "held_out":  # an evaluation may be empty
            what = "record to train on" if self.split == "train" else "record"
            raise UserError(
                f"data {token_file.path}: no {what} is left, all {self.left_out} are longer than "
                f"sequence_length {sequence_length}\nallowed: at least {int(sizes[part].min(initial=2**62))} tokens, "
                f"the shortest record\nfix: --sequence-length {_round(int(sizes[part].max(initial=1)))}, as the longest"
            )
        self._records, self._ends = best_fit(taken, sizes, sequence_length)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._ends)

    def records(self, index: int) -> Ids:
        """Return the indices in the file of the records of sample `index`, int64 `[records]`.

        Answers to one prompt count as records of their own where they do not share it, or not in one sequence.

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
        """Return the number of tokens of each document of sample `index`, in order; None for pack "stream".

        A shared prompt is a document of its own, before those that share it.
        """
        return None if self.pack == "stream" else tuple(stop - start for start, stop in self._ranges(index))

    def parents(self, index: int) -> tuple[int, ...] | None:
        """Return the parent of each document of sample `index`, -1 for none; None if no documents share a prompt."""
        found: list[int] = []
        for record in self.records(index):
            count = int(self._units.count[record])
            found += [-1, *[len(found)] * count] if self._units.shared[record] else [-1] * count
        return tuple(found) if max(found) >= 0 else None

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
        ends = np.cumsum(self._units.sizes(self.token_file.document_offsets, records))
        at = np.searchsorted(ends, np.arange(places.start, places.stop, places.step), side="right")
        found: npt.NDArray[np.float64] = self.token_file.weights[self._units.first[records[at]]]
        return found

    def evaluated(self, count: int | None = None) -> Sequence[int]:
        """Return the samples of an evaluation in order, at most `count`.

        The first samples have the longest records, so fewer than all are taken evenly spread.
        """
        total = len(self)
        if count is None or count >= total:
            return range(total)
        return [(2 * place + 1) * total // (2 * count) for place in range(count)]

    def prompt(self, most: int) -> list[int]:
        """Return the last `most` tokens before the first answer of a record: the prompt of a generated sample."""
        if not len(self):
            return [self.eos_id]
        start, stop = self._units.documents(self.token_file, int(self.records(0)[0]))[0]
        first = start + int(np.argmax(self.token_file.answers_in(range(start, stop))))
        return [int(each) for each in self.token_file.tokens[max(start, first - most) : first]]

    def _ranges(self, index: int) -> list[tuple[int, int]]:
        """Return the tokens in the file of each document of a sample, and of each shared prompt before them."""
        found = []
        for record in self.records(index):
            documents, shared = self._units.documents(self.token_file, record), int(self._units.shared[record])
            if shared:
                found.append((documents[0][0], documents[0][0] + shared))
            found += [(start + shared, stop) for start, stop in documents]
        return found


@dataclass(frozen=True, slots=True)
class _Units:
    """What is packed whole: consecutive documents of the file.

    Attributes:
        first: The first document of each, int64 `[units]`.
        count: The number of documents of each.
        shared: The number of tokens of the prompt that they share; 0: none.
    """

    first: Ids
    count: Ids
    shared: Ids

    def sizes(self, offsets: Ids, units: Ids | slice = slice(None)) -> Ids:
        """Return the number of tokens of each, or of some of them, in a sequence, int64 `[units]`."""
        first, count = self.first[units], self.count[units]
        found: Ids = offsets[first + count] - offsets[first] - self.shared[units] * (count - 1)
        return found

    def documents(self, file: TokenFile, unit: int) -> list[tuple[int, int]]:
        """Return the tokens of each document of a unit in the file."""
        first = int(self.first[unit])
        return list(pairwise(file.document_offsets[first : first + int(self.count[unit]) + 1].tolist()))


def record_sizes(file: TokenFile, length: int, pack: str) -> Ids:
    """Return the tokens of each pair or document of a file, int64 `[pairs or documents]`.

    Of a pair that is longer than a sequence, this is the number in a sequence, where both answers may share the prompt.

    Args:
        file: The file.
        length: Tokens of a sequence.
        pack: As in `WholeDocuments`.
    """
    offsets = np.asarray(file.document_offsets[:: 1 + file.pairs], np.int64)
    sizes: Ids = offsets[1:] - offsets[:-1]
    if file.pairs and pack == "trees" and (long := sizes > length).any():
        sizes = _units(file, np.repeat(long, 2), length, shares=True).sizes(file.document_offsets)
    return sizes


def _units(file: TokenFile, in_part: npt.NDArray[np.bool_], length: int, *, shares: bool) -> _Units:
    """Return what is packed whole: both answers of a pair, answers that share a prompt and fit, or one document.

    Args:
        file: The file.
        in_part: Which documents are in the split; the tokens of others are not read.
        length: Tokens of a sequence.
        shares: Whether documents of a record share their prompt.
    """
    if file.groups and not shares:
        first = np.arange(file.document_count)
        return _Units(first, np.ones_like(first), np.zeros_like(first))
    starts = file.record_starts
    whole = _Units(starts[:-1], np.diff(starts), np.zeros(len(starts) - 1, np.int64))
    if not shares or not (file.pairs or file.groups):
        return whole
    found: list[tuple[int, int, int]] = []
    for record, (start, count) in enumerate(zip(whole.first.tolist(), whole.count.tolist(), strict=True)):
        documents = whole.documents(file, record)
        shared = _shared(file, documents) if count > 1 and in_part[start] else 0
        if file.pairs:
            found.append((start, count, shared))
        else:
            found += _that_fit(start, [stop - begin for begin, stop in documents], shared, length)
    return _Units(*np.array(found, np.int64).reshape(-1, 3).T)


def _that_fit(start: int, sizes: Sequence[int], shared: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Yield first document, number of documents and shared tokens of units that fit in a sequence, if possible."""
    if not shared:
        yield from ((start + i, 1, 0) for i in range(len(sizes)))
        return
    first = used = 0
    for i, size in enumerate(sizes):
        if i > first and used + size - shared > length:
            yield start + first, i - first, shared if i - first > 1 else 0
            first, used = i, 0
        used += size - shared if i > first else size
    yield start + first, len(sizes) - first, shared if len(sizes) - first > 1 else 0


def best_fit(taken: Ids, sizes: Ids, length: int) -> tuple[Ids, Ids]:
    """Return the records sorted by sequence, and the end of each sequence in this order.

    Args:
        taken: Indices of the records to pack, none longer than a sequence.
        sizes: Tokens of each record of the file.
        length: Tokens of a sequence.
    """
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


def _shared(file: TokenFile, documents: Sequence[tuple[int, int]]) -> int:
    """Return the number of tokens that documents share: those that all begin with, without a label that counts.

    The label of a token is the one after it, so the last token before an answer is not shared.
    """
    first, _ = documents[0]
    most = min(int(np.argmax(file.answers_in(range(*each)))) for each in documents) - 1
    for start, _ in documents[1:]:
        apart = np.flatnonzero(file.tokens[first : first + max(most, 0)] != file.tokens[start : start + max(most, 0)])
        most = int(apart[0]) if len(apart) else most
    return most if most * (len(documents) - 1) >= LEAST_SHARED else 0


def _round(tokens: int) -> int:
    """Return a number of tokens rounded up to a multiple of 64."""
    return -(-tokens // 64) * 64
