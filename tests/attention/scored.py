"""Attention with a softcap on scores, or a sink beside them, over ranks: what its definition gives."""

from itertools import product

import torch

import bmburst
from tests.attention.cross_oracle import visible
from tests.attention.oracle import draw, reference
from tests.attention.test_burst_attention import split_attention
from tests.distributed.threads import run_ranks

HEADS, KV_HEADS, DIM = 4, 2, 8
DOCUMENTS = (3, 9, 1, 8)
LENGTH = sum(DOCUMENTS)  # odd: there is padding
MASKS = {
    "causal": "causal",
    "full": "full",
    "window": bmburst.SlidingWindow(4),
    "documents": bmburst.Documents(DOCUMENTS),
    "windows of documents": bmburst.Documents(DOCUMENTS) & bmburst.SlidingWindow(3),
}
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def problem(mask, **scores):
    """Return q, k, v, dO, dLSE in fp64, and what `reference` gives of them with a softcap or a sink."""
    whole = draw(0, 2, LENGTH, HEADS, KV_HEADS, DIM)
    return whole, reference(*whole[:4], mask, whole[4], **scores)


def compare(comm, mask, layout, given, **options):
    whole, wanted = given
    names = ("out", "lse", "dq", "dk", "dv", "dsink")[: len(wanted)]
    for what, ours, exact in zip(names, split_attention(comm, whole, layout, mask, **options), wanted, strict=True):
        said = f"{what} of {mask} over {comm.size} ranks, {layout}, {options}"
        torch.testing.assert_close(ours.detach(), exact, **CLOSE, msg=lambda m, s=said: f"{s}: {m}")


def by_every_strategy(size, name, **scores):
    """Hold every strategy that can work over `size` ranks to the definition."""
    mask = MASKS[name]
    given = problem(mask, **scores)

    def body(comm):
        for strategy, layout in product(("heads", "gather", "kv", "burst", "auto"), ("zigzag", "striped")):
            if strategy == "heads" and HEADS % size:
                continue
            if strategy == "gather" and layout == "striped" and name != "full":
                continue
            compare(comm, mask, layout, given, strategy=strategy, **scores)
        for strategy in ("heads+ring", "heads+gather") if size == 4 else ():
            compare(comm, mask, "zigzag", given, strategy=strategy, **scores)

    run_ranks(size, body)


def recomputed(policy, **scores):
    """Hold attention under a recompute policy to the definition."""
    given = problem("causal", **scores)

    def body(comm):
        for strategy in ("heads", "kv"):
            compare(comm, "causal", "zigzag", given, recompute=policy, strategy=strategy, **scores)

    run_ranks(2, body)


def with_keys_of_another_sequence(**scores):
    """Hold cross-attention, with a mask for all samples and one for each, to the definition."""
    q, k, v, grad, grad_lse = draw(0, 2, 29, HEADS, KV_HEADS, DIM)
    whole = q[:, :13], k, v, grad[:, :13], grad_lse[:, :, :13]
    given = whole, reference(*whole[:4], visible("causal", 13, 29), whole[4], **scores)

    def body(comm):
        for mask, strategy in product(("causal", ("causal", "causal")), ("auto", "gather", "kv", "burst")):
            compare(comm, mask, "zigzag", given, strategy=strategy, **scores)

    run_ranks(3, body)
