"""Every kernel that takes 16 bits here, in bf16 and fp16, against the definition in fp64.

FlashAttention-4 compiles each head dim, mask, GQA ratio and dtype anew, so tests share a few cases.
"""

import math

import pytest
import torch

from bmburst_ops.flash import CAUSAL, FULL, KERNELS, BackwardInputs, Gradients, Scoring
from bmburst_ops.merge import merge_partials_
from tests.ops.masked import tile_of
from tests.ops.masks import attention
from tests.ops.tiles import (
    DEVICE,
    EPSILON,
    assert_same,
    error,
    every_second,
    head_major,
    one_number_off,
    room,
    some_heads,
    wider_room,
)


def takes(kernel, head_dim=64, dtype=torch.bfloat16, deterministic=False):
    q = torch.empty(1, 1, 1, head_dim, dtype=dtype, device=DEVICE)
    able = not deterministic or kernel.nondeterminism(q) is None
    return able and kernel.refusal(q, q) is None


# On CPUs "triton" is its interpreter, whose tests are its own.
HALF = [kernel for kernel in KERNELS if takes(kernel) and (DEVICE == "cuda" or kernel.name != "triton")]
# batch, rows, columns, causal, heads, kv_heads, head_dim, dtype
SQUARE = (1, 257, 257, True, 4, 4, 128, torch.bfloat16)
CASES = [
    SQUARE,
    (2, 131, 300, True, 4, 4, 128, torch.bfloat16),
    (1, 1, 199, True, 4, 4, 128, torch.bfloat16),
    (1, 201, 202, True, 4, 4, 128, torch.bfloat16),  # one key more than queries: a cut of one column
    (1, 391, 301, False, 6, 2, 128, torch.bfloat16),
    (2, 150, 277, True, 4, 2, 64, torch.bfloat16),
    (1, 150, 277, False, 2, 2, 96, torch.float16),
    (1, 150, 277, True, 4, 2, 256, torch.bfloat16),
]
each_kernel = pytest.mark.parametrize("kernel", HALF, ids=lambda kernel: kernel.name)


def bound(kernel, tile):
    """Relative error of a gradient: weights, dS and the result are rounded; "cpu" also sums dK and dV in 16 bits."""
    return (2.5 if kernel.name == "cpu" else 1.5) * EPSILON[tile.dtype]


@each_kernel
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tile_is_as_exact_as_its_dtype(kernel, case):
    if not takes(kernel, case[-2], case[-1]):
        assert kernel.name != "reference"
        return  # its refusal is what test_flash_packages looks at
    tile = tile_of(case)
    part = tile.forward(kernel)
    assert part.out.dtype in (tile.dtype, torch.float32) and part.lse.dtype is torch.float32
    # The weights and the output are rounded once each to the dtype, half an epsilon at most.
    tile.hold_forward(part, EPSILON[tile.dtype], 1e-4)
    tile.hold_backward(tile.backward(kernel), bound(kernel, tile))


@each_kernel
@pytest.mark.parametrize("case", [CASES[1], CASES[4]], ids=str)
def test_peaked_softmax_keeps_delta_exact(kernel, case):
    """With scores of standard deviation 16, delta taken from an O of 16 bits doubles the error: 5.6e-3 in bf16."""
    tile = tile_of(case, spread=4.0)
    tile.hold_backward(tile.backward(kernel), 4e-3 if kernel.name != "cpu" else bound(kernel, tile))


@each_kernel
def test_tiles_of_one_softmax_add_up(kernel):
    tile = tile_of(CASES[4])
    heads, rows = tile.lse.shape[1:]
    out = torch.zeros(tile.out.shape, device=DEVICE)
    lse = torch.full((1, heads, rows), -torch.inf, device=DEVICE)
    scoring = Scoring(FULL, tile.scale)
    grads = []
    for keys in (slice(0, 150), slice(150, None)):
        k, v = tile.k[:, keys], tile.v[:, keys]
        merge_partials_(out, lse, *kernel.forward(tile.q, k, v, scoring))
        given = BackwardInputs(tile.grad, tile.q, k, v, *tile.statistics)
        grads.append(kernel.backward(given, scoring, deterministic=False))
    tile.hold_forward((out, lse), EPSILON[tile.dtype], 1e-4)
    joined = (grads[0].q.double() + grads[1].q, *(torch.cat([g[i] for g in grads], 1) for i in (1, 2)))
    tile.hold_backward(joined, bound(kernel, tile))


@each_kernel
@pytest.mark.parametrize("case", [CASES[1], CASES[4]], ids=str)
@pytest.mark.parametrize("view", [some_heads, head_major, one_number_off], ids=lambda view: view.__name__)
def test_strides_in_and_out(kernel, case, view):
    """Whatever the strides of inputs and results, the numbers are those of dense ones, and are where asked for."""
    tile = tile_of(case)
    dense, gradients = tile.forward(kernel), tile.backward(kernel)
    tile.q, tile.k, tile.v, tile.grad = (view(t) for t in (tile.q, tile.k, tile.v, tile.grad))
    tile.statistics = tuple(every_second(t) for t in tile.statistics)
    targets = room(tile.q, view)
    into = Gradients(*(view(torch.full_like(t, math.nan)) for t in (tile.q, tile.k, tile.v)))
    out, lse = part = tile.forward(kernel, into=targets)
    assert_same(part, targets)
    torch.testing.assert_close(out, dense.out.to(out.dtype))
    torch.testing.assert_close(lse, dense.lse)
    assert lse._base.isnan().sum() == lse._base.numel() - lse.numel()  # nothing is written beside it
    results = tile.backward(kernel, into=into)
    for ours, target, wanted in zip(results, into, gradients, strict=True):
        assert ours is target
        assert error(target, wanted.double().cpu()) < EPSILON[tile.dtype]  # atomics add in any order


@each_kernel
def test_results_go_into_wider_memory(kernel):
    tile = tile_of(CASES[5])
    targets = wider_room(tile.q)
    into = Gradients(*(torch.full(t.shape, math.nan, device=DEVICE) for t in (tile.q, tile.k, tile.v)))
    assert_same(tile.forward(kernel, into=targets), targets)
    tile.hold_forward(targets, EPSILON[tile.dtype], 1e-4)
    tile.backward(kernel, into=into)
    tile.hold_backward(into, bound(kernel, tile))


@each_kernel
@pytest.mark.parametrize("case", [SQUARE, CASES[5]], ids=str)
def test_deterministic_gradients_are_bit_equal(kernel, case):
    if not takes(kernel, case[-2], case[-1], deterministic=True):
        assert kernel.name in ("cudnn", "fa3")
        return
    tile = tile_of((1, 1031, 1031, *case[3:]))
    first = tile.backward(kernel, deterministic=True)
    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(tile.backward(kernel, deterministic=True), first, strict=True))
    tile.hold_backward(first, bound(kernel, tile))


@pytest.mark.parametrize("kernel", [kernel for kernel in HALF if kernel.takes_delta], ids=lambda kernel: kernel.name)
def test_delta_counts_where_the_gradient_is_zero(kernel):
    """The gradient of a log-sum-exp is a delta beside a dO that may be zero: dS = -P * delta."""
    tile = tile_of(SQUARE)
    leaves = [t.double().cpu().requires_grad_() for t in (tile.q, tile.k, tile.v)]
    _, lse = attention(*leaves, CAUSAL, tile.scale)
    expected = torch.autograd.grad(lse, leaves[:2], -tile.delta)
    tile.grad = torch.zeros_like(tile.grad)
    grad_q, grad_k, grad_v = tile.backward(kernel)
    assert error(grad_q, expected[0]) < bound(kernel, tile)
    assert error(grad_k, expected[1]) < bound(kernel, tile)
    assert not grad_v.any()


@each_kernel
def test_bmtrain_turns_cudnn_off(kernel):
    """It does so for the whole process, to say that convolutions shall not use it."""
    tile = tile_of(SQUARE)
    with torch.backends.cudnn.flags(enabled=False):
        assert kernel.refusal(tile.q, tile.k) is None
        assert error(tile.forward(kernel).out, tile.out) < EPSILON[tile.dtype]
        assert error(tile.backward(kernel).q, tile.gradients[0]) < bound(kernel, tile)
