"""From BMTrain's source package to a wheel whose machine code was looked at."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bmburst.errors import UserError
from bmburst.runtime.build_bmtrain.nvcc import write_wrapper
from bmburst.runtime.build_bmtrain.tools import Toolchain, find_toolchain, supported_architectures, tool_path
from bmburst.runtime.doctor.machine_code import read_machine_code

REQUIREMENT = "bmtrain==1.0.1"
_LOG_TAIL = 60  # lines of a failed build's log that are shown
_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildSpec:
    """What to build.

    Args:
        architectures: Compute capabilities to make machine code for, major * 10 + minor, for example (90,).
        output: Folder for the wheel and the build's log; made if it is not there.
        sdist: BMTrain's source package; None: downloaded from the registry.
        portable: Use the instructions that PyPI's wheels use (AVX-512) and no others of this CPU. None: where this
            CPU has them, since the wheel could not run here otherwise.
        install: Install the wheel for this Python.
    """

    architectures: tuple[int, ...]
    output: Path
    sdist: Path | None = None
    portable: bool | None = None
    install: bool = False


def parse_architecture(text: str) -> int:
    """Return a compute capability as major * 10 + minor; "9.0", "90" and "sm_90" are the same.

    Raises:
        UserError: It is none of these.
    """
    found = re.fullmatch(r"(?:sm_|compute_)?(\d{1,2})\.?(\d)", text.strip())
    if found is None:
        raise UserError(
            f"--arch '{text}' is no GPU architecture\nallowed: a compute capability such as 90, 9.0 or sm_90"
        )
    return int(found[1]) * 10 + int(found[2])


def check(spec: BuildSpec) -> Toolchain:
    """Find the tools, and whether they can build what is asked for.

    Raises:
        UserError: A tool or the source package is missing, or nvcc does not know an architecture.
    """
    if spec.sdist is not None:
        _require_sdist(spec.sdist)
    tools = find_toolchain()
    _require_architectures(spec.architectures, supported_architectures(tools.nvcc), tools.nvcc)
    return tools


def build(spec: BuildSpec, tools: Toolchain) -> Path:
    """Build the wheel and return its path. Takes 10 to 60 seconds.

    Args:
        spec: What to build.
        tools: What `check` has found.

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
        _pip(["install", "--no-index", "--no-deps", "--force-reinstall", str(wheel)], dict(os.environ))
    return wheel


def build_environment(environ: Mapping[str, str], tools: Toolchain, wrapper: Path, *, portable: bool) -> dict[str, str]:
    """Return the environment in which pip builds BMTrain.

    Args:
        environ: The user's, kept but for what is listed here.
        tools: Where nvcc and NCCL are.
        wrapper: What CMake is to take for nvcc.
        portable: See BuildSpec.
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
        raise UserError(f"--sdist {sdist}: no such file\nget it: {_download_command()}")
    if not sdist.name.endswith(".tar.gz"):
        raise UserError(f"--sdist {sdist} is no source package (.tar.gz)\nget it: {_download_command()}")


def _require_architectures(wanted: Sequence[int], known: Sequence[int], nvcc: Path) -> None:
    unknown = [sm for sm in wanted if sm not in known]
    if unknown:
        raise UserError(
            f"{nvcc} makes no machine code for {', '.join(f'sm_{sm}' for sm in unknown)}\n"
            f"allowed: {' '.join(map(str, known))}\n"
            "for others install another CUDA and set CUDACXX to its nvcc"
        )


def _download(folder: Path) -> Path:
    """Fetch the source package. Its own requirements are not fetched: they would bring nvidia-nccl-cu11."""
    done = subprocess.run(
        [*_download_words(), "--dest", str(folder)], capture_output=True, text=True, check=False, env=dict(os.environ)
    )
    found = sorted(folder.glob("bmtrain-*.tar.gz"))
    if done.returncode != 0 or not found:
        reason = _pip_reason(done.stdout + done.stderr)
        raise UserError(
            f"{REQUIREMENT} could not be downloaded: {reason[:200]}\n"
            f"where there is network: {_download_command()}\nthen here: --sdist bmtrain-1.0.1.tar.gz"
        )
    return found[0]


def _pip_reason(output: str) -> str:
    """Return the line of pip's output that names the error; its last lines only say where to look."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"(ERROR:|\w+Error:)", line)]
    return (named or lines or ["pip gave no reason"])[-1]


def _download_words() -> list[str]:
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation"]
    return [*pip, "--no-binary=bmtrain", REQUIREMENT]


def _download_command() -> str:
    return f"python -m pip download --no-deps --no-build-isolation --no-binary=bmtrain {REQUIREMENT}"


def _make_wheel(sdist: Path, folder: Path, environ: dict[str, str], log: Path) -> Path:
    words = ["wheel", "--verbose", "--no-cache-dir", "--no-index", "--no-build-isolation", "--no-deps"]
    output = _pip([*words, str(sdist), "--wheel-dir", str(folder)], environ, log)
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise RuntimeError(f"pip made no wheel of {sdist}; its log: {log}\n{_tail(output)}")
    return wheels[0]


def _pip(words: list[str], environ: dict[str, str], log: Path | None = None) -> str:
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
