"""Latent attention over ranks that exchange latents, against its definition on one device."""

from dataclasses import replace
from functools import cache

import pytest
import torch

import bmburst
from bmburst.attention import latents
from bmburst.attention.call import decide, head_shapes
from bmburst.attention.latents import attend_latents
from bmburst.attention.options import AttentionOptions
from bmburst.recompute import checkpoint
from bmburst.schedule.units import Sizes
from bmburst_ops.flash import ReferenceKernel
from tests.attention.exchange_ways import move_heads, record_first_calls
from tests.attention.oracle import reference
from tests.comm.counting import counted
from tests.distributed.threads import on_ranks, run_ranks
from tests.pairs import pairwise
from tests.refusals import refused

HEADS, RANK, ROTARY, REST, VALUE, LENGTH = 6, 7, 3, 5, 9, 29  # 10 numbers a latent, 17 a head
MASKS = {
    "causal": "causal",
    "documents": bmburst.Documents((3, 13, 1, 12)),
    "samples": (bmburst.Documents((29,)), bmburst.Documents((5, 1, 23))),
}


@cache
def drawn():
    """Return queries, latents, rotary keys, the weight and dO of two samples."""
    rng = torch.Generator().manual_seed(0)
    sizes = (HEADS, REST + ROTARY), (1, RANK), (1, ROTARY), (HEADS, VALUE)
    q, latent, rotary, grad = (torch.randn(2, LENGTH, *size, generator=rng, dtype=torch.float64) for size in sizes)
    weight = torch.randn(HEADS * (REST + VALUE), RANK, generator=rng, dtype=torch.float64) / 2
    return q, latent, rotary, weight, grad


@cache
def expected(name):
    """Return output and gradients of the definition."""
    q, latent, rotary, weight, grad = drawn()
    latent, rotary, weight = (t.clone().requires_grad_() for t in (latent, rotary, weight))
    own = torch.einsum("btr,hdr->bthd", latent[:, :, 0], weight.view(HEADS, REST + VALUE, RANK))
    k, v = torch.cat((own[..., :REST], rotary.repeat(1, 1, HEADS, 1)), 3), own[..., REST:]
    masks = MASKS[name] if isinstance(MASKS[name], tuple) else (MASKS[name],) * 2
    parts = [reference(*(t[i : i + 1] for t in (q, k, v, grad)), mask) for i, mask in enumerate(masks)]
    out, _, grad_q, grad_k, grad_v = (torch.cat(each) for each in zip(*parts, strict=True))
    return out, grad_q, *torch.autograd.grad((k, v), (latent, rotary, weight), (grad_k, grad_v))


def over_ranks(comm, name, layout, *, dtype=torch.float64, kernel="auto", frozen=False):
    """Return output and gradients of all tokens, and of the weight's gradient which heads' rows are of this rank."""
    cut = {"layout": layout, "group": comm, "length": LENGTH}
    q, latent, rotary, weight, grad = (t.to(dtype) for t in drawn())
    leaves = [bmburst.shard(t, layout=layout, group=comm).clone().requires_grad_() for t in (q, latent, rotary)]
    weight = weight.clone().requires_grad_(not frozen)
    options = AttentionOptions(mask=MASKS[name], layout=layout, kernel=kernel)
    out = attend_latents(*leaves, weight, LENGTH if name == "causal" else None, comm, options)
    assert out.dtype == dtype
    out.backward(bmburst.shard(grad, layout=layout, group=comm))
    found = [bmburst.unshard(t, **cut) for t in (out.detach(), *(leaf.grad for leaf in leaves))]
    if frozen:
        return [*found, weight.grad], None
    (summed,) = comm.all_reduce(weight.grad.clone()).wait()
    return [*found, summed], (weight.grad.view(HEADS, -1) != 0).any(1).tolist()


@pytest.mark.parametrize(
    ("size", "layout", "name"), pairwise([1, 2, 3, 6, 4], ["zigzag", "contiguous", "striped"], MASKS)
)
def test_equals_the_definition_in_fp64(size, layout, name, monkeypatch):
    """Of 4 ranks, which cannot share 6 heads, each expands its own tokens."""
    move_heads(monkeypatch, "latents")
    for rank, (found, heads) in enumerate(run_ranks(size, over_ranks, name, layout)):
        torch.testing.assert_close(found, expected(name), rtol=1e-9, atol=1e-10)
        own = HEADS // size if HEADS % size == 0 else HEADS
        assert heads == [own == HEADS or i // own == rank for i in range(HEADS)]


def test_kernels_whose_launches_serve_later_calls(monkeypatch):
    """As those of CUDA graphs do, in bf16. No gradient is computed of a weight that does not require one."""
    move_heads(monkeypatch, "latents")
    products, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda *given, **into: products.append(given) or mm(*given, **into))
    first = record_first_calls(monkeypatch, ReferenceKernel)

    def body(comm):
        comm.always = comm.active = False
        options = {"dtype": torch.bfloat16, "kernel": "reference"}
        return [over_ranks(comm, "causal", "zigzag", frozen=frozen, **options)[0] for frozen in (False, True)]

    for results in run_ranks(2, body):
        assert results[1][-1] is None
        for found in results:
            for ours, wanted in zip(found, expected("causal"), strict=True):
                assert ours is None or (ours.double() - wanted).norm() < 2e-2 * wanted.norm()
    assert 0 < len(first) < 2 * 4  # the launches of two ranks
    assert len(products) == 2


@pytest.mark.parametrize(("policy", "passes"), [("none", 1), ("block-keep-attention", 1), ("block", 2)])
def test_moves_the_bytes_of_latents_and_expands_once_a_pass(policy, passes, monkeypatch):
    """Which the cost model counts. A recomputation that keeps attention's results moves and expands nothing."""
    move_heads(monkeypatch, "latents")
    calls, expanded = [], latents._expanded
    monkeypatch.setattr(latents, "_expanded", lambda *args: calls.append(args) or expanded(*args))

    def body(comm):
        (group, counting), options = counted(comm), AttentionOptions(layout="contiguous")
        q, latent, rotary = (t[:1, :6].clone().requires_grad_() for t in drawn()[:3])
        out = checkpoint(policy, lambda *own: attend_latents(*own, drawn()[3], None, group, options), q, latent, rotary)
        forward = counting.sent
        out.sum().backward()
        k, v = q, q.new_empty(1, 6, HEADS, VALUE)
        call = decide(group, q, k, v, None, options, latent_dim=RANK + ROTARY)
        shapes = replace(head_shapes(call.layout, q, k, v), degree=2, latent_dim=RANK + ROTARY)
        return forward, counting.sent - forward, shapes, call.strategy

    for forward, backward, shapes, strategy in run_ranks(2, body):
        ways = [Sizes(replace(strategy, latents=each), shapes) for each in (True, False)]
        predicted, others = ([sum(way.head_bytes(backward=b)) // 2 for b in (False, True)] for way in ways)
        assert forward == predicted[0] < others[0]
        assert backward == predicted[1] + (passes - 1) * predicted[0] and predicted[1] < others[1]
    assert len(calls) == 2 * (1 + passes)  # of two ranks


def test_half_of_the_results_can_be_kept(monkeypatch):
    move_heads(monkeypatch, "latents")

    def body(comm):
        options, found = AttentionOptions(), []
        for policy in ("none", "block-keep-attention:0.5"):
            q, latent, rotary, weight = (
                t.clone().requires_grad_() for t in (*(t[:, :8] for t in drawn()[:3]), drawn()[3])
            )
            out = checkpoint(policy, lambda *own: attend_latents(*own, None, comm, options), q, latent, rotary, weight)
            out.sin().sum().backward()
            found.append([out.detach(), q.grad, latent.grad, rotary.grad, weight.grad])
        return found

    for whole, half in run_ranks(2, body):
        torch.testing.assert_close(half, whole, rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_ranks_that_disagree_are_refused(comm):
    """One has keys and values of all heads, since its weight is not plain."""
    q, latent, rotary = (t[:, :8] for t in drawn()[:3])
    with refused("disagree", "latents of 10"):
        if comm.rank:
            attend_latents(q, latent, rotary, drawn()[3], None, comm, AttentionOptions())
        else:
            bmburst.burst_attention(q, q, q.new_zeros(2, 8, HEADS, VALUE), group=comm)
