"""The host runtime: runs unmodified BMTrain 1.0.1 on CPUs, with gloo instead of NCCL.

BMTrain needs CUDA and NCCL. `install` replaces its compiled extension (`extension`, `nccl`) and patches torch, with the
functions of torch.cuda that BMTrain calls (`cuda`). It changes this process only. It must be called before
`import bmtrain`.

Patches apply to calls that are errors without CUDA (a stream, `device="cuda"`, `.cuda()`), and to results that only
BMTrain's modules get (`is_cuda`, `.cpu()`). Other libraries and torch itself get torch's results, and
`torch.cuda.is_available()` stays False.

Environment: BMBURST_TIMEOUT is the timeout of an exchange between ranks, in seconds (default 1800).
GLOO_SOCKET_IFNAME names the network interfaces that connect the hosts.
"""

import atexit
import ctypes
import functools
import importlib.util
import os
import shlex
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from bmburst.errors import UserError
from bmburst.host.cuda import Stream, Streams, patch_cuda_module
from bmburst.host.extension import EXTENSION, MARK, build_extension
from bmburst.host.nccl import Nccl, Rendezvous
from bmburst.setup.install_bmtrain import install_command

_FLUSH = 10.0  # seconds to wait at exit for pending sends
# Options of mallopt, with bytes: blocks below the first are on the heap, which keeps up to the second when freed.
_KEPT = (("mmap_threshold", -3, 32 << 20), ("trim_threshold", -1, 1 << 30))
_FACTORIES = (
    "arange", "as_tensor", "asarray", "bartlett_window", "blackman_window", "empty", "empty_like", "empty_permuted",
    "empty_strided", "eye", "full", "full_like", "hamming_window", "hann_window", "kaiser_window", "linspace",
    "logspace", "normal", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like",
    "randperm", "range", "scalar_tensor", "sparse_coo_tensor", "sparse_csr_tensor", "tensor", "tril_indices",
    "triu_indices", "zeros", "zeros_like",
)  # fmt: skip
_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


def install() -> None:
    """Make `import bmtrain` work on CPUs in this process. A second call does nothing.

    Raises:
        UserError: CUDA is usable, BMTrain is not installed, or BMTrain is imported already with its own extension.
    """
    if is_installed():
        return
    if torch.cuda.is_available():
        raise UserError(
            "the host runtime is for machines without CUDA, and CUDA is usable here\n"
            "fix: to run on the CPU, set CUDA_VISIBLE_DEVICES= (empty) before Python starts"
        )
    if "bmtrain" in sys.modules:
        raise UserError(
            "bmtrain is imported already, with its own CUDA extension\n"
            "fix: call bmburst.launch.start.start() or bmburst.host.install() before the first `import bmtrain`"
        )
    if importlib.util.find_spec("bmtrain") is None:
        command = shlex.join(install_command())
        raise UserError(f"BMTrain is not installed for {sys.executable}\nfix: {command}")

    streams = Streams()
    nccl = Nccl(streams, Rendezvous())
    _patch_torch(streams)
    silence_deprecations()
    sys.modules[EXTENSION] = build_extension(nccl)
    _keep_freed_memory()
    atexit.register(_close, nccl, os.getpid())
    if os.environ.get("RANK", "0") == "0":
        print("bmburst: no CUDA here, running BMTrain on CPUs (host runtime)", file=sys.stderr)  # noqa: T201


def is_installed() -> bool:
    """Return whether the host runtime is installed in this process."""
    return hasattr(sys.modules.get(EXTENSION), MARK)


def wrap_communication(waiting: Callable[[], AbstractContextManager[None]]) -> None:
    """Enter the context `waiting()` around every launch of BMTrain's communication. On CPUs a launch blocks."""
    getattr(sys.modules[EXTENSION], MARK).waiting = waiting


def silence_deprecations() -> None:
    """Hide torch's deprecation warnings about functions that BMTrain 1.0.1 uses. A user cannot act on them."""
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated", category=UserWarning)
    warnings.filterwarnings("ignore", message=r"The torch\.cuda\.\*DtypeTensor constructors", category=UserWarning)
    warnings.filterwarnings("ignore", message=r"`torch\.jit\.script` is deprecated", category=FutureWarning)


def _keep_freed_memory() -> None:
    """Let the C library keep freed memory for the tensors of the next layer.

    By default it returns most of it to the kernel, which clears each page before it hands it out again: a fifth of the
    CPU time in a step of llama-tiny. Settings in the environment, in either form of glibc, take precedence.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    for name, option, nbytes in _KEPT:
        is_given = f"MALLOC_{name.upper()}_" in os.environ or f"glibc.malloc.{name}=" in tunables
        if mallopt is not None and not is_given:
            mallopt(option, nbytes)


def _close(nccl: Nccl, process: int) -> None:
    if os.getpid() != process:
        return  # a forked child: the connections belong to its parent
    dying = hasattr(sys, "last_value")  # an exception ends this process: the receivers may have ended
    nccl.close(0.0 if dying else _FLUSH)


def _patch_torch(streams: Streams) -> None:
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
