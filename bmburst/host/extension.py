"""Replaces BMTrain's extension `bmtrain.C` without CUDA: its kernels as torch operations, and NCCL over gloo.

The replacement has every name that BMTrain's csrc/bind.cpp defines. The formulas are those of BMTrain 1.0.1's csrc
(adam_cuda.cu, adam_cpu.hpp, cross_entropy.cu, has_inf_nan.cu), computed in fp32. One result differs on purpose:
BMTrain's CPU code truncates fp32 to bf16, which shrinks weights by 0.28 % on average. This module rounds to nearest, as
BMTrain's CUDA code does.

Pointers are addresses of contiguous memory. Streams are ignored, because operations run at once.
"""

import ctypes
import types
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from bmburst.host.cuda import view
from bmburst.host.nccl import Nccl

EXTENSION = "bmtrain.C"
MARK = "__bmburst_host_runtime__"
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
_LOWEST_MAXIMUM = -1e6  # cross_entropy.cu: a row of -inf has this maximum
_NOT_ZERO = 1e-10  # cross_entropy.cu: added to a sum of exponentials before dividing by it
_BLOCK = 1 << 22  # elements of a logits block that is held in fp32 at a time


def build_extension(nccl: Nccl) -> types.ModuleType:
    """Return the module that replaces `bmtrain.C`."""
    module = types.ModuleType(EXTENSION, "BMTrain's extension on the CPU, by bmburst's host runtime.")
    functions: dict[str, Callable[..., object]] = {
        "is_bf16_supported": lambda: 1,
        "to_fp16_from_fp32": partial(cast, dtype=F16),
        "to_bf16_from_fp32": partial(cast, dtype=BF16),
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
    for suffix, dtype in (("fp16", F16), ("bf16", BF16)):
        for launcher in launchers:
            functions[f"{launcher.__name__}_{suffix}_launcher"] = partial(launcher, dtype=dtype)
    functions |= {name: getattr(nccl, name) for name in dir(nccl) if name.startswith("nccl")}
    vars(module).update(functions)
    vars(module)[MARK] = nccl
    return module


def cast(count: int, source: int, target: int, dtype: torch.dtype) -> None:
    """Round `count` fp32 numbers at `source` to the nearest of `dtype` at `target`."""
    view(target, count, dtype).copy_(view(source, count, F32))


def has_nan_inf(n: int, g: int, mid: int, out: int, stream: int, *, dtype: torch.dtype) -> None:
    """Set the byte at `out` to 1 if any of `n` numbers is not finite. `mid` is scratch memory of the CUDA kernel."""
    del mid, stream
    if n > 0 and not torch.isfinite(view(g, n, dtype)).all():
        view(out, 1, torch.uint8).fill_(1)


def adam(
    n: int, p: int, p_low: int, g: int, m: int, v: int,
    beta1: float, beta2: float, eps: float, lr: float, scale: float, decay: float,
    correction1: float, correction2: float, stream: int, *, dtype: torch.dtype,
) -> None:  # fmt: skip
    """BMTrain's CUDA Adam; see `adam_step`. In fp16 the moments are stored multiplied by the loss scale."""
    del stream
    adam_step(
        n, p, p_low, g, m, v, (beta1, beta2), eps, lr, scale, decay, (correction1, correction2),
        dtype=dtype, scaled_moments=dtype == F16,
    )  # fmt: skip


def adam_cpu(
    n: int, p: int, p_low: int, delta_info: int, g: int, m: int, v: int,
    beta1: float, beta2: float, eps: float, lr: float, scale: float, decay: float,
    correction1: float, correction2: float, *, dtype: torch.dtype,
) -> None:  # fmt: skip
    """BMTrain's CPU Adam, which AdamOffloadOptimizer calls; see `adam_step`."""
    adam_step(
        n, p, p_low, g, m, v, (beta1, beta2), eps, lr, scale, decay, (correction1, correction2),
        dtype=dtype, delta_info=delta_info,
    )  # fmt: skip


def adam_step(
    count: int,
    param: int,
    param_low: int,
    grad: int,
    first: int,
    second: int,
    betas: tuple[float, float],
    eps: float,
    lr: float,
    scale: float,
    weight_decay: float,
    corrections: tuple[float, float],
    *,
    dtype: torch.dtype,
    scaled_moments: bool = False,
    delta_info: int = 0,
) -> None:
    """Do one Adam step with decoupled weight decay, in place.

    Args:
        count: Elements of each tensor.
        param: fp32 master parameters.
        param_low: The parameters in `dtype`; overwritten.
        grad: Gradients multiplied by `scale`, in `dtype`.
        first: First moment in fp32; with `scaled_moments` in fp16 and multiplied by `scale`.
        second: Second moment in fp32; with `scaled_moments` multiplied by `scale`.
        betas: Decay rates of the moments.
        eps: Added to the square root of the second moment.
        lr: Learning rate.
        scale: The loss scale.
        weight_decay: Weight decay; multiplied by `lr`.
        corrections: `1 - beta ** step` for both moments.
        dtype: fp16 or bf16.
        scaled_moments: Store the moments multiplied by `scale`, as BMTrain's fp16 CUDA kernel does.
        delta_info: Address of four fp32 numbers to write: mean, variance, sum and sum of squares of the updates divided
            by `lr`. 0: write none.
    """
    if count <= 0:
        return
    beta1, beta2 = (_as_float(beta) for beta in betas)
    keep1, keep2 = (_as_float(1 - beta) for beta in (beta1, beta2))  # 1 - beta in C is a float difference of floats
    p, m, v = view(param, count, F32), view(first, count, F16 if scaled_moments else F32), view(second, count, F32)
    g = view(grad, count, dtype).float()
    held = scale if scaled_moments else 1.0  # the factor that both moments carry
    if not scaled_moments:
        g /= scale
    m32 = (m.float() if scaled_moments else m).mul_(beta1).add_(g, alpha=keep1)
    v.mul_(beta2).addcmul_(g, g, value=keep2 / held)
    denominator = (v * (held / corrections[1])).sqrt_().add_(eps * held)
    update = (m32 / corrections[0]).div_(denominator).add_(p, alpha=weight_decay)
    p.sub_(update, alpha=lr)
    view(param_low, count, dtype).copy_(p)
    if scaled_moments:
        m.copy_(m32)
    if delta_info:
        total, squares = float(update.sum(dtype=torch.float64)), float(update.double().square_().sum())
        mean = total / count
        view(delta_info, 4, F32).copy_(torch.tensor([mean, squares / count - mean * mean, total, squares]))


def cross_entropy_forward(
    rows: int, columns: int, logits: int, target: int, softmax: int, out: int, ignore: int, stream: int,
    *, dtype: torch.dtype,
) -> None:  # fmt: skip
    """Write the softmax of each row in `dtype` and its loss in fp32. The loss of an ignored row is 0.

    Raises:
        IndexError: A target is neither a column nor `ignore`. (BMTrain's CUDA kernel reads out of bounds.)
    """
    del stream
    targets = view(target, rows, torch.int32).long()
    valid = targets != ignore
    wrong = targets[valid & ((targets < 0) | (targets >= columns))]
    if wrong.numel():
        raise IndexError(f"target {int(wrong[0])} is out of range: {columns} classes, ignore_index {ignore}")
    losses = view(out, rows, F32)
    for at, (x, probability) in _blocks(rows, columns, dtype, logits, softmax):
        x32 = x.float()
        largest = x32.amax(1, keepdim=True).clamp_(min=_LOWEST_MAXIMUM)
        exponentials = (x32 - largest).exp_()
        total = exponentials.sum(1, keepdim=True).add_(_NOT_ZERO)
        probability.copy_(exponentials.div_(total))
        picked = x32.gather(1, targets[at].clamp(0, columns - 1)[:, None])
        losses[at] = torch.where(valid[at], (largest + total.log() - picked)[:, 0], 0.0)


def cross_entropy_backward_inplace(
    rows: int, columns: int, grad: int, target: int, softmax: int, ignore: int, stream: int, *, dtype: torch.dtype
) -> None:
    """Replace each row of softmax by the gradient of its logits. The incoming one of an ignored row is already 0."""
    del ignore, stream
    targets, grads = view(target, rows, torch.int32).long(), view(grad, rows, F32)
    for at, (probability,) in _blocks(rows, columns, dtype, softmax):
        gradient = probability.float()
        here = (targets[at] >= 0) & (targets[at] < columns)
        picked = torch.arange(len(here))[here], targets[at][here]
        gradient[picked] -= 1
        probability.copy_(gradient.mul_(grads[at][:, None]))


def fused_sumexp(
    rows: int, columns: int, logits: int, largest: int, out: int, stream: int, *, dtype: torch.dtype
) -> None:
    """Write the sum of `exp(logit - largest)` of each row in fp32."""
    del stream
    maxima, sums = view(largest, rows, F32), view(out, rows, F32)
    for at, (x,) in _blocks(rows, columns, dtype, logits):
        sums[at] = (x.float() - maxima[at][:, None]).exp_().sum(1)


def fused_softmax_inplace(
    rows: int, columns: int, logits: int, largest: int, total: int, stream: int, *, dtype: torch.dtype
) -> None:
    """Replace each row of logits by `exp(logit - largest) / total`."""
    del stream
    maxima, totals = view(largest, rows, F32), view(total, rows, F32)
    for at, (x,) in _blocks(rows, columns, dtype, logits):
        x.copy_((x.float() - maxima[at][:, None]).exp_().div_(totals[at][:, None]))


def _blocks(rows: int, columns: int, dtype: torch.dtype, *addresses: int) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yield ranges of rows and those rows of each `[rows, columns]` matrix: about `_BLOCK` elements or one row."""
    matrices = [view(address, rows * columns, dtype).view(rows, columns) for address in addresses]
    step = max(1, _BLOCK // max(1, columns))
    for start in range(0, rows, step):
        at = slice(start, min(start + step, rows))
        yield at, [matrix[at] for matrix in matrices]


def _as_float(value: float) -> float:
    return ctypes.c_float(value).value
