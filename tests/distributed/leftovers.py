"""What one body leaves behind in a process that runs another after it: what is set back, and what is found changed."""

import atexit
import gc
import logging
import os
import random
import resource
import signal
import sys
import threading
import time
import types
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

_OURS = ("bmburst", "bmburst_ops", "model_center_ext", "benchmarks", "bmtrain", "tests")
_OTHERS = (
    "torch", "torch.cuda", "torch.distributed", "torch.nn", "torch.nn.functional", "torch.optim",
    "torch.utils.checkpoint", "os", "shutil", "signal", "socket", "subprocess", "sys", "threading", "time",
)  # fmt: skip
# Names that imports and the interpreter itself write.
_WRITTEN = frozenset(
    {"__annotations__", "__slotnames__", "__warningregistry__", "_abc_impl", "last_exc", "last_type", "last_value"}
)
_COMPILED = ("bmburst_ops.host_adamw", "bmburst_ops.flash.cpu")
"""Modules whose caches are libraries that a rank has compiled: as what it imports, it keeps them."""
_MEMORY = 2 << 30  # bytes of a rank that is kept
_PATIENCE = 2.0  # seconds in which the threads of what was closed end
_absent = object()


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What a process began with, and each of its bodies begins with."""

    folder: str
    torch_generator: torch.Tensor
    numpy_generator: dict[str, Any]
    python_generator: tuple[Any, ...]
    threads: frozenset[threading.Thread]

    @classmethod
    def now(cls) -> "Beginning":
        _collect()
        return cls(
            folder=os.getcwd(),
            torch_generator=torch.get_rng_state(),
            numpy_generator=np.random.get_state(legacy=False),
            python_generator=random.getstate(),
            threads=frozenset(threading.enumerate()),
        )

    def restore(self, environment: Mapping[str, str]) -> None:
        """Set back the environment, to this one, the folder, the generators and the number of threads."""
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(self.folder)
        torch.set_rng_state(self.torch_generator)
        np.random.set_state(self.numpy_generator)
        random.setstate(self.python_generator)
        torch.set_num_threads(1)

    def clean(self) -> list[str]:
        """Free what no name refers to and what this package caches; return what is left: threads, processes, memory."""
        for key, holder in _holders():
            for value in list(vars(holder).values()) if key not in (*_OTHERS, *_COMPILED) else ():
                if hasattr(type(value), "cache_clear"):
                    value.cache_clear()
        if self._new_threads():
            gc.unfreeze()  # what owns them may be in a cycle, and the body may have frozen that, as training does
        _collect()
        deadline = time.monotonic() + _PATIENCE
        for thread in self._new_threads():
            thread.join(max(deadline - time.monotonic(), 0.0))
        left = [f"thread {thread.name}" for thread in self._new_threads()]
        left += [f"process {child}" for child in _children()]
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        if (nbytes := pages * resource.getpagesize()) > _MEMORY:
            left.append(f"{nbytes >> 20} MiB of memory")
        return left

    def _new_threads(self) -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread not in self.threads]


class Settings:
    """What holds for a whole process, and a body must leave as it was."""

    def __init__(self, settings: dict[str, object], names: "dict[str, dict[str, object]]") -> None:
        self._settings = settings
        self._names = names
        self._modules = frozenset(sys.modules)

    @classmethod
    def now(cls) -> "Settings":
        return cls(_settings(), {key: dict(vars(holder)) for key, holder in _holders()})

    def changed(self) -> list[str]:
        """Return the settings that differ by now, and the names of modules and classes with another value."""
        now = _settings()
        changed = [name for name, value in self._settings.items() if now[name] != value]
        changed += [f"sys.modules[{key!r}]" for key in sys.modules.keys() - self._modules if _is_a_stand_in(key)]
        for key, holder in _holders():
            before = self._names.get(key)
            if before is None:
                continue  # imported since
            after = vars(holder)
            for name in before.keys() | after.keys():
                value = after.get(name, _absent)
                if value is not before.get(name, _absent) and not _may_change(name, value):
                    changed.append(f"{key}.{name}")
        return changed


def _holders() -> Iterator[tuple[str, Any]]:
    """Yield the modules whose names a body may have replaced, and the classes that they define."""
    for key, module in list(sys.modules.items()):
        if key.partition(".")[0] not in _OURS and key not in _OTHERS:
            continue
        yield key, module
        if key not in _OTHERS:
            for value in list(vars(module).values()):
                if isinstance(value, type) and value.__module__ == key:
                    yield f"{key}.{value.__qualname__}", value
    yield "torch.Tensor", torch.Tensor


def _is_a_stand_in(key: str) -> bool:
    return getattr(sys.modules[key], "__spec__", None) is None


def _may_change(name: str, value: object) -> bool:
    return name in _WRITTEN or isinstance(value, types.ModuleType)


def _settings() -> dict[str, object]:
    module: Any = torch.nn.modules.module
    hooks = [name for name in vars(module) if name.startswith("_global_") and name.endswith("_hooks")]
    signals = {number: signal.getsignal(number) for number in signal.valid_signals()}
    limits = (getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))
    return {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_default_device()": torch.get_default_device(),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.is_anomaly_enabled()": torch.is_anomaly_enabled(),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "torch.backends.cudnn.enabled": torch.backends.cudnn.enabled,
        "torch.distributed.is_initialized()": dist.is_initialized(),
        "hooks of all modules": [len(getattr(module, name) or ()) for name in hooks],
        "handlers of signals": signals,
        "warnings.filters": list(warnings.filters),
        "handlers at exit": atexit._ncallbacks(),
        "limits of resources": [resource.getrlimit(limit) for limit in limits],
        "gc": (gc.isenabled(), gc.get_threshold(), list(gc.callbacks)),
        "sys.path": list(sys.path),
        "sys.meta_path": list(sys.meta_path),
        "cores": os.sched_getaffinity(0),
        "log": {name: (made.level, made.propagate, list(made.handlers)) for name, made in _loggers()},
    }


def _loggers() -> Iterator[tuple[str, logging.Logger]]:
    yield "", logging.root
    for name in ("bmburst", "bmburst.launch.start", "bmburst.train"):
        yield name, logging.getLogger(name)


def _collect() -> None:
    gc.collect()
    gc.freeze()  # modules stay: the next collection need not visit them


def _children() -> list[int]:
    tasks = Path("/proc/self/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]
