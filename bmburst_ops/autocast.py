"""Operations that compute in the dtypes of their inputs, also under torch.autocast."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def no_autocast(device: str) -> AbstractContextManager[Any]:
    """Return a context without autocast: the inputs' dtype decides, and sums are fp32 or wider."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def as_autocast_casts(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return tensors as torch.autocast casts those of a product: fp64 stays, other floats get its dtype."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    low = torch.get_autocast_dtype(device)
    return tuple(t.to(low) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors)
