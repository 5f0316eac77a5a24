"""Recurrent layers on a split sequence give what one device gives for each document alone, forward and backward."""

from functools import cached_property

import pytest
import torch

import bmburst
from bmburst.schedule.chain import Chain, make_chain
from bmburst_ops.linear import Recurrence
from tests.distributed.threads import run_ranks
from tests.linear.oracle import problem
from tests.linear.split import FUNCTIONS, KINDS, compare, fold

halos = Chain.halos
advance = Recurrence.advance
LAYOUTS = ("zigzag", "contiguous", "balanced")
# Documents of one token, one over three ranks, one that ends where a run ends; runs shorter than the convolution.
BATCHES = {
    "one": ((23,), (23,)),
    "documents": ((4, 1, 15, 3), (23,)),
    "many": ((2, 2, 20), (1, 11, 12)),
    "short": ((3, 1, 1, 6), (11,)),
}


def products(comm, layouts, batches, kinds, continued=(True,)):
    for layout in layouts:
        for name in batches:
            lengths = BATCHES[name]
            if layout == "balanced" and len(set(lengths)) > 1:
                lengths = lengths[:1] * 2
            for kind in kinds:
                for each in continued:
                    compare(comm, kind, lengths, layout, each, packed=name != "one")


@pytest.mark.parametrize("kind", KINDS)
def test_equals_each_document_alone(kind):
    run_ranks(1, products, ("zigzag",), ("documents",), (kind,))
    run_ranks(2, products, ("zigzag",), ("one",), (kind,), (False,))
    run_ranks(3, products, ("zigzag", "contiguous"), ("documents",), (kind,))
    run_ranks(3, products, ("balanced",), ("many",), (kind,))
    run_ranks(5, products, ("zigzag",), ("short",), (kind,), (False,))


@pytest.mark.parametrize("kind", KINDS)
def test_results_may_be_changed_in_place(kind):
    def gradients(comm, is_in_place):
        case = problem(kind, 2, 6)
        leaves = [t.requires_grad_() for t in case.leaves()]
        given = {**case.tokens, **case.shared, **case.options, "initial_state": case.state}
        results = FUNCTIONS[kind](**given, group=comm, final_state=True)
        results = [t.mul_(3) if is_in_place else t * 3 for t in results]
        return torch.autograd.grad(sum(t.square().sum() for t in results), leaves)

    for size in (1, 2):
        for ours, wanted in run_ranks(size, lambda comm: [gradients(comm, flag) for flag in (True, False)]):
            torch.testing.assert_close(ours, wanted)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_every_layout_and_batch(size, kind):
    run_ranks(size, products, LAYOUTS, tuple(BATCHES), (kind,), (True, False))


@pytest.mark.parametrize("hops", [1, 2])
def test_both_ways_of_folding(monkeypatch, hops):
    """Three ranks share four heads: the last one folds none."""
    fold(monkeypatch, hops)
    run_ranks(3, products, ("zigzag",), ("short",), KINDS)


def test_a_convolution_of_one_token_continues_an_empty_state():
    run_ranks(2, products, ("zigzag",), ("documents",), ("narrow conv",))


def test_a_rank_without_a_real_token():
    """Seven tokens on five ranks in zigzag: chunks of one token, and ranks of padding alone in contiguous order."""
    for layout in ("zigzag", "contiguous"):
        run_ranks(5, lambda comm, layout=layout: [compare(comm, kind, ((6,),), layout) for kind in KINDS])


@pytest.mark.parametrize("kind", KINDS)
def test_what_padding_holds_reaches_nothing(kind):
    """Not even a NaN in it: rows behind the documents of one sample, and what the layout adds, on a rank or all."""

    def found(comm, layout, padding):
        case, masks = problem(kind, 2, 7), (bmburst.Documents((2, 3)), bmburst.Documents((7,)))
        cut = bmburst.SequenceShard.cut(7, layout=layout, size=comm.size, rank=comm.rank)
        tokens = {name: bmburst.shard(t, layout=layout, group=comm).clone() for name, t in case.tokens.items()}
        real = torch.stack([cut.take((torch.arange(7) < n)[None])[0] for n in (5, 7)])
        real[:, cut.real_tokens :] = False
        leaves = [t.masked_fill_(~real.view(*real.shape, *[1] * (t.dim() - 2)), padding) for t in tokens.values()]
        leaves = [t.requires_grad_() for t in (*leaves, *case.shared.values())]
        out = FUNCTIONS[kind](**tokens, **case.shared, **case.options, mask=masks, layout=layout, group=comm)
        assert not out[~real].any()
        return torch.autograd.grad(out.sum(), leaves)

    for size, layout in ((1, "zigzag"), (2, "zigzag"), (3, "contiguous")):
        for zeros, others in zip(*(run_ranks(size, found, layout, value) for value in (0.0, torch.nan)), strict=True):
            assert all(map(torch.equal, zeros, others))


def _leaking(chain):
    """Return the flags of links as if the sequence were one document."""
    return tuple(tuple(bool(link.start) or not starts for starts in chain.starts) for link in chain.links)


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (Recurrence, "advance", lambda *given, backward: advance(*given, backward=True) if backward else given[-1]),
        (Recurrence, "advance", lambda *given, backward: given[-1] if backward else advance(*given, backward=False)),
        (Recurrence, "advance", lambda *given, **_: advance(*given, backward=False)),
        (Chain, "continues", cached_property(_leaking)),
        (Chain, "halos", lambda self, width: 0 * halos(self, width)),
    ],
    ids=["M is lost", "M is lost in backward", "M is not transposed", "documents leak", "halos are others"],
)
def test_mistakes_are_seen(monkeypatch, owner, name, broken):
    """Each typical mistake makes the comparisons above fail."""
    make_chain.cache_clear()  # chains keep their flags
    monkeypatch.setattr(owner, name, broken)
    if isinstance(broken, cached_property):
        broken.__set_name__(owner, name)
    kind = "conv" if name == "halos" else "gated_delta"
    with pytest.raises(AssertionError):
        run_ranks(3, products, ("zigzag",), ("one" if name.startswith("act") else "documents",), (kind,))
    make_chain.cache_clear()


def test_missing_limits_of_dt_are_seen(monkeypatch):
    """The limits belong to the decay, and so to M."""
    monkeypatch.setitem(
        FUNCTIONS, "ssd", lambda **given: bmburst.burst_ssd(**given | {"dt_limit": (0.0, float("inf"))})
    )
    with pytest.raises(AssertionError):
        run_ranks(3, products, ("zigzag",), ("one",), ("ssd",))
