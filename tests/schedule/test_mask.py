"""Masks are values: what they show is their definition, they compare, join, fit and refuse as they say."""

import copy
import math
import pickle
import random
import re

import numpy as np
import pytest
import torch

from bmburst.errors import UserError
from bmburst.schedule.documents import Documents, PrefixLM
from bmburst.schedule.mask import BlockSparse, Causal, Full, Intersection, Mask, SlidingWindow, make_mask
from bmburst.schedule.tree import Tree
from tests.mask_oracle import random_mask, visible
from tests.refusals import refused

MAP = [[1, 0, 1], [0, 1, 0], [1, 1, 1]]
DOCUMENTS = Documents([3, 1, 4])
PREFIXES = PrefixLM([2, 0], [5, 3])
BLOCKS = BlockSparse(MAP, 3)
TREE = Tree([-1, 0, 0], [3, 1, 4])


def drawn(seed, longest=60):
    rng = random.Random(seed)
    length = rng.randint(1, longest)
    return random_mask(rng, length), length


@pytest.mark.parametrize("seed", range(150))
def test_rows_and_blocks_are_the_definition(seed):
    mask, length = drawn(seed)
    mask.require(length)
    every = np.arange(length)
    start, stop = mask.rows(every, length)
    shown = (start[:, None] <= every) & (every < stop[:, None])
    if mask.blocks is None:
        assert shown.diagonal().all()  # as `seen_by` takes for granted
    else:
        cells = mask.blocks.cells.repeat(mask.blocks.size, 0).repeat(mask.blocks.size, 1)
        shown = shown & cells[:length, :length]
    assert (shown == visible(mask, length)).all()
    assert (np.diff(start) >= 0).all() and (np.diff(stop) >= 0).all() and (start <= stop).all()
    some = every[:: 1 + seed % 5]
    assert all((part == whole[some]).all() for part, whole in zip(mask.rows(some, length), (start, stop), strict=True))


def test_what_a_few_masks_show():
    """Written out, so that the oracle cannot be wrong in the same way."""

    def drawing(mask, length):
        return ["".join(".x"[int(seen)] for seen in row) for row in visible(mask, length)]

    assert drawing(SlidingWindow(2), 4) == ["x...", "xx..", ".xx.", "..xx"]
    assert drawing(SlidingWindow(2, causal=False), 4) == ["xx..", "xxx.", ".xxx", "..xx"]
    assert drawing(Documents([1, 3]), 4) == ["x...", ".x..", ".xx.", ".xxx"]
    assert drawing(Documents([2, 2], causal=False), 4) == ["xx..", "xx..", "..xx", "..xx"]
    assert drawing(PrefixLM(2), 4) == ["xx..", "xx..", "xxx.", "xxxx"]
    assert drawing(PrefixLM([0, 2], [2, 3]), 5) == ["x....", "xx...", "..xx.", "..xx.", "..xxx"]
    assert drawing(BlockSparse([[0, 1], [1, 1]], 2), 3) == ["..x", "..x", "xxx"]
    assert drawing(BlockSparse([[1, 1], [0, 1]], 2, causal=True), 4) == ["x...", "xx..", "..x.", "..xx"]
    assert drawing(PrefixLM(3) & SlidingWindow(2, causal=False), 4) == ["xx..", "xxx.", ".xx.", "..xx"]


@pytest.mark.parametrize("tokens", [10, 10**12, 2**63 - 5, 2**63, 10**30])
@pytest.mark.parametrize("causal", [True, False])
def test_a_window_wider_than_the_sequence_hides_nothing(tokens, causal):
    every, wide = np.arange(10), Causal() if causal else Full()
    for shown, wanted in zip(SlidingWindow(tokens, causal).rows(every, 10), wide.rows(every, 10), strict=True):
        assert (shown == wanted).all()
    for shown, wanted in zip(PrefixLM(min(tokens, 2**63)).rows(every, 10), Full().rows(every, 10), strict=True):
        assert (shown == wanted).all()


@pytest.mark.parametrize("seed", range(60))
def test_both_show_what_each_shows(seed):
    one, length = drawn(seed)
    other = random_mask(random.Random(1000 + seed), length)
    if one.blocks is not None and other.blocks is not None and one.blocks.size != other.blocks.size:
        with refused("different blocks", "fix: ", "block_size"):
            one & other
        return
    for joined in (one & other, other & one):
        assert (visible(joined, length) == visible(one, length) & visible(other, length)).all()
        assert joined.length == (one.length or other.length)
        assert joined.needs == one.needs | other.needs
        assert set(joined.starts) == {*one.starts, *other.starts}


@pytest.mark.parametrize("mask", [Full(), Causal(), SlidingWindow(3), DOCUMENTS, PREFIXES, BLOCKS, TREE], ids=str)
def test_what_is_not_in_a_sequence_has_no_rows(mask):
    for places in ([0, 7], torch.arange(8), np.array([3, 1], np.uint8), []):
        assert len(mask.rows(places, 8).stop) == len(places)
    for places in (None, "x", [0.5], [[1]], [8], [-1], [2**70]):
        with refused("positions are | of 8 tokens | allowed: | fix: "):
            mask.rows(places, 8)
    for length in (None, "x", 7.5, -1, True):
        for call in (mask.require, lambda length: mask.rows([0], length), lambda n: mask.seen_intervals(0, 1, n)):
            with refused(f"length | whole number | {length!r}"):
                call(length)
    for first, last, words in ((0, "x", "'x'"), (None, 1, "None"), (0, 8, "[0, 8]"), (3, 1, "3 to 1 do not ascend")):
        with refused(words, "fix: "):
            mask.seen_intervals(first, last, 8)
    with refused(10**30):
        mask.rows([0], 10**30)


def test_joining_keeps_no_more_than_it_must():
    assert Full() & Full() == Full()
    assert Full() & Causal() == Causal() & Full() == Causal() & Causal() == Causal()
    assert (Causal() & DOCUMENTS) & (DOCUMENTS & SlidingWindow(3)) == Intersection(
        (Causal(), DOCUMENTS, SlidingWindow(3))
    )
    maps = BlockSparse([[1, 1], [1, 0]], 4) & Causal() & BlockSparse([[1, 0], [1, 1]], 4, causal=True)
    assert maps == Intersection((Causal(), BlockSparse([[1, 0], [1, 0]], 4, causal=True)))
    assert BLOCKS & BLOCKS == BLOCKS
    with pytest.raises(TypeError):
        Causal() & "causal"


def test_masks_are_equal_by_value():
    groups = [
        [Full(), make_mask("full")],
        [Causal(), make_mask("causal")],
        [SlidingWindow(4), SlidingWindow(np.int32(4), causal=True), make_mask(SlidingWindow(4))],
        [SlidingWindow(4, causal=False)],
        [SlidingWindow(5)],
        [DOCUMENTS, Documents((3, 1, 4)), Documents(np.array([3, 1, 4], np.int32)), Documents(torch.tensor([3, 1, 4]))],
        [Documents([3, 1, 4], causal=False)],
        [Documents([3, 4, 1])],
        [PrefixLM(3), PrefixLM([3]), PrefixLM(torch.tensor(3)), PrefixLM(np.int64(3))],
        [PrefixLM(4)],
        [PREFIXES, PrefixLM(torch.tensor([2, 0]), np.array([5, 3]))],
        [PrefixLM([0, 2], [5, 3])],
        [PrefixLM([2, 0], [3, 5])],
        [PrefixLM(3, [8])],
        [BLOCKS, BlockSparse(torch.tensor(MAP), 3), BlockSparse(np.array(MAP, bool), 3)],
        [BlockSparse(np.array(MAP).T, 3)],
        [BlockSparse(MAP, 4)],
        [BlockSparse(MAP, 3, causal=True)],
        [DOCUMENTS & SlidingWindow(4), Intersection((DOCUMENTS, SlidingWindow(4)))],
    ]
    for i, group in enumerate(groups):
        for mask in group:
            assert [mask == other for others in groups for other in others] == [
                j == i for j, others in enumerate(groups) for _ in others
            ]
        assert len(set(group)) == len(set(map(str, group))) == 1  # equal hashes, and one text
    masks = [group[0] for group in groups]
    assert len(set(masks)) == len({str(mask) for mask in masks}) == len(groups)  # ranks compare masks by their text
    for mask in masks:
        assert pickle.loads(pickle.dumps(mask)) == copy.deepcopy(mask) == mask


def test_a_map_of_blocks_cannot_change_behind_the_mask():
    cells = np.eye(2, dtype=bool)
    mask = BlockSparse(cells, 2)
    cells[:] = False
    assert mask.block_map.tolist() == [[True, False], [False, True]]
    with pytest.raises(ValueError, match="read-only"):
        mask.block_map[0, 0] = False


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32)])
def test_documents_from_where_they_start(make):
    assert Documents.from_cu_seqlens(make([0, 3, 4, 8])) == DOCUMENTS
    assert Documents.from_cu_seqlens(make([0, 5]), causal=False) == Documents([5], causal=False)


def test_what_masks_say_of_themselves():
    both = DOCUMENTS & PREFIXES & SlidingWindow(2, causal=False)
    for mask, length, starts, needs in (
        (Full(), None, (), set()),
        (Causal(), None, (), set()),
        (SlidingWindow(3), None, (), {"window"}),
        (SlidingWindow(3, causal=False), None, (), {"window"}),
        (DOCUMENTS, 8, (0, 3, 4), {"segments"}),
        (Documents([3, 5], causal=False), 8, (0, 3), {"segments"}),
        (PrefixLM(3), None, (), set()),
        (PREFIXES, 8, (0, 5), {"segments"}),
        (BLOCKS, None, (), {"cells"}),
        (BlockSparse(MAP, 3, causal=True), None, (), {"cells"}),
        (BlockSparse(MAP, 384), None, (), {"blocks"}),
        (BlockSparse(MAP, 384) & Causal(), None, (), {"blocks"}),
        (BlockSparse(MAP, 384) & SlidingWindow(9), None, (), {"cells", "window"}),
        (BlockSparse(MAP, 4) & DOCUMENTS, 8, (0, 3, 4), {"cells", "segments"}),
        (both, 8, (0, 3, 4, 5), {"segments", "window"}),
    ):
        assert (mask.length, mask.starts, mask.needs) == (length, starts, needs)
        assert isinstance(mask, Mask) and isinstance(mask.needs, frozenset)
    assert (BLOCKS.blocks.size, BLOCKS.blocks.cells.tolist()) == (3, np.array(MAP, bool).tolist())
    assert (BLOCKS & both).blocks.cells is not None and both.blocks is None


def test_masks_in_words():
    assert [str(mask) for mask in (Full(), Causal(), SlidingWindow(4), SlidingWindow(4, causal=False))] == [
        "full", "causal", "window of 4, causal", "window of 4",
    ]  # fmt: skip
    digest = r" \([0-9a-f]{12}\)"
    for mask, words in (
        (DOCUMENTS, f"3 documents of 1 to 4 tokens{digest}, causal"),
        (PREFIXES, f"prefixes of 2 documents of 3 to 5 tokens{digest}{digest}"),
        (PrefixLM(4), f"prefixes{digest}"),
        (BLOCKS, f"blocks of 3{digest}"),
        (BlockSparse(MAP, 2, causal=True) & SlidingWindow(9), f"window of 9, causal & blocks of 2{digest}, causal"),
    ):
        assert re.fullmatch(words, str(mask))


REFUSED = [
    (lambda: SlidingWindow(0), "sliding window | whole number | at least 1 | got 0"),
    (lambda: SlidingWindow(2.5), "sliding window | whole number | at least 1 | got 2.5"),
    (lambda: SlidingWindow(None), "sliding window | whole number | at least 1 | got None"),
    (lambda: Documents([]), "lengths | documents | empty | at least one | fix: "),
    (lambda: SlidingWindow(True), "sliding window | whole number | at least 1 | got True"),
    (lambda: SlidingWindow(4, "no"), "causal | bool | 'no' | True or False"),
    (lambda: Documents([3, 0]), "document 1 | 0 tokens | leave | out"),
    (lambda: Documents([0, 3, 5]), "document 0 | 0 tokens | from_cu_seqlens"),
    (lambda: Documents([3, -2]), "document 1 | -2 tokens | leave | out"),
    (lambda: Documents([3, 2], 4), "causal | bool | 4 | True or False"),
    (lambda: Documents([3, 2.0]), "lengths | documents | whole numbers | [3, 2.0]"),
    (lambda: Documents([[3, 2]]), "lengths | documents | whole numbers | [[3, 2]]"),
    (lambda: Documents([[3], [2, 1]]), "lengths | documents | numbers | [[3], [2, 1]]"),
    (lambda: Documents("causal"), "lengths | documents | whole numbers | 'causal'"),
    (lambda: Documents(None), "lengths | documents | whole numbers | None"),
    (lambda: Documents([True]), "lengths | documents | whole numbers | [True]"),
    (lambda: Documents.from_cu_seqlens([1, 3]), "cu_seqlens | start at 0 | total | [1, 3]"),
    (lambda: Documents.from_cu_seqlens([0, 3, 3]), "document 1 | 0 tokens | leave | out"),
    (lambda: Documents.from_cu_seqlens([0]), "cu_seqlens | start at 0 | total | [0]"),
    (lambda: Documents.from_cu_seqlens([]), "cu_seqlens | start at 0 | total | []"),
    (lambda: Documents.from_cu_seqlens([0, -1]), "document 0 | -1 tokens"),
    (lambda: PrefixLM(-1), "prefix | whole number | at least 0 | -1"),
    (lambda: PrefixLM([1, 2]), "2 prefix lengths | one document | one to each document"),
    (lambda: PrefixLM([1], [2, 3]), "1 prefix lengths | 2 documents | one to each document"),
    (lambda: PrefixLM([1, 4], [2, 3]), "prefix | document 1 | 4 tokens | 0 to 3 | fix: "),
    (lambda: PrefixLM([], []), "lengths | documents | empty | at least one | fix: "),
    (lambda: BlockSparse([[1, 0]], 4), "block_map | [blocks, blocks] | [1, 2] | fix: "),
    (lambda: BlockSparse([[0.0, -math.inf], [0.0, 0.0]], 4), "block_map | neither true nor false | float64 | fix: "),
    (lambda: BlockSparse([[math.nan]], 4), "block_map | neither true nor false"),
    (lambda: BlockSparse([["a"]], 4), "block_map | neither true nor false"),
    (lambda: BlockSparse([], 4), "block_map | [blocks, blocks] | [0]"),
    (lambda: BlockSparse([[1], [0, 1]], 4), "block_map | numbers | [[1], [0, 1]]"),
    (lambda: BlockSparse(MAP, 3, 1), "causal | bool | 1 | True or False"),
    (lambda: BlockSparse(MAP, 0), "block_size | whole number | at least 1 | 0"),
    (lambda: DOCUMENTS & Documents([3, 6]), "masks | 8 | 9 | tokens | fix: "),
    (lambda: BLOCKS & BlockSparse(MAP, 4), "BlockSparse | different blocks | fix: | block_size"),
    (lambda: BLOCKS & BlockSparse([[1]], 3), "BlockSparse | different blocks | fix: | block_size"),
    (lambda: make_mask("causl"), "mask | 'causl' | 'causal' | causal, full"),
    (lambda: make_mask(Causal), "mask | name | class Causal"),
    (lambda: make_mask(None), "mask | name | NoneType | causal, full"),
    (lambda: make_mask(torch.ones(9, 9)), "mask | name | Tensor | causal, full"),
    (lambda: DOCUMENTS.require(9), "mask | 8 tokens | 9 real | 9 tokens | length=8 | padding"),
    (lambda: DOCUMENTS.require(7), "mask | 8 tokens | 7 real | 7 tokens"),
    (lambda: (PREFIXES & BLOCKS).require(9), "mask | 8 tokens | 9 real | length=8"),
    (lambda: BLOCKS.require(10), "10 tokens | 4 blocks of 3 | block_map | has 3 | [4, 4] | length"),
    (lambda: (Causal() & BLOCKS).require(6), "6 tokens | 2 blocks of 3 | block_map | has 3 | [2, 2]"),
]


@pytest.mark.parametrize(("wrong", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_refusals(wrong, words):
    with refused(words):
        wrong()


def test_a_refusal_is_short_whatever_was_given():
    with pytest.raises(UserError) as refusal:
        Documents(torch.rand(300, 300))
    assert len(str(refusal.value)) < 250 and str(refusal.value).count("\n") <= 1


def test_masks_fit():
    for mask, lengths in (
        (DOCUMENTS, (8,)),
        (BLOCKS, (7, 8, 9)),
        (Causal() & PREFIXES & BLOCKS, (8,)),
        (Full(), (1, 99)),
    ):
        for length in lengths:
            mask.require(length)
