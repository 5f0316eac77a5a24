"""The Triton twin of `linear_cross_entropy.cross_entropy_`: logits are read twice, the gradient is written once.

The normalizer is found in one reading (Milakov and Gimelshein, arXiv:1805.02867). Importing it needs Triton.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

_NUMBERS = 4096  # of a row, that a program holds


def cross_entropy_(logits: Tensor, labels: Tensor, ignore_index: int, gradient: Tensor | None) -> Tensor:
    """See `bmburst_ops.linear_cross_entropy.cross_entropy_`."""
    rows, width = logits.shape
    losses = torch.empty(rows, dtype=logits.dtype, device=logits.device)
    if rows:
        with torch.cuda.device_of(logits):  # Triton launches on the current device, wherever the tensors are
            _kernel[(rows,)](
                *(logits, labels, losses, logits if gradient is None else gradient, width, ignore_index),
                WITH_GRADIENT=gradient is not None,
                BLOCK=min(_NUMBERS, triton.next_power_of_2(width)),
                num_warps=8,
            )
    return losses


@triton.jit
def _kernel(
    logits, labels, losses, gradient, width, ignore_index, WITH_GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * width
    label = tl.load(labels + row)
    is_valid = label != ignore_index
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(at + columns, mask=columns < width, other=float("-inf"))
        larger = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), 0)
        largest = larger
    log_normalizer = largest + tl.log(total)
    target = tl.load(at + label, mask=is_valid, other=0.0)
    tl.store(losses + row, tl.where(is_valid, log_normalizer - target, 0.0))
    if WITH_GRADIENT:
        tl.debug_barrier()  # the gradient may lie where the target was read
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = tl.load(at + columns, mask=columns < width, other=float("-inf"))
            p = tl.exp(x - log_normalizer)
            p = tl.where(columns == label, p - 1.0, p)
            p = tl.where(is_valid, p, 0.0)
            tl.store(gradient + row * width + columns, p.to(gradient.dtype.element_ty), mask=columns < width)
