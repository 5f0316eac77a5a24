"""Patches torch.cuda for BMTrain on a machine without CUDA, and builds a replacement of its extension `bmtrain.C`.

Patches apply to calls that are errors without CUDA (a stream, `device="cuda"`, `.cuda()`), and to results that only
BMTrain's modules get (`is_cuda`, `.cpu()`). Other libraries and torch itself get torch's results, and
`torch.cuda.is_available()` stays False. The replacement has every name that BMTrain's csrc/bind.cpp defines.
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
from bmburst.runtime.host.cuda import Stream, Streams, patch_cuda_module
from bmburst.runtime.host.nccl import Nccl

_FACTORIES = (
    "arange", "as_tensor", "asarray", "bartlett_window", "blackman_window", "empty", "empty_like", "empty_permuted",
    "empty_strided", "eye", "full", "full_like", "hamming_window", "hann_window", "kaiser_window", "linspace",
    "logspace", "normal", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like",
    "randperm", "range", "scalar_tensor", "sparse_coo_tensor", "sparse_csr_tensor", "tensor", "tril_indices",
    "triu_indices", "zeros", "zeros_like",
)  # fmt: skip
_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


def apply(streams: Streams) -> None:
    """Patch torch in this process. The patches are permanent."""
    _remember_real_functions()
    patch_cuda_module(streams)
    for name in _FACTORIES:
        _patch_factory(name)
    _patch_tensor()
    for name in _METHODS:
        setattr(Tensor, name, _on_the_host(getattr(Tensor, name)))
    _patch_default_device()
    _patch_generator()
    _patch_load()


def _remember_real_functions() -> None:
    """Make torch fill its tables of factory functions before these are patched.

    `with torch.device(...)`, tensor subclasses and TorchScript look up factory functions by identity, in tables that
    torch fills on first use.
    """
    import torch.jit._builtins
    import torch.overrides
    import torch.utils._device

    torch.utils._device._device_constructors()
    torch.overrides.get_overridable_functions()
    torch.overrides.get_ignored_functions()
    builtins: Any = torch.jit._builtins
    builtins._get_builtin_table()


def _patch_factory(name: str) -> None:
    """Make a factory function accept `device="cuda"` and `pin_memory=True`, which are errors without CUDA."""
    import torch.jit._builtins

    real = getattr(torch, name)
    factory = _on_the_host(real)
    setattr(torch, name, factory)
    builtin: Any = torch.jit._builtins
    operator = builtin._find_builtin(real)
    if operator is not None:
        builtin._register_builtin(factory, operator)


def _on_the_host(real: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that creates a tensor: keywords that ask for a GPU are changed to the CPU."""

    @functools.wraps(real)
    def make(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return real(*args, **kwargs)

    return make


def _patch_default_device() -> None:
    """Make `with torch.device("cuda")` and `torch.set_default_device("cuda")` create tensors on the CPU."""
    import torch.utils._device

    context: Any = torch.utils._device.DeviceContext
    real = context.__init__

    def start(self: object, device: object) -> None:
        real(self, "cpu" if _is_cuda(device) else device)

    context.__init__ = functools.wraps(real)(start)


def _patch_generator() -> None:
    """Make `torch.Generator(device="cuda")` return a CPU generator."""
    real = torch.Generator

    class Kind(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, real)

    class Generator(metaclass=Kind):
        __doc__, __module__, __qualname__ = real.__doc__, "torch", "Generator"  # where pickle finds it

        def __new__(cls, device: object = "cpu") -> Any:
            return real("cpu" if _is_cuda(device) else device)  # type: ignore[arg-type]

    module: Any = torch
    module.Generator = Generator


def _patch_load() -> None:
    """Make `torch.load` read tensors that were saved on, or are mapped to, a GPU into host memory."""
    module: Any = torch
    real_load = module.load

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return real_load(f, _to_the_host(map_location), *args, **kwargs)

    for storage in (torch.UntypedStorage, torch.TypedStorage):
        kind: Any = storage
        kind.cuda = functools.wraps(kind.cuda)(lambda self, *_, **__: self)
    module.load = functools.wraps(real_load)(load)


def _to_the_host(wanted: Any) -> Callable[[torch.UntypedStorage, str], Any]:
    """Return a `map_location` like `wanted`, except that it keeps tensors on the CPU that would go to a GPU."""

    def locate(storage: torch.UntypedStorage, saved_on: str) -> Any:
        if callable(wanted):
            placed = wanted(storage, saved_on)
            if placed is not None:
                return placed
            place: object = saved_on
        elif isinstance(wanted, dict):
            place = wanted.get(saved_on, saved_on)
        else:
            place = saved_on if wanted is None else wanted
        if _is_cuda(place):
            return storage
        serialization: Any = torch.serialization
        return serialization.default_restore_location(storage, str(place))

    return locate


def _patch_tensor() -> None:
    tensor: Any = Tensor
    storage: Any = torch.TypedStorage
    real_is_cuda, real_storage_is_cuda = tensor.is_cuda, storage.is_cuda
    real_to, real_cpu, real_record_stream = tensor.to, tensor.cpu, tensor.record_stream
    real_type = tensor.type

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

    def type_(self: Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        name = f"{dtype.__module__}.{dtype.__name__}" if isinstance(dtype, type) else dtype
        if isinstance(name, str) and name.startswith("torch.cuda."):
            return _moved(self, real_type(self, name.replace(".cuda.", "."), non_blocking, **kwargs))
        return real_type(self, dtype, non_blocking, **kwargs)

    tensor.type = functools.wraps(real_type)(type_)
    tensor.is_cuda = property(is_cuda)
    storage.is_cuda = property(storage_is_cuda)
    tensor.cuda = functools.wraps(tensor.cuda)(to_cuda)
    tensor.to = functools.wraps(real_to)(to)
    tensor.cpu = functools.wraps(real_cpu)(cpu)
    tensor.record_stream = functools.wraps(real_record_stream)(record_stream)
    tensor.pin_memory = functools.wraps(tensor.pin_memory)(lambda self, *_: self)


def _moved(before: Tensor, after: Tensor) -> Tensor:
    """Return the result of a copy to a GPU: a tensor with its own memory, because BMTrain takes over the storage.

    A parameter is not copied, as if it were already on the GPU: BMTrain's blocks hold its memory.
    """
    return after.clone() if after is before and not isinstance(before, torch.nn.Parameter) else after


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _asked_by_bmtrain() -> bool:
    """Return whether a module of BMTrain called the patched function."""
    caller: Callable[[int], Any] = sys._getframe
    return str(caller(2).f_globals.get("__name__", "")).partition(".")[0] == "bmtrain"


EXTENSION = "bmtrain.C"
MARK = "__bmburst_host_runtime__"


def build_extension(nccl: Nccl) -> types.ModuleType:
    """Return the module that replaces `bmtrain.C`."""
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
    """See `kernels.has_nan_inf`. `mid` is scratch memory that only the CUDA kernel needs."""
    del mid, stream
    kernels.has_nan_inf(n, g, out, dtype)


def adam(
    n: int, p: int, p_low: int, g: int, m: int, v: int,
    beta1: float, beta2: float, eps: float, lr: float, scale: float, decay: float,
    correction1: float, correction2: float, stream: int, *, dtype: torch.dtype,
) -> None:  # fmt: skip
    """BMTrain's CUDA Adam; see `kernels.adam`. In fp16 the moments are stored multiplied by the loss scale."""
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
    """BMTrain's CPU Adam, which AdamOffloadOptimizer calls; see `kernels.adam`."""
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
    """See `kernels.cross_entropy_backward`. The incoming gradient of an ignored row is already 0."""
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
