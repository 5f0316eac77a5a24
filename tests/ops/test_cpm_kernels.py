"""Norms by the package cpm-kernels: where it is taken, what it is refused for, and what it is given.

There is no GPU here that it runs on, so a stand-in has its functions: the parameters of version 1.0.11, and of what the
CUDA sources compute the order of roundings. It reads and writes the memory that the pointers name.
"""

import ctypes
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from bmburst_ops import fused, rms_norm
from bmburst_ops.errors import KernelError
from tests.ops.another_machine import AnotherMachine
from tests.refusals import refused

STREAM = 1234
HALF = torch.float16


def numbers(pointer: int, count: int) -> torch.Tensor:
    """The fp16 numbers at an address."""
    raw = (ctypes.c_int16 * count).from_address(pointer)
    return torch.frombuffer(raw, dtype=torch.int16).view(HALF)


class StandIn(ModuleType):
    """What `import cpm_kernels` gives, as far as it is used."""

    def __init__(self) -> None:
        super().__init__("cpm_kernels")
        self.calls: list[tuple[str, int]] = []

    def layernorm_step(self, batch: int, n: int, mat: int, out: int, eps: float, rd_mean: bool, stream: int) -> None:
        """`layernorm_step` of cpm_kernels/kernels/layernorm.py; the kernel counts numbers in int32."""
        assert rd_mean is False and stream == STREAM and batch > 0 and batch * n < 2**31
        rows = numbers(mat, batch * n).view(batch, n).float()
        numbers(out, batch * n).copy_((rows * torch.rsqrt(rows.square().mean(1, keepdim=True) + eps)).flatten())
        self.calls.append(("layernorm_step", batch))

    def arith_batch_mul(self, batch: int, n: int, x: int, alpha: int, out: int, stream: int) -> None:
        """`arith_batch_mul` of cpm_kernels/kernels/arith.py, whose kernel works on pairs, 4 bytes at once."""
        assert n % 2 == 0 and x % 4 == alpha % 4 == out % 4 == 0 and stream == STREAM
        rows = numbers(x, batch * n).view(batch, n)
        numbers(out, batch * n).copy_((rows * numbers(alpha, n)).flatten())
        self.calls.append(("arith_batch_mul", batch))


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """The stand-in, installed, for tensors in host memory."""
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "cpm_kernels", stand_in)
    monkeypatch.setattr(rms_norm.CPM_KERNELS, "refusal", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=STREAM))
    return stand_in


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(3, 7, 10), (1, 2), (5, 1024), (2, 3, 4, 6)], ids=str)
def test_forward_and_backward_are_the_definitions(package: StandIn, shape: tuple[int, ...]) -> None:
    x, weight, grad = random(*shape), random(shape[-1], seed=1), random(*shape, seed=2)
    ours = [part.to(HALF).requires_grad_() for part in (x, weight)]
    wide = [part.detach().double().requires_grad_() for part in ours]
    result = rms_norm.rms_norm(*ours, 1e-3, kernel="cpm-kernels")
    assert result.dtype == HALF
    rms = (wide[0].square().mean(-1, keepdim=True) + 1e-3).sqrt()
    expected = wide[0] / rms * wide[1]
    torch.testing.assert_close(result.double(), expected, rtol=2**-9, atol=2**-14)  # two roundings of 2^-11 and more
    found = torch.autograd.grad(result, ours, grad.to(HALF))
    wanted = torch.autograd.grad(expected, wide, grad.to(HALF).double())
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2**-9, atol=2**-8 * other.abs().max().item())
    rows = x.numel() // shape[-1]
    assert package.calls == [("layernorm_step", rows), ("arith_batch_mul", rows)]


def test_what_it_is_given_is_dense_and_begins_with_a_pair(package: StandIn) -> None:
    x, weight = random(3, 5, 16).to(HALF), random(9, seed=1).to(HALF)
    columns, odd = x[..., 1:9], weight[1:]
    assert not columns.is_contiguous() and odd.data_ptr() % 4
    result = rms_norm.rms_norm(columns, odd, 1e-5, kernel="cpm-kernels")
    torch.testing.assert_close(result, rms_norm.rms_norm(columns, odd, 1e-5), rtol=2**-9, atol=2**-14)
    in_fp32 = rms_norm.rms_norm(columns, odd.float(), 1e-5, kernel="cpm-kernels")  # with a factor on logits
    assert torch.equal(in_fp32, result)


def test_many_rows_are_given_in_calls_that_it_can_count(package: StandIn) -> None:
    few = rms_norm.CpmKernels(most=25)
    x, weight = random(7, 10).to(HALF), random(10, seed=1).to(HALF)
    result, _ = few.norm_forward(x, weight, 1e-5)
    assert [rows for name, rows in package.calls if name == "layernorm_step"] == [2, 2, 2, 1]
    torch.testing.assert_close(result, rms_norm.rms_norm(x, weight, 1e-5), rtol=2**-9, atol=2**-14)
    assert few.norm_forward(x[:0], weight, 1e-5)[0].shape == (0, 10)


def on_gpu(dtype: torch.dtype = HALF, features: int = 8, device: str = "cuda:0") -> SimpleNamespace:
    """What a refusal looks at of a tensor."""
    return SimpleNamespace(is_cuda=True, device=torch.device(device), dtype=dtype, shape=torch.Size((2, features)))


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (8, 6), (8, 9)])
def test_it_is_taken_where_its_machine_code_runs(capability: tuple[int, int]) -> None:
    package = rms_norm.CpmKernels(AnotherMachine(capability, {"cpm_kernels": None}))
    assert rms_norm.choose_norm("cpm-kernels", on_gpu(), on_gpu(), package) is package


@pytest.mark.parametrize(
    ("x", "weight", "capability", "installed", "words"),
    [
        (on_gpu(), on_gpu(), (9, 0), True, "compute capability 7.0 to 8.9 | 9.0"),
        (on_gpu(), on_gpu(), (12, 0), True, "compute capability | 12.0"),
        (on_gpu(), on_gpu(), (6, 1), True, "compute capability | 6.1"),
        (on_gpu(torch.bfloat16), on_gpu(), (8, 0), True, "float16 only | torch.bfloat16"),
        (on_gpu(torch.float32), on_gpu(), (8, 0), True, "float16 only | torch.float32"),
        (on_gpu(features=7), on_gpu(), (8, 0), True, "even number of features | 7"),
        (on_gpu(), on_gpu(device="cuda:1"), (8, 0), True, "cuda:0 and cuda:1"),
        (torch.zeros(2, 8, dtype=HALF), torch.zeros(8, dtype=HALF), (8, 0), True, "cpu and cpu"),
        (on_gpu(), on_gpu(), (8, 0), False, "not installed | pip install bmburst[cpm-kernels]"),
    ],
)
def test_it_is_refused_by_name(x, weight, capability, installed, words) -> None:
    package = rms_norm.CpmKernels(AnotherMachine(capability, {"cpm_kernels": None} if installed else {}))
    with refused("norm kernel 'cpm-kernels'", words, "'auto' | torch, triton", error=KernelError, lines=2):
        rms_norm.choose_norm("cpm-kernels", x, weight, package)


def test_names_that_are_none_and_kernels_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    row = torch.zeros(8)
    with refused("'cpm-kernel' | did you mean 'cpm-kernels' | auto, torch, triton, cpm-kernels", error=KernelError):
        rms_norm.rms_norm(row, row, 1e-5, kernel="cpm-kernel")
    with refused("norm kernel 'triton' | needs Triton", error=KernelError):
        rms_norm.choose_norm("triton", row.double(), row)
    assert rms_norm.choose_norm("torch", row, row) is None
    taken = SimpleNamespace(WIDEST_ROW=8)
    monkeypatch.setattr(rms_norm, "triton_twin", lambda *_: taken)
    assert rms_norm.choose_norm("auto", row, row) is rms_norm.choose_norm("triton", row, row) is taken
    assert rms_norm.choose_norm("torch", row, row) is None


def test_plain_torch_by_name_is_so_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(rms_norm, "triton_twin", lambda module, *_: asked.append(module))
    x, weight = random(3, 8).requires_grad_(), random(8, seed=1)
    rms_norm.rms_norm(x, weight, 1e-5, kernel="torch").sum().backward()
    assert not asked
    rms_norm.rms_norm(x, weight, 1e-5).sum().backward()
    assert asked == ["triton_elementwise"] * 2  # forward and backward


@pytest.mark.parametrize("problem", [ModuleNotFoundError("No pkg_resources"), RuntimeError("CUDA driver version")])
def test_a_package_that_cannot_be_imported_is_said(problem: Exception) -> None:
    def fails(module: str) -> ModuleType:
        raise problem

    with refused("cpm-kernels | cpm_kernels | cannot be imported", problem, error=KernelError):
        fused.import_package("cpm_kernels", "cpm-kernels", fails)
