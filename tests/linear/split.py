"""Runs a layer on split sequences, and puts its results together again."""

from functools import cache, partial

import torch

import bmburst
from bmburst.linear import check
from tests.linear.oracle import problem, whole

FUNCTIONS = {
    "gated_delta": bmburst.burst_linear_attention,
    "kda": partial(bmburst.burst_linear_attention, kind="kda"),
    "decay": partial(bmburst.burst_linear_attention, kind="decay"),
    "ssd": bmburst.burst_ssd,
    "scan": bmburst.burst_scan,
    "conv": bmburst.burst_causal_conv,
}
KINDS = tuple(FUNCTIONS)
FUNCTIONS["narrow conv"] = bmburst.burst_causal_conv


def fold(monkeypatch, hops):
    """Let states be exchanged in so many hops, whatever the cost model would choose."""
    monkeypatch.setattr(check, "choose_hops", lambda *_: hops)


@cache
def expected(kind, lengths, continued):
    """Return inputs, gradients of the results, and what one device gives: the same for all ranks and layouts."""
    real = sum(lengths[0])
    case = problem(kind, len(lengths), real)
    for leaf in case.leaves():
        leaf.requires_grad_()
    out, final = whole(case, lengths, continued=continued)
    rng = torch.Generator().manual_seed(1)
    grads = [torch.randn(t.shape, generator=rng, dtype=torch.float64) for t in (out, final)]
    found = torch.autograd.grad((out, final), case.leaves(), grads, materialize_grads=True)
    return case, grads, [out.detach(), final.detach(), *found]


def compare(comm, kind, lengths, layout, continued=True, packed=True, **options):
    """Compare outputs, the final state and all gradients with one device, and check that padding is zero."""
    case, (grad_out, grad_final), wanted = expected(kind, lengths, continued)
    length = grad_out.shape[1]
    masks = tuple(bmburst.Documents(each) for each in lengths) if packed else "causal"
    one = masks[0] if packed else bmburst.Causal()
    cut = {"layout": layout, "group": comm, "mask": one}
    tokens = {name: bmburst.shard(t.detach(), **cut).clone().requires_grad_() for name, t in case.tokens.items()}
    shared = {name: t.detach().clone().requires_grad_() for name, t in case.shared.items()}
    state = case.state.detach().clone().requires_grad_()
    given = {"initial_state": state} if continued else {}
    mask = one if len(set(lengths)) == 1 else masks
    out, final = FUNCTIONS[kind](
        **tokens, **shared, **case.options, **given, **options,
        mask=mask, layout=layout, length=length, group=comm, final_state=True,
    )  # fmt: skip
    # Each rank has a share of the gradient of the final state.
    leaves = [*tokens.values(), *shared.values(), state]
    grads = torch.autograd.grad(
        (out, final), leaves, (bmburst.shard(grad_out, **cut), grad_final / comm.size), allow_unused=not continued
    )
    real = bmburst.SequenceShard.cut(length, layout=layout, size=comm.size, rank=comm.rank, mask=one).real_tokens
    for tensor in (out, *grads[: len(tokens)]):
        assert not tensor[:, real:].any()
    of_tokens, of_others = grads[: len(tokens)], grads[len(tokens) : len(leaves) - (not continued)]
    got = [bmburst.unshard(out.detach(), length=length, **cut), final.detach()]
    got += [bmburst.unshard(grad, length=length, **cut) for grad in of_tokens]
    got += [comm.all_reduce(grad).wait()[0] for grad in of_others]
    names = ["out", "final", *tokens, *shared, "state"]
    for name, ours, theirs in zip(names, got, wanted, strict=False):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
