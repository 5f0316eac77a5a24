"""A split sequence gives what one device gives, forward and backward, in every layout, mask, strategy and length."""

import inspect
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch

import bmburst
from bmburst.errors import UserError
from bmburst.recompute import checkpoint
from bmburst.schedule.mask import make_mask
from bmburst_ops.flash import ReferenceKernel
from tests.attention.exchange_ways import change_strategy
from tests.attention.oracle import draw, problem, reference
from tests.distributed.processes import on_processes
from tests.distributed.threads import on_ranks, run_ranks
from tests.pairs import pairwise

LAYOUTS = ["contiguous", "zigzag", "striped"]


def split_attention(
    comm, whole, layout, mask, dtype=torch.float64, with_lse=True, sink=None, recompute=None, key_layout=None, **options
):
    """Cut, attend on every rank, and put everything together again; the last gradient is that of a sink.

    Keys are another sequence if they have a layout or a length of their own.
    """
    length, key_length = (t.shape[1] for t in whole[:2])
    cut = {"layout": layout, "group": comm} | ({"mask": make_mask(mask)} if layout == "balanced" else {})
    of_keys = cut | {"layout": key_layout or layout}
    q, grad = (bmburst.shard(t.to(dtype), **cut) for t in (whole[0], whole[3]))
    k, v = (bmburst.shard(t.to(dtype), **of_keys) for t in whole[1:3])
    leaves = [t.clone().requires_grad_() for t in (q, k, v, *(() if sink is None else (sink,)))]
    if key_layout is not None or key_length != length:
        options |= {"key_layout": key_layout, "key_length": key_length}
    options |= {"mask": mask, "layout": layout, "length": length, "group": comm, "return_lse": True}

    def work(q, k, v, sink=None):
        return bmburst.burst_attention(q, k, v, sink=sink, **options)

    out, lse = work(*leaves) if recompute is None else checkpoint(recompute, work, *leaves)
    assert out.dtype == dtype
    assert lse.dtype == torch.promote_types(dtype, torch.float32)
    padding, key_padding = _padding(length, **cut), _padding(key_length, **of_keys)
    assert not out[:, padding].any()
    assert (lse[:, :, padding] == -torch.inf).all()
    objective = (out * grad).sum()
    if with_lse:
        grad_lse, real = bmburst.shard(whole[4].to(dtype), dim=2, **cut), torch.isfinite(lse)
        objective = objective + (lse[real] * grad_lse[real]).sum()
    *grads, of_sink = (*torch.autograd.grad(objective, leaves), None)[:4]
    assert not grads[0][:, padding].any() and not any(g[:, key_padding].any() for g in grads[1:])
    found = [bmburst.unshard(t, length=length, **cut) for t in (out, grads[0])]
    found += [bmburst.unshard(g, length=key_length, **of_keys) for g in grads[1:]]
    found.insert(1, bmburst.unshard(lse, dim=2, length=length, **cut))
    return found + (
        [] if sink is None else [comm.all_gather(of_sink[None].contiguous()).wait()[0].flatten(0, 1).sum(0)]
    )


def _padding(length, group, **cut):
    return slice(bmburst.SequenceShard.cut(length, size=group.size, rank=group.rank, **cut).real_tokens, None)


def compare(comm, layout, mask, length, heads, kv_heads, options, value_dim=8):
    whole, expected = problem(length, heads, kv_heads, mask, value_dim=value_dim)
    torch.testing.assert_close(split_attention(comm, whole, layout, mask, **options), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("size", "layout", "mask", "strategy", "kernel"),
    pairwise([1, 2, 3, 4], LAYOUTS, ["causal", "full"], ["kv", "burst", "auto"], ["reference", "cpu"]),
)
def test_equals_one_device_in_fp64(size, layout, mask, strategy, kernel):
    # size + 1 tokens leave whole ranks without a real one
    for length, heads, kv_heads in ((size, 2, 2), (size + 1, 2, 1), (13 + size, 4, 2), (24, 3, 1), (29, 2, 2)):
        run_ranks(size, compare, layout, mask, length, heads, kv_heads, {"strategy": strategy, "kernel": kernel})


@on_processes(3)
def test_equals_one_device_over_processes():
    comm = bmburst.communicator(None)
    for strategy in ("kv", "burst"):
        for layout in LAYOUTS:
            compare(comm, layout, "causal", 31, 4, 2, {"strategy": strategy, "scale": None})


@on_ranks(3)
def test_scale_and_negative_peaks(comm):
    whole = draw(3, 1, 18, 2, 2, 8, spread=6.0)  # scores in the hundreds: a naive merge overflows
    expected = reference(*whole[:4], "causal", whole[4], scale=0.9)
    got = split_attention(comm, whole, "zigzag", "causal", scale=0.9)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def hold_accuracy(dtype, sizes, most=2.0, tokens=96, spread=1.0, nodes=None, **options):
    """Errors against fp64 are at most so many times those of one device's kernel, on each number of ranks."""
    whole = draw(1, 1, tokens, 4, 2, 32, dtype, spread)
    exact = reference(*whole[:4], "causal")
    q, k, v = (t.to(dtype).transpose(1, 2).requires_grad_() for t in whole[:3])
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    grads = torch.autograd.grad(out, (q, k, v), whole[3].to(dtype).transpose(1, 2))
    single = [t.transpose(1, 2).double() for t in (out, *grads)]

    def body(comm):
        comm.nodes = nodes
        got = split_attention(comm, whole, "zigzag", "causal", dtype, with_lse=False, **options)
        for name, ours, theirs, wanted in zip("oqkv", got[:1] + got[2:], single, exact[:1] + exact[2:], strict=True):
            ours_error, theirs_error = ((t.double() - wanted).norm() / wanted.norm() for t in (ours, theirs))
            assert ours_error <= most * theirs_error, (name, comm.size, ours_error.item(), theirs_error.item())

    for size in sizes:
        run_ranks(size, body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strategy", ["kv", "burst"])
def test_no_less_accurate_than_one_device(dtype, strategy):
    hold_accuracy(dtype, (1, 2, 4, 8), strategy=strategy)


@on_ranks(2)
def test_strided_inputs_and_gradients(comm):
    """Slices of one projection, which is how models make them, a head_dim that is not dense, and such a dO."""
    whole = draw(5, 2, 20, 4, 2, 8)
    fused = torch.cat(whole[:3], dim=2).requires_grad_()
    mine = bmburst.shard(fused, group=comm)
    q, k, v = mine[:, :, :4], mine[:, :, 4:6], mine[:, :, 6:]
    q, k = (t.transpose(2, 3).contiguous().transpose(2, 3) for t in (q, k))
    out = bmburst.burst_attention(q, k, v, group=comm)
    out.backward(bmburst.shard(whole[3], group=comm).transpose(1, 3).contiguous().transpose(1, 3))
    (total,) = comm.all_reduce(fused.grad).wait()
    expected = reference(*whole[:4], "causal")
    torch.testing.assert_close(total, torch.cat(expected[2:], dim=2), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
@pytest.mark.parametrize("head_dim", [1, 7, 300])
@on_ranks(2)
def test_any_head_dim(comm, kernel, head_dim):
    whole = draw(6, 1, 10, 2, 1, head_dim)
    expected = reference(*whole[:4], "causal", whole[4])
    got = split_attention(comm, whole, "zigzag", "causal", kernel=kernel)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
@on_ranks(2)
def test_gradients_scale_with_the_loss(comm, kernel):
    """Down to 1e-25 and up to 1e25 in fp32: no square of a gradient may leave fp32's range."""
    whole = draw(7, 1, 12, 2, 2, 8, torch.float32)
    q, k, v, grad = (bmburst.shard(t.float(), group=comm).clone().requires_grad_() for t in whole[:4])
    out = bmburst.burst_attention(q, k, v, group=comm, kernel=kernel)
    expected = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
    for scale in (1e-25, 1e-20, 1e20, 1e25):
        for ours, wanted in zip(
            torch.autograd.grad(out, (q, k, v), grad * scale, retain_graph=True), expected, strict=True
        ):
            torch.testing.assert_close(ours / scale, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", ["kv", "burst"])
@on_ranks(2)
def test_what_requires_a_gradient(comm, strategy):
    whole = draw(8, 1, 12, 2, 2, 8)
    out, lse, *grads = reference(*whole[:4], "causal")
    mine = [bmburst.shard(t, group=comm) for t in whole]
    attend = partial(bmburst.burst_attention, group=comm, strategy=strategy)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            got = attend(*mine[:3])
        assert not got.requires_grad
        torch.testing.assert_close(got, bmburst.shard(out, group=comm))
    for i in range(3):
        inputs = [t.clone().requires_grad_(i == j) for j, t in enumerate(mine[:3])]
        attend(*inputs).backward(mine[3])
        assert [t.grad is not None for t in inputs] == [i == j for j in range(3)]
        torch.testing.assert_close(inputs[i].grad, bmburst.shard(grads[i], group=comm))
    inputs = [t.clone().requires_grad_() for t in mine[:3]]
    result, got = attend(*inputs, return_lse=True)
    torch.testing.assert_close(got.detach(), bmburst.shard(lse, dim=2, group=comm))
    assert got.dtype == torch.float64
    first = torch.autograd.grad(got.sum(), inputs, retain_graph=True)  # dO is None
    _, _, *wanted = reference(*whole[:3], torch.zeros_like(whole[3]), "causal", torch.ones_like(whole[4]))
    for ours, theirs in zip(first, wanted, strict=True):
        torch.testing.assert_close(ours, bmburst.shard(theirs, group=comm))
    with pytest.raises(UserError, match="create_graph=True"):
        torch.autograd.grad(result.square().sum(), inputs, create_graph=True)[0].sum().backward()


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
def test_autocast_changes_nothing(kernel):
    def run(comm):
        q, k, v = (bmburst.shard(t.float(), group=comm).requires_grad_() for t in draw(9, 1, 12, 2, 2, 8)[:3])
        out, lse = bmburst.burst_attention(q, k, v, group=comm, kernel=kernel, return_lse=True)
        return out, lse, *torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))

    def body(comm):
        expected = run(comm)
        with torch.autocast("cpu", torch.bfloat16):
            got = run(comm)
        assert all(a.equal(b) and a.dtype == torch.float32 for a, b in zip(got, expected, strict=True))

    run_ranks(2, body)


@pytest.mark.parametrize(("strategy", "size"), [("auto", 2), ("gather", 4), ("heads+gather", 4)])
def test_repeated_backward_is_bitwise_equal(monkeypatch, strategy, size):
    change_strategy(monkeypatch, lambda chosen, _: replace(chosen, most_kv_heads=1))

    def body(comm):
        whole, layout = draw(2, 1, 40, 4, 4, 16, torch.float32), "striped" if strategy == "auto" else "zigzag"
        options = {"deterministic": True, "strategy": strategy}
        runs = [split_attention(comm, whole, layout, "causal", torch.float32, **options) for _ in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))

    run_ranks(size, body)


@pytest.mark.parametrize(("strategy", "tiles"), [("auto", None), ("gather", 4)])  # own keys and a rectangle, a rank
@pytest.mark.parametrize("wanted", [True, False])
def test_the_kernel_is_told_whether_to_be_deterministic(monkeypatch, wanted, strategy, tiles):
    seen, real = [], ReferenceKernel.backward

    def backward(*args, deterministic, **options):
        seen.append(deterministic)
        return real(*args, deterministic=deterministic, **options)

    monkeypatch.setattr(ReferenceKernel, "backward", backward)

    def body(comm):
        q, k, v = (t.requires_grad_() for t in zeros(None))
        options = {"kernel": "reference", "strategy": strategy, "deterministic": wanted}
        bmburst.burst_attention(q, k, v, group=comm, **options).sum().backward()

    run_ranks(2, body)
    assert seen == [wanted] * (tiles or len(seen)) and seen


def zeros(comm, tokens=4, heads=2, kv_heads=2, dim=8, dtype=torch.float32):
    shapes = [(1, tokens, h, dim) for h in (heads, kv_heads, kv_heads)]
    return [torch.zeros(shape, dtype=dtype) for shape in shapes]


def test_one_process_alone():
    q, k, v = zeros(None, tokens=6)
    assert bmburst.burst_attention(q, k, v, transport="gloo").shape == q.shape  # nothing moves, by any transport
    with pytest.raises(UserError, match="unknown transport 'threads'"):
        bmburst.burst_attention(q, k, v, transport="threads")


def test_the_signatures_are_the_documented_ones():
    parameters = inspect.signature(bmburst.burst_attention).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == ["q", "k", "v"]
    assert {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} == {
        "mask": "causal",
        "layout": "zigzag",
        "length": None,
        "key_layout": None,
        "key_length": None,
        "sink": None,
        "group": None,
        "scale": None,
        "softcap": None,
        "kernel": "auto",
        "strategy": "auto",
        "transport": "auto",
        "deterministic": False,
        "return_lse": False,
    }
    for function, first, last in (
        (bmburst.shard, "x", ("pad_value", 0)),
        (bmburst.unshard, "x_local", ("length", None)),
    ):
        named = [(p.name, p.default) for p in inspect.signature(function).parameters.values()]
        middle = [("dim", 1), ("layout", "zigzag"), ("group", None)]
        assert named == [(first, inspect.Parameter.empty), *middle, last, ("mask", None)]


@on_processes(2)
def test_a_compiled_caller():
    """The graph ends before attention and goes on after it; results are those of an eager caller."""
    q, k, v = (t.requires_grad_() for t in (torch.randn(1, 6, h, 8) for h in (4, 2, 2)))
    warnings.filterwarnings("error", message="(?s).*bmburst")  # the compiler looks into what it cannot keep

    def caller(strategy, *x):
        out = bmburst.burst_attention(*(t * 2 for t in x), strategy=strategy)
        return (out.float() * 3 - 1).square().sum()

    for strategy in ("heads", "gather", "ring"):
        expected = torch.autograd.grad(caller(strategy, q, k, v), (q, k, v))
        compiled = torch.compile(partial(caller, strategy), backend="aot_eager")
        for _ in range(2):
            torch.testing.assert_close(torch.autograd.grad(compiled(q, k, v), (q, k, v)), expected)
