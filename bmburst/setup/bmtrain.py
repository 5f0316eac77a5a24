"""Checks that BMTrain is installed, importable, and compiled for this machine's GPUs; without GPUs the host runtime.

The architectures of a binary are read from CUDA's fat binaries, which contain machine code and PTX. A fat binary is in
the section .nv_fatbin of a shared object, or in a file of its own. It starts with a 16-byte header: magic number
0xba55ed50, version 1, the size of the header, and the size of all entries. The header of each entry has its kind (1:
PTX, 2: an ELF cubin), the sizes of header and content, and the architecture. NVIDIA does not document the format. It
was derived from binaries of CUDA 11 and 13 and compared with the output of cuobjdump.
"""

import importlib.machinery
import importlib.util
import os
import shlex
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from bmburst.setup.install_bmtrain import REQUIREMENT, has_wheel, install_command
from bmburst.setup.system import BMBURST, Finding

_CONTAINER = struct.Struct("<IHHQ")  # magic, version, header size, size of the entries
_ENTRY = struct.Struct("<HHIQ12xI")  # kind, version, header size, content size, ..., architecture
_MAGIC = struct.pack("<IHH", 0xBA55ED50, 1, 16)
_PTX, _CUBIN = 1, 2


@dataclass(frozen=True, slots=True)
class MachineCode:
    """The architectures in a binary, as CUDA numbers them: 90 is sm_90, of compute capability 9.0.

    Attributes:
        cubins: Machine code, which runs on GPUs of the same major and the same or a higher minor number.
        ptx: PTX assembly, which the driver compiles for the same and every later architecture.
    """

    cubins: frozenset[int] = field(default_factory=frozenset)
    ptx: frozenset[int] = field(default_factory=frozenset)

    def runs_on(self, capability: int) -> bool:
        """Return whether a GPU of this compute capability (major * 10 + minor) can run the binary."""
        own = any(sm // 10 == capability // 10 and sm <= capability for sm in self.cubins)
        return own or any(sm <= capability for sm in self.ptx)

    def __str__(self) -> str:
        """Return the architectures in nvcc's notation, for example "sm_80 sm_90, PTX compute_90"."""
        parts = [" ".join(f"sm_{sm}" for sm in sorted(self.cubins))]
        if self.ptx:
            parts.append("PTX " + " ".join(f"compute_{sm}" for sm in sorted(self.ptx)))
        return ", ".join(filter(None, parts)) or "no GPU code"


def read_machine_code(binary: bytes) -> MachineCode:
    """Return the architectures of all fat binaries in a file's content."""
    found: dict[int, set[int]] = {_PTX: set(), _CUBIN: set()}
    at = binary.find(_MAGIC)
    while at >= 0 and at + _CONTAINER.size <= len(binary):
        _, _, header, size = _CONTAINER.unpack_from(binary, at)
        entry, end = at + header, at + header + size
        if end > len(binary):  # the magic number occurred by chance, or the file is truncated
            at = binary.find(_MAGIC, at + 1)
            continue
        while entry + _ENTRY.size <= end:
            kind, _, entry_header, content, architecture = _ENTRY.unpack_from(binary, entry)
            if entry_header < _ENTRY.size:
                break
            if kind in found:
                found[kind].add(architecture)
            entry += entry_header + content
        at = binary.find(_MAGIC, end)
    return MachineCode(cubins=frozenset(found[_CUBIN]), ptx=frozenset(found[_PTX]))


_TESTED = REQUIREMENT.partition("==")[2]
_IMPORT = """
import torch
if not torch.cuda.is_available():
    from bmburst import host
    host.install()
import bmtrain
"""
_IMPORT_TIMEOUT = 300  # seconds; a cold import of torch from a network disk takes minutes


def installed(
    name: str, gpus: list[int] | None = None, find: Callable[[str], object] = importlib.util.find_spec
) -> Finding:
    """Look for the package and import it as in training, in a separate process.

    Args:
        name: Name of the finding.
        gpus: See `machine_code`.
        find: Finds a module by its name; None if there is none.
    """
    done = None if find("bmtrain") is None else _import_apart()
    gpus = capabilities() if gpus is None else gpus  # imports torch, so it is asked behind the process
    if done is None:
        return Finding(name, "missing", "not installed", fix_command(gpus, has_wheel=has_wheel()))
    found = _version()
    how = "" if gpus else ", on the CPU (host runtime)"
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        fix = fix_command(gpus, has_wheel=has_wheel(), again=True)
        return Finding(name, "broken", f"{found} cannot be imported{how}: {reason}", fix)
    other = "" if found == _TESTED else f" (bmburst is tested with {_TESTED})"
    return Finding(name, "ok", f"{found}{other}{how}")


def _import_apart() -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", _IMPORT]
    env = _environment(str(Path(__file__).resolve().parents[2]))  # bmburst may run from its source tree
    return subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT, check=False, env=env)


def machine_code(name: str, gpus: list[int] | None = None) -> Finding:
    """Compare the architectures in BMTrain's extension with GPUs.

    Args:
        name: Name of the finding.
        gpus: Compute capabilities, as of `capabilities`; by default of this machine's GPUs.
    """
    gpus = capabilities() if gpus is None else gpus
    spec = importlib.util.find_spec("bmtrain")
    if spec is None or not spec.submodule_search_locations:
        return Finding(name, "note", "BMTrain is not installed")
    folder = Path(next(iter(spec.submodule_search_locations)))
    files = extension_files(folder)
    if not files:
        others = ", ".join(path.name for path in sorted(folder.glob("C.*so")))
        detail = f"none for this Python{f' (but {others})' if others else ''}"
        if not gpus:
            return Finding(name, "note", f"{detail}; the host runtime needs none")
        return Finding(name, "missing", detail, f"{BMBURST} build-bmtrain --install")
    code = read_machine_code(files[0].read_bytes())
    return judge(name, code, gpus)


def judge(name: str, code: MachineCode, gpus: list[int]) -> Finding:
    """Return the finding for an extension's code.

    Args:
        name: Name of the finding.
        code: The architectures in the extension.
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


def fix_command(gpus: list[int], *, has_wheel: bool, again: bool = False) -> str:
    """Return the command that installs BMTrain so that it works, without BMTrain's NCCL package.

    Args:
        gpus: Compute capabilities of the GPUs, as of `capabilities`.
        has_wheel: Whether the registry has a wheel for this Python.
        again: Whether it is installed already but does not work.
    """
    if gpus and (again or not has_wheel):
        return f"{BMBURST} build-bmtrain --install"
    return shlex.join(install_command(again=again))


def _version() -> str:
    try:
        return metadata.version("bmtrain")
    except metadata.PackageNotFoundError:
        return "of unknown version"


def _environment(root: str) -> dict[str, str]:
    path = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": f"{path}{os.pathsep}{root}" if path else root}


def _names(architectures: list[int]) -> str:
    return ", ".join(f"sm_{sm}" for sm in architectures)
