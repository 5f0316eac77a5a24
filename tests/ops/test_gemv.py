"""Products of decoding against fp64: torch's, and the Triton kernel for one row, interpreted or on a GPU."""

import pytest
import torch
from torch.nn.functional import silu

from bmburst_ops import gemv, triton_gemv
from tests.pairs import in_turn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ERRORS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SLICES = {
    "all": [slice(0, 40)],
    "some": [slice(7, 8)],
    "adjacent": [slice(3, 9), slice(9, 14), slice(14, 20)],
    "apart": [slice(20, 31), slice(2, 7), slice(36, 40)],
    "two": [slice(1, 2), slice(30, 33)],
    "empty": [slice(4, 4), slice(5, 6), slice(9, 9)],
}


def operands(dtype, features, count=1, device="cpu"):
    """Return x, a weight and a bias, the first two as parts of wider tensors whose other numbers are NaN."""
    draws = torch.Generator().manual_seed(features)
    x, weight, bias = (torch.randn(*s, generator=draws) for s in ((count, features), (40, features), (40,)))
    wide = [torch.nn.functional.pad(each, (3, 5), value=torch.nan).to(device, dtype) for each in (x, weight)]
    return *(each[:, 3 : 3 + features] for each in wide), bias.to(device, dtype)


def check(found, expected, dtype):
    assert found.dtype == dtype and found.shape == expected.shape
    assert (found.cpu().double() - expected).norm() <= ERRORS[dtype] * expected.norm()


@pytest.mark.parametrize(("name", "dtype"), in_turn(SLICES, [torch.float64, *DTYPES]))
@pytest.mark.parametrize("count", [1, 3])
def test_torch_by_rows(name, dtype, count):
    x, weight, bias = operands(dtype, 50, count)
    products = gemv.project_rows(x, weight, SLICES[name], bias)
    for product, rows in zip(products, SLICES[name], strict=True):
        check(product, x.double() @ weight[rows].double().T + bias[rows].double(), dtype)
    check(gemv.project(x, weight), x.double() @ weight.double().T, dtype)


@pytest.mark.parametrize(("name", "dtype"), in_turn(SLICES, DTYPES))
@pytest.mark.parametrize("features", [1, 16, 50])
def test_triton_by_rows(name, dtype, features):
    """The interpreter's block has 16 features."""
    x, weight, bias = operands(dtype, features, device=DEVICE)
    for beside in (None, bias):
        product = triton_gemv.project(x, weight, SLICES[name], beside)
        picked = torch.cat([torch.arange(40)[rows] for rows in SLICES[name]])
        expected = x.cpu().double() @ weight.cpu()[picked].double().T
        check(product, expected if beside is None else expected + bias.cpu()[picked].double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [(slice(0, 20), slice(20, 40)), (slice(25, 32), slice(2, 9))])
def test_gated(dtype, rows):
    """Torch rounds both products, Triton only the result."""
    x, weight, _ = operands(dtype, 50, device=DEVICE)
    gate, up = (x.cpu().double() @ weight[each].cpu().double().T for each in rows)
    check(triton_gemv.gated(x, weight, *rows), silu(gate) * up, dtype)
    check(gemv.gated(x, weight, *rows), silu(gate) * up, dtype)


@pytest.mark.skipif(DEVICE == "cpu", reason="one row takes the Triton kernel on a GPU only")
@pytest.mark.parametrize("features", [4096, 14336, 7168, 4100])
def test_a_gpu_takes_the_kernel_for_one_row(features, monkeypatch):
    """Widths of models, also of a slice of columns, against torch's product."""
    x, weight = torch.randn(1, features, device=DEVICE), torch.randn(64, 2 * features, device=DEVICE)
    x, weight = x.bfloat16(), weight.bfloat16()[:, features:]
    expected = torch.nn.functional.linear(x.double(), weight.double()).cpu()
    check(gemv.project(x, weight), expected, torch.bfloat16)
    monkeypatch.setattr(triton_gemv, "project", None)
    with pytest.raises(TypeError):
        gemv.project(x, weight)
