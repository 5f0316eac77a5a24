"""What the build needs: where each tool is, and the command that gets one that is not there."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from bmburst.errors import UserError

_PIP = f"{sys.executable} -m pip install"
_OLDEST_CMAKE = (3, 18)
_MAKES_WHEELS = (70, 1)  # the setuptools that needs no package `wheel` for it
# NVIDIA's packages of one toolkit, which unpack into one folder, nvidia/cu13.
_NVCC_PACKAGES = "nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-cccl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """A tool that is not there.

    Attributes:
        what: Its name.
        command: What gets it; those that begin alike are joined into one.
    """

    what: str
    command: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Toolchain:
    """Where the tools are.

    Attributes:
        nvcc: CUDA's compiler.
        nccl: Folder of NCCL, with include/nccl.h and lib/libnccl.so.2.
    """

    nvcc: Path
    nccl: Path


def find_toolchain() -> Toolchain:
    """Find everything that the build needs.

    Raises:
        UserError: Something is missing; names all of it, and the commands that get it.
    """
    nvcc, nccl = find_nvcc(), find_nccl()
    missing = list_missing(nvcc, nccl)
    if missing or nvcc is None or nccl is None:
        commands = "; ".join(join_commands([tool.command for tool in missing]))
        raise UserError(f"missing: {', '.join(tool.what for tool in missing)}\nget them: {commands}")
    return Toolchain(nvcc=nvcc, nccl=nccl)


def list_missing(nvcc: Path | None, nccl: Path | None) -> list[Missing]:
    """Return what is not there of all that the build needs.

    Args:
        nvcc: CUDA's compiler, where it was found.
        nccl: NCCL's folder, where it was found.
    """
    found = []
    if nvcc is None:
        found.append(Missing(what="nvcc", command=f"{_PIP} {_NVCC_PACKAGES}"))
    if not _has_cmake():
        found.append(Missing(what=f"cmake {_OLDEST_CMAKE[0]}.{_OLDEST_CMAKE[1]} or later", command=f"{_PIP} cmake"))
    if not (_which("make") or importlib.util.find_spec("ninja")):
        found.append(Missing(what="make or ninja", command=f"{_PIP} ninja"))
    if not (_which("c++") or _which(os.environ.get("CXX", "g++"))):
        found.append(Missing(what="a C++ compiler", command="apt-get install -y g++"))
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        found.append(Missing(what="Python.h", command=f"apt-get install -y python{version}-dev"))
    for module in ("pip", "setuptools", "wheel", "pybind11"):
        if not _has_module(module):
            command = f"{sys.executable} -m ensurepip" if module == "pip" else f"{_PIP} {module}"
            found.append(Missing(what=module, command=command))
    if nccl is None:
        command = f"{_PIP} --no-deps nvidia-nccl-cu{cuda_major(nvcc) if nvcc else 13}"
        found.append(Missing(what="nccl.h and libnccl.so.2", command=command))
    return found


def join_commands(commands: Sequence[str]) -> list[str]:
    """Return the commands with those of one installer and the same options joined: its last words are packages."""
    joined: dict[str, list[str]] = {}
    for command in commands:
        start = next((s for s in (f"{_PIP} --no-deps", _PIP, "apt-get install -y") if command.startswith(s)), command)
        joined.setdefault(start, []).append(command[len(start) :].strip())
    return [" ".join([start, *packages]).strip() for start, packages in joined.items()]


def find_nvcc() -> Path | None:
    """Return CUDA's compiler: CUDACXX, CUDA_HOME, the PATH, /usr/local/cuda, or NVIDIA's Python packages."""
    named = os.environ.get("CUDACXX")
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    spec = importlib.util.find_spec("nvidia")
    packages = [Path(folder) for folder in (spec.submodule_search_locations if spec else None) or ()]
    candidates = [
        *([named] if named else []),
        *(f"{home}/bin/nvcc" for home in homes),
        shutil.which("nvcc"),
        "/usr/local/cuda/bin/nvcc",
        *(str(path) for folder in packages for path in sorted(folder.glob("cu*/bin/nvcc"), reverse=True)),
    ]
    return next((Path(path).resolve() for path in candidates if path and os.access(path, os.X_OK)), None)


def find_nccl() -> Path | None:
    """Return NCCL's folder: what NCCL_INCLUDE_DIR and NCCL_LIB_DIR name, or torch's own NCCL package."""
    include, libraries = os.environ.get("NCCL_INCLUDE_DIR"), os.environ.get("NCCL_LIB_DIR")
    if include and libraries:
        folders = [Path(include).parent] if Path(include).parent == Path(libraries).parent else []
    else:
        try:
            spec = importlib.util.find_spec("nvidia.nccl")
        except ModuleNotFoundError:
            spec = None
        folders = [Path(folder) for folder in (spec.submodule_search_locations if spec else None) or ()]
    whole = [f for f in folders if (f / "include/nccl.h").is_file() and (f / "lib/libnccl.so.2").is_file()]
    return whole[0] if whole else None


def supported_architectures(nvcc: Path) -> list[int]:
    """Return the compute capabilities that this nvcc makes machine code for, major * 10 + minor."""
    return sorted({int(sm) for sm in re.findall(r"\bsm_(\d+)\b", _output([str(nvcc), "--list-gpu-code"]))})


def cuda_major(nvcc: Path) -> int:
    """Return the major version of the CUDA that nvcc belongs to."""
    found = re.search(r"release (\d+)\.", _output([str(nvcc), "--version"]))
    if found is None:
        raise UserError(f"{nvcc} --version names no release: is it CUDA's compiler?\nset CUDACXX to the nvcc to use")
    return int(found.group(1))


def tool_path() -> str:
    """Return a PATH that begins with this Python's own programs: cmake and ninja may be packages of it."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _has_cmake() -> bool:
    cmake = _which("cmake")
    if cmake is None:
        return False
    found = re.search(r"cmake version (\d+)\.(\d+)", _output([cmake, "--version"]))
    return found is not None and (int(found[1]), int(found[2])) >= _OLDEST_CMAKE


def _has_module(name: str) -> bool:
    if importlib.util.find_spec(name) is not None:
        return True
    return name == "wheel" and _setuptools() >= _MAKES_WHEELS


def _setuptools() -> tuple[int, ...]:
    """Return setuptools' version, nothing where it is not installed. Not imported: it would replace distutils."""
    try:
        text = metadata.version("setuptools")
    except metadata.PackageNotFoundError:
        return ()
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


def _which(name: str) -> str | None:
    return shutil.which(name, path=tool_path())


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout
