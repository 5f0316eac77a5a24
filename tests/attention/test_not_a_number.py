"""What is not a number stays in its document and in its sample, in outputs and in gradients."""

import pytest
import torch

import bmburst
from tests.distributed.threads import run_ranks

LENGTHS = (5, 1, 9, 6)
DOCUMENTS = bmburst.Documents(LENGTHS)
WHERE = 8  # in the third document
FIRST, END = 6, 15


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("mask", [DOCUMENTS, DOCUMENTS & bmburst.SlidingWindow(3)], ids=["documents", "window"])
@pytest.mark.parametrize(("size", "strategy"), [(1, "auto"), (2, "kv"), (2, "burst"), (2, "heads"), (2, "gather")])
def test_documents_and_samples(kernel, name, mask, size, strategy):
    torch.manual_seed(0)
    whole = {each: torch.randn(2, sum(LENGTHS), 2, 8) for each in "qkv"}
    whole[name][1, WHERE, 1, 3] = float("nan")

    def body(comm):
        given = {each: bmburst.shard(x, group=comm).requires_grad_() for each, x in whole.items()}
        out = bmburst.burst_attention(**given, mask=mask, group=comm, kernel=kernel, strategy=strategy)
        wanted = (out, *torch.autograd.grad(out.square().sum(), list(given.values())))
        for found in wanted:
            seen = bmburst.unshard(found.detach(), group=comm, length=sum(LENGTHS)).isfinite()
            assert seen[0].all()  # another sample
            assert seen[1, :FIRST].all() and seen[1, END:].all()  # other documents
            assert seen[1, :, 0].all()  # another head
        assert not all(bmburst.unshard(x.detach(), group=comm).isfinite().all() for x in wanted)

    run_ranks(size, body)
