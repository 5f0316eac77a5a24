"""Tensors as libraries move them: dense, and where nothing is added up, as bytes."""

from collections.abc import Sequence

import torch
from torch import Tensor


def contiguous(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors as they can be sent, outside of any graph."""
    return tuple(t.detach().contiguous() for t in tensors)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's memory, uint8 `[bytes]`: what is only moved moves in any dtype."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # of one number any stride is contiguous
