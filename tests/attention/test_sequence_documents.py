"""Packed documents cut over ranks: what every rank holds is what each document alone would give, put in its place."""

from functools import partial

import numpy as np
import pytest
import torch

import bmburst
from bmburst.schedule.documents import Documents, PrefixLM
from bmburst.schedule.layout import make_layout
from bmburst.schedule.mask import Causal, Mask, SlidingWindow
from bmburst.sequence import SequenceShard
from bmburst_ops import IGNORE_INDEX
from tests.distributed.threads import on_ranks, run_ranks
from tests.refusals import refused

LAYOUTS = ["contiguous", "zigzag", "striped", "balanced"]
# One token, one document, borders of ranks inside documents and on them, a long tail.
PACKED = [(4,), (5, 6), (1, 1, 1, 1, 7), (11, 1), (2, 37, 1, 3), (8, 8, 8, 8), (1,) * 13]


def alone(tokens: torch.Tensor, lengths: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Return token, label and position of each token, one document after another."""
    found = []
    for document in tokens.split(lengths):
        ids = document.tolist()
        found += zip(ids, [*ids[1:], IGNORE_INDEX], range(len(ids)), strict=True)
    return found


def put_together(cuts: list[SequenceShard], parts: list[bmburst.ShardedBatch], row: int) -> dict[int, tuple]:
    """Return what the ranks hold at each global position; each is held once."""
    found: dict[int, tuple] = {}
    for cut, part in zip(cuts, parts, strict=True):
        for at, *values in zip(cut.positions().tolist(), *(t[row].tolist() for t in part), strict=True):
            assert at not in found
            found[at] = tuple(values)
    return found


@pytest.mark.parametrize("lengths", PACKED, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equals_documents_alone(lengths: tuple[int, ...], layout: str, size: int) -> None:
    """One mask for both samples of a batch; then joined with a window, which changes nothing here."""
    total = sum(lengths)
    tokens = torch.randint(1000, (2, total), generator=torch.Generator().manual_seed(total))
    mask = Documents(lengths)
    for documents in (mask, mask & SlidingWindow(3)):
        cuts = [SequenceShard.cut(total, layout=layout, size=size, rank=rank, mask=mask) for rank in range(size)]
        parts = [cut.batch(tokens, documents=documents) for cut in cuts]
        valid = 2 * (total - len(lengths))
        for row in range(2):
            held = put_together(cuts, parts, row)
            for at, (token, label, position) in enumerate(alone(tokens[row], lengths)):
                assert held[at][:3] == (token, label, position)
                assert held[at][3] == pytest.approx(0 if label == IGNORE_INDEX else 1 / valid)
            for at in range(total, len(held)):
                assert (held[at][1], held[at][3]) == (IGNORE_INDEX, 0)


@pytest.mark.parametrize("layout", LAYOUTS[:3])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_documents_of_each_sample_and_padding_behind_them(layout: str, size: int) -> None:
    packed, total = [(5, 6), (11,), (1, 1, 2), (3, 4, 4)], 11
    tokens = torch.arange(100, 100 + 4 * total).reshape(4, total)
    cuts = [SequenceShard.cut(total, layout=layout, size=size, rank=rank) for rank in range(size)]
    parts = [cut.batch(tokens, documents=[Documents(lengths) for lengths in packed]) for cut in cuts]
    valid = sum(sum(lengths) - len(lengths) for lengths in packed)
    for row, lengths in enumerate(packed):
        held = put_together(cuts, parts, row)
        real = sum(lengths)
        assert [held[at][:3] for at in range(real)] == alone(tokens[row, :real], lengths)
        assert all(held[at][1] == IGNORE_INDEX and held[at][3] == 0 for at in range(real, len(held)))
    assert sum(part.weights.sum().item() for part in parts) == pytest.approx(1)
    assert max(part.weights.max().item() for part in parts) == pytest.approx(1 / valid)


def test_given_labels_are_taken_as_they_are() -> None:
    """The trainer's last label of a document is its end-of-document id; only padding loses its label."""
    tokens = torch.arange(9)[None]
    cut = SequenceShard.cut(9, layout="contiguous", size=1, rank=0)
    part = cut.batch(tokens, tokens + 1, Documents((4, 3)))
    assert part.labels[0].tolist() == [1, 2, 3, 4, 5, 6, 7, IGNORE_INDEX, IGNORE_INDEX]
    assert part.positions[0, :7].tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert cut.batch(tokens, documents=Causal()).positions[0].tolist() == list(range(9))
    assert cut.batch(tokens, documents=PrefixLM((1, 0), (4, 5))).positions[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_balanced_is_the_layout_that_attention_makes(size: int) -> None:
    """By mask and real length alone, cut fresh or again for a batch whose documents end before the sequence."""
    total, first, second = 77, Documents((40, 1, 36)), Documents((3, 60, 14))
    for rank in range(size):
        cut = SequenceShard.cut(total, layout="balanced", size=size, rank=rank, mask=first)
        other = SequenceShard.cut(total, layout="balanced", size=size, rank=rank, mask=second)
        assert cut.under(second) == other
        assert cut.layout == make_layout("balanced", size, cut.local_tokens, first, total)
        short = Documents((30, 20))
        again = cut.under(short)
        assert (again.length, again.local_tokens) == (total, cut.local_tokens)
        assert again.layout == make_layout("balanced", size, cut.local_tokens, short, 50)
        striped = SequenceShard.cut(total, layout="striped", size=size, rank=rank, mask=first)
        assert striped.under([first, second]) == striped
        assert size == 1 or cut.layout != other.layout


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", [Documents((3, 30, 8)), "causal", "full"], ids=str)
@on_ranks(3)
def test_shard_and_unshard_are_inverses_under_a_mask(comm, layout: str, mask: Mask | str) -> None:
    x = torch.randn(2, 41, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    part = bmburst.shard(x, layout=layout, group=comm, mask=mask)
    whole = bmburst.unshard(part, layout=layout, group=comm, length=41, mask=mask)
    assert torch.equal(whole, x)
    cut = SequenceShard.cut(41, layout=layout, size=comm.size, rank=comm.rank, mask=mask)
    assert torch.equal(part, cut.take(x))
    factors = torch.randn(41, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (whole * factors).sum().backward()
    # Every rank's loss counts: unshard sums them, shard keeps this rank's tokens.
    mine = torch.zeros(41, 1, dtype=torch.float64).index_fill(0, cut.positions()[: cut.real_tokens], 3.0)
    torch.testing.assert_close(x.grad, (factors * mine).expand(2, -1, -1))


def test_bad_input_is_refused_on_every_rank() -> None:
    good, x = Documents((3, 2)), torch.zeros(1, 5)

    def body(comm) -> None:
        def refuses(words: str, function, tensor: torch.Tensor, usual: dict, **options: object) -> None:
            with refused(words):
                function(tensor, group=comm, **usual | (options if comm.rank == 1 else {}))

        balanced, differ = {"layout": "balanced", "mask": good}, "disagree | fix: | mask=2 documents of 2 to 3 tokens"
        refuses("'balanced' | pass mask=", bmburst.shard, x, balanced, mask=None)
        refuses("4 tokens | 5 real | length=4", bmburst.shard, x, balanced, mask=Documents((4,)))
        refuses(differ, bmburst.shard, x, balanced, mask=Documents((2, 3)))
        refuses("mask | 'docs' | causal, full", bmburst.shard, x, balanced, mask="docs")
        refuses("mask | name | list | causal, full | bmburst.Documents", bmburst.shard, x, {}, mask=[good])
        refuses("5 tokens | 6 real | length=5", bmburst.unshard, torch.zeros(1, 8), balanced | {"length": 5}, length=6)
        refuses("'balanced' | pass mask=", bmburst.unshard, torch.zeros(1, 8), balanced | {"length": 5}, mask=None)
        refuses(differ, bmburst.unshard, torch.zeros(1, 8), balanced | {"length": 5}, mask=Documents((2, 3)))

    run_ranks(2, body)
    cut = partial(SequenceShard.cut, 5, size=2, rank=0)
    with refused("'balanced'", "pass mask="):
        cut(layout="balanced")
    with refused("6 tokens", "5 real", "5 tokens"):
        cut(layout="zigzag", mask=Documents((6,)))
    one = cut(layout="balanced", mask=good)
    with refused("'balanced'", "each sample", "micro_batch_size", "'zigzag'"):
        one.under((good, good))
    for wrong, words in (
        (Documents((6,)), "6 tokens | 5 real"),
        (Documents((2, 3)), "balanced | 2 documents of 2 to 3 tokens | other documents | cut.under(documents)"),
        ([good, Documents((3,))], "balanced | other documents | cut.under(documents)"),
        ([good], "1 samples | batch of 2 | one bmburst.Documents"),
    ):
        with refused(words):
            one.batch(torch.zeros(2, 5, dtype=torch.int64), documents=wrong)
    one.batch(torch.zeros(2, 5, dtype=torch.int64), documents=[good & SlidingWindow(2), good])


def test_balanced_ranks_have_like_work() -> None:
    """Long-tailed documents: no rank has more than the bound over the mean."""
    lengths = np.random.default_rng(0).lognormal(3, 1.5, 60).astype(int) + 1
    mask, total, size = Documents(tuple(lengths.tolist())), int(lengths.sum()), 4
    position = np.concatenate([np.arange(n) for n in lengths])

    def most_over_mean(layout: str) -> float:
        areas = []
        for rank in range(size):
            cut = SequenceShard.cut(total, layout=layout, size=size, rank=rank, mask=mask)
            mine = cut.positions()[: cut.real_tokens].numpy()
            areas.append(int((position[mine] + 1).sum()))
        return max(areas) / (sum(areas) / size)

    assert most_over_mean("balanced") < 1.1 < most_over_mean("contiguous")
