"""Checkpointing drops activations, keeps attention, and never mixes up calls."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import bmburst
from bmburst.mesh import current_mesh
from bmburst.recompute import checkpoint, is_recomputing
from bmburst.recompute.host_store import HostStore
from bmburst.recompute.policy import POLICIES, BlockBytes, Policy
from tests.attention.counting import count_forward
from tests.distributed.threads import mesh_of, on_ranks, run_ranks
from tests.live_bytes import LiveBytes
from tests.refusals import refused

EMPTY = 64  # torch's checkpoint keeps an empty tensor, and one for each input that lies in host memory


class Layer(torch.nn.Module):
    """Projection, attention twice, projection: two calls of attention in one checkpoint."""

    def __init__(self, comm, seed):
        super().__init__()
        self.comm = comm
        rng = torch.Generator().manual_seed(seed)
        self.qkv = torch.nn.Parameter(torch.randn(3 * 16, 16, generator=rng, dtype=torch.float64) / 4)
        self.out = torch.nn.Parameter(torch.randn(16, 16, generator=rng, dtype=torch.float64) / 4)

    def forward(self, x):
        for _ in range(2):
            q, k, v = (t.unflatten(-1, (2, 8)) for t in (x @ self.qkv.T).split(16, -1))
            x = x + bmburst.burst_attention(q, k, v, group=self.comm).flatten(-2) @ self.out.T
        return torch.tanh(x)


def inputs(comm, seed):
    whole = torch.randn(1, 12, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return bmburst.shard(whole, group=comm)


@pytest.fixture
def forward_calls(monkeypatch):
    calls = []
    count_forward(monkeypatch, lambda call: calls.append(call.comm.rank))
    return calls


def _plain(comm):
    layer = Layer(comm, 0)
    x = inputs(comm, 1).requires_grad_()
    layer(x).square().sum().backward()
    return [x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("policy", POLICIES)
@on_ranks(2)
def test_calls_are_never_mixed_up(comm, policy):
    """Two models, microbatches in flight, an eval, a no_grad and an exception between them, backward in any order."""
    layers = [Layer(comm, 0), Layer(comm, 7)]
    batches, store = [inputs(comm, seed) for seed in (1, 2, 3)], HostStore()
    plain = [layer(x).square().sum() for layer in layers for x in batches]
    expected = [
        torch.autograd.grad(loss, layer.parameters())
        for loss, layer in zip(plain, [layers[0]] * 3 + [layers[1]] * 3, strict=True)
    ]

    losses = []
    for layer in layers:
        for x in batches:
            losses.append(checkpoint(policy, layer, x.requires_grad_(), store=store).square().sum())
            with torch.no_grad():
                checkpoint(policy, layer, x * 3, store=store)
            checkpoint(policy, layer.eval(), x * 5, store=store)  # a forward that never sees a backward
            with pytest.raises(RuntimeError, match="on purpose"):
                checkpoint(policy, _fails, layer, x * 7, store=store)
    owners = [layers[0]] * 3 + [layers[1]] * 3
    for i in (4, 0, 5, 2, 1, 3):
        got = torch.autograd.grad(losses[i], owners[i].parameters())
        torch.testing.assert_close(got, expected[i], rtol=1e-12, atol=1e-12)


def _fails(layer, x):
    layer(x)
    raise RuntimeError("on purpose")


@on_ranks(1)
def test_keeps_what_it_says_and_no_more(comm):
    """Bytes that live between forward and backward, by policy; none where no backward can come."""
    layer, x = Layer(comm, 0), inputs(comm, 1).requires_grad_()
    alive, store = LiveBytes(), HostStore()

    def on_device():
        return alive.now - store.nbytes

    with alive:
        kept = {}
        for policy in POLICIES:
            y = checkpoint(policy, layer, x, store=store)
            kept[policy] = on_device() - y.nbytes
            y.sum().backward(retain_graph=True)
            layer.zero_grad()
            x.grad = None
            left = kept[policy] if "all" not in policy else 0  # backward was given what was still here
            assert abs(on_device() - y.nbytes - left) <= 2 * EMPTY
            del y
            assert on_device() == 0
            with torch.no_grad():
                y = checkpoint(policy, layer, x, store=store)
                assert on_device() == y.nbytes
            y = checkpoint(policy, layer, x, store=store)
            del y  # never sees a backward
            assert on_device() == 0
            with pytest.raises(RuntimeError, match="on purpose"):
                checkpoint(policy, _fails, layer, x, store=store)
            assert on_device() == 0
    batch, tokens, heads, head_dim = 1, 12, 2, 8
    attention = 2 * batch * tokens * heads * (head_dim * 8 + 8)  # two calls, in fp64
    block = BlockBytes(0.0, attention, kept["none"] - attention)  # x itself was there before
    assert block.rest > 3 * attention
    for name in POLICIES:
        policy = Policy.parse(name)
        assert 0 <= kept[name] - policy.kept(block) - policy.hosted(block) <= 2 * EMPTY, name
    assert kept["block"] <= EMPTY < attention


@pytest.mark.parametrize("policy", POLICIES)
def test_backward_twice_outside_the_mesh_and_in_another_thread(policy, forward_calls):
    """What a recomputation finds is what the forward found, not what is there when backward runs."""

    def body(comm):
        mesh = mesh_of(comm)
        layer, x = Layer(None, 0), inputs(comm, 1).requires_grad_()
        with mesh.current():
            loss = checkpoint(policy, layer, x).square().sum()
        loss.backward(retain_graph=True)
        with ThreadPoolExecutor(1) as another:
            another.submit(loss.backward).result()
        assert current_mesh() is None
        return [x.grad / 2, *(p.grad / 2 for p in layer.parameters())]

    expected = run_ranks(2, _plain)
    forward_calls.clear()
    torch.testing.assert_close(run_ranks(2, body), expected, rtol=1e-12, atol=1e-12)
    assert len(forward_calls) == 2 * (6 if policy.startswith("block+") or policy == "block" else 2)


@pytest.mark.parametrize(("inner", "rings"), [("none", 2), ("block", 4), ("block-keep-attention", 2)])
def test_a_checkpoint_inside_a_checkpoint(inner, rings, forward_calls):
    def body(comm, outer, inner):
        layer, x = Layer(comm, 0), inputs(comm, 1).requires_grad_()
        # The sine needs the inner result again: the outer recomputation goes through the inner checkpoint.
        checkpoint(outer, lambda t: checkpoint(inner, layer, t).sin(), x).square().sum().backward()
        return [x.grad, *(p.grad for p in layer.parameters())]

    expected = run_ranks(2, body, "none", "none")
    forward_calls.clear()
    torch.testing.assert_close(run_ranks(2, body, "block-keep-attention", inner), expected, rtol=1e-12, atol=1e-12)
    assert len(forward_calls) == 2 * rings


@pytest.mark.parametrize(
    ("policy", "calls"),
    [("none", [(False, False), (False, True)]), ("block", [(False, False), (False, False), (True, False)])],
)
def test_only_what_is_called_again_itself_may_leave_out_its_end(policy, calls):
    """Inside of another checkpoint's recomputation its result is needed."""
    seen = []

    def inner(x):
        seen.append((is_recomputing(inner), is_recomputing(outer)))
        return x.sin()

    def outer(x):
        return checkpoint(policy, inner, x).sin()

    checkpoint("block", outer, torch.ones(2, requires_grad=True)).sum().backward()
    assert seen == calls and not is_recomputing(inner)


@on_ranks(1)
def test_a_change_in_place_of_what_is_kept_is_an_error(comm):
    def change(comm, x):
        out = bmburst.burst_attention(x, x, x, group=comm)
        return out.mul_(3).sin()

    x = torch.randn(1, 4, 2, 8, requires_grad=True)
    loss = checkpoint("block-keep-attention", change, comm, x).sum()
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_a_policy_of_layers_is_no_policy_of_a_call():
    with refused("one call", "fix: block+offload", "layer i"):
        checkpoint("block+offload+first-3", torch.tanh, torch.zeros(1, requires_grad=True))


def test_unknown_policy():
    with refused("recompute policy", "'blocks'", "'block'", "known: "):
        checkpoint("blocks", torch.tanh, torch.zeros(1))
