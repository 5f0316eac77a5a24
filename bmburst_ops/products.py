"""Products of matrices of 16 bits that are summed, and kept, in fp32."""

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor, wide: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    """Return a @ b accumulated in, and never rounded below, the wide dtype; in `out`, if that is given."""
    if a.is_cuda and a.dtype != wide:
        return torch.mm(a, b, out_dtype=wide, out=out)
    return torch.mm(a.to(wide), b.to(wide), out=out)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to a wide total in place: a second tensor of the weight's size would cost its memory and traffic."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
