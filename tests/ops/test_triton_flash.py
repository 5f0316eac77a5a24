"""Our Triton attention against its definition in fp64: small tiles in the interpreter, on GPUs larger ones."""

import pytest
import torch
from triton import JITFunction

from bmburst_ops.errors import KernelError
from bmburst_ops.flash import CAUSAL, FULL, BackwardInputs, Gradients, Partial, Scoring, queries_ahead, select_kernel
from bmburst_ops.flash.triton import TritonKernel, block_sizes_for
from tests.attention.oracle import draw
from tests.ops.another_machine import AnotherMachine
from tests.ops.masks import attention
from tests.ops.tiles import error
from tests.pairs import in_turn
from tests.refusals import refused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNEL = TritonKernel()
ERRORS = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of the norm: a few roundings of the dtype
# queries, keys, causal, heads, KV heads, head dim
SMALL = [(33, 70, True, 4, 2, 16), (35, 67, False, 3, 1, 40), (65, 65, True, 2, 2, 5), (1, 50, True, 2, 1, 32)]
LARGE = [((513, 1029, True, 4, 2, head_dim), torch.bfloat16) for head_dim in (5, 16, 40, 64, 128, 192, 256)]
LARGE += [((513, 1029, True, 4, 2, head_dim), torch.float32) for head_dim in (64, 250)]
LARGE += [((700, 333, False, 8, 1, head_dim), torch.bfloat16) for head_dim in (64, 128)]
LARGE += [((1024, 1024, True, 4, 4, 128), torch.float16), ((1, 300, True, 2, 1, 128), torch.bfloat16)]
# A new head dim or dtype takes a GPU's compiler about ten seconds, the interpreter none.
TILES = LARGE if DEVICE == "cuda" else in_turn([(tile,) for tile in SMALL], ERRORS)


@pytest.mark.parametrize(("tile", "dtype"), TILES, ids=str)
def test_tile_equals_the_definition(tile, dtype):
    q, k, v, grad, pattern, expected, lse, delta = make(tile, dtype)
    assert KERNEL.refusal(q, k) is None
    part = KERNEL.forward(q, k, v, Scoring(pattern, 0.2))
    assert part.out.dtype == dtype and part.lse.dtype == torch.float32
    torch.testing.assert_close(part.lse.double().cpu(), lse, rtol=1e-5, atol=1e-5)
    given = BackwardInputs(grad, q, k, v, part.lse, delta)
    gradients = KERNEL.backward(given, Scoring(pattern, 0.2), deterministic=True)
    assert {g.dtype for g in gradients} == {torch.float32}
    for name, ours, wanted in zip("oqkv", (part.out, *gradients), expected, strict=True):
        assert error(ours, wanted) < ERRORS[dtype], name
    again = KERNEL.backward(given, Scoring(pattern, 0.2), deterministic=True)
    assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))


@pytest.mark.parametrize("distance", [1024, 2**23] if DEVICE == "cuda" else [1024])
def test_reads_and_writes_where_it_is_told(distance):
    """Tokens, and statistics of heads, are `distance` numbers apart: on GPUs also more than 32 bits can count."""
    tile = (300, 300, True, 2, 1, 32) if DEVICE == "cuda" else (40, 70, True, 2, 1, 12)
    q, k, v, grad, pattern, _, lse, delta = make(tile, torch.bfloat16, batch=1)
    wanted = KERNEL.forward(q, k, v, Scoring(pattern, 0.2))
    lse = lse.to(DEVICE, torch.float32)
    gradients = KERNEL.backward(BackwardInputs(grad, q, k, v, lse, delta), Scoring(pattern, 0.2), deterministic=True)

    columns, head_dim = k.shape[1], q.shape[3]
    memory = torch.empty(columns, distance, dtype=torch.bfloat16, device=DEVICE)
    memory[:, :1024] = -7.0
    places = iter(memory[:, i * 128 : (i + 1) * 128] for i in range(8))

    def elsewhere(tensor):
        place = next(places)[: tensor.shape[1], : tensor.shape[2] * head_dim]
        return place.unflatten(1, (tensor.shape[2], head_dim))[None].copy_(tensor)

    far = [elsewhere(t) for t in (q, k, v, grad)]
    out = elsewhere(torch.zeros_like(q))
    heads = torch.full((2, distance), -7.0, device=DEVICE)
    targets = Partial(out, heads[None, :, : q.shape[1]])
    part = KERNEL.forward(*far[:3], Scoring(pattern, 0.2), into=targets)
    assert all(a is b for a, b in zip(part, targets, strict=True))
    torch.testing.assert_close(part, wanted)
    assert (heads[:, q.shape[1] :] == -7).all()
    into = Gradients(*(elsewhere(torch.zeros_like(t)) for t in (q, k, v)))
    statistics = [torch.stack([t, t], -1)[..., 1] for t in (lse, delta)]
    given = BackwardInputs(far[3], *far[:3], *statistics)
    ours = KERNEL.backward(given, Scoring(pattern, 0.2), deterministic=True, into=into)
    for a, b, c in zip(ours, into, gradients, strict=True):
        assert a is b
        torch.testing.assert_close(a.float(), c, rtol=2**-7, atol=0)
    rows_written = torch.zeros(8, columns, 128, dtype=torch.bool, device=DEVICE)
    for i, tensor in enumerate((*far, out, *into)):
        rows_written[i, : tensor.shape[1], : tensor.shape[2] * head_dim] = True
    assert (memory[:, :1024].unflatten(1, (8, 128)).transpose(0, 1)[~rows_written] == -7).all()


def test_a_negative_scale():
    q, k, v, *_ = (t.to(DEVICE, torch.float32) for t in draw(0, 1, 40, 2, 2, 16))
    out, lse = attention(*(t.double().cpu() for t in (q, k, v)), CAUSAL, -30.0)
    part = KERNEL.forward(q, k, v, Scoring(CAUSAL, -30.0))
    assert error(part.out, out) < 1e-4 and error(part.lse, lse) < 1e-6  # scores near 300 in fp32


@pytest.mark.parametrize("sign", [1, -1])
def test_scores_far_from_zero(sign):
    """Log-sum-exps near 300 and -300: what lies beyond the tile's edge, with a score of zero, must not be weighed."""
    q, k, v, grad, _ = draw(0, 1, 39, 2, 1, 16, torch.float32)
    q[..., 0], k[..., 0] = 30.0, 50.0 * sign
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out, lse = attention(*leaves, FULL, 0.2)
    gradients = torch.autograd.grad(out, leaves, grad)
    out, lse = out.detach(), lse.detach()
    delta = (out * grad).sum(-1).transpose(1, 2)
    q, k, v, grad, lse, delta = (t.to(DEVICE, torch.float32) for t in (q, k, v, grad, lse, delta))
    part = KERNEL.forward(q, k, v, Scoring(FULL, 0.2))
    # Scores of 300 in fp32 are good to 3e-5, and so are the weights.
    assert error(part.out, out) < 1e-4 and error(part.lse, lse.double().cpu()) < 1e-6
    ours = KERNEL.backward(BackwardInputs(grad, q, k, v, lse, delta), Scoring(FULL, 0.2), deterministic=False)
    for name, a, b in zip("qkv", ours, gradients, strict=True):
        assert error(a, b) < 5e-4, name


def test_rows_and_tiles_without_a_key():
    """A query that saw no key, with a log-sum-exp of -inf, gives nothing; an empty tile gives nothing."""
    q, k, v, grad, pattern, _, lse, delta = make((33, 40, True, 2, 1, 16), torch.float32)
    statistics = [t.to(DEVICE, torch.float32).clone() for t in (lse, delta)]
    statistics[0][:, :, 7] = -torch.inf
    given = BackwardInputs(grad, q, k, v, *statistics)
    some = KERNEL.backward(given, Scoring(pattern, 0.2), deterministic=False)
    statistics[0][:, :, 7] = lse[:, :, 7]
    grad[:, 7], statistics[1][:, :, 7] = 0, 0
    again = KERNEL.backward(given, Scoring(pattern, 0.2), deterministic=False)
    for ours, wanted in zip(some, again, strict=True):
        assert torch.equal(ours, wanted)

    part = KERNEL.forward(q, k[:, :0], v[:, :0], Scoring(FULL, 0.2))
    assert not part.out.any() and (part.lse == -torch.inf).all()
    for queries, keys in ((33, 0), (0, 40)):
        near = (q[:, :queries], k[:, :keys], v[:, :keys], *(t[..., :queries] for t in statistics))
        gradients = KERNEL.backward(BackwardInputs(grad[:, :queries], *near), Scoring(FULL, 0.2), deterministic=False)
        assert [g.shape for g in gradients] == [t.shape for t in near[:3]]
        assert not any(g.any() for g in gradients)


def test_refuses_with_a_reason():
    q = torch.zeros(1, 4, 2, 16, device=DEVICE)
    for bad, words in (
        (q.double(), "float32, bfloat16 and float16 | torch.float64"),
        (q.new_zeros(1, 4, 2, 257), "up to 256 | 257"),
        (q.to("meta"), "NVIDIA GPUs | TRITON_INTERPRET=1 | meta"),
    ):
        with refused("kernel 'triton'", words, error=KernelError):
            select_kernel("triton", bad, bad)
    with refused("kernel 'triton' | not installed | pip install 'triton", error=KernelError):
        select_kernel("triton", q, q, kernels=[TritonKernel(AnotherMachine())])


def make(tile, dtype, batch=2):
    """Return q, k, v, dO on the device, the pattern, the definition's (out, dq, dk, dv), its lse, and delta."""
    rows, columns, causal, heads, kv_heads, head_dim = tile
    _, k, v, _, _ = draw(0, batch, columns, heads, kv_heads, head_dim, dtype)
    q, _, _, grad, _ = draw(1, batch, rows, heads, kv_heads, head_dim, dtype)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = attention(*leaves, CAUSAL if causal else FULL, 0.2)
    expected = (out.detach(), *torch.autograd.grad(out, leaves, grad))
    delta = (out.detach() * grad).sum(-1).transpose(1, 2).to(DEVICE, torch.float32)
    return (
        *(t.detach().to(DEVICE, dtype) for t in (q, k, v, grad)),
        CAUSAL if causal else FULL,
        expected,
        lse.detach(),
        delta,
    )


@pytest.mark.parametrize(
    ("capability", "dtype", "named"),
    [((8, 0), "bfloat16", "small"), ((9, 0), "float16", "hopper"), ((10, 3), "bfloat16", "hopper"),
     ((12, 0), "bfloat16", "small"), ((9, 0), "float32", "fp32")],
)  # fmt: skip
def test_kernels_are_cut_for_the_device(capability, dtype, named):
    """By shared memory, and by the power of two that the head dim is padded to."""
    compiled, machine = JITFunction.__new__(JITFunction), AnotherMachine(capability)
    tables = {name: ((64, f"{name} 64"), (128, f"{name} 128")) for name in ("hopper", "small", "fp32", "interpreted")}
    for head_dim, padded in ((1, 64), (64, 64), (65, 128), (128, 128)):
        q = queries_ahead(torch.device("cuda"), getattr(torch, dtype), head_dim)
        assert block_sizes_for(q, compiled, **tables, machine=machine) == f"{named} {padded}"
