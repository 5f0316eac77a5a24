"""AdamW on 16-bit weights with fp32 state, each tensor read and written once. Importing it needs Triton.

The arithmetic is that of BMTrain's kernel for bf16 weights (csrc/cuda/adam_cuda.cu, 1.0.1): the state is the same, and
results differ only by the compiler's fused multiply-adds. A thread of BMTrain's kernel accesses one element of each
tensor; here it accesses 16 bytes, because the kernel is bound by memory traffic, 28 bytes per element.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import ctypes

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # elements per program: 8 for each of its 128 threads


def adamw_(
    master: Tensor,
    weights: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    scale: float,
) -> None:
    """Take one step of AdamW (arXiv:1711.05101, algorithm 2) in place.

    Args:
        master: fp32 master weights; contiguous, as all tensors.
        weights: 16-bit weights, only written: the master rounded to nearest even.
        gradient: In the dtype of `weights`.
        mean: First moment, fp32.
        square: Second moment, fp32.
        lr: Learning rate.
        betas: Decay of the moments.
        eps: Added to the root of the second moment.
        weight_decay: Per unit of `lr`.
        step: Number of steps taken, including this one.
        scale: The gradient is divided by it; the result is exact if it is a power of 2.
    """
    tensors = master, weights, gradient, mean, square
    assert all(t.is_contiguous() and t.numel() == master.numel() for t in tensors)
    if not master.numel():
        return
    kept = [_in_fp32(beta) for beta in betas]
    added = [_in_fp32(1 - beta) for beta in kept]  # as C subtracts floats: for 0.999 the error is 1e-5
    corrections = [1 - beta**step for beta in betas]
    numbers = (*kept, *added, eps, lr / corrections[0], 1 / corrections[1], lr * weight_decay, 1 / scale)
    with torch.cuda.device_of(master):  # Triton launches on the current device, wherever the tensors are
        _kernel[(triton.cdiv(master.numel(), _BLOCK),)](*tensors, master.numel(), *numbers, BLOCK=_BLOCK, num_warps=4)


def _in_fp32(value: float) -> float:
    return ctypes.c_float(value).value


@triton.jit
def _kernel(
    master, weights, gradient, mean, square, count,
    kept1, kept2, added1, added2, eps, rate, square_factor, decay, unscale, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * unscale
    m = kept1 * tl.load(mean + at, mask=inside, other=0.0) + added1 * g
    v = kept2 * tl.load(square + at, mask=inside, other=0.0) + added2 * g * g
    p = tl.load(master + at, mask=inside, other=0.0)
    p -= tl.div_rn(rate * m, tl.sqrt_rn(v * square_factor) + eps) + decay * p
    tl.store(mean + at, m, mask=inside)
    tl.store(square + at, v, mask=inside)
    tl.store(master + at, p, mask=inside)
    tl.store(weights + at, p.to(weights.dtype.element_ty), mask=inside)
