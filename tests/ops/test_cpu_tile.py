"""Attention of long tiles on one thread of a CPU, as its definition in fp64 has it."""

from functools import partial

import pytest
import torch

from bmburst_ops.flash import BackwardInputs, Gradients, Partial, cpu
from bmburst_ops.flash.cpu import CpuKernel
from tests.ops.another_machine import AnotherMachine
from tests.ops.masked import tile_of
from tests.ops.tiles import EPSILON, assert_same, error, every_second, room, some_heads

# Products are added up in fp32, 64 at a time: a few roundings.
NEAR = 1e-6
TILE = (1, 65, 130, True, 2, 1, 32, torch.float32)


def of_any_length():
    """Return the kernel that takes the C kernel for tiles of any length."""
    return CpuKernel(AnotherMachine(cpu="AVX512"), least_scores=0)


of_cpu = partial(tile_of, device="cpu")


def passes(tile, library=None):
    """Return output, statistics and gradients."""
    q, k, v, grad = tile.q, tile.k, tile.v, tile.grad
    library = library or cpu.compile_for(q.shape[3])
    options = {"causal": tile.pattern.right == 0, "scale": tile.scale}
    part = cpu.forward_tile(library, q, k, v, **options)
    return *part, *cpu.backward_tile(library, BackwardInputs(grad, q, k, v, *tile.statistics), **options)


@pytest.mark.parametrize(
    ("batch", "rows", "columns", "causal"),
    [(1, 1, 3, True), (2, 97, 131, True), (1, 64, 64, True), (1, 64, 129, False), (2, 130, 67, False)],
)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 2, 32), (4, 2, 64), (3, 1, 128)])
def test_tile_equals_the_definition(batch, rows, columns, causal, heads, kv_heads, head_dim):
    tile = of_cpu((batch, rows, columns, causal, heads, kv_heads, head_dim, torch.float32))
    for ours, wanted in zip(passes(tile), (tile.out, tile.lse, *tile.gradients), strict=True):
        assert error(ours, wanted) < NEAR


def test_large_scores():
    """Weights from 1 down to what fp32 cannot hold; the largest score of a query moves from block to block."""
    tile = of_cpu((1, 70, 200, True, 2, 1, 32, torch.float32), spread=12.0)
    assert tile.lse.max() > 100 and tile.gradients[0].norm() > 0
    for ours, wanted in zip(passes(tile), (tile.out, tile.lse, *tile.gradients), strict=True):
        assert error(ours, wanted) < 100 * NEAR  # scores of some hundreds are rounded, and a power takes that as it is


def test_any_strides():
    tile = of_cpu(TILE)
    dense = passes(tile)
    for view in (some_heads, every_second, lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)):
        other = of_cpu(TILE)
        for name in ("q", "k", "v", "grad"):
            setattr(other, name, view(getattr(tile, name)))
        for ours, same in zip(passes(other), dense, strict=True):
            assert torch.equal(ours, same)


@pytest.mark.parametrize("name", ["q", "k", "v", "grad"])
def test_what_is_not_a_number_is_shown_and_stays_in_its_sample(name):
    clean, spoiled = of_cpu((2, *TILE[1:])), of_cpu((2, *TILE[1:]))
    getattr(spoiled, name)[1, 60, 0, 5] = torch.nan
    wanted, found = passes(clean), passes(spoiled)
    assert all(torch.equal(x[0], y[0]) for x, y in zip(found, wanted, strict=True))
    shown = [not x[1].isfinite().all() for x in found]
    assert shown == [name != "grad", name in "qk", True, True, name != "v"]


@pytest.fixture
def one_thread():
    """As on a rank of the host runtime."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def calls(one_thread, monkeypatch):
    """The names of what is called of the C kernel."""
    names = []
    for name in ("forward_tile", "backward_tile"):
        real = getattr(cpu, name)
        monkeypatch.setattr(cpu, name, lambda *a, _n=name, _f=real, **o: (names.append(_n), _f(*a, **o))[1])
    return names


def test_the_kernel_uses_it_and_writes_where_it_is_told(calls):
    tile, kernel = of_cpu(TILE), of_any_length()
    into = room(tile.q, some_heads)
    part = tile.forward(kernel, into=into)
    assert_same(part, into)
    given = Gradients(*(some_heads(torch.full_like(t, torch.nan)) for t in (tile.q, tile.k, tile.v)))
    gradients = tile.backward(kernel, into=given)
    assert_same(gradients, given)
    assert calls == ["forward_tile", "backward_tile"]
    for ours, wanted in zip((*part, *gradients), (tile.out, tile.lse, *tile.gradients), strict=True):
        assert error(ours, wanted) < NEAR


@pytest.mark.parametrize("case", [(*TILE[:-1], torch.bfloat16), (*TILE[:-2], 16, torch.float32)], ids=["bf16", "width"])
def test_torch_computes_other_tiles(calls, case):
    tile = of_cpu(case)
    assert error(tile.forward(of_any_length()).out, tile.out) < 4 * EPSILON[torch.bfloat16]
    assert not calls


def test_torch_computes_where_several_threads_may(calls):
    torch.set_num_threads(2)
    tile = of_cpu(TILE)
    assert error(tile.forward(of_any_length()).out, tile.out) < NEAR
    assert not calls


def test_torch_computes_without_a_compiler(calls, monkeypatch):
    cpu.compile_for.cache_clear()
    monkeypatch.setenv("PATH", "")
    tile = of_cpu(TILE)
    try:
        assert isinstance(tile.forward(of_any_length()), Partial) and not calls
    finally:
        cpu.compile_for.cache_clear()
