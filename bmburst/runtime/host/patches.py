"""Patches torch.cuda for BMTrain on a machine without CUDA, and builds the stand-in for its extension `bmtrain.C`.

Each change to torch only affects what would otherwise be an error without CUDA (a stream, `device="cuda"`, `.cuda()`),
or answers to BMTrain's own modules alone (`is_cuda`, `.cpu()`): other libraries, and torch itself, see the truth.
`torch.cuda.is_available()` stays False. The stand-in has every name that BMTrain's csrc/bind.cpp defines.
"""

import functools
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bmburst.runtime.host import kernels
from bmburst.runtime.host.nccl import Nccl
from bmburst.runtime.host.streams import Stream, Streams

_STORAGES = ("Float", "Double", "Half", "BFloat16", "Char", "Byte", "Short", "Int", "Long", "Bool")
_FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace", "ones",
    "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "tensor", "zeros",
    "zeros_like",
)  # fmt: skip


def apply(streams: Streams) -> None:
    """Change torch in this process, for good."""
    _remember_real_functions()
    _patch_cuda_module(streams)
    for name in _FACTORIES:
        _patch_factory(name)
    _patch_tensor()


def _remember_real_functions() -> None:
    """Fill torch's own tables of its factories while they hold the real ones.

    `with torch.device(...)`, tensor subclasses and TorchScript look factories up by identity, in tables that are made
    at first use.
    """
    import torch.jit._builtins
    import torch.overrides
    import torch.utils._device

    torch.utils._device._device_constructors()
    torch.overrides.get_overridable_functions()
    torch.overrides.get_ignored_functions()
    builtins: Any = torch.jit._builtins
    builtins._get_builtin_table()


def _patch_cuda_module(streams: Streams) -> None:
    cuda: Any = torch.cuda
    set_rng_state = cuda.set_rng_state

    def set_state(state: Tensor, device: object = "cuda") -> None:
        # Without CUDA, torch keeps such a call for when CUDA is initialised. A state of the CPU is ours.
        if state.numel() == torch.get_rng_state().numel():
            torch.set_rng_state(state)
        else:
            set_rng_state(state, device)

    cuda.Stream, cuda.Event = streams.Stream, streams.Event
    cuda.stream, cuda.set_stream = streams.use, streams.set_stream
    cuda.current_stream, cuda.default_stream = streams.current, streams.default_stream
    cuda.synchronize = streams.synchronize
    cuda.current_device = lambda: 0
    cuda.set_device = _ignore
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    cuda.set_rng_state = set_state
    cuda.memory_summary = lambda *_, **__: "no CUDA memory: bmburst's host runtime is in use"
    cuda.reset_peak_memory_stats = _ignore
    for name in _STORAGES:
        setattr(cuda, f"{name}Storage", _constructor(f"{name}Storage"))
    cuda.FloatTensor = _constructor("FloatTensor")


def _ignore(*_: object, **__: object) -> None:
    """Do nothing."""


def _constructor(name: str) -> type:
    """Return a class that makes CPU objects: none is an instance of it, as none is of the CUDA class."""
    host = getattr(torch, name)

    def make(cls: type, *args: object, **kwargs: object) -> object:
        del cls
        return host(*args, **kwargs)

    return type(name, (), {"__new__": make, "__module__": "torch.cuda"})


def _patch_factory(name: str) -> None:
    """Let a function that makes tensors take `device="cuda"` and `pin_memory=True`, which are errors without CUDA."""
    import torch.jit._builtins

    real = getattr(torch, name)

    @functools.wraps(real)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return real(*args, **kwargs)

    setattr(torch, name, factory)
    builtin: Any = torch.jit._builtins
    operator = builtin._find_builtin(real)
    if operator is not None:
        builtin._register_builtin(factory, operator)


def _patch_tensor() -> None:
    tensor: Any = Tensor
    storage: Any = torch.TypedStorage
    real_is_cuda, real_storage_is_cuda = tensor.is_cuda, storage.is_cuda
    real_to, real_cpu, real_record_stream = tensor.to, tensor.cpu, tensor.record_stream

    def is_cuda(self: Tensor) -> bool:
        return _asked_by_bmtrain() or bool(real_is_cuda.__get__(self))

    def storage_is_cuda(self: object) -> bool:
        return _asked_by_bmtrain() or bool(real_storage_is_cuda.__get__(self))

    def to_cuda(self: Tensor, *args: object, **kwargs: object) -> Tensor:
        del args, kwargs
        return _moved(self, self)

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args and _is_cuda(args[0]):
            return _moved(self, real_to(self, "cpu", *args[1:], **kwargs))
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            return _moved(self, real_to(self, *args, **(kwargs | {"device": "cpu"})))
        moved: Tensor = real_to(self, *args, **kwargs)
        return moved

    def cpu(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        moved: Tensor = real_cpu(self, *args, **kwargs)
        return moved.clone() if moved is self and _asked_by_bmtrain() else moved

    def record_stream(self: Tensor, stream: Any) -> None:
        if isinstance(stream, Stream):
            stream.keep(self)
        else:
            real_record_stream(self, stream)

    tensor.is_cuda = property(is_cuda)
    storage.is_cuda = property(storage_is_cuda)
    tensor.cuda = functools.wraps(tensor.cuda)(to_cuda)
    tensor.to = functools.wraps(real_to)(to)
    tensor.cpu = functools.wraps(real_cpu)(cpu)
    tensor.record_stream = functools.wraps(real_record_stream)(record_stream)
    tensor.pin_memory = functools.wraps(tensor.pin_memory)(lambda self, *_: self)


def _moved(before: Tensor, after: Tensor) -> Tensor:
    """Return what a copy to a GPU gives: memory of its own, which BMTrain counts on when it takes the storage.

    A parameter is on the "GPU" already: BMTrain's blocks hold its memory, and it must stay theirs.
    """
    return after.clone() if after is before and not isinstance(before, torch.nn.Parameter) else after


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _asked_by_bmtrain() -> bool:
    """Whether a patched name was used by a module of BMTrain."""
    caller: Callable[[int], Any] = sys._getframe
    return str(caller(2).f_globals.get("__name__", "")).partition(".")[0] == "bmtrain"


EXTENSION = "bmtrain.C"
MARK = "__bmburst_host_runtime__"


def build_extension(nccl: Nccl) -> types.ModuleType:
    """Return the module."""
    module = types.ModuleType(EXTENSION, "BMTrain's extension on the CPU, by bmburst's host runtime.")
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
