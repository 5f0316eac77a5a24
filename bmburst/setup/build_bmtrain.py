"""Builds a wheel of BMTrain's unmodified source package for this Python, CUDA and GPUs, and checks its machine code.

BMTrain 1.0.1 on PyPI has wheels for Python up to 3.11 with machine code for GPUs up to sm_80. Its source package lists
architectures in CMakeLists.txt, some of which CUDA 13 no longer supports, and its search for NCCL fails with newer NCCL
packages. So this build finds the tools, passes the location of NCCL, and compiles through the wrapper `nvcc`.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from bmburst.errors import UserError
from bmburst.setup.bmtrain import read_machine_code
from bmburst.setup.install_bmtrain import REQUIREMENT
from bmburst.setup.nvcc import write_wrapper

_PIP = f"{sys.executable} -m pip install"
_OLDEST_CMAKE = (3, 18)
_MAKES_WHEELS = (70, 1)  # the first setuptools that builds wheels without the package `wheel`
# NVIDIA's packages of one toolkit, which unpack into one folder, nvidia/cu13.
_NVCC_PACKAGES = "nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-cccl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Toolchain:
    """Paths of the tools.

    Attributes:
        nvcc: CUDA's compiler.
        nccl: Folder of NCCL, with include/nccl.h and lib/libnccl.so.2.
    """

    nvcc: Path
    nccl: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What the build finds on a machine.

    Attributes:
        nvcc: CUDA's compiler, or None.
        nccl: NCCL's folder, or None.
        include: Folder of Python's headers.
        which: Returns the path of a program, or None.
        has_module: Returns whether Python has a module.
    """

    nvcc: Path | None
    nccl: Path | None
    include: Path
    which: Callable[[str], str | None]
    has_module: Callable[[str], bool]

    @classmethod
    def here(cls) -> "Machine":
        """Return this machine."""
        include = Path(sysconfig.get_paths()["include"])
        return cls(nvcc=find_nvcc(), nccl=find_nccl(), include=include, which=_which, has_module=_has_module)


def find_toolchain(machine: Machine) -> Toolchain:
    """Return the tools of a machine.

    Raises:
        UserError: Tools are missing. The message names all of them and the commands that install them.
    """
    missing = list_missing(machine)
    if missing or machine.nvcc is None or machine.nccl is None:
        commands = "; ".join(join_commands(list(missing.values())))
        raise UserError(f"missing: {', '.join(missing)}\nfix: {commands}")
    return Toolchain(nvcc=machine.nvcc, nccl=machine.nccl)


def list_missing(machine: Machine) -> dict[str, str]:
    """Return the tools that the build needs and that a machine lacks, each with the command that installs it."""
    nvcc, which, has_module = machine.nvcc, machine.which, machine.has_module
    found = {}
    if nvcc is None:
        found["nvcc"] = f"{_PIP} {_NVCC_PACKAGES}"
    if not _has_cmake(which("cmake")):
        found[f"cmake {_OLDEST_CMAKE[0]}.{_OLDEST_CMAKE[1]} or later"] = f"{_PIP} cmake"
    if not (which("make") or has_module("ninja")):
        found["make or ninja"] = f"{_PIP} ninja"
    if not (which("c++") or which(os.environ.get("CXX", "g++"))):
        found["a C++ compiler"] = "apt-get install -y g++"
    if not (machine.include / "Python.h").is_file():
        found["Python.h"] = f"apt-get install -y python{sys.version_info.major}.{sys.version_info.minor}-dev"
    for module in ("pip", "setuptools", "wheel", "pybind11"):
        if not has_module(module):
            found[module] = f"{sys.executable} -m ensurepip" if module == "pip" else f"{_PIP} {module}"
    if machine.nccl is None:
        found["nccl.h and libnccl.so.2"] = f"{_PIP} --no-deps nvidia-nccl-cu{cuda_major(nvcc) if nvcc else 13}"
    return found


def join_commands(commands: Sequence[str]) -> list[str]:
    """Return the commands; commands of the same installer and options are joined into one with all packages."""
    joined: dict[str, list[str]] = {}
    for command in commands:
        start = next((s for s in (f"{_PIP} --no-deps", _PIP, "apt-get install -y") if command.startswith(s)), command)
        joined.setdefault(start, []).append(command[len(start) :].strip())
    return [" ".join([start, *packages]).strip() for start, packages in joined.items()]


def find_nvcc() -> Path | None:
    """Return CUDA's compiler, from CUDACXX, CUDA_HOME, the PATH, /usr/local/cuda or NVIDIA's Python packages."""
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
    """Return NCCL's folder, from NCCL_INCLUDE_DIR and NCCL_LIB_DIR or torch's NCCL package."""
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
    """Return the compute capabilities that nvcc compiles machine code for, as major * 10 + minor."""
    return sorted({int(sm) for sm in re.findall(r"\bsm_(\d+)\b", _output([str(nvcc), "--list-gpu-code"]))})


def cuda_major(nvcc: Path) -> int:
    """Return the major version of nvcc's CUDA."""
    found = re.search(r"release (\d+)\.", _output([str(nvcc), "--version"]))
    if found is None:
        raise UserError(f"{nvcc} --version does not print a CUDA release\nfix: set CUDACXX to the path of CUDA's nvcc")
    return int(found.group(1))


def tool_path() -> str:
    """Return a PATH that begins with this Python's programs, because cmake and ninja may be Python packages."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _has_cmake(cmake: str | None) -> bool:
    if cmake is None:
        return False
    found = re.search(r"cmake version (\d+)\.(\d+)", _output([cmake, "--version"]))
    return found is not None and (int(found[1]), int(found[2])) >= _OLDEST_CMAKE


def _has_module(name: str) -> bool:
    if importlib.util.find_spec(name) is not None:
        return True
    return name == "wheel" and _setuptools() >= _MAKES_WHEELS


def _setuptools() -> tuple[int, ...]:
    """Return setuptools' version, or () if it is not installed. Importing setuptools would replace distutils."""
    try:
        text = metadata.version("setuptools")
    except metadata.PackageNotFoundError:
        return ()
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


def _which(name: str) -> str | None:
    return shutil.which(name, path=tool_path())


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout


_DOWNLOAD = ("-m", "pip", "download", "--no-deps", "--no-build-isolation", "--no-binary=bmtrain", REQUIREMENT)
_DOWNLOAD_COMMAND = shlex.join(["python", *_DOWNLOAD])
_LOG_TAIL = 60  # lines of a failed build's log that are shown
_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildSpec:
    """Options of a build.

    Args:
        architectures: Compute capabilities to compile for, as major * 10 + minor, for example (90,).
        output: Folder for the wheel and the build's log. It is created if it does not exist.
        sdist: BMTrain's source package. None: download it from the registry.
        portable: Whether to compile for the CPU instructions of PyPI's wheels (AVX-512), or for those of this CPU.
            None: true if this CPU has AVX-512; otherwise such a wheel could not run here.
        install: Install the wheel for this Python.
    """

    architectures: tuple[int, ...]
    output: Path
    sdist: Path | None = None
    portable: bool | None = None
    install: bool = False


def parse_architecture(text: str) -> int:
    """Return a compute capability as major * 10 + minor, 90 for "9.0", "90" or "sm_90"; UserError for other text."""
    found = re.fullmatch(r"(?:sm_|compute_)?(\d{1,2})\.?(\d)", text.strip())
    if found is None:
        raise UserError(
            f"--arch '{text}' is not a GPU architecture\nallowed: a compute capability such as 90, 9.0 or sm_90\n"
            "fix: for example --arch 80 (A100), 90 (H100, H200) or 100 (B200)"
        )
    return int(found[1]) * 10 + int(found[2])


def check_toolchain(spec: BuildSpec, machine: Machine | None = None) -> Toolchain:
    """Find the tools, and check that they can build for the architectures.

    Args:
        spec: What is built.
        machine: Where; None: here.

    Raises:
        UserError: A tool or the source package is missing, or nvcc does not know an architecture.
    """
    if spec.sdist is not None:
        _require_sdist(spec.sdist)
    tools = find_toolchain(machine or Machine.here())
    _require_architectures(spec.architectures, supported_architectures(tools.nvcc), tools.nvcc)
    return tools


def build_wheel(spec: BuildSpec, tools: Toolchain) -> Path:
    """Build the wheel and return its path. Takes 10 to 60 seconds.

    Args:
        spec: What to build.
        tools: What `check_toolchain` found.

    Raises:
        UserError: The source package cannot be downloaded.
        RuntimeError: The build failed, or its wheel lacks an architecture.
    """
    spec.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bmburst-build-") as scratch:
        folder = Path(scratch)
        sdist = spec.sdist or _download(folder)
        wrapper = write_wrapper(folder, tools.nvcc, spec.architectures)
        portable = _has_avx512() if spec.portable is None else spec.portable
        environ = build_environment(os.environ, tools, wrapper, portable=portable)
        made = _make_wheel(sdist, folder / "wheel", environ, spec.output / "build-bmtrain.log")
        _require_machine_code(made, spec.architectures)
        wheel = Path(shutil.copy2(made, spec.output))
    if spec.install:
        _pip(["install", "--no-index", "--no-deps", "--force-reinstall", str(wheel)], os.environ)
    return wheel


def build_environment(environ: Mapping[str, str], tools: Toolchain, wrapper: Path, *, portable: bool) -> dict[str, str]:
    """Return the environment in which pip builds BMTrain.

    Args:
        environ: The user's environment. Only the variables below are changed.
        tools: Paths of nvcc and NCCL.
        wrapper: The wrapper of nvcc that CMake calls.
        portable: See `BuildSpec`.
    """
    # The linker gets $ORIGIN through CMake and a shell; without the backslash the shell would expand it to nothing.
    rpath = r"-Wl,-rpath,\$ORIGIN/../nvidia/nccl/lib"
    return {name: value for name, value in environ.items() if name != "NCCL_ROOT_DIR"} | {
        "PATH": tool_path(),
        "CUDACXX": str(wrapper),
        "NCCL_INCLUDE_DIR": str(tools.nccl / "include"),
        "NCCL_LIB_DIR": str(tools.nccl / "lib"),
        "LDFLAGS": " ".join(filter(None, [environ.get("LDFLAGS"), rpath])),
        "BUILD_DOCKER_ENV": str(int(portable)),  # 0 means -march=native
    }


def _require_sdist(sdist: Path) -> None:
    if not sdist.is_file():
        raise UserError(f"--sdist {sdist}: no such file\nfix: {_DOWNLOAD_COMMAND}")
    if not sdist.name.endswith(".tar.gz"):
        raise UserError(f"--sdist {sdist} is not a source package (.tar.gz)\nfix: {_DOWNLOAD_COMMAND}")


def _require_architectures(wanted: Sequence[int], known: Sequence[int], nvcc: Path) -> None:
    unknown = [sm for sm in wanted if sm not in known]
    if unknown:
        raise UserError(
            f"{nvcc} does not support {', '.join(f'sm_{sm}' for sm in unknown)}\n"
            f"allowed: {' '.join(map(str, known))}\n"
            "fix: install another CUDA and set CUDACXX to its nvcc"
        )


def _download(folder: Path) -> Path:
    """Download the source package without its requirements, which would install nvidia-nccl-cu11."""
    command = [sys.executable, *_DOWNLOAD, "--dest", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(folder.glob("bmtrain-*.tar.gz"))
    if done.returncode != 0 or not found:
        reason = _pip_reason(done.stdout + done.stderr)
        raise UserError(
            f"{REQUIREMENT} could not be downloaded: {reason[:200]}\n"
            f"fix: {_DOWNLOAD_COMMAND} on a machine with a network, then --sdist bmtrain-1.0.1.tar.gz here"
        )
    return found[0]


def _pip_reason(output: str) -> str:
    """Return the line of pip's output with the error. The last lines only give hints."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"(ERROR:|\w+Error:)", line)]
    return (named or lines or ["pip gave no reason"])[-1]


def _make_wheel(sdist: Path, folder: Path, environ: Mapping[str, str], log: Path) -> Path:
    words = ["wheel", "--verbose", "--no-cache-dir", "--no-index", "--no-build-isolation", "--no-deps"]
    output = _pip([*words, str(sdist), "--wheel-dir", str(folder)], environ, log)
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise RuntimeError(f"pip made no wheel of {sdist}; its log: {log}\n{_tail(output)}")
    return wheels[0]


def _pip(words: list[str], environ: Mapping[str, str], log: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
        env=environ,
    )
    if log is not None:
        log.write_text(done.stdout)
    if done.returncode != 0:
        where = f"; its log: {log}" if log is not None else ""
        raise RuntimeError(f"pip {words[0]} failed with status {done.returncode}{where}\n{_tail(done.stdout)}")
    return done.stdout


def _require_machine_code(wheel: Path, architectures: Sequence[int]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = f"bmtrain/C{sysconfig.get_config_var('EXT_SUFFIX')}"
        if name not in archive.namelist():
            raise RuntimeError(f"{wheel.name} lacks {name}: it was built for another Python")
        code = read_machine_code(archive.read(name))
    if code.cubins != set(architectures):
        raise RuntimeError(f"{wheel.name} holds {code}, not machine code for {sorted(architectures)}")


def _has_avx512() -> bool:
    return _CPU_INFO.is_file() and " avx512f " in f"{_CPU_INFO.read_text()} ".replace("\n", " ")


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-_LOG_TAIL:])
