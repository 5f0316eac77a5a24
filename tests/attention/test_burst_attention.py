"""A split sequence gives what one device gives, forward and backward, in every layout, mask, strategy and length."""

import pytest
import torch

import bmburst
from bmburst.comm.local import run_ranks
from bmburst.errors import UserError
from bmburst.schedule import AttentionShape, backward_bytes, forward_bytes
from tests.attention.oracle import draw, reference
from tests.distributed.processes import run_processes

LAYOUTS = ["contiguous", "zigzag", "striped"]


def split_attention(comm, whole, layout, mask, dtype=torch.float64, with_lse=True, **options):
    """Cut, attend on every rank, and put everything together again."""
    length = whole[0].shape[1]
    q, k, v, grad = (bmburst.shard(t.to(dtype), layout=layout, group=comm) for t in whole[:4])
    grad_lse = bmburst.shard(whole[4].to(dtype), dim=2, layout=layout, group=comm)
    q, k, v = (t.clone().requires_grad_() for t in (q, k, v))
    out, lse = bmburst.burst_attention(
        q, k, v, mask=mask, layout=layout, length=length, group=comm, return_lse=True, **options
    )
    assert out.dtype == dtype
    assert lse.dtype == torch.promote_types(dtype, torch.float32)
    padding = slice(bmburst.SequenceShard.cut(length, layout=layout, size=comm.size, rank=comm.rank).real_tokens, None)
    assert not out[:, padding].any()
    assert (lse[:, :, padding] == -torch.inf).all()
    real = torch.isfinite(lse)
    objective = (out * grad).sum() + ((lse[real] * grad_lse[real]).sum() if with_lse else 0)
    grads = torch.autograd.grad(objective, (q, k, v))
    assert all(not g[:, padding].any() for g in grads)
    whole_lse = bmburst.unshard(lse, dim=2, layout=layout, group=comm, length=length)
    return [bmburst.unshard(out, layout=layout, group=comm, length=length), whole_lse] + [
        bmburst.unshard(g, layout=layout, group=comm, length=length) for g in grads
    ]


def compare(comm, layout, mask, length, heads, kv_heads, options):
    whole = draw(0, 2, length, heads, kv_heads, 8)
    expected = reference(*whole[:4], mask, whole[4])
    for got, wanted in zip(split_attention(comm, whole, layout, mask, **options), expected, strict=True):
        torch.testing.assert_close(got.detach(), wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("strategy", ["kv", "burst"])
@pytest.mark.parametrize("kernel", ["reference", "cpu"])
def test_equals_one_device_in_fp64(size, layout, mask, strategy, kernel):
    for length, heads, kv_heads in ((size, 2, 2), (13 + size, 4, 2), (24, 3, 1), (29, 2, 2)):
        run_ranks(size, compare, layout, mask, length, heads, kv_heads, {"strategy": strategy, "kernel": kernel})


def test_equals_one_device_over_processes():
    run_processes(3, _over_processes)


def _over_processes():
    comm = bmburst.communicator(None)
    for strategy in ("kv", "burst"):
        for layout in LAYOUTS:
            compare(comm, layout, "causal", 31, 4, 2, {"strategy": strategy, "scale": None})


def test_scale_and_negative_peaks():
    def body(comm):
        whole = draw(3, 1, 18, 2, 2, 8, spread=6.0)  # scores in the hundreds: a naive merge overflows
        expected = reference(*whole[:4], "causal", whole[4], scale=0.9)
        got = split_attention(comm, whole, "zigzag", "causal", scale=0.9)
        for ours, wanted in zip(got, expected, strict=True):
            torch.testing.assert_close(ours.detach(), wanted, rtol=1e-9, atol=1e-9)

    run_ranks(3, body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strategy", ["kv", "burst"])
def test_no_less_accurate_than_one_device(dtype, strategy):
    """Against fp64, at most twice the error of one device's kernel on the same inputs, at any number of ranks."""
    whole = draw(1, 1, 96, 4, 2, 32, dtype)
    exact = reference(*whole[:4], "causal")
    q, k, v = (t.to(dtype).transpose(1, 2).requires_grad_() for t in whole[:3])
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    grads = torch.autograd.grad(out, (q, k, v), whole[3].to(dtype).transpose(1, 2))
    single = [t.transpose(1, 2).double() for t in (out, *grads)]

    def body(comm):
        got = split_attention(comm, whole, "zigzag", "causal", dtype, with_lse=False, strategy=strategy)
        for name, ours, theirs, wanted in zip("oqkv", got[:1] + got[2:], single, exact[:1] + exact[2:], strict=True):
            ours_error, theirs_error = ((t.double() - wanted).norm() / wanted.norm() for t in (ours, theirs))
            assert ours_error <= 2 * theirs_error, (name, comm.size, ours_error.item(), theirs_error.item())

    for size in (1, 2, 4, 8):
        run_ranks(size, body)


def test_strided_inputs_and_module_grad_flow():
    """Queries, keys and values as slices of one projection, which is how models make them."""

    def body(comm):
        whole = draw(5, 2, 20, 4, 2, 8)
        fused = torch.cat(whole[:3], dim=2).requires_grad_()
        mine = bmburst.shard(fused, group=comm)
        out = bmburst.burst_attention(mine[:, :, :4], mine[:, :, 4:6], mine[:, :, 6:], group=comm)
        out.backward(bmburst.shard(whole[3], group=comm))
        (total,) = comm.all_reduce(fused.grad).wait()
        expected = reference(*whole[:4], "causal")
        torch.testing.assert_close(total, torch.cat(expected[2:], dim=2), rtol=1e-9, atol=1e-10)

    run_ranks(2, body)


class Counting:
    """A communicator that counts what it sends on the ring."""

    def __init__(self, inner):
        self.inner, self.rank, self.size, self.transport, self.sent = inner, inner.rank, inner.size, "threads", 0
        self.all_gather = inner.all_gather

    def ring(self, *tensors, shift=1):
        self.sent += sum(t.numel() * t.element_size() for t in tensors)
        return self.inner.ring(*tensors, shift=shift)

    def all_to_all(self, tensor):
        raise AssertionError(tensor)

    reduce_scatter = all_reduce = all_to_all


@pytest.mark.parametrize(("strategy", "travellers"), [("kv", "kv"), ("burst", "q")])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1)])
def test_moves_the_bytes_that_the_formula_says(strategy, travellers, heads, kv_heads):
    def body(comm):
        counting = Counting(comm)
        shape = AttentionShape(batch=2, tokens=6, heads=heads, kv_heads=kv_heads, head_dim=8)
        q, k, v = (torch.randn(2, 6, h, 8).bfloat16().requires_grad_() for h in (heads, kv_heads, kv_heads))
        out = bmburst.burst_attention(q, k, v, group=counting, strategy=strategy)
        assert counting.sent == forward_bytes(shape, comm.size)
        out.sum().backward()
        assert counting.sent - forward_bytes(shape, comm.size) == backward_bytes(shape, comm.size, travellers)

    run_ranks(3, body)


def test_repeated_backward_is_bitwise_equal():
    def body(comm):
        whole = draw(2, 1, 40, 2, 2, 16, torch.float32)
        runs = [split_attention(comm, whole, "striped", "causal", torch.float32, deterministic=True) for _ in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))

    run_ranks(2, body)


def zeros(comm, tokens=4, heads=2, kv_heads=2, dim=8, dtype=torch.float32):
    shapes = [(1, tokens, h, dim) for h in (heads, kv_heads, kv_heads)]
    return [torch.zeros(shape, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": "casual"}, "unknown mask 'casual'; did you mean 'causal'"),
        ({"layout": "stripe"}, "unknown layout 'stripe'; did you mean 'striped'"),
        ({"kernel": "cpuu"}, "unknown kernel 'cpuu'; did you mean 'cpu'"),
        ({"kernel": "torch"}, "kernel 'torch' runs on NVIDIA GPUs only"),
        ({"strategy": "brust"}, "unknown strategy 'brust'; did you mean 'burst'"),
        ({"transport": "gloom"}, "unknown transport 'gloom'; did you mean 'gloo'"),
        ({"transport": "nccl"}, "transport 'nccl' was asked for, but the group's tensors move by threads"),
        ({"length": 9}, "length is 9, but 2 ranks x 4 local tokens hold 1 to 8"),
        ({"length": 0}, "length is 0"),
        ({"scale": 0.0}, "scale must be a positive number"),
    ],
)
def test_unknown_values_are_refused_on_every_rank(options, message):
    def body(comm):
        with pytest.raises(UserError, match=message) as caught:
            bmburst.burst_attention(*zeros(comm), group=comm, **options)
        assert len(str(caught.value).splitlines()) <= 3

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[0], k, v), r"q must be \[batch, local_tokens, heads, head_dim\], got shape \[4, 2, 8\]"),
        (lambda q, k, v: (q.long(), k, v), "share one floating-point dtype, got torch.int64"),
        (lambda q, k, v: (q, k.double(), v), "share one floating-point dtype"),
        (lambda q, k, v: (q, k, v[:, :, :1]), "k and v must have the same shape"),
        (lambda q, k, v: (q, k[:, :2], v[:, :2]), "local_tokens and head_dim must be equal"),
        (lambda q, k, v: (q[:, :, :1], k, v), "1 query heads cannot share 2 key/value heads"),
        (lambda q, k, v: (q[:, :3], k[:, :3], v[:, :3]), "needs a multiple of 2 tokens a rank, got 3"),
        (lambda q, k, v: (q[:, :0], k[:, :0], v[:, :0]), "got shape"),
    ],
)
@pytest.mark.parametrize("wrong_ranks", [(0, 1), (1,)])
def test_bad_tensors_are_refused_on_every_rank(change, message, wrong_ranks):
    def body(comm):
        tensors = zeros(comm)
        with pytest.raises(UserError, match=message):
            bmburst.burst_attention(*(change(*tensors) if comm.rank in wrong_ranks else tensors), group=comm)

    run_ranks(2, body)


def test_ranks_that_disagree_are_refused_on_every_rank():
    def body(comm):
        for mine in ({"mask": ["causal", "full"][comm.rank]}, {"length": 7 + comm.rank}, {"scale": 1.0 + comm.rank}):
            with pytest.raises(UserError, match="ranks of the group disagree"):
                bmburst.burst_attention(*zeros(comm), group=comm, **mine)
        with pytest.raises(UserError, match=r"rank 1: burst_attention q float32\[1, 6, 2, 8\]"):
            bmburst.burst_attention(*zeros(comm, tokens=4 + 2 * comm.rank), group=comm)

    run_ranks(2, body)
