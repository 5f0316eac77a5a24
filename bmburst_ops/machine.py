"""What kernels ask of a machine before they run: processors, cuDNN, and packages, which are found without import."""

import importlib.util
import re
from functools import cache
from importlib import metadata

import torch


class Machine:
    """This machine. A kernel gets one when it is made, so its rules can also be asked for another machine."""

    def capability(self, device: torch.device) -> tuple[int, int]:
        """Return the compute capability of a GPU."""
        return torch.cuda.get_device_capability(device)

    def gpu(self, device: torch.device) -> str:
        """Return the name of a GPU."""
        return torch.cuda.get_device_name(device)

    def cpu(self) -> str:
        """Return the vector instructions of the CPU that torch uses, for example "AVX512"."""
        return torch.backends.cpu.get_cpu_capability()

    def cudnn(self) -> int:
        """Return the version of torch's cuDNN, for example 91002 for 9.10.2; 0 if it has none."""
        return torch.backends.cudnn.version() or 0

    def version(self, distribution: str) -> tuple[int, ...] | None:
        """See `version_of`."""
        return version_of(distribution)

    def beta(self, distribution: str) -> int | None:
        """See `beta_of`."""
        return beta_of(distribution)

    def has(self, module: str) -> bool:
        """See `is_there`."""
        return is_there(module)


HERE = Machine()


@cache
def version_of(distribution: str) -> tuple[int, ...] | None:
    """Return the version of an installed distribution, for example (2, 8, 3) for 2.8.3; None if it is not installed.

    It looks up the distribution and not the module: flash-attn and flash-attn-4 share the top-level module
    `flash_attn`, and flash-attn includes an older copy of flash-attn-4.
    """
    try:
        return tuple(int(n) for n in re.findall(r"\d+", metadata.version(distribution))[:3])
    except metadata.PackageNotFoundError:
        return None


@cache
def beta_of(distribution: str) -> int | None:
    """Return the number of an installed alpha or beta version, for example 36 for 4.0.0b36; None for other versions."""
    if version_of(distribution) is None:
        return None
    found = re.search(r"\d(?:a|b)(\d+)", metadata.version(distribution))
    return None if found is None else int(found[1])


@cache
def is_there(module: str) -> bool:
    """Whether a top-level module can be found."""
    return importlib.util.find_spec(module) is not None
