"""Raw addresses, as C functions take them, seen as tensors."""

import ctypes

import torch
from torch import Tensor


def view(address: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return the `count` elements at `address` as a tensor that shares their memory and does not keep it alive.

    Args:
        address: First byte, as from `Tensor.data_ptr`. May be 0 where `count` is 0.
        count: Number of elements, at least 0.
        dtype: What the memory holds.
    """
    if count == 0:
        return torch.empty(0, dtype=dtype)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)
