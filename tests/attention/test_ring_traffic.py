"""What a ring moves, when it moves it, and what a rank keeps of it."""

from types import SimpleNamespace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import bmburst
from bmburst.comm.checks import CheckedCommunicator
from bmburst.comm.communicator import CompletedTransfer
from bmburst.schedule.layout import Contiguous
from bmburst.schedule.units import HeadShapes, backward_bytes
from bmburst_ops.flash import ReferenceKernel
from tests.attention.test_burst_attention import LAYOUTS, zeros
from tests.comm.counting import counted
from tests.distributed.threads import on_ranks, past_first_calls
from tests.live_bytes import LiveBytes


@pytest.mark.parametrize(("strategy", "ring_tensors"), [("kv", "kv"), ("burst", "q")])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1)])
@on_ranks(3)
def test_moves_the_bytes_that_the_formula_says(comm, strategy, ring_tensors, heads, kv_heads):
    sizes = HeadShapes(
        layout=Contiguous(comm.size, 6),
        degree=1,
        batch=2,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=8,
        itemsize=2,
        statistics_itemsize=4,
    )
    forward, backward = count(comm, torch.bfloat16, heads, kv_heads, strategy)
    assert forward == (sizes.groups - 1) * 2 * sizes.k_bytes
    assert backward == backward_bytes(sizes, ring_tensors)


def count(comm, dtype, heads, kv_heads, strategy, head_dim=8):
    """Return the bytes that a rank sends in forward, and in backward."""
    group, counting = counted(comm)
    q, k, v = (torch.randn(2, 6, h, head_dim).to(dtype).requires_grad_() for h in (heads, kv_heads, kv_heads))
    out = bmburst.burst_attention(q, k, v, group=group, strategy=strategy)
    forward = counting.sent
    out.sum().backward()
    return forward, counting.sent - forward


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@on_ranks(3)
def test_the_ring_moves_the_fewest_bytes(comm, dtype):
    choices = set()
    for heads, kv_heads, head_dim in ((2, 2, 8), (4, 2, 8), (8, 2, 8), (3, 3, 2), (2, 2, 1)):
        kv, burst, ring = (count(comm, dtype, heads, kv_heads, s, head_dim)[1] for s in ("kv", "burst", "ring"))
        assert ring == min(kv, burst)
        choices.add(kv < burst)
    assert choices == {True, False}


@pytest.mark.parametrize("strategy", ["burst", "kv", "gather", "heads"])
@on_ranks(3)
def test_backward_keeps_inputs_output_and_log_sum_exp_alone(comm, strategy):
    kept = []
    q, k, v = (torch.randn(2, 5, heads, 8, requires_grad=True) for heads in (12, 3, 3))
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        bmburst.burst_attention(q, k, v, group=comm, mask="full", layout="contiguous", strategy=strategy)
    sizes = {t.untyped_storage().data_ptr(): t.nbytes for t in kept}
    assert sum(sizes.values()) == 4 * 2 * 5 * (8 * (12 + 3 + 3 + 12) + 12)


class Echo:
    """Stands for a ring of any size: what comes is as large as what goes, and has its memory from the start."""

    transport = "threads"

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def ring(self, *tensors, **_):
        return CompletedTransfer(tuple(t.clone(memory_format=torch.contiguous_format) for t in tensors))

    def all_gather(self, tensor):
        raise AssertionError(f"{tensor.shape}: nothing may be as large as the sequence")

    all_to_all = reduce_scatter = all_reduce = outbox = inbox = pull = push = all_gather


class Logging(Echo):
    """Writes down when a hop starts, with how many tensors, and when it is waited for."""

    def __init__(self, size, log):
        super().__init__(0, size)
        self.log = log

    def ring(self, *tensors, **_):
        self.log.append(f"start {len(tensors)}")
        return SimpleNamespace(wait=lambda: self.log.append(f"wait {len(tensors)}") or tensors)


@pytest.mark.parametrize(("strategy", "blocks", "gradients"), [("kv", 2, 2), ("burst", 4, 1)])
def test_hops_are_hidden_behind_compute(monkeypatch, strategy, blocks, gradients):
    """The next block is on its way while a tile is computed; gradients follow one step behind and arrive meanwhile."""
    log = []
    for name in ("forward", "backward"):
        real = getattr(ReferenceKernel, name)
        monkeypatch.setattr(ReferenceKernel, name, lambda *a, real=real, **o: log.append("tile") or real(*a, **o))
    q, k, v = (t.requires_grad_() for t in zeros(None))
    comm = past_first_calls(CheckedCommunicator(Logging(3, log), torch.device("cpu"), always=False))
    out = bmburst.burst_attention(q, k, v, group=comm, kernel="reference", strategy=strategy)
    assert log == ["start 2", "tile", "wait 2", "start 2", "tile", "wait 2", "tile"]
    log.clear()
    out.sum().backward()
    start, wait = f"start {blocks}", f"wait {blocks}"
    send, add = f"start {gradients}", f"wait {gradients}"
    assert log == [start, "tile", send, wait, start, "tile", add, send, wait, "tile", add, send, add]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strategy", ["kv", "burst"])
def test_memory_grows_with_the_local_tokens_only(layout, strategy):
    def peaks(rank, size, tokens):
        comm = past_first_calls(CheckedCommunicator(Echo(rank, size), torch.device("cpu"), always=False))
        q, k, v = (torch.randn(1, tokens, h, 32).requires_grad_() for h in (4, 2, 2))
        alive = LiveBytes()
        with alive:
            out = bmburst.burst_attention(q, k, v, group=comm, layout=layout, strategy=strategy)
            forward = alive.peak
            out.backward(torch.ones_like(out))
        return forward, alive.peak

    for last in (False, True):
        small, *larger = (peaks((size - 1) * last, size, 64) for size in (4, 8, 16))
        assert all(peak <= small for peak in larger), (small, larger)
        assert all(a <= b for a, b in zip(peaks((2 - 1) * last, 2, 64), small, strict=True))
    inputs = 4 * 64 * 32 * (4 + 2 + 2)  # bytes of q, k and v
    assert small[0] <= 2.6 * inputs
    assert small[1] <= 6.6 * inputs  # sums of what travels are made for a step, not kept beside those of what stays
