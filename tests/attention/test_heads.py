"""Attention by exchanging heads: its plan by brute force, its results against fp64 and one device's bits."""

from itertools import chain, product
from types import SimpleNamespace

import pytest
import torch

import bmburst
from bmburst.attention.call import decide
from bmburst.attention.options import AttentionOptions
from bmburst.comm.checks import CheckedCommunicator
from bmburst.schedule.heads_plan import Strides, make_heads_plan
from bmburst.schedule.layout import LAYOUTS, make_layout
from bmburst.schedule.mask import Causal
from bmburst.schedule.units import HeadShapes, unit_plans
from bmburst_ops.flash.cpu import CpuKernel
from tests.attention.exchange_ways import WAYS, move_heads, record_first_calls, take_recordings
from tests.attention.oracle import draw, reference
from tests.attention.test_burst_attention import compare
from tests.comm.counting import counted
from tests.distributed.processes import run_processes
from tests.distributed.threads import on_ranks, run_ranks
from tests.pairs import pairwise
from tests.refusals import refused

CASES = [
    (size, degree, name, heads, kv_heads)
    for size, degree, name, (heads, kv_heads) in product(
        (1, 2, 4, 6), (1, 2, 3, 4, 6), LAYOUTS, ((4, 4), (8, 2), (8, 1), (12, 6))
    )
    if size % degree == 0 and heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)
    if not (name == "striped" and 1 < degree < size)
]


@pytest.mark.parametrize(("size", "degree", "name", "heads", "kv_heads"), CASES)
@pytest.mark.parametrize("is_one", [True, False])
def test_every_byte_comes_and_goes_to_its_place_once(size, degree, name, heads, kv_heads, is_one):
    """Tensors whose every element is its own position, moved by the plans of all ranks."""
    batch, tokens, dim = 2, 8, 2
    layout = make_layout(name, size, tokens, Causal())
    shapes = HeadShapes(
        layout=layout, degree=degree, batch=batch, heads=heads, kv_heads=kv_heads, head_dim=dim, itemsize=2,
        statistics_itemsize=4,
    )  # fmt: skip
    assert shapes.refusal() is None
    kinds = [(heads, "bshd"), (kv_heads, "bshd"), (kv_heads, "bshd"), (heads, "bshd"), (heads, "bhs"), (heads, "bhs")]
    whole = [numbered(batch, size * tokens, h, dim, order, i) for i, (h, order) in enumerate(kinds)]
    local = [[cut(t, layout, rank) for t in whole] for rank in range(size)]
    strides = tuple(strides_of(t) for t in local[0])
    own = shapes.own_heads, shapes.own_kv_heads
    units = () if is_one else unit_plans(*own, most=1, pace=0.0, backward=True, overlaps=True)[-1]
    plans = [make_heads_plan(shapes, rank, strides, backward=True, units=units) for rank in range(size)]
    for target, plan in enumerate(plans):
        inbox = [-1] * plan.nbytes
        for exchange in plan.inbound:
            for source in range(size):
                for move in exchange.receives[source]:
                    copy(local[source][move.source.buffer], move.source, inbox, move.target)
        own = [own_share(t, kinds[i][1], i in (1, 2), shapes, target) for i, t in enumerate(whole)]
        order = [r for r in range(size) if r // degree == target // degree]
        columns = sorted(p for r in order for p in positions(layout, r))
        for first, tensor, (_, kind) in zip(plan.views[0], own, kinds, strict=True):
            start = first.start * tensor.element_size()
            wanted = tensor[:, columns] if kind == "bshd" else tensor[:, :, columns]
            flat = raw(wanted)
            assert inbox[start : start + len(flat)] == flat


def numbered(batch, tokens, heads, dim, order, seed):
    shape = (batch, tokens, heads, dim) if order == "bshd" else (batch, heads, tokens)
    dtype = torch.int16 if order == "bshd" else torch.int32
    return (
        (torch.randperm(torch.Size(shape).numel(), generator=torch.Generator().manual_seed(seed))).view(shape).to(dtype)
    )


def positions(layout, rank):
    return [run.start + run.stride * i for run in layout.runs(rank) for i in range(run.tokens)]


def cut(tensor, layout, rank):
    index = positions(layout, rank)
    return (tensor[:, index] if tensor.dim() == 4 else tensor[:, :, index]).contiguous()


def strides_of(tensor):
    batch, second, third = (stride * tensor.element_size() for stride in tensor.stride()[:3])
    return Strides(batch, second, third) if tensor.dim() == 4 else Strides(batch, third, second)


def own_share(tensor, order, is_kv, shapes, rank):
    heads = shapes.kv_heads if is_kv else shapes.heads
    own = shapes.own_kv_heads if is_kv else shapes.own_heads
    first = rank % shapes.degree * heads // shapes.degree
    return tensor[:, :, first : first + own] if order == "bshd" else tensor[:, first : first + own]


def raw(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def copy(tensor, source, inbox, target):
    data = raw(tensor)
    for row in range(source.rows):
        a, b = source.offset + row * source.pitch, target.offset + row * target.pitch
        assert inbox[b : b + target.width] == [-1] * target.width  # nothing is written twice
        inbox[b : b + target.width] = data[a : a + source.width]


@pytest.fixture(params=WAYS)
def units(request, monkeypatch):
    """A head exchange in one step, pipelined as over the memory of peers, or by one collective each way."""
    move_heads(monkeypatch, request.param)


@pytest.mark.parametrize(
    ("size", "layout", "mask", "units", "case"),
    pairwise([2, 3, 4], LAYOUTS, ["causal", "full"], WAYS, range(4)),
    indirect=["units"],
)
def test_equals_one_device_in_fp64(size, layout, mask, units, case):
    length, heads, kv_heads = ((size, size, size), (size + 1, 2 * size, 1), (29, 3 * size, size), (24, 2 * size, size))[
        case
    ]
    run_ranks(size, compare, layout, mask, length, heads, kv_heads, {"strategy": "heads"})


@pytest.mark.parametrize(
    ("layout", "mask", "units", "size", "heads", "kv_heads", "a_rank", "more"),
    pairwise(
        ["zigzag", "contiguous"],
        ["causal", "full"],
        WAYS[:2],
        [(4, 2, 2), (4, 6, 1), (6, 3, 3), (6, 4, 2)],
        [(1, 0), (3, -1), (0, 29)],
    ),
    indirect=["units"],
)
def test_heads_inside_a_ring(layout, mask, units, size, heads, kv_heads, a_rank, more):
    """Of `a_rank` tokens for each rank, and some more."""
    run_ranks(size, compare, layout, mask, a_rank * size + more, heads, kv_heads, {"strategy": "heads+ring"})


def test_over_processes(units):
    run_processes(2, _over_processes)


def _over_processes():
    comm = bmburst.communicator(None)
    for layout in LAYOUTS:
        compare(comm, layout, "causal", 31, 4, 2, {"strategy": "heads", "scale": None})


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_the_bits_of_one_device(kernel, units):
    """No sum over ranks, so no rounding that one device does not have."""
    q, k, v, grad = (t.float() for t in draw(0, 1, 96, 4, 4, 16)[:4])
    alone = run_ranks(1, attend, q, k, v, grad, kernel)[0]
    for size in (2, 4):
        for got in run_ranks(size, attend, q, k, v, grad, kernel):
            for ours, theirs in zip(got, alone, strict=True):
                assert torch.equal(ours, theirs)


def attend(comm, q, k, v, grad, kernel):
    mine = [bmburst.shard(t, group=comm) for t in (q, k, v, grad)]
    inputs = [t.clone().requires_grad_() for t in mine[:3]]
    out = bmburst.burst_attention(*inputs, group=comm, strategy="heads", kernel=kernel)
    parts = [out, *torch.autograd.grad(out, inputs, mine[3])]
    return [bmburst.unshard(t.detach(), group=comm, length=q.shape[1]) for t in parts]


@on_ranks(2)
def test_strided_inputs(comm, units):
    """Slices of one projection, heads before tokens, and a head_dim that is not dense."""
    whole = draw(5, 2, 20, 4, 2, 8)
    expected = reference(*whole[:4], "causal")
    fused = bmburst.shard(torch.cat(whole[:3], dim=2), group=comm)
    grad = bmburst.shard(whole[3], group=comm)
    for order in ((0, 1, 2, 3), (0, 2, 1, 3), (3, 0, 1, 2)):
        back = [order.index(i) for i in range(4)]
        base = fused.permute(order).contiguous().requires_grad_()
        q, k, v = base.permute(back).split((4, 2, 2), dim=2)
        out = bmburst.burst_attention(q, k, v, group=comm, strategy="heads")
        out.backward(grad.permute(order).contiguous().permute(back))
        got = bmburst.unshard(base.grad.permute(back), group=comm, length=20)
        torch.testing.assert_close(got, torch.cat(expected[2:], dim=2), rtol=1e-9, atol=1e-10)


@on_ranks(2)
def test_every_rank_may_have_strides_of_its_own(comm, units):
    """Contiguous, a slice of a projection, heads before tokens, and expanded over tokens or heads."""
    whole = [torch.full((1, 8, 8, 8), 0.5).double(), *draw(6, 1, 8, 8, 4, 8)[1:4]]
    expected = reference(*whole, "causal")
    mine = [bmburst.shard(t, group=comm) for t in whole]
    q, k, v, grad = mine
    if comm.rank == 0:
        q = q[:, :1, :1].expand(q.shape)
        k = torch.cat((k, v), 2)[:, :, :4]
    else:
        v = v.transpose(1, 2).contiguous().transpose(1, 2)
        grad = grad.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    out = bmburst.burst_attention(*inputs, group=comm, strategy="heads")
    got = [out, *torch.autograd.grad(out, inputs, grad)]
    for ours, wanted in zip(got, (expected[0], *expected[2:]), strict=True):
        torch.testing.assert_close(bmburst.unshard(ours, group=comm, length=8), wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (4, 1)])
@on_ranks(4)
def test_moves_the_bytes_that_its_tensors_have(comm, heads, kv_heads, units):
    group, counting = counted(comm)
    q, k, v = (torch.randn(2, 6, h, 8).bfloat16().requires_grad_() for h in (heads, kv_heads, kv_heads))
    out = bmburst.burst_attention(q, k, v, group=group, strategy="heads")
    away = (comm.size - 1) / comm.size
    repeated = max(kv_heads, comm.size)  # each rank gets a KV head of its own
    rows = 2 * 6
    assert counting.sent == away * rows * (16 * (2 * heads + 2 * repeated) + 4 * heads)
    counting.sent = 0
    out.sum().backward()
    assert counting.sent == away * rows * (16 * (3 * heads + 4 * repeated) + 2 * 4 * heads)


@pytest.mark.parametrize(
    ("name", "heads", "kv_heads", "layout", "words"),
    [
        ("heads", 6, 2, "zigzag", "6 query heads | 4 ranks"),
        ("heads", 12, 3, "zigzag", "3 key/value heads | 4 ranks"),
        ("heads+ring", 3, 3, "zigzag", "3 query heads | 2 ranks"),
        ("heads+ring", 4, 4, "striped", "layout | 'striped' | neighbouring ranks"),
        ("gather", 4, 4, "striped", "layout | 'striped' | neighbouring tokens | 'zigzag'"),
    ],
)
@on_ranks(4)
def test_what_cannot_be_is_refused_with_its_reason(comm, name, heads, kv_heads, layout, words):
    q, k, v = (torch.zeros(1, 4, h, 8) for h in (heads, kv_heads, kv_heads))
    with refused("strategy", f"'{name}'", words, "strategy='auto'"):
        bmburst.burst_attention(q, k, v, group=comm, strategy=name, layout=layout)
    bmburst.burst_attention(q, k, v, group=comm, layout=layout)


def test_units_follow_each_other_while_kernels_run(monkeypatch):
    """The next heads are on their way before a kernel's results are, and those go home at once."""
    log = []

    class Logging(CheckedCommunicator):
        def push(self, *args, **options):
            log.append("push")
            return super().push(*args, **options)

        def pull(self, *args, **options):
            log.append("pull")
            return super().pull(*args, **options)

    move_heads(monkeypatch, "several units")

    def body(comm):
        logging = Logging(comm.inner, comm.device)
        q = torch.zeros(1, 4, 6, 8)
        bmburst.burst_attention(q, q, q, group=logging if comm.rank == 0 else comm, strategy="heads")

    run_ranks(2, body)
    assert log == ["push", "push", "pull", "push", "pull", "pull"]


@pytest.mark.parametrize("units", WAYS[:2], indirect=True)
def test_kernels_write_where_results_go_home_from(monkeypatch, units):
    """Output and log-sum-exp alike: a kernel that can write there leaves nothing to copy."""
    boxes, written = set(), set()
    real = CpuKernel.forward

    def forward(*args, into, **options):
        written.update(t.untyped_storage().data_ptr() for t in into)
        return real(*args, into=into, **options)

    class Boxes(CheckedCommunicator):
        def outbox(self, *args):
            box = super().outbox(*args)
            boxes.add(box.untyped_storage().data_ptr())
            return box

    monkeypatch.setattr(CpuKernel, "forward", forward)
    q = torch.zeros(1, 4, 6, 8)
    run_ranks(2, lambda comm: bmburst.burst_attention(q, q, q, group=Boxes(comm.inner, comm.device), strategy="heads"))
    assert written and written <= boxes


@pytest.mark.parametrize(("mask", "varies"), [("causal", False), (bmburst.Documents([3, 5]), True)], ids=str)
def test_recordings_have_a_place_each_and_know_what_a_backward_under_documents_takes(monkeypatch, units, mask, varies):
    """Of 8 tokens, 4 query heads and 2 KV heads a rank: fp32 sums of dQ, dK and dV, and three statistics."""
    asked, ran = [], []

    def recording(*where):
        asked.append(where)
        return SimpleNamespace(run=lambda work, varying: ran.append((where[1], varying)) or work())

    take_recordings(monkeypatch, CpuKernel, recording)

    def body(comm):
        q, k, v = (torch.randn(1, 4, h, 8, requires_grad=True) for h in (8, 4, 4))
        bmburst.burst_attention(q, k, v, group=comm, mask=mask, strategy="heads", kernel="cpu").sum().backward()

    run_ranks(2, body)
    assert len({where[:3] for where in asked}) == len(asked)  # also where a box is used again
    forward, backward = ([varying for kind, varying in ran if kind is which] for which in (False, True))
    assert forward and not any(forward)
    assert sum(backward) == (2 * 8 * (4 * 8 + 2 * 2 * 8 + 3 * 4) * 4 if varies else 0)


def test_the_launches_of_the_first_call_in_a_place_serve_later_calls(monkeypatch):
    """As those of a CUDA graph do: on the memory of that call, until a longer call needs more."""
    move_heads(monkeypatch, "at once")
    lengths = 4, 4, 8, 4, 8

    def body(comm):
        comm.active, found = False, []
        for seed, tokens in enumerate(lengths):
            drawn = torch.Generator().manual_seed(2 * seed + comm.rank)
            q, k, v = (torch.randn(2, tokens, h, 8, generator=drawn, requires_grad=True) for h in (8, 4, 4))
            with torch.inference_mode():  # its tensors must not be those of training
                bmburst.burst_attention(q, k, v, group=comm, strategy="heads", kernel="cpu")
            out = bmburst.burst_attention(q, k, v, group=comm, strategy="heads", kernel="cpu")
            out.sin().sum().backward()
            found += [out.detach(), q.grad, k.grad, v.grad]
        return found

    called = run_ranks(2, body)
    first = record_first_calls(monkeypatch, CpuKernel)
    launched = run_ranks(2, body)
    assert all(map(torch.equal, chain(*launched), chain(*called)))
    assert 0 < len(first) < 2 * 3 * len(lengths)


@on_ranks(2)
def test_plans_are_made_once(comm):
    inputs = [torch.zeros(1, 8, 4, 8) for _ in range(3)]
    calls = [decide(comm, *inputs, None, AttentionOptions(strategy="heads")) for _ in range(2)]
    plan, same = (call.heads_plan([t.clone() for t in inputs], backward=False) for call in calls)
    assert plan is same
    assert plan is not calls[0].heads_plan([t.mT.contiguous().mT for t in inputs], backward=False)
