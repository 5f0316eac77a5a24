"""Memory that kernels read from and write to: what vector loads and TMA can address, and results put where asked."""

import torch
from torch import Tensor

from bmburst_ops.flash.kernel import Gradients, Partial

_VECTOR = 16  # bytes: a vector load, and the unit of TMA's addresses and strides


def is_aligned(tensor: Tensor, unit: int = _VECTOR) -> bool:
    """Whether rows are dense, start at multiples of so many bytes, and no dimension repeats the same memory."""
    *strides, last = tensor.stride()
    step = unit // tensor.element_size()
    return last == 1 and tensor.data_ptr() % unit == 0 and all(s > 0 and s % step == 0 for s in strides)


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor as GPU kernels can read it, a copy only where it is not."""
    return tensor if is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def writable(target: Tensor | None, like: Tensor) -> Tensor | None:
    """Return the target if a GPU kernel whose results are typed as `like` can write there itself, or else None."""
    return target if target is not None and target.dtype is like.dtype and is_aligned(target) else None


def writable_statistic(target: Tensor | None) -> Tensor | None:
    """Return the target if a GPU kernel that stores fp32 statistics number by number can write there, or else None."""
    fits = target is not None and target.dtype is torch.float32 and is_aligned(target, target.element_size())
    return target if fits else None


def deliver(result: Tensor, target: Tensor | None) -> Tensor:
    """Return the result where it was asked for: copied unless it is there already, or nobody asked."""
    if target is None:
        return result
    return target if _is_same(result, target) else target.copy_(result)


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Whether these are one memory, seen the same way."""
    if a is b:
        return True
    if a.dtype is not b.dtype or a.shape != b.shape or not a.data_ptr() == b.data_ptr() != 0:
        return False
    # The stride of a dimension of one says nothing, and what was flattened and unflattened has another.
    return all(mine == theirs or size == 1 for size, mine, theirs in zip(a.shape, a.stride(), b.stride(), strict=True))


def deliver_partial(result: Partial, into: Partial | None) -> Partial:
    """Return output and log-sum-exp where they were asked for, as `deliver`."""
    return result if into is None else Partial(*map(deliver, result, into))


def deliver_gradients(results: Gradients, into: Gradients | None) -> Gradients:
    """Return the gradients where they were asked for, as `deliver`."""
    return results if into is None else Gradients(*map(deliver, results, into))


def gradient_memory(q: Tensor, k: Tensor, v: Tensor, into: Gradients | None) -> Gradients:
    """Return what a kernel may write gradients to: what the caller gave where it can, and new memory elsewhere."""
    targets = (None, None, None) if into is None else into
    written = (writable(target, like) for target, like in zip(targets, (q, k, v), strict=True))
    return Gradients(*(torch.empty_like(x) if t is None else t for t, x in zip(written, (q, k, v), strict=True)))
