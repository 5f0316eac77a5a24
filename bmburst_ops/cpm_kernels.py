"""RMSNorm forward with the package cpm-kernels (OpenBMB, 1.0.11), for fp16 where Triton's kernels do not run.

Two of its kernels fit: `layernorm_step` without mean, for contiguous rows of features with sums in fp32, and
`arith_batch_mul` for the weight. Its other norms, which have a backward, need the features in the middle,
`[batch, features, tokens]`: with rows of features, 31 of 32 threads would be idle. It has no SiLU, no rotary embedding,
and no cross entropy of fp32 logits. For sums and products of two tensors torch is as good.

The package contains machine code for sm_61 to sm_86, without PTX that a driver could compile for newer GPUs. Importing
it needs a driver, the CUDA runtime and cuBLASLt as system libraries, and `pkg_resources` (setuptools before 82). So it
is imported at first use. We have not run it, because we have no GPU that it supports. Tests use a stand-in with the
same signatures, which does the same as its published CUDA sources.
"""

import torch
from torch import Tensor

from bmburst_ops.flash.limits import import_package, is_there

NAME = "cpm-kernels"
_MODULE = "cpm_kernels"
_FROM, _BELOW = (7, 0), (9, 0)  # machine code runs on GPUs of the same major version, from its minor version on
_NUMBERS = 2**31 - 1  # elements per call: the package counts them in 32 bits


def refusal(x: Tensor, weight: Tensor) -> str | None:
    """Return why the package does not support these tensors, as a phrase after the kernel's name; None if it does."""
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
    """Return the norm of fp16 x, contiguous, rounded before and after the weight; the package returns no statistic.

    Raises:
        KernelError: The package cannot be imported.
    """
    package = import_package(_MODULE, NAME)
    features = x.shape[-1]
    rows = x.reshape(-1, features).contiguous()
    result = torch.empty_like(rows)
    factors = weight.to(torch.float16, copy=True)  # aligned: the kernel reads pairs of numbers
    stream = torch.cuda.current_stream(x.device).cuda_stream
    most = _NUMBERS // features
    with torch.cuda.device_of(x):  # the package launches on the current device
        for given, out in zip(rows.split(most), result.split(most), strict=True):
            if not len(given):
                continue
            size = len(given), features
            package.layernorm_step(*size, given.data_ptr(), out.data_ptr(), eps, False, stream)
            package.arith_batch_mul(*size, out.data_ptr(), factors.data_ptr(), out.data_ptr(), stream)
    return result.view(x.shape), None
