"""What is passed to packages that are not installed here, by stand-ins with their signatures; and who is preferred."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn import attention

from bmburst_ops.errors import KernelError
from bmburst_ops.flash import CAUSAL, BackwardInputs, Gradients, Partial, Scoring, kernels_on, select_kernel
from bmburst_ops.flash.cpu import CpuKernel
from bmburst_ops.flash.fa2_fa3 import FlashAttention3Kernel
from bmburst_ops.flash.inputs import aligned, is_aligned
from bmburst_ops.flash.padded import PaddedKernel
from bmburst_ops.flash.torch_cuda import CudnnKernel, TorchKernel
from bmburst_ops.machine import beta_of, is_there, version_of
from tests.ops.another_machine import AnotherMachine
from tests.ops.masked import Masked, tile_of
from tests.ops.package_stand_ins import cudnn, fa4, take_operations
from tests.ops.tiles import (
    EPSILON,
    assert_same,
    every_second,
    one_number_off,
    room,
    some_heads,
    some_statistics,
)
from tests.refusals import refused

CASES = [
    (2, 37, 53, True, 6, 2, 64, torch.bfloat16),
    (1, 53, 37, False, 4, 4, 64, torch.float16),
    (1, 1, 9, True, 2, 1, 32, torch.bfloat16),
    (1, 6, 7, True, 2, 2, 32, torch.bfloat16),
]


def test_fa4_writes_where_it_can(monkeypatch):
    made = fa4(monkeypatch)
    kernel = made.kernel
    q = torch.randn(2, 5, 2, 16).bfloat16()
    lse = kernel.forward(q, q, q, Scoring(CAUSAL, 1.0)).lse
    assert made.asked == (None, None)
    for out, writes in ((some_heads(q), True), (one_number_off(q), False), (torch.empty(q.shape), False)):
        kernel.forward(q, q, q, Scoring(CAUSAL, 1.0), into=Partial(out, torch.empty_like(lse)))
        assert made.asked[0] is (out if writes else None)
    for statistic, writes in (
        (some_statistics(torch.zeros_like(lse)), True),  # rows that start at any number
        (torch.zeros(2, 2, 5).transpose(0, 1), True),
        (torch.zeros(2, 2, 5, dtype=torch.float64), False),
        (every_second(torch.zeros_like(lse)), False),
        (torch.zeros(2, 5, 2).mT, False),
    ):
        part = kernel.forward(q, q, q, Scoring(CAUSAL, 1.0), into=Partial(torch.empty_like(q), statistic))
        assert made.asked[1] is (statistic if writes else None)
        assert part.lse is statistic and torch.equal(statistic.float(), lse)


def test_torch_gives_results_where_asked(monkeypatch):
    take_operations(
        monkeypatch,
        _flash_attention_forward=lambda *_, **__: (1 * q, 2 * statistic, None),
        _flash_attention_backward=lambda *_, **__: (3 * q, 4 * q, 5 * q),
    )
    q = torch.randn(1, 5, 2, 16).bfloat16()
    out, *into = (some_heads(torch.zeros_like(q)) for _ in range(4))
    kernel, scoring = TorchKernel(), Scoring(CAUSAL, 1.0)
    statistic = torch.randn(1, 2, 5)
    targets = Partial(out, some_statistics(torch.zeros_like(statistic)))
    assert_same(kernel.forward(q, q, q, scoring, targets), targets)
    assert torch.equal(out, q) and torch.equal(targets.lse, 2 * statistic)
    given = BackwardInputs(q, q, q, q, statistic, statistic)
    gradients = kernel.backward(given, scoring, deterministic=False, into=Gradients(*into))
    assert_same(gradients, into)
    assert all(torch.equal(t, n * q) for n, t in enumerate(into, 3))


@pytest.mark.parametrize(
    ("view", "fits"),
    [
        (lambda t: t, True),
        (lambda t: t[:, :, 1:], True),
        (lambda t: t.transpose(1, 2), True),
        (lambda t: t[..., 8:16], True),
        (lambda t: t[..., 4:12], False),  # rows start at 8 bytes
        (lambda t: t.transpose(2, 3), False),  # rows are not dense
        (lambda t: t[..., ::2], False),
        (lambda t: t[:, :1].expand(-1, 3, -1, -1), False),  # one memory for several tokens
        (lambda t: t.flatten()[:180].view(1, 3, 3, 20), False),  # rows of 40 bytes
        (lambda t: t.flatten()[:180].view(1, 3, 3, 20)[..., :16], False),
    ],
)
def test_alignment(view, fits):
    tensor = view(torch.randn(1, 3, 4, 16).bfloat16())
    assert is_aligned(tensor) == fits
    dense = aligned(tensor)
    assert is_aligned(dense) or dense.is_contiguous()
    assert torch.equal(dense, tensor) and (dense is tensor) == fits


@pytest.mark.parametrize("case", [*CASES, (CAUSAL, 9, 4, 2, 2, 32, torch.bfloat16)], ids=str)
def test_cudnn_is_called_as_it_wants(monkeypatch, case):
    made = cudnn(monkeypatch)
    kernel, tile = made.kernel, Masked(*case, device="cpu") if case[0] is CAUSAL else tile_of(case, device="cpu")
    tile.q, tile.k, tile.v, tile.grad = (one_number_off(t) for t in (tile.q, tile.k, tile.v, tile.grad))
    targets = room(tile.q, some_heads)
    into = Gradients(*(some_heads(torch.empty_like(t)) for t in (tile.q, tile.k, tile.v)))
    for part in (tile.forward(kernel), tile.forward(kernel, into=targets)):
        tile.hold_forward(part, EPSILON[tile.dtype])
    assert_same(part, targets)
    for gradients in (tile.backward(kernel), tile.backward(kernel, into=into)):
        tile.hold_backward(gradients, 1.5 * EPSILON[tile.dtype])
    assert_same(gradients, into)


def test_a_package_that_cannot_be_imported_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    q = torch.zeros(1, 4, 2, 16, dtype=torch.bfloat16)
    with refused("'fa3' | flash_attn_interface | cannot be imported", error=KernelError):
        FlashAttention3Kernel().forward(q, q, q, Scoring(CAUSAL, 1.0))


def query(head_dim=128, dtype=torch.bfloat16, heads=2, **_):
    """Return what a kernel looks at of a query on a GPU."""
    return SimpleNamespace(device=torch.device("cuda:0"), dtype=dtype, shape=(1, 8, heads, head_dim))


def kernels(capability, installed, cudnn=91900, **_):
    """Return the kernels of a machine with these packages."""
    return kernels_on(AnotherMachine(capability, installed, cudnn))


def test_packages_are_found_without_import():
    assert version_of("pytest") == pytest.version_tuple[:3]
    assert is_there("this") and "this" not in sys.modules  # Python's own, which prints when it is imported
    assert version_of("flash-attn-0") is None and not is_there("flash_attn_0")
    assert beta_of("flash-attn-0") is None and beta_of("pytest") is None


@pytest.mark.parametrize(
    ("version", "beta"), [("4.0.0b36", 36), ("4.0.0a7.dev1", 7), ("4.0.0rc1", None), ("4.1", None)]
)
def test_betas_are_told_from_later_versions(tmp_path, monkeypatch, version, beta):
    (tmp_path / "package_of_versions-1.dist-info").mkdir()
    (tmp_path / "package_of_versions-1.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: package-of-versions\nVersion: {version}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for function in (version_of, beta_of):
        function.cache_clear()
    assert beta_of("package-of-versions") == beta
    for function in (version_of, beta_of):
        function.cache_clear()


ALL = {"flash-attn": (2, 8, 3), "flash-attn-4": (4, 0, 0, 36), "flash_attn_interface": None}
CAPPED = {"needs": ("softcap",)}
BLOCKS = {"needs": ("blocks",)}
HOPPER, AMPERE, BLACKWELL, GEFORCE = (9, 0), (8, 0), (10, 0), (12, 0)


@pytest.mark.parametrize(
    ("capability", "installed", "options", "deterministic", "name"),
    [
        (HOPPER, ALL, {}, False, "fa4"),
        (HOPPER, ALL, {"head_dim": 256}, True, "fa4"),
        (HOPPER, {"flash-attn-4": (4, 0, 0)}, {}, False, "fa4"),
        (HOPPER, {"flash-attn-4": (4, 0, 0, 35)}, {}, False, "cudnn"),
        (HOPPER, {"flash_attn_interface": None}, {}, False, "fa3"),
        (HOPPER, {"flash_attn_interface": None}, {}, True, "torch"),
        (HOPPER, {}, {}, False, "cudnn"),
        (HOPPER, {}, {"cudnn": 0}, False, "torch"),
        (HOPPER, {"flash-attn": (2, 8, 3)}, {}, True, "fa2"),
        (HOPPER, {"flash-attn": (2, 6, 3)}, {}, True, "torch"),
        (AMPERE, ALL, {}, False, "fa2"),
        (AMPERE, {}, {"dtype": torch.float16}, False, "torch"),
        (BLACKWELL, ALL, {"head_dim": 256}, False, "fa2"),
        (GEFORCE, ALL, {}, False, "fa4"),
        (GEFORCE, ALL, {}, True, "fa2"),
        (HOPPER, ALL, {"dtype": torch.float64}, False, "reference"),
        (HOPPER, ALL, {"head_dim": 512}, False, "reference"),
        (HOPPER, ALL, CAPPED, True, "fa4"),
        (BLACKWELL, ALL, CAPPED, False, "fa4"),
        (HOPPER, {"flash_attn_interface": None}, CAPPED, False, "fa3"),
        (HOPPER, {"triton": None}, CAPPED, False, "triton"),
        (HOPPER, {}, CAPPED, False, "reference"),
        (AMPERE, ALL, CAPPED, False, "fa2"),
        (GEFORCE, ALL, CAPPED, False, "fa2"),
        (HOPPER, ALL | {"triton": None}, BLOCKS, False, "fa4"),
        (HOPPER, ALL | {"triton": None}, BLOCKS, True, "triton"),
        (HOPPER, ALL | {"triton": None}, BLOCKS | {"head_dim": 256}, False, "triton"),
        (HOPPER, ALL | {"triton": None}, {"needs": ("cells",)}, False, "triton"),
        (BLACKWELL, ALL | {"triton": None}, BLOCKS, False, "triton"),
    ],
    ids=str,
)
def test_the_fastest_that_can_is_chosen(capability, installed, options, deterministic, name):
    q, needs = query(**options), frozenset(options.get("needs", ()))
    able = kernels(capability, installed, **options)
    assert select_kernel("auto", q, q, deterministic, needs, kernels=able).name == name


@pytest.mark.parametrize(
    ("name", "capability", "installed", "options", "deterministic", "words"),
    [
        ("fa4", HOPPER, {}, {}, False, "package flash-attn-4"),
        ("fa4", HOPPER, {"flash-attn": (2, 8, 3)}, {}, False, "package flash-attn-4"),
        ("fa4", HOPPER, {"flash-attn-4": (4, 0, 0, 35)}, {}, False, "flash-attn-4 4.0.0b36 or newer | 4.0.0b35"),
        ("fa4", AMPERE, ALL, {}, False, "Hopper or Blackwell | a GPU"),
        ("fa4", BLACKWELL, ALL, {"head_dim": 136}, False, "multiples of 8 up to 128 | 136"),
        ("fa4", HOPPER, ALL, {"head_dim": 100}, False, "multiples of 8 up to 256 | 100"),
        ("fa4", HOPPER, ALL, {"dtype": torch.float32}, False, "float16 and bfloat16 | torch.float32"),
        ("fa4", GEFORCE, ALL, {}, True, "deterministic backward | a GPU"),
        ("fa3", BLACKWELL, ALL, {}, False, "Hopper alone | a GPU"),
        ("fa3", HOPPER, {}, {}, False, "flash_attn_interface"),
        ("fa3", HOPPER, ALL, {}, True, "deterministic backward"),
        ("cudnn", HOPPER, {}, {"cudnn": 90300}, False, "cuDNN 9.5.1 or newer | 90300"),
        ("cudnn", HOPPER, {}, {"cudnn": 90800, "head_dim": 256}, False, "up to 128 | 256"),
        ("cudnn", AMPERE, {}, {}, False, "Hopper or newer | a GPU"),
        ("cudnn", HOPPER, {}, {}, True, "deterministic backward | torch"),
        ("fa2", HOPPER, {"flash-attn-4": (4, 0, 0)}, {}, False, "package flash-attn\n"),
        ("fa2", HOPPER, {"flash-attn": (2, 6, 3)}, {}, False, "flash-attn 2.7 or newer | 2.6.3"),
        ("fa2", (7, 5), ALL, {}, False, "Ampere or newer | a GPU"),
        ("fa4", GEFORCE, ALL, CAPPED, False, "logit softcapping | a GPU | fa2"),
        ("cudnn", HOPPER, ALL, CAPPED, False, "logit softcapping | fa4, fa3, fa2"),
        ("torch", HOPPER, ALL, CAPPED, False, "logit softcapping | fa4, fa3, fa2"),
        ("fa4", HOPPER, ALL, {"needs": ("cells",)}, False, "block_size | multiple of 128 | Causal | ranks"),
        ("fa4", HOPPER, ALL, BLOCKS | {"head_dim": 72}, False, "head dims 64, 96, 128 alone | block-sparse masks | 72"),
        ("fa4", BLACKWELL, ALL, BLOCKS, False, "block-sparse masks | Hopper alone | a GPU"),
        ("fa4", HOPPER, ALL, BLOCKS, True, "deterministic backward | block-sparse masks"),
        ("fa4", HOPPER, ALL, {"needs": ("blocks", "softcap")}, False, "softcapping | block-sparse masks"),
        ("fa2", HOPPER, ALL, BLOCKS, False, "cannot do block-sparse masks"),
    ],
    ids=str,
)
def test_a_kernel_asked_for_says_why_not(name, capability, installed, options, deterministic, words):
    q, needs = query(**options), frozenset(options.get("needs", ()))
    with refused(f"kernel '{name}'", words, error=KernelError):
        select_kernel(name, q, q, deterministic, needs, kernels=kernels(capability, installed, **options))


@pytest.mark.parametrize(
    ("capability", "installed", "name", "widths", "needs", "pads"),
    [
        (HOPPER, ALL, "fa4", (192, 128), (), False),
        (HOPPER, ALL, "fa4", (96, 64), ("segments",), False),
        (HOPPER, ALL, "fa4", (128, 128), (), False),
        (HOPPER, ALL, "fa4", (128, 192), (), True),
        (HOPPER, ALL, "fa4", (192, 64), (), True),
        (HOPPER, ALL, "fa4", (96, 64), ("blocks",), True),
        (BLACKWELL, ALL, "fa4", (96, 64), (), True),
        (BLACKWELL, ALL, "fa2", (192, 128), (), True),
        (HOPPER, {"flash_attn_interface": None}, "fa3", (192, 128), (), True),
        (HOPPER, {}, "cudnn", (192, 128), (), False),
        (HOPPER, {}, "cudnn", (160, 128), (), True),
        (AMPERE, {}, "torch", (192, 128), (), True),
        (AMPERE, {"triton": None}, "triton", (40, 10), ("cells",), False),
        (HOPPER, ALL, "reference", (128, 512), (), False),
    ],
    ids=str,
)
def test_who_takes_two_widths(capability, installed, name, widths, needs, pads):
    """The choice is that of the wider head dim; "auto" but for block-sparse masks, where fa4 must be named."""
    head_dim, value_dim = widths
    q, able, name_asked = query(head_dim), kernels(capability, installed), "fa4" if "blocks" in needs else "auto"
    kernel = select_kernel(name_asked, q, q, False, frozenset(needs), value_dim, able)
    assert kernel.name == name and isinstance(kernel, PaddedKernel) == pads


@pytest.mark.parametrize(("installed", "name", "pads"), [(ALL, "fa4", True), ({}, "cudnn", False)])
def test_who_takes_two_widths_of_shared_kv_heads(installed, name, pads):
    q, k = query(192, heads=4), query(192)
    kernel = select_kernel("auto", q, k, False, frozenset(), 128, kernels(HOPPER, installed))
    assert kernel.name == name and isinstance(kernel, PaddedKernel) == pads


@pytest.mark.parametrize("kernel", [CudnnKernel(), FlashAttention3Kernel()], ids=lambda kernel: kernel.name)
def test_backward_never_breaks_the_promise_of_equal_bits(kernel):
    q, lse = torch.zeros(1, 4, 2, 16, dtype=torch.bfloat16), torch.zeros(1, 2, 4)
    with refused(f"kernel '{kernel.name}' | deterministic backward", error=KernelError):
        kernel.backward(BackwardInputs(q, q, q, q, lse, lse), Scoring(CAUSAL, 1.0), deterministic=True)


@pytest.mark.parametrize("kernel", [CudnnKernel(), TorchKernel(), CpuKernel()], ids=lambda kernel: kernel.name)
def test_a_kernel_without_a_softcap_never_leaves_it_out(kernel):
    q, lse = torch.zeros(1, 4, 2, 16, dtype=torch.bfloat16), torch.zeros(1, 2, 4)
    scoring = Scoring(CAUSAL, 1.0, 50.0)
    with refused(f"kernel '{kernel.name}' | logit softcapping", error=KernelError):
        kernel.forward(q, q, q, scoring)
    with refused(f"kernel '{kernel.name}' | logit softcapping", error=KernelError):
        kernel.backward(BackwardInputs(q, q, q, q, lse, lse), scoring, deterministic=False)


def test_another_implementation_in_place_of_torchs_is_refused():
    """It is asked at each call: users may activate it at any time."""
    attention.register_flash_attention_impl("ANOTHER", register_fn=lambda: SimpleNamespace(remove=lambda: None))
    q, able = query(), kernels(AMPERE, {})
    assert select_kernel("auto", q, q, kernels=able).name == "torch"
    attention.activate_flash_attention_impl("ANOTHER")
    try:
        assert select_kernel("auto", q, q, kernels=able).name == "reference"
        with refused("kernel 'torch' | ANOTHER | activate_flash_attention_impl | reference", error=KernelError):
            select_kernel("torch", q, q, kernels=able)
    finally:
        attention.restore_flash_attention_impl()
    assert select_kernel("auto", q, q, kernels=able).name == "torch"


@pytest.mark.parametrize("name", ["fa4", "fa3", "cudnn", "fa2"])
def test_gpu_kernels_refuse_cpu_tensors(name):
    q = torch.zeros(1, 4, 2, 16, dtype=torch.bfloat16)
    with refused(f"kernel '{name}' | NVIDIA GPUs | cpu", error=KernelError):
        select_kernel(name, q, q)


def test_looking_for_a_kernel_imports_nothing():
    before, q = set(sys.modules), query()
    assert select_kernel("auto", q, q, kernels=kernels(HOPPER, ALL)).name == "fa4"
    assert not {name for name in set(sys.modules) - before if name.startswith("flash_attn")}
