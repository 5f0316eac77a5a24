"""Deals the chunks of layout "balanced" to ranks: as many chunks for each, of nearly equal work. Imports no torch.

Where chunks of two ranks alternate in a document, the keys that the queries of one see end at a stair for each
alternation, and each stair is a call of the kernel. So the chunks of a document are dealt in nested runs, as in layout
"zigzag", if the ranks' work stays as even.
"""

from collections.abc import Sequence
from itertools import groupby, islice

import numpy as np

from bmburst.schedule.tiles import Span
from bmburst_ops.pattern import IntArray

UNEVEN = 0.005
"""By which fraction nested runs may raise the largest work of a rank. By the cost model, the calls that they save take
0.001 to 0.2 of a pass of trees of 16K to 128K tokens on 2 to 8 H200s."""
_FEWEST = 4
"""Chunks of a document in which those of two ranks can alternate so often that a call is added: 0 1 0 1."""
_TRIES = 16
"""Swaps that are tried at a time, those that even out most first."""


def deal_chunks(
    areas: Sequence[int], size: int, documents: Sequence[Span] = (), trees: Sequence[Span] = ()
) -> tuple[int, ...]:
    """Return the owner of each chunk: `size` ranks get the same number of chunks, with nearly equal sums of areas.

    Args:
        areas: Visible pairs of the queries of each chunk. Their number is an even multiple of `size`.
        size: Ranks.
        documents: The chunks that each document has tokens in. In a document, the runs of two ranks do not alternate
            more often than A B A if the largest sum is at most `UNEVEN` above that of `balance_chunks`.
        trees: The chunks of documents that see each other. A rank gets no further ones: it would need their keys.
    """
    even = balance_chunks(areas, size)
    long = [span for span in documents if len(span) >= _FEWEST]
    if size == 1 or all(_nest(even[span.slice]) for span in long):
        return even
    weights = np.asarray(areas, np.int64)
    most = (1 + UNEVEN) * int(_sums(weights, even, size).max())
    starts = [_nested(weights, even, size, long)]
    zigzag = np.abs(2 * np.arange(len(areas)) + 1 - len(areas)) * size // len(areas)
    if all({*even[span.slice]}.issuperset(zigzag[span.slice].tolist()) for span in trees):
        starts.append(zigzag)
    for start in starts:
        owners = _evened(weights, start, size, long, trees)
        if int(_sums(weights, owners, size).max()) <= most:
            return tuple(owners.tolist())
    return even


def balance_chunks(areas: Sequence[int], size: int) -> tuple[int, ...]:
    """Return the owner of each chunk: `size` ranks get the same number of chunks, with nearly equal sums of areas.

    Chunks are sorted by area and assigned in rounds of `size`: in each round the rank with the smallest sum gets the
    largest chunk. The sums then differ by at most the largest area minus the smallest. Proof: if the sums of two ranks
    differ by d, and the rank with the smaller sum gets the larger of two chunks, which differ by c, the sums differ by
    |d - c| <= max(d, c), and c is at most the difference within its round. Afterwards the ranks with the largest and
    the smallest sum swap two chunks as long as that reduces their difference: with a few long documents, the largest
    sum falls from 1.2 to 1.01 times the mean.
    """
    weights = np.asarray(areas, np.int64)
    order = np.argsort(-weights, kind="stable")
    sums, owners = np.zeros(size, np.int64), np.empty(len(areas), np.int64)
    for chunks in order.reshape(-1, size):
        lightest = np.argsort(sums, kind="stable")
        owners[chunks] = lightest
        sums[lightest] += weights[chunks]
    for _ in areas:  # an upper bound; about two swaps per rank are needed
        if not _swap(weights, owners, sums):
            break
    return tuple(owners.tolist())


def _swap(weights: IntArray, owners: IntArray, sums: IntArray) -> bool:
    """Swap the two chunks that reduce the difference of the largest and smallest sum most; False if none does."""
    most, least = int(sums.argmax()), int(sums.argmin())
    ours, theirs = np.flatnonzero(owners == most), np.flatnonzero(owners == least)
    moved = weights[ours][:, None] - weights[theirs]
    apart = np.abs(sums[most] - sums[least] - 2 * moved)
    best = int(apart.argmin())
    if apart.flat[best] >= sums[most] - sums[least]:
        return False
    i, j = divmod(best, len(theirs))
    owners[ours[i]], owners[theirs[j]] = least, most
    sums[most] -= moved[i, j]
    sums[least] += moved[i, j]
    return True


def _nested(weights: IntArray, even: Sequence[int], size: int, documents: Sequence[Span]) -> IntArray:
    """Return owners with as many chunks of each document as in `even`, in nested runs."""
    owners, home = np.array(even), np.full(len(even), -1)
    by_size = sorted(range(len(documents)), key=lambda number: len(documents[number]))
    for number in by_size:  # a chunk of several documents counts for the longest of them
        home[documents[number].slice] = number
    for number in reversed(by_size):
        here = np.flatnonzero(home == number)
        owners[here] = _runs_of(owners[here], _sums(weights, owners, size))
    return owners


def _evened(
    weights: IntArray, owners: IntArray, size: int, documents: Sequence[Span], trees: Sequence[Span]
) -> IntArray:
    """Return owners after swaps that keep runs nested, and ranks to the trees that they have chunks of."""
    owners = owners.copy()
    for _ in weights:  # an upper bound, as in `balance_chunks`
        if not _swap_nested(weights, owners, size, documents, trees):
            break
    return owners


def _runs_of(owners: IntArray, sums: IntArray) -> IntArray:
    """Return the owners of a document's chunks in nested runs, two a rank; the outermost rank has the smallest sum.

    Of an odd number of chunks, the ranks with small sums have one more in their later run, where areas are larger.
    """
    counts = np.bincount(owners, minlength=len(sums))
    ranks = [rank for rank in np.argsort(sums, kind="stable").tolist() if counts[rank]]
    odd = [rank for rank in ranks if counts[rank] % 2]
    later = set(odd[: -(-len(odd) // 2)])
    second = {rank: counts[rank] // 2 + (rank in later) for rank in ranks}
    outside = [rank for rank in ranks for _ in range(counts[rank] - second[rank])]
    inside = [rank for rank in reversed(ranks) for _ in range(second[rank])]
    return np.array(outside + inside)


def _swap_nested(
    weights: IntArray, owners: IntArray, size: int, documents: Sequence[Span], trees: Sequence[Span]
) -> bool:
    """Swap a chunk of the rank with the largest sum as in `_evened`; False if no swap evens out the sums."""
    sums = _sums(weights, owners, size)
    most = int(sums.argmax())
    ours, theirs = np.flatnonzero(owners == most), np.flatnonzero(owners != most)
    gaps = sums[most] - sums[owners[theirs]]
    moved = weights[ours][:, None] - weights[theirs]
    after = np.maximum(-moved, moved - gaps)  # the larger of both sums, less the largest sum before
    for flat in islice(np.argsort(after, axis=None, kind="stable").tolist(), _TRIES):
        if after.flat[flat] >= 0:
            return False
        i, j = ours[flat // len(theirs)], theirs[flat % len(theirs)]
        held = [(span, {*owners[span.slice].tolist()}) for span in trees if _has(span, i) or _has(span, j)]
        owners[[i, j]] = owners[[j, i]]
        nest = all(_nest(owners[span.slice].tolist()) for span in documents if _has(span, i) or _has(span, j))
        if nest and all(before.issuperset(owners[span.slice].tolist()) for span, before in held):
            return True
        owners[[i, j]] = owners[[j, i]]
    return False


def _nest(owners: Sequence[int]) -> bool:
    """Return whether no two ranks alternate as A B A B."""
    runs = [rank for rank, _ in groupby(owners)]
    last = {rank: place for place, rank in enumerate(runs)}
    around: list[int] = []  # ranks that go on later, from the outermost
    for place, rank in enumerate(runs):
        while around and around[-1] != rank and last[around[-1]] < place:
            around.pop()
        if not around or around[-1] != rank:
            if rank in around:
                return False
            around.append(rank)
    return True


def _has(span: Span, chunk: int) -> bool:
    return span.start <= chunk < span.stop


def _sums(weights: IntArray, owners: Sequence[int] | IntArray, size: int) -> IntArray:
    sums = np.zeros(size, np.int64)
    np.add.at(sums, np.asarray(owners), weights)
    return sums
