"""RMSNorm's forward by the package cpm-kernels (OpenBMB, 1.0.11), for fp16 where Triton's kernels do not run.

Of its kernels two fit what bmburst computes: `layernorm_step` without mean, which takes rows of features one after
another and sums in fp32, and `arith_batch_mul` for the weight. Its other norms, with their backward, want the features
in the middle, `[batch, features, tokens]`: for rows of features 31 of 32 of their threads would have nothing to do. It
has no SiLU, rotary embedding or cross entropy of logits in fp32; sums and products of two tensors torch has as well.

The package holds machine code (sm_61 to sm_86) and nothing that a driver could adapt. Importing it needs a driver, the
CUDA runtime and cuBLASLt as shared libraries of the system, and `pkg_resources` (setuptools before 82), so it is
imported where it is first used. We have not run it: we have no GPU that it runs on. Tests call a stand-in with its
signatures, which does what its published CUDA sources do.
"""

import torch
from torch import Tensor

from bmburst_ops.flash.limits import import_package, is_there

NAME = "cpm-kernels"
_MODULE = "cpm_kernels"
_FROM, _BELOW = (7, 0), (9, 0)  # machine code runs on its own generation, from its own minor number on
_NUMBERS = 2**31 - 1  # of a call: it counts them in 32 bits


def refusal(x: Tensor, weight: Tensor) -> str | None:
    """Return why it cannot take these, as words behind the kernel's name, or None."""
    if not x.is_cuda or weight.device != x.device:
        return f"runs on NVIDIA GPUs only, and the tensors are on {x.device} and {weight.device}"
    found = torch.cuda.get_device_capability(x.device)
    if not _FROM <= found < _BELOW:
        return f"has machine code for compute capability 7.0 to 8.9 alone, and this GPU has {found[0]}.{found[1]}"
    if x.dtype != torch.float16:
        return f"takes float16 only, got {x.dtype}"
    if x.shape[-1] % 2 or x.shape[-1] > _NUMBERS:
        return f"takes an even number of features, got {x.shape[-1]}"
    if not is_there(_MODULE):
        return "is not installed: pip install bmburst[cpm-kernels]"
    return None


def norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, None]:
    """Return the norm of fp16 x, contiguous, rounded before the weight and again after; it tells no statistic.

    Raises:
        KernelError: The package cannot be imported.
    """
    package = import_package(_MODULE, NAME)
    features = x.shape[-1]
    rows = x.reshape(-1, features).contiguous()
    result = torch.empty_like(rows)
    factors = weight.to(torch.float16, copy=True)  # it reads pairs, which a part of a larger tensor may not begin with
    stream = torch.cuda.current_stream(x.device).cuda_stream
    most = _NUMBERS // features
    with torch.cuda.device_of(x):  # it launches on the current device
        for given, out in zip(rows.split(most), result.split(most), strict=True):
            if not len(given):
                continue
            size = len(given), features
            package.layernorm_step(*size, given.data_ptr(), out.data_ptr(), eps, False, stream)
            package.arith_batch_mul(*size, out.data_ptr(), factors.data_ptr(), out.data_ptr(), stream)
    return result.view(x.shape), None
