"""Operations that compute in the dtypes of their inputs, also under torch.autocast."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def no_autocast(device: str) -> AbstractContextManager[Any]:
    """Return a context without autocast: the inputs' dtype decides, and sums are fp32 or wider."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def is_cast_by_autocast(tensor: Tensor) -> bool:
    """Return whether torch.autocast casts a tensor before a product: floats except those of fp64."""
    return tensor.is_floating_point() and tensor.dtype != torch.float64


def as_autocast_casts(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return tensors as torch.autocast casts those of a product: in its dtype."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    low = torch.get_autocast_dtype(device)
    return tuple(t.to(low) if is_cast_by_autocast(t) else t for t in tensors)
