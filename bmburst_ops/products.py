"""Products of matrices of 16 bits that are summed, and kept, in fp32."""

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor, wide: torch.dtype) -> Tensor:
    """Return a @ b accumulated in, and never rounded below, the wide dtype."""
    if a.is_cuda and a.dtype != wide:
        return torch.mm(a, b, out_dtype=wide)
    return a.to(wide) @ b.to(wide)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to a wide total in place: a second tensor of the weight's size would cost its memory and traffic."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
