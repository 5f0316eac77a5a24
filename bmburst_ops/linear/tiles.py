"""Sizes of tiles and of memory that the Triton kernels of recurrences share."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

COLUMNS = 64
"""Columns of a state for a program."""
WIDE = 128
"""Wider keys take more warps."""
SCRATCH = 32 << 10
"""Bytes of shared memory for other things than loads."""
ROOM = 96 << 10
"""Bytes of shared memory for loads of wide keys in wide blocks; Ada and consumers' GPUs have less."""


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have; 0 on a CPU, in Triton's interpreter."""
    if device.type == "cpu":
        return 0
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def floats(like: Tensor, *shape: int) -> Tensor:
    """Return memory for fp32 on the device of a tensor."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)
