"""Cross-attention as BMTrain's module calls it, over peer copies, and in checkpoints that save attention."""

import pytest
import torch

import bmburst
from bmburst.comm.peer import PeerCommunicator
from bmburst.mesh import Mesh
from bmburst.recompute import checkpoint
from tests import lazy
from tests.attention.counting import watch_forward
from tests.attention.cross_oracle import compare, layout_of, local, problem
from tests.distributed.programs import on_program
from tests.distributed.threads import run_ranks
from tests.stand_in_driver import install

QUERIES, KEYS = 13, 29
LAYOUTS = "zigzag", "contiguous"
PAIRED = bmburst.Documents((4, 9), True, (20, 9))


def attended(comm, mask, attend, policy="none"):
    """Return a checkpoint's output and gradients over the ranks, whole, and those of the definition."""
    whole, expected = problem(QUERIES, KEYS, 4, 2, mask, with_lse=False)
    ql, kl = (layout_of(name, comm.size, n, mask) for name, n in zip(LAYOUTS, (QUERIES, KEYS), strict=True))
    q, grad = (local(whole[i], ql, comm.rank, QUERIES) for i in (0, 3))
    inputs = [t.requires_grad_() for t in (q, *(local(t, kl, comm.rank, KEYS) for t in whole[1:3]))]
    out = checkpoint(policy, attend, *inputs)
    found = [out, *torch.autograd.grad(out, inputs, grad)]
    sequences = ((LAYOUTS[0], QUERIES), (LAYOUTS[0], QUERIES), *[(LAYOUTS[1], KEYS)] * 2)
    joined = [
        bmburst.unshard(t.detach(), layout=layout, length=length, group=comm)
        for t, (layout, length) in zip(found, sequences, strict=True)
    ]
    return joined, (expected[0], *expected[2:])


def close(pairs):
    torch.testing.assert_close(*pairs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("size", [1, 2, 3])
@on_program()
def test_the_module_takes_the_length_of_keys_at_each_call(size: int) -> None:
    comm = Mesh.over_bmtrain().sequence
    module = lazy.BurstAttention(mask="full", layout=LAYOUTS[0], key_layout=LAYOUTS[1], group=comm)
    close(attended(comm, "full", lambda q, k, v: module(q, k, v, QUERIES, None, KEYS)))
    close(attended(comm, PAIRED, lambda q, k, v: module(q, k, v, QUERIES, PAIRED, key_length=KEYS)))


@pytest.mark.parametrize("strategy", ["heads", "gather", "kv", "burst"])
def test_peer_copies(monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    driver = install(monkeypatch, batches=True)

    def body(comm):
        moved = comm.over(PeerCommunicator(comm, torch.device("cpu")))
        for mask in ("full", "causal", PAIRED):
            compare(moved, mask, LAYOUTS, (QUERIES, KEYS), 4, 2, strategy=strategy)
            compare(moved, mask, LAYOUTS, (KEYS, QUERIES), 4, 2, strategy=strategy) if mask != PAIRED else None

    run_ranks(2, body)
    assert driver.calls["cuMemcpy3DBatchAsync_v2"] > 10


@pytest.mark.parametrize("mask", ["full", "causal", PAIRED], ids=str)
@pytest.mark.parametrize("policy", ["block", "block-keep-attention", "block-keep-attention:0.5"])
def test_a_checkpoint_saves_all_of_cross_attention(monkeypatch: pytest.MonkeyPatch, policy: str, mask: object) -> None:
    """Of a part too: no prefix of the queries attends to a prefix of the keys alone."""
    ran = []
    watch_forward(monkeypatch, lambda *seen: ran.append(seen))

    def body(comm):
        def attend(q, k, v):
            cut = {"layout": LAYOUTS[0], "length": QUERIES, "key_layout": LAYOUTS[1], "key_length": KEYS}
            return bmburst.burst_attention(q, k, v, mask=mask, group=comm, **cut)

        close(attended(comm, mask, attend, policy))

    run_ranks(2, body)
    assert len(ran) == (4 if policy == "block" else 2)  # block attends again in backward, on either rank


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_a_checkpoint_saves_all_of_it_where_keys_happen_to_lie_as_the_queries(
    monkeypatch: pytest.MonkeyPatch, layout: str, mask: str
) -> None:
    """Such a call is planned as self-attention: whose prefix a full mask and a contiguous layout do not have."""
    ran = []
    watch_forward(monkeypatch, lambda *seen: ran.append(seen))

    def body(comm):
        x = torch.randn(1, 8, 2, 8, requires_grad=True)
        options = {"mask": mask, "layout": layout, "length": 15, "key_length": 15, "group": comm}
        attend = lambda t: bmburst.burst_attention(t, t, t, **options)  # noqa: E731
        checkpoint("block-keep-attention:0.5", attend, x).sum().backward()

    run_ranks(2, body)
    assert len(ran) == 2  # one a rank: none is recomputed
