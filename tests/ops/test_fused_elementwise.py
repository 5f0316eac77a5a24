"""The fused norm, activation and rotary embedding against fp64 and their twins: in Triton's interpreter, or on a GPU.

Each runs through its autograd function, as in a model.
"""

import pytest
import torch

from bmburst_ops import fused, linear_cross_entropy, rms_norm, rotary, swiglu, triton_elementwise, triton_reductions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Half a unit of the dtype on a GPU; the interpreter cuts bf16 off instead of rounding it.
TOLERANCE = {
    torch.float32: {"rtol": 3e-6, "atol": 2e-6},
    torch.float16: {"rtol": 2**-10, "atol": 2**-20},
    torch.bfloat16: {"rtol": 2**-7, "atol": 2**-18},
}
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@pytest.fixture
def triton(monkeypatch):
    """Let the kernels compute wherever the tensors are, but in fp64, and collect the names of those that did."""
    used, modules = set(), {"triton_elementwise": triton_elementwise, "triton_reductions": triton_reductions}

    class Recorded:
        def __init__(self, module):
            self.module = module

        def __getattr__(self, name):
            found = getattr(self.module, name)

            def called(*args, **options):
                used.add(name)
                return found(*args, **options)

            return called if callable(found) else found

    def twin(name, *tensors):
        return Recorded(modules[name]) if all(t.dtype in TOLERANCE for t in tensors) else None

    for module in (rms_norm, swiglu, rotary, linear_cross_entropy):
        monkeypatch.setattr(module, "triton_twin", twin)
    return used


@every_dtype
@pytest.mark.parametrize(
    ("shape", "layout"),
    [((2, 37, 40), "dense"), ((9, 13), "columns"), ((3, 5, 300), "slice"), ((1, 1), "dense"), ((3, 4099), "dense")],
    ids=str,
)
def test_norm(triton, shape, layout, dtype):
    x, weight = laid_out(shape, layout, dtype), random(shape[-1:], dtype, 1)
    grad = laid_out(shape, "slice" if layout == "dense" else "dense", dtype, 2)
    check(lambda x, w: rms_norm.rms_norm(x, w, 1e-3), [x, weight], grad)
    assert triton == {"norm_forward", "norm_backward"}


@every_dtype
@pytest.mark.parametrize("factor", [None, 1.0, -0.375])
@pytest.mark.parametrize(
    ("shape", "layout"), [((2, 37, 40), "dense"), ((9, 13), "columns"), ((3, 5, 300), "slice"), ((1, 1), "dense")]
)
def test_norm_of_a_stream(triton, shape, layout, factor, dtype):
    """Two results, with gradients of both; nothing is added where there is no factor."""
    x, added, weight = laid_out(shape, layout, dtype), laid_out(shape, "slice", dtype, 3), random(shape[-1:], dtype, 1)
    grads = [laid_out(shape, of, dtype, seed) for seed, of in ((4, "slice"), (5, "dense"))]

    def function(x, weight, *added):
        return rms_norm.stream_norm(x, *(added or [None]), weight, 1e-3, factor=1.0 if factor is None else factor)

    # The stream is rounded before it is normalised, which fp64 knows nothing of.
    check(function, [x, weight] if factor is None else [x, weight, added], grads, units=3 if factor else 1)
    assert triton == {"norm_forward" if factor is None else "add_norm_forward", "norm_backward"}
    stream, normed = function(x, weight, *([] if factor is None else [added]))
    torch.testing.assert_close(normed, rms_norm.rms_norm(stream, weight, 1e-3), rtol=0, atol=0)
    assert factor is not None or stream.data_ptr() == x.data_ptr()


@every_dtype
@pytest.mark.parametrize("shape", [(3, 4099), (1,), (0, 7)], ids=str)
def test_scaled(triton, shape, dtype):
    """An fp32 sum is rounded once; a factor of 16 bits would lose digits."""
    x, factor = random(shape, torch.float32), torch.tensor(0.1 / 3, device=DEVICE)
    found = linear_cross_entropy.scaled(x, factor, dtype)
    assert found.dtype == dtype and triton == {"scaled"}
    torch.testing.assert_close(found.double(), x.double() * factor.double(), **TOLERANCE[dtype])


@every_dtype
@pytest.mark.parametrize(("rows", "words"), [(5, 41), (3, 4096), (2, 9001), (1, 1), (0, 7)])
def test_cross_entropy(triton, rows, words, dtype):
    """Of fp32 logits, with the gradient in any dtype; a token without a label has none."""
    logits = random((rows, words), torch.float32) * 5
    labels = torch.arange(rows, device=DEVICE) * 7 % words
    labels[1:2] = -100
    exact = logits.double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(exact, labels, reduction="none")
    (of_logits,) = torch.autograd.grad(wanted.sum(), exact)
    gradient = torch.empty_like(logits, dtype=dtype)
    losses = linear_cross_entropy.cross_entropy_(logits.clone(), labels, -100, gradient)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), wanted.detach(), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(gradient.double(), of_logits, **TOLERANCE[dtype] | {"atol": 2e-6})
    assert torch.equal(linear_cross_entropy.cross_entropy_(logits.clone(), labels, -100, None), losses)
    in_place = logits.clone()
    assert torch.equal(linear_cross_entropy.cross_entropy_(in_place, labels, -100, in_place), losses)
    torch.testing.assert_close(in_place.double(), of_logits, rtol=3e-6, atol=2e-6)
    assert triton == {"cross_entropy_"}


@every_dtype
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("shape", "layout"),
    [((2, 37, 41), "dense"), ((37, 33), "slice"), ((5, 7), "columns"), ((), "dense"), ((3, 2051), "slice")],
    ids=str,
)
def test_activation(triton, shape, layout, dtype, overwrite):
    gate, up = laid_out(shape, layout, dtype), random(shape, dtype, 1)
    grad = laid_out(shape, "dense" if overwrite or layout == "dense" else "slice", dtype, 2)
    check(lambda g, u: swiglu.swiglu(g, u, overwrite_grad=overwrite), [gate, up], grad)
    assert triton == {"swiglu", "swiglu_backward"}


@every_dtype
@pytest.mark.parametrize(
    ("shape", "layout"),
    [((2, 37, 3, 16), "slice"), ((1, 5, 40, 64), "dense"), ((2, 3, 2, 6), "columns"), ((1, 1, 1, 130), "dense")],
    ids=str,
)
def test_rotary(triton, shape, layout, dtype):
    angle = 3 * random((shape[0], shape[-1] // 2, shape[1]), torch.float32, 9).transpose(1, 2)
    cos, sin = (1.25 * angle.cos(), 1.25 * angle.sin())  # a common factor, as yarn's; tokens last

    def turn(x):
        wide = torch.promote_types(x.dtype, torch.float32)
        return rotary.apply_rotary(x, cos.to(wide), sin.to(wide))

    check(turn, [laid_out(shape, layout, dtype)], laid_out(shape, layout, dtype, 2))
    assert triton == {"rotate"}


def test_queries_and_keys_may_be_a_slice_of_one_projection(triton):
    projected, cos, sin = random((2, 5, 6 * 8), torch.float32), *random((2, 2, 5, 4), torch.float32, 1)
    turned = rotary.apply_rotary(projected.view(2, 5, 6, 8)[:, :, :5], cos, sin)  # 4 queries, 1 key, 1 value
    heads = projected.view(2, 5, 6, 8)
    parts = [rotary.apply_rotary(heads[:, :, at], cos, sin) for at in (slice(4), slice(4, 5))]
    torch.testing.assert_close(turned, torch.cat(parts, 2), rtol=1e-6, atol=1e-6)


def test_a_rotation_may_write_into_a_part_of_a_tensor(triton):
    x, cos, sin = random((2, 5, 3, 8), torch.float32), *random((2, 2, 5, 4), torch.float32, 1)
    for back in (False, True):
        whole = torch.zeros(4, 5, 5, 8, device=DEVICE)
        rotary.rotate(x, cos, sin, back=back, out=whole[1:3, :, 1:4])
        expected = rotary.apply_rotary(x, cos, -sin if back else sin)
        torch.testing.assert_close(whole[1:3, :, 1:4], expected, rtol=0, atol=0)
        assert whole.abs().sum().item() == pytest.approx(expected.abs().sum().item())
        part = whole[1:3, :, 1:4].copy_(x)
        assert rotary.rotate(part, cos, sin, back=back, out=part) is part  # in place
        torch.testing.assert_close(part, expected, rtol=0, atol=0)
    assert triton == {"rotate"}


def test_many_rows_for_a_program(triton, monkeypatch):
    """Rows are added up in a fixed order: in 16 bits or with atomics the sum of so many would be off, or differ."""
    monkeypatch.setattr(triton_elementwise, "_PROGRAMS", 3)
    x, grad = random((4999, 24), torch.bfloat16), (1 + random((4999, 24), torch.float32, 1)).bfloat16()
    weight = random((24,), torch.float32, 2)
    check(lambda x, w: rms_norm.rms_norm(x, w, 1e-3), [x, weight], grad, sums=4999)
    normed = triton_elementwise.norm_forward(x, weight, 1e-3)[1]
    first, second = (triton_elementwise.norm_backward(grad, x, weight, normed)[1] for _ in range(2))
    assert torch.equal(first, second)


def test_a_frozen_weight_of_a_norm_changes_nothing_else(triton):
    x, weight, grad = (random(shape, torch.float32, seed) for seed, shape in enumerate(((37, 24), (24,), (37, 24))))
    normed = triton_elementwise.norm_forward(x, weight, 1e-3)[1]
    for beside in (None, grad):
        trained = triton_elementwise.norm_backward(grad, x, weight, normed, beside)
        frozen = triton_elementwise.norm_backward(grad, x, weight, normed, beside, wants_weight=False)
        assert torch.equal(trained[0], frozen[0])
        assert trained[1] is not None and frozen[1] is None


def test_extremes(triton):
    """A row of zeros, numbers whose exponential overflows, nothing at all."""
    x = torch.zeros(3, 5, device=DEVICE, requires_grad=True)
    rms_norm.rms_norm(x, torch.ones(5, device=DEVICE), 1e-5).sum().backward()
    assert torch.isfinite(x.grad).all()
    far = torch.tensor([-1e4, 1e4, -90.0, 0.0], device=DEVICE)
    grad = torch.ones_like(far)
    check(swiglu.swiglu, [far, far.flip(0)], grad)
    none = torch.zeros(0, 4, 2, 8, device=DEVICE, requires_grad=True)
    angles = torch.zeros(0, 4, 4, device=DEVICE)
    for result in (
        rms_norm.rms_norm(none, torch.ones(8, device=DEVICE), 1e-5),
        swiglu.swiglu(none, none),
        rotary.apply_rotary(none, angles, angles),
    ):
        assert torch.autograd.grad(result.sum(), none)[0].shape == none.shape


def test_what_is_overwritten(triton):
    """The gradient of the result where that is asked for and dense, and never what autograd keeps."""
    inputs = [random((3, 5), torch.float32, seed).requires_grad_() for seed in range(2)]
    before = [x.detach().clone() for x in inputs]
    for overwrite in (False, True):
        grad = random((3, 5), torch.float32, 2)
        result = swiglu.swiglu(*inputs, overwrite_grad=overwrite)
        of_gate, _ = torch.autograd.grad(result, inputs, grad, retain_graph=True)
        assert (of_gate.data_ptr() == grad.data_ptr()) is overwrite
        for _ in range(2):  # the gradient of a sum is one number, expanded
            again = torch.autograd.grad(result.sum(), inputs, retain_graph=True)
            plain = torch.autograd.grad((torch.nn.functional.silu(inputs[0]) * inputs[1]).sum(), inputs)
            torch.testing.assert_close(again, plain)
    assert all(torch.equal(x, kept) for x, kept in zip(inputs, before, strict=True))


def test_who_computes():
    """Triton where it can; plain torch on other devices, in fp64, and for rows wider than a program holds."""
    row, wide = torch.ones(2, 8, device=DEVICE), torch.ones(1, triton_elementwise.WIDEST_ROW + 1, device=DEVICE)
    angles, heads = torch.ones(1, 2, 4, device=DEVICE), torch.ones(1, 2, 1, 8, device=DEVICE, dtype=torch.bfloat16)
    on_gpu = DEVICE == "cuda"
    assert rms_norm.choose_norm("auto", row, row[0]) is (triton_elementwise if on_gpu else None)
    assert rotary._fused(heads, angles, angles) is (triton_elementwise if on_gpu else None)
    assert fused.triton_twin("triton_elementwise", row, row) is (triton_elementwise if on_gpu else None)
    assert rms_norm.choose_norm("auto", wide, wide[0]) is None
    assert rotary._fused(heads, angles.bfloat16(), angles.bfloat16()) is None
    assert fused.triton_twin("triton_elementwise", row.double(), row.double()) is None
    assert fused.triton_twin("triton_elementwise", row, row.cpu()) is None


def random(shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


def laid_out(shape, layout, dtype, seed=0):
    """Return random numbers: dense, at odd places of a longer row, or with the last dimension not the innermost."""
    dense = random(shape, dtype, seed)
    if layout == "dense":
        return dense
    if layout == "columns":
        return dense.transpose(0, -1).contiguous().transpose(0, -1)
    wide = torch.full((*shape[:-2], 2 * shape[-2], shape[-1] + 3), torch.nan, dtype=dtype, device=DEVICE)
    return wide[..., 1::2, 1:-2].copy_(dense)


def check(function, inputs, grads, *, sums=40, units=1):
    """Compare results and gradients with those in fp64 of the same inputs, which plain torch computes.

    Args:
        function: Of the inputs.
        inputs: Leaves; the second may be a weight, whose gradient is a sum over rows.
        grads: Of the result, or of each of several; may be overwritten.
        sums: How many numbers a gradient adds up.
        units: How many times the error of one rounding a number may be off.
    """
    grads = grads if isinstance(grads, list) else [grads]
    exact_inputs, exact_grads = [x.double().requires_grad_() for x in inputs], [g.double() for g in grads]
    exact = listed(function(*exact_inputs))
    wanted = [*exact, *torch.autograd.grad(exact, exact_inputs, exact_grads)]
    leaves = [x.detach().requires_grad_() for x in inputs]
    results = listed(function(*leaves))
    assert results[-1].is_contiguous()
    found = [*results, *torch.autograd.grad(results, leaves, grads)]
    for ours, theirs, like in zip(found, wanted, [inputs[0]] * len(results) + inputs, strict=True):
        assert ours.dtype is like.dtype
        tolerance = TOLERANCE[like.dtype]
        atol = units * tolerance["atol"] * max(1.0, sums**0.5 / 4)
        if units > 1:
            atol = max(atol, tolerance["rtol"] * float(theirs.detach().abs().max()))
        torch.testing.assert_close(ours.double(), theirs, rtol=units * tolerance["rtol"], atol=atol)


def listed(results):
    return list(results) if isinstance(results, tuple) else [results]
