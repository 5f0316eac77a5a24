"""Checks of Python, torch, the GPUs, their access to each other, and NCCL, and `Finding`, the result of any check.

The packages nvidia-nccl-cu11, -cu12 and -cu13 all contain nvidia/nccl/lib/libnccl.so.2. pip overwrites the file without
a warning, and removing one package removes the file for all. Then torch cannot be imported, or runs with an NCCL that
it was not built for.
"""

import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from bmburst.amounts import GIB
from bmburst.errors import one_line

Status = Literal["ok", "missing", "broken", "note"]

PIP = f"{sys.executable} -m pip"
BMBURST = f"{sys.executable} -m bmburst"

_DRIVER = Path("/proc/driver/nvidia/version")
_OLDEST_PYTHON = (3, 11)


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check.

    Attributes:
        name: Subject of the check.
        status: "ok": usable; "missing": absent, `fix` installs it; "broken": present but unusable, `fix` repairs it;
            "note": for information, no action needed.
        detail: The result in words.
        fix: A shell command; empty if nothing needs to be done or no command helps.
    """

    name: str
    status: Status
    detail: str
    fix: str = ""


def python(name: str) -> Finding:
    """Check the version of Python."""
    detail = f"{platform.python_version()} ({sys.executable}), {platform.system()} {platform.machine()}"
    if sys.version_info < _OLDEST_PYTHON:
        return Finding(name, "broken", f"{detail}: bmburst needs 3.11 or later", "uv python install 3.12")
    return Finding(name, "ok", detail)


def torch(name: str, installed: Any = metadata) -> Finding:
    """Import torch, which also shows whether its libraries are whole; `installed` as in `nccl_packages`."""
    try:
        import torch as module
    except ModuleNotFoundError as error:
        return Finding(name, "missing", one_line(error), f"{PIP} install torch")
    except (ImportError, OSError) as error:
        fix = repair_command(installed) if "nccl" in str(error) else f"{PIP} install --force-reinstall torch"
        return Finding(name, "broken", one_line(error), fix)
    build = f"CUDA {module.version.cuda}" if module.version.cuda else "a CPU build"
    return Finding(name, "ok", f"{module.__version__}, {build}")


def gpus(name: str, module: Any = None, driver: str | None = None) -> Finding:
    """Compute on every GPU that torch sees; if it sees none, find the reason.

    Args:
        name: Name of the finding.
        module: torch, or what stands in for it.
        driver: Version of NVIDIA's driver, as of `driver_version`, which is asked by default.
    """
    if module is None:
        import torch as module
    driver = driver_version() if driver is None else driver
    if not module.cuda.is_available():
        return _no_gpus(name, module, driver)
    found = []
    for index in range(module.cuda.device_count()):
        ones = module.ones(8, device=f"cuda:{index}")
        if float(ones.sum()) != 8.0:
            return Finding(name, "broken", f"GPU {index} adds eight ones to {float(ones.sum())}")
        properties = module.cuda.get_device_properties(index)
        major, minor = properties.major, properties.minor
        found.append(f"{index}: {properties.name} sm_{major}{minor} {properties.total_memory / GIB:.0f} GiB")
    return Finding(name, "ok", "; ".join([*found, f"driver {driver or 'unknown'}"]))


def _no_gpus(name: str, module: Any, driver: str) -> Finding:
    cpu = "BMTrain runs on the CPU (host runtime)"
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return Finding(name, "note", f"hidden by CUDA_VISIBLE_DEVICES= (empty); {cpu}")
    if not driver:
        return Finding(name, "note", f"no NVIDIA driver; {cpu}")
    if module.version.cuda is None:
        fix = f"{PIP} install --force-reinstall torch"
        return Finding(name, "broken", f"there is a driver ({driver}) but torch is a CPU build", fix)
    try:
        module.cuda.init()
    except RuntimeError as error:
        reason = one_line(error)
    else:
        reason = "torch sees no device"
    fix = f"{PIP} install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126"
    return Finding(name, "broken", f"driver {driver}, torch for CUDA {module.version.cuda}: {reason}", fix)


def driver_version() -> str:
    """Return the version of NVIDIA's driver; empty if there is none."""
    if _DRIVER.is_file():
        words = _DRIVER.read_text().split("\n")[0].split()
        numbers = [word for word in words if word[0].isdigit() and "." in word]
        if numbers:
            return numbers[0]
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return ""
    command = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.split("\n")[0].strip() if done.returncode == 0 else ""


def peer_access(name: str, cuda: Any = None) -> Finding:
    """Check which pairs of GPUs can read each other's memory, by `torch.cuda` or what stands in for it."""
    if cuda is None:
        from torch import cuda
    count = cuda.device_count() if cuda.is_available() else 0
    if count < 2:
        return Finding(name, "note", f"{count or 'no'} GPU{'s' if not count else ''} here: nothing to reach")
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    apart = [f"{a}->{b}" for a, b in pairs if not cuda.can_device_access_peer(a, b)]
    if apart:
        detail = f"not between {', '.join(apart)}: their transfers go through host memory, by NCCL"
        return Finding(name, "note", detail)
    return Finding(name, "ok", f"between all {count} GPUs")


_PREFIX = "nvidia-nccl-cu"
_MAPS = Path("/proc/self/maps")


def nccl_loaded(name: str) -> Finding:
    """Check which libnccl the dynamic linker has loaded into this process with torch."""
    import torch

    paths = mapped_libraries(_MAPS.read_text())
    if torch.version.cuda is None:
        where = f"; {', '.join(paths)} is loaded all the same" if paths else ""
        return Finding(name, "note", f"torch is a CPU build and has none, gloo carries transfers{where}")
    if len(paths) > 1:
        return Finding(name, "broken", f"two are loaded: {', '.join(paths)}", "unset LD_LIBRARY_PATH LD_PRELOAD")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return Finding(name, "ok", f"{version} ({paths[0] if paths else 'inside torch'})")


def mapped_libraries(maps: str) -> list[str]:
    """Return the files named libnccl.so* in the text of /proc/PID/maps, each once."""
    files = [line.split(maxsplit=5)[5] for line in maps.splitlines() if len(line.split(maxsplit=5)) == 6]
    return sorted({file for file in files if Path(file).name.startswith("libnccl.so")})


def nccl_packages(name: str, installed: Any = metadata) -> Finding:
    """Look for NCCL packages that own the same file, or whose file is missing or belongs to another package.

    Args:
        name: Name of the check.
        installed: The packages of this Python, as `importlib.metadata` tells of them.
    """
    owned = {d.metadata["Name"]: _files(d) for d in installed.distributions() if _is_nccl(d)}
    wanted = _wanted(installed)
    if not owned:
        if wanted is None:
            return Finding(name, "note", "none installed, none needed")
        return Finding(name, "broken", f"torch needs {wanted}, which is not installed", repair_command(installed))
    owners = Counter(path for files in owned.values() for path in set(files))
    shared = sorted(path for path, count in owners.items() if count > 1)
    if shared:
        both = " and ".join(sorted(owned))
        detail = f"{both} own the same files ({shared[0]}): one has overwritten the other"
        if wanted is None:
            return Finding(name, "note", f"{detail}; torch uses neither")
        return Finding(name, "broken", detail, repair_command(installed))
    damaged = [path for files in owned.values() for path, size in files.items() if not _has_size(path, size)]
    if damaged and wanted is not None:
        return Finding(name, "broken", f"{damaged[0]} is gone or another package's", repair_command(installed))
    return Finding(name, "ok", ", ".join(f"{found} {installed.version(found)}" for found in sorted(owned)))


def repair_command(installed: Any) -> str:
    """Return the command that reinstalls torch's NCCL package and removes all others; see `nccl_packages`."""
    wanted = _wanted(installed)
    kept = (wanted or "").partition("==")[0]
    others = [n for d in installed.distributions() if _is_nccl(d) and (n := d.metadata["Name"]) != kept]
    remove = f"{PIP} uninstall -y {' '.join(sorted(others))}; " if others else ""
    return f"{remove}{PIP} install --force-reinstall --no-deps {wanted}" if wanted else remove.rstrip("; ")


def _wanted(installed: Any) -> str | None:
    """Return torch's requirement of NCCL, for example "nvidia-nccl-cu13==2.28.9"; None for a CPU build."""
    try:
        requirements = installed.requires("torch") or []
    except metadata.PackageNotFoundError:
        return None
    found = [text.partition(";")[0].strip() for text in requirements if text.startswith(_PREFIX)]
    return found[0].replace(" ", "") if found else None


def _is_nccl(distribution: metadata.Distribution) -> bool:
    return (distribution.metadata["Name"] or "").startswith(_PREFIX)


def _files(distribution: metadata.Distribution) -> dict[str, int | None]:
    """Return the absolute paths of a package's libraries and headers, with their sizes at installation."""
    files = [file for file in distribution.files or () if file.suffix == ".h" or ".so" in file.name]
    return {str(Path(str(distribution.locate_file(file))).resolve()): file.size for file in files}


def _has_size(path: str, size: int | None) -> bool:
    return Path(path).is_file() and size in (None, Path(path).stat().st_size)
