"""A rank that reads its part alone has what it had of the whole: in every layout, packed or not, and at less cost."""

import dataclasses
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from bmburst.data import Batches, PackedSequences, evaluation_batches
from bmburst.errors import UserError
from bmburst.schedule.documents import Documents
from bmburst.schedule.layout import LAYOUTS
from bmburst.sequence import IGNORE_INDEX, SequenceShard
from bmburst.train.loading import LocalBatch, token_losses
from tests import tiny
from tests.data.test_samples import Counted
from tests.train.given import local

SIZES = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tiny.token_file(tmp_path_factory.mktemp("local") / "x", tiny.random_texts(300, seed=5, mean=3.0))


def from_whole(cut, inputs, labels, documents):
    """Return what a rank cuts from whole sequences, one after the other: `SequenceShard.batch` of each."""
    parts = []
    for row, pair in enumerate(zip(inputs, labels, strict=True)):
        mask = Documents(documents[row]) if documents else None
        under = cut.under(mask) if mask else cut
        tokens, following, positions, _ = under.batch(*(t[None] for t in pair), mask)
        parts.append(torch.stack([tokens, following, positions]))
    return torch.cat(parts, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pack", ["stream", "documents"])
@pytest.mark.parametrize("length", [97, 256, 801])
def test_equals_the_cut_of_whole_samples(file, layout, pack, length):
    """Of training's samples and of evaluation's, of which the last row is partial and one has no text."""
    train = PackedSequences(file, split="train", sequence_length=length, pack=pack)
    held = PackedSequences(file, split="held_out", sequence_length=length, pack=pack)
    rows = (len(held) + 1) // 2 * 2 + 2  # more than there are
    (evaluated,) = evaluation_batches(held, batch_size=rows)
    assert evaluated.rows[-1] is None
    for samples in (next(Batches(train, batch_size=3, seed=1)), evaluated):
        whole = *map(torch.from_numpy, samples.whole()), samples.documents
        for size in SIZES:
            counted = 0
            for rank in range(size):
                cut = SequenceShard.cut(length, layout=layout, size=size, rank=rank, mask="causal")
                batch = LocalBatch.read(cut, samples)
                assert batch.ids.dtype == torch.int64
                assert torch.equal(batch.ids, from_whole(cut, *whole))
                assert batch.masks == (whole[2] and tuple(map(Documents, whole[2])))
                assert batch.length == length
                counted += int((batch.labels != IGNORE_INDEX).sum())
            assert counted == int((whole[1] != IGNORE_INDEX).sum()) == samples.label_count


@pytest.mark.parametrize("layout", LAYOUTS)
def test_labels_behind_the_documents_do_not_count(layout):
    inputs, documents = torch.arange(131)[None], ((40, 1, 60),)
    for rank in range(3):
        cut = SequenceShard.cut(131, layout=layout, size=3, rank=rank, mask="causal")
        batch = local(cut, inputs, inputs + 1, documents)
        assert torch.equal(batch.ids, from_whole(cut, inputs, inputs + 1, documents))
    with pytest.raises(UserError, match="131"):
        local(cut, inputs, inputs, ((100, 32),))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pack", ["stream", "documents"])
def test_a_rank_reads_its_part_alone(file, layout, pack):
    """Each of its tokens, and the label behind each: none twice where they are neighbours."""
    length = 4001
    sequences = PackedSequences(file, split="train", sequence_length=length, pack=pack)
    taken = {}
    for size in SIZES:
        for rank in range(size):
            counted = Counted(file.tokens)
            sequences.token_file = dataclasses.replace(file, tokens=counted)
            cut = SequenceShard.cut(length, layout=layout, size=size, rank=rank, mask="causal")
            batch = LocalBatch.read(cut, next(Batches(sequences, batch_size=2, seed=0)))
            taken[size, rank] = counted.taken
            assert counted.taken <= batch.ids[0].numel() * (2 if layout == "striped" and size > 1 else 1) + 2 * 8
    most = [max(n for (ranks, _), n in taken.items() if ranks == size) for size in SIZES]
    assert all(more > less for more, less in pairwise(most[layout == "striped" :]))


@pytest.mark.parametrize("documents", [None, ((3, 5), (8,)), ((3, 5),)])
def test_the_model_is_given_a_length_or_the_masks_that_define_it(documents):
    inputs, given = torch.arange(16).reshape(2, 8)[: len(documents or "ab")], []
    cut = SequenceShard.cut(8, layout="contiguous", size=2, rank=1, mask="causal")
    batch = local(cut, inputs, inputs + 1, documents)
    token_losses(SimpleNamespace(loss=lambda *asked: given.extend(asked)), batch)
    tokens, positions, labels, *extent = given
    assert torch.equal(torch.stack([tokens, labels, positions]), batch.ids)
    masks = tuple(map(Documents, documents or ()))
    assert extent == ([8] if documents is None else [None, masks if len(masks) > 1 else masks[0]])


def test_micro_batches():
    inputs = torch.arange(35).reshape(5, 7)
    cut = SequenceShard.cut(7, layout="zigzag", size=2, rank=0)
    whole = local(cut, inputs, inputs + 1, ((7,), (3, 4), (7,), (1, 6), (2, 5)))
    for batch in (whole, dataclasses.replace(whole, masks=None)):
        parts = list(batch.micro_batches(2))
        assert [part.ids.shape[1] for part in parts] == [2, 2, 1]
        assert torch.equal(torch.cat([part.ids for part in parts], 1), batch.ids)
        assert sum((part.masks or () for part in parts), ()) == (batch.masks or ())
        assert {part.length for part in parts} == {7}
