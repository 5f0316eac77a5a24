"""Where Triton's kernels stand in for their plain torch twins: the one place that decides.

The kernels are ours and not Liger-Kernel's (0.6.4), whose SwiGLU writes gradients over the inputs that autograd has
saved, whose rotary turns its inputs in place or copies heads that are a slice, and whose norm rounds twice as LLaMA's.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CAPABILITY = (8, 0)  # the first with bf16


def triton_twin(module: str, *tensors: Tensor) -> Any | None:
    """Return `bmburst_ops.<module>`, whose kernels do the work, or None where plain torch has to.

    Args:
        module: Its name. It needs Triton, so it is imported here and nowhere else.
        tensors: What it would read, at least one. Kernels take fp32 and 16 bits, on one NVIDIA GPU.
    """
    device = tensors[0].device
    is_taken = all(t.is_cuda and t.device == device and t.dtype in _DTYPES for t in tensors)
    return _module(module) if is_taken and torch.cuda.get_device_capability(device) >= _CAPABILITY else None


@cache
def _module(name: str) -> Any | None:
    return None if find_spec("triton") is None else import_module(f"bmburst_ops.{name}")
