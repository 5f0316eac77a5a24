"""Asking kernels before there is any tensor: a launcher's question, and no memory of a GPU is taken for it."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Queries:
    """What a kernel asks of queries before it takes them."""

    device: torch.device
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_cuda: bool


def queries_ahead(device: torch.device, dtype: torch.dtype, head_dim: int) -> Tensor:
    """Return what stands for queries, or keys, in `select_kernel`, `able_kernels` and `Kernel.refusal` alone.

    Args:
        device: Where they will be.
        dtype: Theirs.
        head_dim: Features of a head.
    """
    return cast(Tensor, _Queries(device, dtype, (1, 1, 1, head_dim), device.type == "cuda"))
