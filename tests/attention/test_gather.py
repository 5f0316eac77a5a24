"""Gathering gives what one device gives, moves what the mask needs, and works beside what moves."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import bmburst
from bmburst.attention import call as decided
from bmburst.attention.gather import gather_backward, gather_forward
from bmburst.comm.checks import CheckedCommunicator
from bmburst.comm.communicator import CompletedTransfer
from bmburst_ops.flash import CAUSAL, BackwardInputs, Gradients, Partial
from bmburst_ops.merge import row_dots
from tests.attention.exchange_ways import change_strategy
from tests.attention.oracle import draw, reference
from tests.attention.test_burst_attention import compare, hold_accuracy
from tests.comm.counting import counted
from tests.distributed.threads import on_ranks, run_ranks
from tests.live_bytes import LiveBytes
from tests.pairs import pairwise

CASES = [
    ("contiguous", "causal"),
    ("zigzag", "causal"),
    ("contiguous", "full"),
    ("zigzag", "full"),
    ("striped", "full"),
]


@pytest.fixture(params=[0, 1, 2], ids=lambda most: f"most={most}")
def most(request, monkeypatch):
    """How many KV heads a unit may have."""
    in_units(monkeypatch, request.param)
    return request.param


def in_units(monkeypatch, most):
    change_strategy(monkeypatch, lambda strategy, _: replace(strategy, most_kv_heads=most))


@pytest.mark.parametrize(
    ("most", "size", "layout", "mask", "more", "length", "heads", "kv_heads"),
    # size + 1 tokens leave whole ranks without a real one
    pairwise([0, 1, 2], [2, 3, 4], CASES, [(1, 0, 2, 2), (1, 1, 2, 1), (1, 13, 4, 2), (0, 24, 3, 1), (0, 29, 6, 3)]),
    indirect=["most"],
)
def test_equals_one_device_in_fp64(most, size, layout, mask, more, length, heads, kv_heads):
    options = {"strategy": "gather", "kernel": "reference" if size == 3 else "cpu"}
    run_ranks(size, compare, layout, mask, more * size + length, heads, kv_heads, options)


@pytest.mark.parametrize(
    ("most", "layout", "mask", "heads", "kv_heads", "length"),
    pairwise([0, 1, 2], CASES[:4], [(4, 4), (4, 1), (12, 6)], [5, 21, 32]),
    indirect=["most"],
)
def test_equals_one_device_beside_an_exchange_of_heads(most, layout, mask, heads, kv_heads, length):
    run_ranks(4, compare, layout, mask, length, heads, kv_heads, {"strategy": "heads+gather"})


class Eager:
    """A communicator whose transfers are done as soon as they are started; those of `run_ranks` are when waited for."""

    def __init__(self, inner):
        self.inner, self.rank, self.size, self.transport = inner, inner.rank, inner.size, "threads"
        self.all_gather, self.outbox, self.inbox, self.push = inner.all_gather, inner.outbox, inner.inbox, inner.push

    def pull(self, exchange, outbox, targets, lane=0):
        return CompletedTransfer(self.inner.pull(exchange, outbox, targets, lane).wait())


@pytest.mark.parametrize("strategy", ["gather", "heads+gather"])
def test_nothing_that_is_still_read_is_written(monkeypatch, strategy):
    in_units(monkeypatch, 1)

    def body(comm):
        group = CheckedCommunicator(Eager(comm), torch.device("cpu"), always=False)
        compare(group, "zigzag", "causal", 29, 8, 8, {"strategy": strategy})

    run_ranks(4, body)


@pytest.mark.parametrize(
    ("dtype", "kernel", "spread", "size"),
    pairwise([torch.float32, torch.bfloat16, torch.float16], ["cpu", "reference"], [1.0, 4.0], [2, 4, 8]),
)
def test_no_less_accurate_than_one_device(dtype, kernel, spread, size):
    """Hardly more error. In fp32 a merge sees the last bit of a large log-sum-exp."""
    most = 2.0 if dtype is torch.float32 else 1.25
    hold_accuracy(dtype, [size], most, tokens=256, spread=spread, strategy="gather", kernel=kernel)


def test_strided_inputs_and_results():
    """Slices of one projection, a head_dim that is not dense, and results written where they are asked for."""

    def body(comm):
        whole = draw(5, 2, 24, 4, 2, 8)
        out, lse, *grads = (bmburst.shard(t, dim=2 if t.dim() == 3 else 1, group=comm) for t in expected)
        fused = bmburst.shard(torch.cat(whole[:3], dim=2), group=comm)
        q, k, v = fused[:, :, :4], fused[:, :, 4:6], fused[:, :, 6:]
        q, k = (t.transpose(2, 3).contiguous().transpose(2, 3) for t in (q, k))
        grad = bmburst.shard(whole[3], group=comm)
        call = decided.decide(comm, q, k, v, 24, decided.AttentionOptions(strategy="gather"))
        room = torch.full_like(fused, 7)
        part = Partial(room[:, :, :4], torch.full((2, 6, 20), 7.0, dtype=lse.dtype)[:, 1:5, 3:11])
        assert all(a is b for a, b in zip(gather_forward(call, q, k, v, part), part, strict=True))
        torch.testing.assert_close(part, Partial(out, lse))
        into = Gradients(room[:, :, :4], room[:, :, 4:6], room[:, :, 6:])
        gather_backward(call, BackwardInputs(grad, q, k, v, part.lse, row_dots(grad, out)), into)
        torch.testing.assert_close(into, grads, rtol=1e-9, atol=1e-10)

    expected = reference(*draw(5, 2, 24, 4, 2, 8)[:4], "causal")
    run_ranks(3, body)


def seen_by(layout, size, rank, length, mask):
    """Return how many keys of other ranks stand before one of a rank's queries, in 8 tokens a rank."""
    runs = [bmburst.schedule.layout.make_layout(layout, size, 8).runs(r) for r in range(size)]
    places = [[run.start + run.stride * i for run in each for i in range(run.tokens)] for each in runs]
    real = [[place for place in each if place < length] for each in places]
    last = max(real[rank], default=-1) if mask == "causal" else length
    return sum(place < last for r, owned in enumerate(real) if r != rank and real[rank] for place in owned)


@pytest.mark.parametrize(("layout", "mask"), CASES)
@pytest.mark.parametrize("length", [24, 17, 7])
def test_moves_only_what_the_mask_needs(most, layout, mask, length):
    size, batch, kv_heads, head_dim = 3, 2, 3, 8

    def body(comm):
        group, counting = counted(comm)
        q, k, v = (torch.randn(batch, 8, h, head_dim).bfloat16().requires_grad_() for h in (6, kv_heads, kv_heads))
        attend = partial(bmburst.burst_attention, group=group, layout=layout, mask=mask, length=length)
        out = attend(q, k, v, strategy="gather")
        forward = counting.received
        out.sum().backward()
        return forward, counting.received - forward

    seen = [seen_by(layout, size, rank, length, mask) for rank in range(size)]
    key = 2 * batch * kv_heads * head_dim * 2  # bytes of a token's K and V, or of their gradients
    moved = run_ranks(size, body)
    assert [forward for forward, _ in moved] == [key * n for n in seen]
    assert sum(backward for _, backward in moved) == 2 * key * sum(seen)  # again, and the gradients of each


class Silent:
    """Stands for a group of any size, from which zeros come; writes down when something is started and waited for."""

    transport = "threads"

    def __init__(self, rank, size, log=None):
        self.rank, self.size, self.log = rank, size, [] if log is None else log

    def outbox(self, nbytes, _):
        return torch.zeros(nbytes, dtype=torch.uint8)

    def pull(self, exchange, outbox, targets, lane):
        assert outbox.numel() == exchange.nbytes
        for target in targets:
            target.zero_()
        number = sum(entry.startswith(f"{lane} starts") for entry in self.log)
        self.log.append(f"{lane} starts {number}")
        return type("Told", (), {"wait": lambda _: self.log.append(f"{lane} is here {number}") or targets})()


class Idle:
    """A kernel that takes no memory of its own beside its results; writes down when it is called."""

    name, takes_delta, recordable = "reference", True, False

    def __init__(self, log):
        self.log = log

    def forward(self, q, k, _, scoring, into=None):
        self.note(q, k, scoring.pattern)
        into = into or Partial(torch.empty_like(q), torch.empty(q.shape[0], q.shape[2], q.shape[1]))
        return Partial(*(result.zero_() for result in into))

    def backward(self, given, scoring, *, into, **_):
        self.note(given.q, given.k, scoring.pattern)
        for gradient in into:
            gradient.zero_()

    def note(self, q, k, pattern):
        self.log.append("own" if pattern == CAUSAL else f"rectangle {q.shape[1]} x {k.shape[1]}")


def alone(rank, size, log, most, tokens=8, heads=6, kv_heads=3, head_dim=4):
    """Return one rank's call, with what it attends to."""
    comm = CheckedCommunicator(Silent(rank, size, log), torch.device("cpu"), always=False)
    q, k, v = (torch.zeros(1, tokens, h, head_dim) for h in (heads, kv_heads, kv_heads))
    call = decided.decide(comm, q, k, v, None, decided.AttentionOptions(strategy="gather"))
    return replace(call, kernel=Idle(log), strategy=replace(call.strategy, most_kv_heads=most)), (q, k, v)


def test_transfers_are_under_way_beside_kernels():
    """Own keys hide the first pull; beside a unit's kernels come the next one's keys and the last one's gradients."""
    log = []
    call, inputs = alone(1, 3, log, most=1)
    out, lse = gather_forward(call, *inputs)
    rectangles = ["rectangle 4 x 4", "rectangle 4 x 12"]
    assert log == [
        *("2 starts 0", "own", "2 starts 1", "2 is here 0", *rectangles),
        *("2 starts 2", "2 is here 1", *rectangles, "2 is here 2", *rectangles),
    ]
    log.clear()
    gather_backward(call, BackwardInputs(out, *inputs, lse, lse))
    rectangles = ["rectangle 8 x 4", "rectangle 4 x 8"]
    assert log == [
        *("2 starts 0", "own", "2 starts 1", "2 is here 0", *rectangles, "3 starts 0"),
        *("own", "2 starts 2", "2 is here 1", *rectangles, "3 starts 1", "3 is here 0"),
        *("own", "2 is here 2", *rectangles, "3 starts 2", "3 is here 1", "3 is here 2"),
    ]


@pytest.mark.parametrize(("most", "turns"), [(0, 1), (2, 2), (1, 2)])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_memory_is_what_the_formula_says(most, turns, size):
    tokens, kv_heads, group, head_dim = 64, 6, 2, 16
    unit = (most or kv_heads) * head_dim * 4  # bytes of a token in a unit's K
    for rank in (0, size - 1):
        call, inputs = alone(rank, size, [], most, tokens, kv_heads * group, kv_heads, head_dim)
        results = sum(t.numel() * t.element_size() for t in inputs)
        statistics = 4 * tokens * kv_heads * group
        alive = LiveBytes()
        with alive:
            out, lse = gather_forward(call, *inputs)
        moving = 2 * turns * size * tokens * unit
        rectangle = tokens * group * unit + 4 * tokens * (most or kv_heads) * group  # what the kernel gives
        assert alive.peak <= inputs[0].numel() * 4 + statistics + moving + rectangle + 1024 * 2 * turns
        alive = LiveBytes()
        with alive:
            gather_backward(call, BackwardInputs(out, *inputs, lse, lse))
        moving += 2 * turns * (2 * size - 1) * tokens * unit
        parts_of_queries = 3 * tokens * group * unit
        assert alive.peak <= results + moving + parts_of_queries + tokens * group * unit + 1024 * 4 * turns


@on_ranks(3)
def test_padding_is_never_read(comm):
    """What stands in padding rows, here nothing that is a number, goes nowhere."""
    whole = draw(4, 1, 21, 4, 2, 8)
    _, _, *grads = expected = reference(*whole[:4], "causal")
    q, k, v, grad = (bmburst.shard(t, group=comm, pad_value=float("nan")) for t in whole[:4])
    q, k, v = (t.clone().requires_grad_() for t in (q, k, v))
    out = bmburst.burst_attention(q, k, v, group=comm, length=21, strategy="gather", kernel="reference")
    torch.testing.assert_close(out.detach(), bmburst.shard(expected[0], group=comm))
    out.backward(grad.nan_to_num())
    for ours, wanted in zip((q.grad, k.grad, v.grad), grads, strict=True):
        torch.testing.assert_close(ours, bmburst.shard(wanted, group=comm))
