"""Every kernel computes tiles as the reference does: rectangles, GQA, a global log-sum-exp and delta in backward."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch

from bmburst_ops.errors import KernelError
from bmburst_ops.flash import CAUSAL, FULL, KERNELS, BackwardInputs, ReferenceKernel, Scoring, select_kernel
from bmburst_ops.flash.torch_cuda import TorchKernel
from bmburst_ops.merge import merge_partials_, row_dots, surrogate_out
from tests.attention.oracle import draw
from tests.live_bytes import LiveBytes
from tests.ops.masks import attention
from tests.ops.package_stand_ins import take_operations
from tests.refusals import refused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXACT = {"rtol": 1e-9, "atol": 1e-9}
DOUBLE = torch.zeros(1, 1, 1, 16, dtype=torch.float64, device=DEVICE)
RUNNABLE = [kernel for kernel in KERNELS if kernel.refusal(DOUBLE, DOUBLE) is None]  # the others: test_flash_half.py


@pytest.mark.parametrize("kernel", RUNNABLE, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(
    ("rows", "columns", "causal"), [(7, 7, True), (5, 12, True), (6, 5, False), (1, 9, True), (700, 700, True)]
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (3, 1)])
def test_tile_equals_the_definition(kernel, rows, columns, causal, heads, kv_heads):
    dtype = torch.float64
    _, k, v, _, _ = draw(0, 2, columns, heads, kv_heads, 16, dtype)
    q, _, _, grad, _ = draw(1, 2, rows, heads, kv_heads, 16, dtype)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    pattern = CAUSAL if causal else FULL
    out, lse = attention(*leaves, pattern, 0.2)
    expected = torch.autograd.grad(out, leaves, grad)

    q, k, v, grad = (t.to(DEVICE, dtype) for t in (q, k, v, grad))
    assert kernel.refusal(q, k) is None
    part = kernel.forward(q, k, v, Scoring(pattern, 0.2))
    torch.testing.assert_close(part.out.double().cpu(), out.detach(), **EXACT)
    torch.testing.assert_close(part.lse.double().cpu(), lse.detach(), **EXACT)
    given = BackwardInputs(grad, q, k, v, part.lse, row_dots(grad, part.out))
    gradients = kernel.backward(given, Scoring(pattern, 0.2), deterministic=False)
    torch.testing.assert_close(gradients, expected, **EXACT, check_dtype=False, check_device=False)


@pytest.mark.parametrize("kernel", RUNNABLE, ids=lambda kernel: kernel.name)
def test_tiles_of_one_softmax_add_up(kernel):
    """Two halves of the keys, merged; their gradients, from the merged log-sum-exp and delta, add up to the whole's."""
    dtype = torch.float64
    q, k, v, grad, _ = draw(0, 1, 24, 4, 2, 16, dtype)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    whole, whole_lse = attention(*leaves, FULL, 0.25)
    expected = torch.autograd.grad(whole, leaves, grad)

    q, k, v, grad = (t.to(DEVICE, dtype) for t in (q, k, v, grad))
    wide = torch.promote_types(dtype, torch.float32)
    out, lse = torch.zeros_like(q, dtype=wide), torch.full((1, 4, 24), -torch.inf, dtype=wide, device=DEVICE)
    halves = [slice(0, 9), slice(9, None)]
    for half in halves:
        merge_partials_(out, lse, *kernel.forward(q, k[:, half], v[:, half], Scoring(FULL, 0.25)))
    torch.testing.assert_close(lse.double().cpu(), whole_lse.detach(), **EXACT)
    delta = row_dots(grad, out)
    parts = [
        kernel.backward(BackwardInputs(grad, q, k[:, h], v[:, h], lse, delta), Scoring(FULL, 0.25), deterministic=False)
        for h in halves
    ]
    joined = (parts[0].q.double() + parts[1].q.double(), *(torch.cat([p[i] for p in parts], 1) for i in (1, 2)))
    torch.testing.assert_close(joined, expected, **EXACT, check_dtype=False, check_device=False)


@pytest.mark.parametrize("kernel", RUNNABLE, ids=lambda kernel: kernel.name)
def test_any_strides(kernel):
    """Inputs and statistics that are not dense in any dimension give what their dense copies give."""
    dtype = torch.float64
    dense = [t.to(DEVICE, dtype) for t in draw(3, 2, 11, 4, 4, 16, dtype)[:4]]
    lse, delta = (torch.randn(2, 4, 11, device=DEVICE, dtype=torch.promote_types(dtype, torch.float32)) for _ in "ld")
    near = BackwardInputs(*dense[3:], *dense[:3], lse, delta)
    for order in ((0, 1, 2, 3), (0, 1, 3, 2), (3, 2, 1, 0)):
        back = [order.index(i) for i in range(4)]
        q, k, v, grad = (t.permute(order).contiguous().permute(back) for t in dense)
        far = BackwardInputs(grad, q, k, v, *(torch.stack([t.mT, t.mT], -1)[..., 1].mT for t in (lse, delta)))
        for ours, wanted in (
            (kernel.forward(q, k, v, Scoring(CAUSAL, 0.2)), kernel.forward(*dense[:3], Scoring(CAUSAL, 0.2))),
            (
                kernel.backward(far, Scoring(CAUSAL, 0.2), deterministic=True),
                kernel.backward(near, Scoring(CAUSAL, 0.2), deterministic=True),
            ),
        ):
            torch.testing.assert_close(ours, wanted)


def test_the_references_memory_is_linear():
    rows = 2048
    q, k, v, grad = (torch.randn(1, rows, 1, 4) for _ in "qkvg")
    kernel, alive = ReferenceKernel(), LiveBytes()
    with alive:
        part = kernel.forward(q, k, v, Scoring(CAUSAL, 0.5))
        assert alive.peak < rows * rows * 4  # less than one matrix of scores
        kernel.backward(BackwardInputs(grad, q, k, v, part.lse, part.lse), Scoring(CAUSAL, 0.5), deterministic=True)
        assert alive.peak < 2 * rows * rows * 4


def test_torchs_switch_is_set_for_a_deterministic_call_only(monkeypatch):
    seen = []
    q = torch.zeros(1, 4, 2, 8)

    def backward(*args, **kwargs):
        seen.append(torch.get_deterministic_debug_mode())
        if len(seen) == 4:
            raise RuntimeError("on purpose")
        return q, q, q

    take_operations(monkeypatch, _flash_attention_backward=backward)
    given = BackwardInputs(q, q, q, q, torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))
    call = partial(TorchKernel().backward, given, Scoring(CAUSAL, 1))
    try:
        for before in (0, 1):
            torch.set_deterministic_debug_mode(before)
            for wanted in (False, True):
                with pytest.raises(RuntimeError, match="on purpose") if len(seen) == 3 else nullcontext():
                    call(deterministic=wanted)
                assert torch.get_deterministic_debug_mode() == before
    finally:
        torch.set_deterministic_debug_mode(0)
    assert seen == [0, 2, 1, 2]


@pytest.mark.parametrize("gap", [0.0, 10.0, 100.0, -100.0])
def test_merge_survives_empty_rows_and_large_gaps(gap):
    rng = torch.Generator().manual_seed(0)
    out, part = (torch.randn(2, 5, 3, 8, generator=rng) for _ in range(2))
    lse, part_lse = (torch.randn(2, 3, 5, generator=rng) for _ in range(2))
    part_lse += gap
    for row, (mine, other) in enumerate([(True, False), (False, True), (True, True)]):
        if mine:
            lse[:, :, row], out[:, row] = -torch.inf, 0
        if other:
            part_lse[:, :, row], part[:, row] = -torch.inf, 0
    total = torch.logaddexp(lse.double(), part_lse.double())
    weights = [(x.double() - total.clamp(min=-1e300)).exp().transpose(1, 2)[..., None] for x in (lse, part_lse)]
    expected = out.double() * weights[0] + part.double() * weights[1]
    merge_partials_(out, lse, part, part_lse)
    torch.testing.assert_close(out, expected.float())
    torch.testing.assert_close(lse, total.float())


@pytest.mark.parametrize("scale", [1e-36, 1e-23, 1.0, 1e19, 1e36])
def test_surrogate_has_the_delta_and_is_zero_where_grad_is(scale):
    _, _, _, grad, delta = (t.float() for t in draw(0, 2, 9, 3, 3, 16))
    grad[:, 4] = 0
    delta[:, :, 4] = 0
    surrogate = surrogate_out(grad * scale, delta * scale)
    assert surrogate.dtype == grad.dtype
    torch.testing.assert_close(row_dots(grad, surrogate), delta)
    assert not surrogate[:, 4].any()


def test_selection_refuses_with_a_reason():
    q = torch.zeros(1, 4, 2, 16)
    assert select_kernel("auto", q, q).name == "cpu"
    assert isinstance(select_kernel("reference", q, q), ReferenceKernel)
    with refused("'refrence' | did you mean 'reference'", error=KernelError):
        select_kernel("refrence", q, q)
    with refused("'torch' | NVIDIA GPUs | cpu", error=KernelError):
        select_kernel("torch", q, q)
    with refused("kernel 'None' | auto", error=KernelError):
        select_kernel(None, q, q)
    small = q.to(torch.float8_e4m3fn)
    with refused("'cpu' | float64, float32, bfloat16 and float16 | torch.float8_e4m3fn", error=KernelError):
        select_kernel("cpu", small, small)
    with refused("'cpu' | on the CPU | meta", error=KernelError):
        select_kernel("cpu", q.to("meta"), q)
    assert select_kernel("auto", small, small).name == "reference"
