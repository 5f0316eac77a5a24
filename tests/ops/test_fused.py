"""The fused kernels do what their plain torch twins do: in Triton's interpreter, and where there is a GPU on it."""

import pytest
import torch

from bmburst_ops import merge, triton_reductions
from bmburst_ops.fused import triton_module
from tests.ops.another_machine import AnotherMachine

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Half a unit of the dtype on a GPU; the interpreter cuts numbers off instead of rounding them.
TOLERANCE = {torch.float32: {"rtol": 2e-6, "atol": 1e-6}, torch.bfloat16: {"rtol": 2**-7, "atol": 2**-20}}
SHAPES = [(2, 37, 3, 16), (1, 301, 2, 40), (1, 5, 1, 1), (1, 3, 2, 300)]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request):
    return request.param


@pytest.fixture(params=SHAPES, ids=str)
def shape(request):
    torch.manual_seed(0)
    return request.param


@pytest.fixture(params=["dense", "strided"])
def lay_out(request):
    """Put numbers on the device, dense or at the odd places of a tensor whose dimensions are in another order."""

    def dense(tensor):
        return tensor.to(DEVICE, copy=True)

    def strided(tensor):
        last = tensor.ndim - 1
        order = [last - 1, *range(last - 1), last]
        wide = torch.zeros([2 * tensor.shape[i] for i in order], dtype=tensor.dtype, device=DEVICE)
        view = wide[(slice(1, None, 2),) * tensor.ndim].permute([order.index(i) for i in range(tensor.ndim)])
        return view.copy_(tensor)

    return dense if request.param == "dense" else strided


@pytest.mark.parametrize("is_narrow", [False, True])
def test_merge(shape, dtype, lay_out, is_narrow):
    out, part, lse, part_lse = torch.randn(shape), torch.randn(shape).to(dtype), statistic(shape), 50 * statistic(shape)
    out = out.to(dtype) if is_narrow else out
    for row, (mine, other) in enumerate([(False, False), (True, False), (False, True)]):  # who has seen a key
        lse[:, :, row] += 0 if mine else -torch.inf
        part_lse[:, :, row] += 0 if other else -torch.inf
        out[:, row], part[:, row] = out[:, row] * mine, part[:, row] * other
    ours = [lay_out(t) for t in (out, lse, part, part_lse)]
    merge.merge_partials_(out, lse, part, part_lse)
    triton_reductions.merge_partials_(*ours)
    check(ours[0], out)
    check(ours[1], lse)
    assert out.isfinite().all() and (lse[:, :, 0] == -torch.inf).all()


def test_row_dots(shape, dtype, lay_out):
    grad, out = torch.randn(shape).to(dtype), torch.randn(shape)
    ours = triton_reductions.row_dots(lay_out(grad), lay_out(out))
    assert ours.is_contiguous()
    torch.testing.assert_close(ours.cpu(), merge.row_dots(grad, out), rtol=1e-5, atol=1e-5 * shape[-1] ** 0.5)


@pytest.mark.parametrize("scale", [1e-33, 1e-23, 1.0, 1e19, 1e36])
def test_surrogate(shape, dtype, lay_out, scale):
    grad, delta = (torch.randn(shape) * scale).to(dtype), statistic(shape) * scale
    grad[:, 1] = delta[:, :, 1] = 0
    ours = triton_reductions.surrogate_out(lay_out(grad), lay_out(delta))
    check(ours, merge.surrogate_out(grad, delta))
    assert not ours[:, 1].any()


def test_add(shape, dtype, lay_out):
    total, share = torch.randn(shape), torch.randn(shape).to(dtype)
    ours = lay_out(total)
    merge.add_(total, share)
    triton_reductions.add_(ours, lay_out(share))
    check(ours, total)


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("result", [torch.float32, torch.bfloat16], ids=str)
def test_sum_of_parts(shape, dtype, lay_out, count, result):
    parts, out = torch.randn(count, *shape).to(dtype), torch.full(shape, 3.0, dtype=result)
    exact, ours = parts.double().sum(0), lay_out(out)
    merge.sum_parts(parts, out)
    check(out, exact.to(result))
    triton_reductions.sum_parts(lay_out(parts), ours)
    check(ours, exact.to(result))


def test_the_sum_may_be_put_in_place_of_a_part(dtype):
    parts = torch.randn(3, 2, 37, 3, 16).to(dtype)
    expected = parts.double().sum(0).to(dtype)
    ours = parts.to(DEVICE, copy=True)
    merge.sum_parts(parts, parts[1])
    triton_reductions.sum_parts(ours, ours[1])
    check(parts[1], expected)
    check(ours[1], expected)


@pytest.mark.parametrize("distance", [2048, 2**30] if DEVICE == "cuda" else [2048])
def test_offsets_of_64_bits(distance):
    """Heads lie `distance` numbers apart: on GPUs also so far that 32 bits do not count them."""
    memory = torch.empty(3, distance, dtype=torch.bfloat16, device=DEVICE)
    far = memory[:, : 37 * 16].unflatten(1, (37, 16)).transpose(0, 1)[None]
    far.copy_(torch.randn(far.shape))
    share, delta = torch.randn(far.shape, device=DEVICE), torch.randn(1, 3, 37, device=DEVICE)
    near = far.clone(memory_format=torch.contiguous_format)
    check(triton_reductions.row_dots(far, far), triton_reductions.row_dots(near, near).cpu())
    check(triton_reductions.surrogate_out(far, delta), triton_reductions.surrogate_out(near, delta).cpu())
    triton_reductions.add_(far, share)
    triton_reductions.add_(near, share)
    check(far, near.cpu())
    triton_reductions.sum_parts(share[None], far)
    check(far, share.bfloat16().cpu())


def test_who_computes():
    """Triton where it can, plain torch elsewhere: on other devices, in fp64, and without Triton."""
    tensor = torch.zeros(1, 4, 2, 8, device=DEVICE)
    wanted = triton_reductions if DEVICE == "cuda" else None
    assert merge._fused(tensor, tensor.bfloat16()) is wanted
    assert merge._fused(tensor, tensor.double()) is None
    assert merge._fused(tensor, tensor.cpu().bfloat16(), tensor.cpu()) is None
    assert triton_module("triton_reductions", AnotherMachine()) is None
    assert triton_module("triton_reductions") is triton_reductions


def statistic(shape):
    return torch.randn(shape[0], shape[2], shape[1])


def check(ours, wanted):
    assert ours.dtype is wanted.dtype
    torch.testing.assert_close(ours.cpu(), wanted, **TOLERANCE[wanted.dtype])
