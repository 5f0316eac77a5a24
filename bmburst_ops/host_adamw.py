"""AdamW update on the CPU (arXiv:1711.05101, algorithm 2): a compiled kernel and its plain torch twin.

The kernel, `host_adamw.c`, reads and writes each number once. It is compiled at first use for the current processor, in
a fraction of a second. Without a C compiler, torch's operations compute the same. They take three times as long on one
thread, and twelve times on 16.

A bf16 weight is the upper half of its fp32 master weight. So instead of the master, only the difference may be stored:
the remainder, a 16-bit integer.

    remainder = bits(master) - bits(weight as fp32)        master = float(bits(weight as fp32) + remainder)

Weights are rounded to nearest even, so remainders are in -32768 ... 32768. The largest does not fit in 16 bits: if a
master is exactly between two weights and the lower one is even, its last bit is lost.
"""

import ctypes
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from bmburst_ops.errors import KernelError, unknown_kernel
from bmburst_ops.fused import compiled
from bmburst_ops.moments import Rounding, aligned, blocks_of, decoded, encode_, part_of, random_bits, table

Kernel = Literal["auto", "c", "torch"]
KERNELS: tuple[str, ...] = get_args(Kernel)
PIECE = 1 << 20
"""Elements that torch's operations process at once, so that intermediate results stay in the CPU's caches."""
_FLAGS = ("-O3", "-fopenmp", "-ffp-contract=off")


class Rates(NamedTuple):
    """The rates of a step.

    Attributes:
        lr: Learning rate.
        betas: Decay of the moments.
        eps: Added to the root of the second moment.
        weight_decay: Per unit of `lr`; decoupled.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


def adamw_(
    weights: Tensor,
    gradient: Tensor,
    moments: tuple[Tensor, Tensor],
    rates: Rates,
    *,
    step: int,
    scale: float = 1.0,
    master: Tensor | None = None,
    remainder: Tensor | None = None,
    rounding: Rounding | None = None,
    kernel: Kernel = "auto",
    piece: int = PIECE,
) -> None:
    """Do one step in place. All tensors are flat `[n]`, contiguous and in host memory.

    Args:
        weights: fp32, bf16 or fp16; written.
        gradient: In the dtype of the weights; only read.
        moments: The first and the second; updated. fp32; with `rounding` bf16, or uint8 codes.
        rates: The rates.
        step: Number of this step, from 1.
        scale: Gradients are divided by it, in fp32.
        master: fp32 master weights of 16-bit weights; updated. fp32 weights have no separate master.
        remainder: Remainders of bf16 weights instead of a master, int16; updated.
        rounding: How small moments are rounded and, for 8 bits, their scales (`bmburst_ops.moments`). bf16 weights then
            have remainders.
        kernel: "c", "torch", or "auto": "c" if it can be compiled.
        piece: Elements that plain torch updates at once.

    Raises:
        KernelError: The kernel is unknown, or cannot be compiled.
    """
    if kernel not in KERNELS:
        raise unknown_kernel(kernel, KERNELS)
    library = None if kernel == "torch" else _compiled()
    if kernel == "c" and library is None:
        raise KernelError("kernel 'c' needs a C compiler with OpenMP\nfix: install gcc, or kernel='auto'")
    numbers = _numbers(rates, step, scale)
    if library is not None and weights.dtype != torch.float16:
        _call(library, weights, gradient, moments, numbers, master, remainder, rounding)
        return
    for run in aligned(len(weights), rounding.first if rounding else 0, piece):
        part, given, stored = weights[run], gradient[run], (moments[0][run], moments[1][run])
        of_run = part_of(rounding, run) if rounding else None
        wide = given.float() if given.dtype != torch.float32 else given.clone()
        of_part = part if master is None else master[run]
        of_part = of_part if remainder is None else joined(part, remainder[run])
        if library is not None:
            _call(library, of_part, wide, stored, numbers, rounding=of_run)
        else:
            with widened(stored, of_run) as state:
                _by_torch(of_part, wide, state, rates, step, scale)
        if remainder is not None:
            split(of_part, part, remainder[run])
        elif master is not None:
            part.copy_(of_part)


@contextmanager
def widened(moments: tuple[Tensor, Tensor], rounding: Rounding | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Give both moments in fp32; round and store them at the end. All are flat `[n]`, on any device.

    Without `rounding` they are fp32 themselves.
    """
    if rounding is None:
        yield moments
        return
    scales, first = rounding.scales or (None, None), rounding.first
    wide = tuple(
        decoded(each, of_it, first, signed=signed)
        for each, of_it, signed in zip(moments, scales, (True, False), strict=True)
    )
    yield wide[0], wide[1]
    noise = random_bits(first, len(wide[0]), rounding.key, wide[0].device)
    encode_(moments[0], scales[0], wide[0], first, noise & 0xFFFF, signed=True)
    encode_(moments[1], scales[1], wide[1], first, noise >> 16, signed=False)


def joined(weights: Tensor, remainder: Tensor) -> Tensor:
    """Return the fp32 master weights of bf16 weights and int16 remainders, all `[n]`."""
    master = weights.float()
    master.view(torch.int32).add_(remainder.int())
    return master


def split(master: Tensor, weights: Tensor, remainder: Tensor) -> None:
    """Write the bf16 weights nearest to fp32 master weights, and their int16 remainders, all `[n]`."""
    weights.copy_(master)
    difference = master.view(torch.int32) - weights.float().view(torch.int32)
    remainder.copy_(difference.clamp_max_((1 << 15) - 1))


def _by_torch(
    master: Tensor, gradient: Tensor, moments: tuple[Tensor, Tensor], rates: Rates, step: int, scale: float
) -> None:
    """Do a step on fp32 tensors with torch's fused operation, which divides the gradient in place."""
    torch._fused_adamw_(
        [master],
        [gradient],
        [moments[0]],
        [moments[1]],
        [],
        [torch.tensor(float(step))],
        lr=rates.lr,
        beta1=rates.betas[0],
        beta2=rates.betas[1],
        weight_decay=rates.weight_decay,
        eps=rates.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=None if scale == 1 else torch.tensor(float(scale)),
    )


class _Numbers(ctypes.Structure):
    """`rates` of `host_adamw.c`."""

    _fields_ = (
        *((name, ctypes.c_float) for name in ("scale", "decay", "rest1", "beta2", "rest2")),
        *((name, ctypes.c_float) for name in ("step_size", "root", "eps")),
    )


def _numbers(rates: Rates, step: int, scale: float) -> _Numbers:
    (first, second), lr = rates.betas, rates.lr
    return _Numbers(
        scale=scale,
        decay=1 - lr * rates.weight_decay,
        rest1=1 - first,
        beta2=second,
        rest2=1 - second,
        step_size=lr / (1 - first**step),
        root=math.sqrt(1 - second**step),
        eps=rates.eps,
    )


def _call(
    library: ctypes.CDLL,
    weights: Tensor,
    gradient: Tensor,
    moments: tuple[Tensor, Tensor],
    numbers: _Numbers,
    master: Tensor | None = None,
    remainder: Tensor | None = None,
    rounding: Rounding | None = None,
) -> None:
    dtype = torch.float32 if master is None and remainder is None else torch.bfloat16
    if rounding is not None:
        assert master is None and weights.dtype == gradient.dtype == dtype
        _call_small(library, weights, gradient, moments, numbers, remainder, rounding)
        return
    own: tuple[Tensor, ...]
    if remainder is not None:
        function, own = library.adamw_remainder, (remainder,)
    elif master is not None:
        function, own = library.adamw_master, (master,)
    else:
        function, own = library.adamw_fp32, ()
    assert weights.dtype == gradient.dtype == dtype and moments[0].dtype == moments[1].dtype == torch.float32
    pointers = _pointers((weights, *own, gradient, *moments), len(weights))
    function(ctypes.c_int64(len(weights)), *pointers, ctypes.byref(numbers), _threads())


def _call_small(
    library: ctypes.CDLL,
    weights: Tensor,
    gradient: Tensor,
    moments: tuple[Tensor, Tensor],
    numbers: _Numbers,
    remainder: Tensor | None,
    rounding: Rounding,
) -> None:
    count, scales = len(weights), rounding.scales or ()
    assert all(each.dtype == (torch.uint8 if scales else torch.bfloat16) for each in moments)
    tables = [table(weights.device, signed=signed) for signed in (True, False)] if scales else []
    own, none = (() if remainder is None else (remainder,)), [ctypes.c_void_p()]
    library.adamw_small(
        ctypes.c_int64(count),
        ctypes.c_int64(rounding.first),
        ctypes.c_uint32(rounding.key),
        *_pointers((weights,), count),
        *(_pointers(own, count) or none),
        *_pointers((gradient, *moments), count),
        *(_pointers(scales, blocks_of(rounding.first, count)) or 2 * none),
        *(_pointers(tables, 256) or 2 * none),
        ctypes.byref(numbers),
        _threads(),
    )


def _pointers(tensors: Sequence[Tensor], length: int) -> list[ctypes.c_void_p]:
    assert all(t.is_contiguous() and len(t) == length and t.device.type == "cpu" for t in tensors)
    return [ctypes.c_void_p(t.data_ptr()) for t in tensors]


def _threads() -> ctypes.c_int32:
    return ctypes.c_int32(torch.get_num_threads())


@cache
def _compiled() -> ctypes.CDLL | None:
    """Return the compiled kernel; None if it cannot be compiled."""
    return compiled(Path(__file__).with_suffix(".c"), _FLAGS)
