"""Python, torch, the GPUs, and their access to each other."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from bmburst.amounts import GIB
from bmburst.runtime.doctor.finding import PIP, Finding, one_line

_DRIVER = Path("/proc/driver/nvidia/version")
_OLDEST_PYTHON = (3, 11)


def python(name: str) -> Finding:
    """Look at the interpreter."""
    detail = f"{platform.python_version()} ({sys.executable}), {platform.system()} {platform.machine()}"
    if sys.version_info < _OLDEST_PYTHON:
        return Finding(name, "broken", f"{detail}: bmburst needs 3.11 or later", "uv python install 3.12")
    return Finding(name, "ok", detail)


def torch(name: str) -> Finding:
    """Import torch, which also shows whether its libraries are whole."""
    try:
        import torch as module
    except ModuleNotFoundError as error:
        return Finding(name, "missing", one_line(error), f"{PIP} install torch")
    except (ImportError, OSError) as error:
        from bmburst.runtime.doctor.nccl import repair_command

        fix = repair_command() if "nccl" in str(error) else f"{PIP} install --force-reinstall torch"
        return Finding(name, "broken", one_line(error), fix)
    build = f"CUDA {module.version.cuda}" if module.version.cuda else "a CPU build"
    return Finding(name, "ok", f"{module.__version__}, {build}")


def gpus(name: str) -> Finding:
    """Compute on every GPU that torch can see; say why where it sees none."""
    import torch as module

    if not module.cuda.is_available():
        return _no_gpus(name)
    found = []
    for index in range(module.cuda.device_count()):
        ones = module.ones(8, device=f"cuda:{index}")
        if float(ones.sum()) != 8.0:
            return Finding(name, "broken", f"GPU {index} adds eight ones to {float(ones.sum())}")
        properties = module.cuda.get_device_properties(index)
        major, minor = properties.major, properties.minor
        found.append(f"{index}: {properties.name} sm_{major}{minor} {properties.total_memory / GIB:.0f} GiB")
    return Finding(name, "ok", "; ".join([*found, f"driver {driver_version() or 'unknown'}"]))


def _no_gpus(name: str) -> Finding:
    import torch as module

    cpu = "BMTrain runs on the CPU (host runtime)"
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return Finding(name, "note", f"hidden by CUDA_VISIBLE_DEVICES= (empty); {cpu}")
    driver = driver_version()
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
    """Return the version of NVIDIA's driver, or nothing where there is none."""
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


def peer_access(name: str) -> Finding:
    """Ask which pairs of GPUs can read each other's memory."""
    import torch as module

    count = module.cuda.device_count() if module.cuda.is_available() else 0
    if count < 2:
        return Finding(name, "note", f"{count or 'no'} GPU{'s' if not count else ''} here: nothing to reach")
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    apart = [f"{a}->{b}" for a, b in pairs if not module.cuda.can_device_access_peer(a, b)]
    if apart:
        detail = f"not between {', '.join(apart)}: their transfers go through host memory, by NCCL"
        return Finding(name, "note", detail)
    return Finding(name, "ok", f"between all {count} GPUs")
