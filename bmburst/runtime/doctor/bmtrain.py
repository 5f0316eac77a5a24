"""BMTrain: installed, importable, compiled for this machine's GPUs; or, without GPUs, the host runtime."""

import importlib.machinery
import importlib.util
import os
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from bmburst.runtime.doctor.finding import BMBURST, Finding
from bmburst.runtime.doctor.machine_code import MachineCode, read_machine_code
from bmburst.runtime.install_bmtrain import has_wheel, install_command

_TESTED = "1.0.1"
_IMPORT = "import bmtrain"
_HOST = "from bmburst.runtime import host; host.install(); import bmtrain"
_IMPORT_TIMEOUT = 300  # seconds; a cold import of torch from a network disk takes minutes


def installed(name: str) -> Finding:
    """Look for the package and import it as training would, in a process of its own."""
    if importlib.util.find_spec("bmtrain") is None:
        return Finding(name, "missing", "not installed", fix_command())
    found = _version()
    code = _IMPORT if _has_cuda() else _HOST
    how = "" if _has_cuda() else ", on the CPU (host runtime)"
    command = [sys.executable, "-c", code]
    root = str(Path(__file__).resolve().parents[3])  # bmburst may run from its source tree
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT, check=False, env=_environment(root)
    )
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        fix = fix_command(again=True)
        return Finding(name, "broken", f"{found} cannot be imported{how}: {reason}", fix)
    other = "" if found == _TESTED else f" (bmburst is tested with {_TESTED})"
    return Finding(name, "ok", f"{found}{other}{how}")


def machine_code(name: str) -> Finding:
    """Compare the architectures in BMTrain's extension with this machine's GPUs."""
    spec = importlib.util.find_spec("bmtrain")
    if spec is None or not spec.submodule_search_locations:
        return Finding(name, "note", "BMTrain is not installed")
    folder = Path(next(iter(spec.submodule_search_locations)))
    files = extension_files(folder)
    if not files:
        others = ", ".join(path.name for path in sorted(folder.glob("C.*so")))
        detail = f"none for this Python{f' (but {others})' if others else ''}"
        if not _has_cuda():
            return Finding(name, "note", f"{detail}; the host runtime needs none")
        return Finding(name, "missing", detail, f"{BMBURST} build-bmtrain --install")
    code = read_machine_code(files[0].read_bytes())
    return judge(name, code, capabilities())


def judge(name: str, code: MachineCode, gpus: list[int]) -> Finding:
    """Return the finding for an extension's code.

    Args:
        name: Of the finding.
        code: What the extension holds.
        gpus: Compute capabilities of this machine's GPUs, major * 10 + minor.
    """
    if not gpus:
        return Finding(name, "note", f"{code}; no GPU here to run it")
    unable = sorted({sm for sm in gpus if not code.runs_on(sm)})
    if unable:
        wanted = " ".join(map(str, sorted(set(gpus))))
        fix = f"{BMBURST} build-bmtrain --install --arch {wanted}"
        return Finding(name, "broken", f"{code}: nothing that {_names(unable)} could run", fix)
    compiled = sorted({sm for sm in gpus if not MachineCode(cubins=code.cubins).runs_on(sm)})
    how = f"; the driver compiles its PTX for {_names(compiled)}" if compiled else ""
    return Finding(name, "ok", f"{code}{how}")


def extension_files(folder: Path) -> list[Path]:
    """Return the compiled extension `C` in BMTrain's folder that this Python would import."""
    return [path for end in importlib.machinery.EXTENSION_SUFFIXES if (path := folder / f"C{end}").is_file()]


def capabilities() -> list[int]:
    """Return the compute capability of each GPU, major * 10 + minor."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [major * 10 + minor for major, minor in map(torch.cuda.get_device_capability, range(count))]


def fix_command(*, again: bool = False) -> str:
    """Return the command that installs BMTrain so that it works here, never with its own NCCL package.

    Args:
        again: It is installed already, and does not work.
    """
    if _has_cuda() and (again or not has_wheel()):
        return f"{BMBURST} build-bmtrain --install"
    return shlex.join(install_command(again=again))


def _version() -> str:
    try:
        return metadata.version("bmtrain")
    except metadata.PackageNotFoundError:
        return "of unknown version"


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _environment(root: str) -> dict[str, str]:
    path = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": f"{path}{os.pathsep}{root}" if path else root}


def _names(architectures: list[int]) -> str:
    return ", ".join(f"sm_{sm}" for sm in architectures)
