"""Selection between Triton kernels and their plain torch twins: `triton_twin`. No other module decides this.

Liger-Kernel (0.6.4) is not used, for three reasons. Its SwiGLU overwrites saved inputs with gradients. Its rotary
embedding rotates its inputs in place, or copies heads that are a slice. Its norm rounds twice, as Hugging Face's LLaMA.
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
    """Return the module `bmburst_ops.<module>` if its Triton kernels support these tensors; None: use plain torch.

    Args:
        module: Name of the module. It needs Triton, so it is imported only here.
        tensors: Inputs of the operation, at least one. Kernels support fp32 and 16-bit dtypes on one NVIDIA GPU.
    """
    device = tensors[0].device
    is_taken = all(t.is_cuda and t.device == device and t.dtype in _DTYPES for t in tensors)
    return _module(module) if is_taken and torch.cuda.get_device_capability(device) >= _CAPABILITY else None


@cache
def _module(name: str) -> Any | None:
    return None if find_spec("triton") is None else import_module(f"bmburst_ops.{name}")
