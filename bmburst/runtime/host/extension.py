"""The stand-in for BMTrain's compiled extension `bmtrain.C`: every name that its csrc/bind.cpp defines."""

import types
from collections.abc import Callable
from functools import partial

import torch

from bmburst.runtime.host import kernels
from bmburst.runtime.host.nccl import Nccl

NAME = "bmtrain.C"
MARK = "__bmburst_host_runtime__"


def build(nccl: Nccl) -> types.ModuleType:
    """Return the module."""
    module = types.ModuleType(NAME, "BMTrain's extension on the CPU, by bmburst's host runtime.")
    functions: dict[str, Callable[..., object]] = {
        "is_bf16_supported": lambda: 1,
        "to_fp16_from_fp32": partial(kernels.cast, dtype=kernels.F16),
        "to_bf16_from_fp32": partial(kernels.cast, dtype=kernels.BF16),
    }
    launchers: tuple[Callable[..., None], ...] = (
        has_nan_inf,
        adam,
        adam_cpu,
        cross_entropy_forward,
        cross_entropy_backward_inplace,
        fused_sumexp,
        fused_softmax_inplace,
    )
    for suffix, dtype in (("fp16", kernels.F16), ("bf16", kernels.BF16)):
        for launcher in launchers:
            functions[f"{launcher.__name__}_{suffix}_launcher"] = partial(launcher, dtype=dtype)
    functions |= {name: getattr(nccl, name) for name in dir(nccl) if name.startswith("nccl")}
    vars(module).update(functions)
    vars(module)[MARK] = nccl
    return module


def has_nan_inf(n: int, g: int, mid: int, out: int, stream: int, *, dtype: torch.dtype) -> None:
    """See `kernels.has_nan_inf`; `mid` is scratch memory of the CUDA kernel."""
    del mid, stream
    kernels.has_nan_inf(n, g, out, dtype)


def adam(
    n: int, p: int, p_low: int, g: int, m: int, v: int,
    beta1: float, beta2: float, eps: float, lr: float, scale: float, decay: float,
    correction1: float, correction2: float, stream: int, *, dtype: torch.dtype,
) -> None:  # fmt: skip
    """BMTrain's CUDA Adam: see `kernels.adam`. The fp16 one keeps its moments times the loss scale."""
    del stream
    kernels.adam(
        n, p, p_low, g, m, v, (beta1, beta2), eps, lr, scale, decay, (correction1, correction2),
        dtype=dtype, scaled_moments=dtype == kernels.F16,
    )  # fmt: skip


def adam_cpu(
    n: int, p: int, p_low: int, delta_info: int, g: int, m: int, v: int,
    beta1: float, beta2: float, eps: float, lr: float, scale: float, decay: float,
    correction1: float, correction2: float, *, dtype: torch.dtype,
) -> None:  # fmt: skip
    """BMTrain's CPU Adam, of AdamOffloadOptimizer: see `kernels.adam`."""
    kernels.adam(
        n, p, p_low, g, m, v, (beta1, beta2), eps, lr, scale, decay, (correction1, correction2),
        dtype=dtype, delta_info=delta_info,
    )  # fmt: skip


def cross_entropy_forward(
    m: int, n: int, x: int, target: int, softmax: int, out: int, ignore: int, stream: int, *, dtype: torch.dtype
) -> None:
    """See `kernels.cross_entropy_forward`."""
    del stream
    kernels.cross_entropy_forward(m, n, x, target, softmax, out, ignore, dtype)


def cross_entropy_backward_inplace(
    m: int, n: int, grad: int, target: int, x: int, ignore: int, stream: int, *, dtype: torch.dtype
) -> None:
    """See `kernels.cross_entropy_backward`; an ignored row's incoming gradient is already 0."""
    del ignore, stream
    kernels.cross_entropy_backward(m, n, grad, target, x, dtype)


def fused_sumexp(m: int, n: int, x: int, largest: int, out: int, stream: int, *, dtype: torch.dtype) -> None:
    """See `kernels.sum_exp`."""
    del stream
    kernels.sum_exp(m, n, x, largest, out, dtype)


def fused_softmax_inplace(m: int, n: int, x: int, largest: int, total: int, stream: int, *, dtype: torch.dtype) -> None:
    """See `kernels.softmax`."""
    del stream
    kernels.softmax(m, n, x, largest, total, dtype)
