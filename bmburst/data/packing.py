"""Packing: documents to sequences of fixed length, train / held-out split, and the random order of training."""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from bmburst.data.token_file import TokenFile
from bmburst.errors import UserError, require_known

Spans = npt.NDArray[np.int64]
_ROUNDS, _MASK = 8, (1 << 64) - 1  # rounds of `Permutation`; 64 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Token ranges, int64 `[ranges, 2]` of (start, stop), sorted and disjoint; both parts together are the corpus."""

    train: Spans
    held_out: Spans


def split_documents(file: TokenFile, held_out_fraction: float) -> Split:
    """Hold out a part of the documents, chosen by a hash of their text.

    Documents are sorted by their keys (hashes), so that equal documents are adjacent. Whole documents are held out in
    this order while they fit into the requested number of tokens. If they are less than half of it (a corpus of one or
    a few large files), the end of the next document is held out too. So the held-out part has between half and all of
    the requested tokens. It depends only on the texts, not on file names, seeds or sequence lengths, and equal
    documents are treated equally.

    Args:
        file: The corpus.
        held_out_fraction: Fraction of the corpus's tokens to hold out, in (0, 1).

    Raises:
        UserError: The fraction is not in (0, 1), or the corpus has fewer than 4 tokens.
    """
    _require_fraction(held_out_fraction)
    total = file.token_count
    if total < 4:
        raise UserError(
            f"data {file.path}: {total} tokens are too few to hold some out for evaluation\n"
            f"allowed: at least 4 tokens\nfix: give more text, it has {file.text_bytes} bytes"
        )
    target = max(1, int(total * held_out_fraction))
    starts, ends = np.asarray(file.document_offsets[:-1]), np.asarray(file.document_offsets[1:])
    held_from = ends.copy()  # document d holds out its tokens [held_from[d], ends[d])

    order, groups, in_order = _by_text(file)
    whole = int(np.searchsorted(in_order[groups], target, side="right")) - 1  # number of texts that fit completely
    held_from[order[: groups[whole]]] = starts[order[: groups[whole]]]
    held = int(in_order[groups[whole]])
    if 2 * held < target:
        copies = order[groups[whole] : groups[whole + 1]]
        held_from[copies] -= max((target - held) // len(copies), 1)  # less than the document, since it does not fit
    return Split(train=_joined(starts, held_from), held_out=_joined(held_from, ends))


def _by_text(file: TokenFile) -> tuple[Spans, Spans, Spans]:
    """Return documents sorted by key, the index of each distinct text in this order, and cumulative token counts."""
    sizes = np.diff(file.document_offsets)
    order = np.argsort(file.document_keys, kind="stable")
    keys = np.asarray(file.document_keys)[order]
    groups = np.append(np.flatnonzero(np.diff(keys, prepend=~keys[:1])), len(order))
    return order, groups, np.append(0, np.cumsum(sizes[order]))


def held_out_documents(file: TokenFile, held_out_fraction: float) -> npt.NDArray[np.bool_]:
    """Return which documents are held out, bool `[documents]`: whole documents, in the order of `split_documents`.

    Neither more than this fraction of the tokens are held out, nor more than this fraction of the texts, rounded up: a
    few records of extreme length, which a run may leave out, do not take most of the other records from training. At
    least one text is held out, and at least one is not.

    Raises:
        UserError: The fraction is not in (0, 1), or all documents have the same text.
    """
    _require_fraction(held_out_fraction)
    order, groups, in_order = _by_text(file)
    if len(groups) < 3:
        raise UserError(
            f"data {file.path}: {file.document_count} records of one text are too few to hold some out for evaluation\n"
            "allowed: at least 2 different records\nfix: give more records"
        )
    fit = int(np.searchsorted(in_order[groups], file.token_count * held_out_fraction, side="right")) - 1
    texts = len(groups) - 1
    most = min(fit, math.ceil(texts * held_out_fraction))
    held = np.zeros(file.document_count, bool)
    held[order[: groups[min(max(most, 1), texts - 1)]]] = True
    return held


def _require_fraction(held_out_fraction: float) -> None:
    if not 0 < held_out_fraction < 1:
        raise UserError(
            f"held_out_fraction is {held_out_fraction}\nallowed: above 0 and below 1\n"
            "fix: use a value from 0.01 to 0.1, as is usual"
        )


def _joined(starts: Spans, stops: Spans) -> Spans:
    """Return the non-empty ranges, with adjacent ranges merged."""
    kept = starts < stops
    starts, stops = starts[kept], stops[kept]
    first = np.append(True, starts[1:] != stops[:-1])
    return np.stack([starts[first], stops[np.append(first[1:], True)]], axis=1)


SPLITS = ("train", "held_out", "all")
PACKS = ("stream", "documents", "trees")
"""Whether tokens attend to the whole sequence ("stream"), or only to their own document ("documents", "trees").

In "trees", documents of one record share their prompt, which is in the sequence once."""
HELD_OUT_FRACTION = 0.05


class PartOfCorpus(ABC):
    """One split of a corpus in sequences of fixed length: its options, and the order of its samples in training."""

    def __init__(
        self,
        token_file: TokenFile,
        *,
        split: str,
        sequence_length: int,
        held_out_fraction: float = HELD_OUT_FRACTION,
        pack: str = "stream",
    ) -> None:
        require_known("split", split, SPLITS)
        require_known("pack", pack, PACKS)
        if sequence_length < 1:
            raise UserError(
                f"sequence_length is {sequence_length}\nallowed: at least 1 token\n"
                "fix: give the number of tokens of one training sequence, for example 4096"
            )
        self.token_file = token_file
        self.split = split
        self.sequence_length = sequence_length
        self.held_out_fraction = held_out_fraction
        self.pack = pack
        self._find_samples()

    @abstractmethod
    def _find_samples(self) -> None:
        """Find the samples of the split; raises the errors of the class."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples of an epoch."""

    @property
    def eos_id(self) -> int:
        """The end-of-document id, also used for padding."""
        return self.token_file.eos_id

    def parents(self, index: int) -> tuple[int, ...] | None:
        """Return the parent of each document of sample `index`, -1 for none; None if no documents share a prompt."""
        del index
        return None

    @property
    def fingerprint(self) -> str:
        """Equal for two corpora only if they have the same tokens and answers in the same documents."""
        return self.token_file.fingerprint

    @property
    def weighted(self) -> bool:
        """Whether documents have weights: not in text."""
        return False

    def weights(self, index: int, places: range) -> npt.NDArray[np.float64]:  # noqa: ARG002
        """Return the weights of the labels of sample `index` at positions without padding, `[len(places)]`: 1."""
        return np.ones(len(places))

    def drawn(self, position: int, seed: int) -> int:
        """Return the index of the sample at `position` of the infinite training order."""
        epoch, place = divmod(position, len(self))
        return permutation(len(self), seed, epoch)(place)


class PackedSequences(PartOfCorpus):
    """The documents of one split of a corpus, concatenated and cut into sequences.

    The stream is an end-of-document id, then each document followed by its end-of-document id. Sample i is
    `stream[i * S : (i + 1) * S + 1]`, S + 1 ids: inputs are the first S, labels the last S. Consecutive samples share
    one id, so every token of the split is a label exactly once, and the first token of each document is predicted from
    an end-of-document id. The remainder of fewer than S labels is the partial sample: training drops it, evaluation
    pads it.

    With pack "documents" the samples are the same, and `documents` returns the lengths of their documents. The inputs
    of a document are the end-of-document id before it and its text; its labels are its text and the end-of-document id
    after it. So no label is lost, and tokens attend only to their own document. There is one exception: if the end of a
    document is held out, the next document in training starts with the last token kept of it. If a sample ends inside
    a document, the rest is a separate document of the next sample and starts with the token before the cut.

    Args:
        token_file: The corpus.
        split: "train", "held_out" or "all".
        sequence_length: S, tokens per sequence.
        held_out_fraction: Fraction of the corpus's tokens that is never trained on, in [0, 1); "all" ignores it.
        pack: "stream": each sample is one text; "documents" and "trees": attention is separate for each document.

    Attributes:
        label_count: Number of labels, equal to the number of tokens of the split.
        partial_labels: Number of labels of the partial sample; 0 if there is none.

    Raises:
        UserError: A value is out of range, or "train" has less than one full sequence.
    """

    def _find_samples(self) -> None:
        token_file, sequence_length = self.token_file, self.sequence_length
        if self.split == "all" or (self.split == "train" and not self.held_out_fraction):
            spans = np.array([[0, token_file.token_count]], np.int64)
        else:
            parts = split_documents(token_file, self.held_out_fraction)
            spans = parts.train if self.split == "train" else parts.held_out
        self._spans = spans
        self._ends = np.cumsum(spans[:, 1] - spans[:, 0])  # end of each span, in labels
        self.label_count = int(self._ends[-1])
        self.partial_labels = self.label_count % sequence_length
        if self.split == "train" and not len(self):
            raise UserError(
                f"data {token_file.path}: {self.label_count} tokens to train on are less than one sequence of "
                f"{sequence_length}\n"
                f"fix: give more text, it has {token_file.text_bytes} bytes, or a smaller sequence_length"
            )

    def __len__(self) -> int:
        """Return the number of full samples."""
        return self.label_count // self.sequence_length

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Return sample `index`, int64 `[sequence_length + 1]`; only its tokens are read from the file.

        The partial sample, if there is one, has the index `len(self)` and is shorter.

        Raises:
            IndexError: There is no such sample.
        """
        return self.read(index, range(self.labels_in(index) + 1))

    def read(self, index: int, places: range) -> npt.NDArray[np.int64]:
        """Return the ids of sample `index` at given positions, int64 `[len(places)]`; reads only these from the file.

        Args:
            index: See `__getitem__`.
            places: Positions in the sample, ascending, from 0 to `labels_in(index)` inclusive.

        Raises:
            IndexError: There is no such sample or position.
        """
        start, stop = self._labels_of(index)
        ids = np.empty(len(places), np.int64)
        if not places:
            return ids
        if places.step < 1 or places[0] < 0 or places[-1] > stop - start:
            raise IndexError(f"no places {places} in sample {index} of {stop - start + 1} ids")
        token = start + places[0] - 1  # index in the split
        filled = int(token < 0)  # an end-of-document id precedes the first token
        ids[:filled] = self.token_file.eos_id
        skip = 0  # tokens of the next range before the first requested one
        for begin, end in self._file_ranges(token + filled * places.step, start + places[-1]):
            picked = self.token_file.tokens[begin + skip : end : places.step]
            ids[filled : filled + len(picked)] = picked
            filled += len(picked)
            skip += len(picked) * places.step - (end - begin)
        return ids

    def pairs(self, index: int, places: range) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return inputs and labels of sample `index` at positions below `labels_in`, each int64 `[len(places)]`."""
        first, stop, step = places.start, places.stop, places.step
        if step == 1:  # a label is the next input: one read serves both
            ids = self.read(index, range(first, stop + 1))
            return ids[:-1], ids[1:]
        return self.read(index, places), self.read(index, range(first + 1, stop + 1, step))

    def counted_in(self, index: int) -> int:
        """Return the number of labels of sample `index` that count in the loss: all."""
        return self.labels_in(index)

    def evaluated(self, count: int | None = None) -> Sequence[int]:
        """Return the samples of an evaluation in order, the partial sample last; at most `count`."""
        whole = range(len(self) + (self.partial_labels > 0))
        return whole if count is None else whole[:count]

    def prompt(self, most: int) -> list[int]:
        """Return the first tokens of the first document, at most `most`: the prompt of a generated sample."""
        first, *_ = self.documents(0) or (most,)
        return [int(each) for each in self[0][: min(first, most)]]

    def labels_in(self, index: int) -> int:
        """Return the number of labels of sample `index`: `sequence_length` except in the partial sample.

        Raises:
            IndexError: There is no such sample.
        """
        start, stop = self._labels_of(index)
        return stop - start

    def text_bytes(self, index: int) -> int:
        """Return the number of bytes of text that the labels of sample `index` encode.

        Bits per byte is the sum of the labels' losses in nats / ln 2 / these bytes. Summed over all samples, they are
        the bytes of the split's documents; within a document they may be estimated, see `TokenFile.bytes_between`.
        """
        return sum(self.token_file.bytes_between(*r) for r in self._file_ranges(*self._labels_of(index)))

    def documents(self, index: int) -> tuple[int, ...] | None:
        """Return the number of inputs of each document of sample `index`, in order; None for pack "stream".

        Their sum is `labels_in(index)`.

        Raises:
            IndexError: There is no such sample.
        """
        if self.pack == "stream":
            return None
        offsets = self.token_file.document_offsets
        lengths: list[int] = []
        for start, stop in self._file_ranges(*self._labels_of(index)):
            first, last = np.searchsorted(offsets, [start + 1, stop])
            lengths += np.diff(offsets[first:last], prepend=start, append=stop).tolist()
        return tuple(lengths)

    def _labels_of(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self) + (self.partial_labels > 0):
            raise IndexError(f"no sample {index} among {len(self)} of {self.sequence_length} tokens")
        start = index * self.sequence_length
        return start, min(start + self.sequence_length, self.label_count)

    def _file_ranges(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of the file that hold the split's tokens [start, stop)."""
        span = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            file_stop, end = int(self._spans[span, 1]), int(self._ends[span])
            count = min(stop, end) - start
            file_start = file_stop - (end - start)
            yield file_start, file_start + count
            start, span = start + count, span + 1


class Permutation:
    """A pseudorandom permutation of range(size) for a key, computed element by element without a table.

    A Feistel network permutes the integers of 2b bits, for the smallest such range that contains `size`. A result
    outside of range(size) is permuted again until it is inside ("cycle walking", Black and Rogaway 2002,
    doi:10.1007/3-540-45760-7_9). The range is less than four times `size`, so this takes fewer than four iterations on
    average.

    Args:
        size: Number of elements, at least 1.
        key: Integers that select the permutation.
    """

    def __init__(self, size: int, *key: int) -> None:
        self._size = size
        self._half_bits = max(1, -(-(size - 1).bit_length() // 2))
        digest = hashlib.blake2b(repr((size, *key)).encode(), digest_size=8 * _ROUNDS // 2).digest()
        self._keys = [int.from_bytes(digest[i : i + 4], "little") for i in range(0, len(digest), 4)]

    def __call__(self, index: int) -> int:
        """Return the image of `index`; IndexError unless it is in range(size)."""
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


@lru_cache(maxsize=64)
def permutation(size: int, *key: int) -> Permutation:
    """Return the permutation of a size and a key, cached."""
    return Permutation(size, *key)
