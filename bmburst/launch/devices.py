"""The GPUs that torch will see in the ranks, as NVIDIA's driver tells them: the launcher asks without importing torch.

Importing torch takes seconds. So the launcher starts the ranks first, and imports torch while they do.
"""

import ctypes
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

BFLOAT16 = (8, 0)  # the least compute capability of GPUs that have it: Ampere
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of cuda.h
_NAME = 256  # bytes for the name of a GPU
_BUILD = re.compile(r"^cuda\b.*= *['\"](\d+)\.", re.MULTILINE)  # of torch/version.py, which torch's build writes


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU.

    Attributes:
        name: Its name.
        capability: Its compute capability.
    """

    name: str
    capability: tuple[int, int]


@cache
def gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that torch sees in this environment, in its order. Opens none: a launcher leaves them to ranks.

    Without a driver, with one that is too old for torch, or with a CPU build of torch there are none.
    """
    build = cuda_of_torch()
    if build is None:
        return ()
    try:
        return ask_driver(ctypes.CDLL("libcuda.so.1"), build)
    except OSError:
        return ()


def cuda_of_torch(find: Callable[[str], ModuleSpec | None] = importlib.util.find_spec) -> int | None:
    """Return the major version of CUDA that torch is built for, without importing torch; None for a CPU build.

    Args:
        find: Finds a module by its name.
    """
    spec = find("torch")
    if spec is None or spec.origin is None:
        return None
    found = _BUILD.search(Path(spec.origin).with_name("version.py").read_text(encoding="utf-8"))
    return int(found[1]) if found else None


def ask_driver(driver: Any, build: int) -> tuple[Gpu, ...]:
    """Return the GPUs that a driver shows to this process, which CUDA_VISIBLE_DEVICES selects.

    Args:
        driver: libcuda.
        build: Major version of CUDA that torch is built for. An older driver runs none of its kernels.
    """
    version, count = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDriverGetVersion(ctypes.byref(version)) or version.value // 1000 < build:
        return ()
    if driver.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    return tuple(_gpu(driver, index) for index in range(count.value))


def _gpu(driver: Any, index: int) -> Gpu:
    device, name = ctypes.c_int(), ctypes.create_string_buffer(_NAME)
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, _NAME, device)
    major, minor = (_attribute(driver, device, number) for number in (_MAJOR, _MINOR))
    return Gpu(name.value.decode(), (major, minor))


def _attribute(driver: Any, device: ctypes.c_int, number: int) -> int:
    value = ctypes.c_int()
    driver.cuDeviceGetAttribute(ctypes.byref(value), number, device)
    return value.value
