"""Which NCCL this process uses, and whether packages overwrite each other's.

The packages nvidia-nccl-cu11, -cu12 and -cu13 all own nvidia/nccl/lib/libnccl.so.2. pip writes one over the other
without a word, and removing one removes the file for all; torch then fails to import, or runs with an NCCL that it
was not built for.
"""

from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from bmburst.runtime.doctor.finding import PIP, Finding

_PREFIX = "nvidia-nccl-cu"
_MAPS = Path("/proc/self/maps")


def loaded(name: str) -> Finding:
    """Look which libnccl the dynamic linker has put into this process with torch."""
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


def packages(name: str) -> Finding:
    """Look for two NCCL packages that own one file, and for one whose file is gone or another's."""
    owned = {d.metadata["Name"]: _files(d) for d in metadata.distributions() if _is_nccl(d)}
    wanted = _wanted()
    if not owned:
        if wanted is None:
            return Finding(name, "note", "none installed, none needed")
        return Finding(name, "broken", f"torch needs {wanted}, which is not installed", repair_command())
    shared = shared_files(owned)
    if shared:
        both = " and ".join(sorted(owned))
        detail = f"{both} own the same files ({shared[0]}): one has overwritten the other"
        if wanted is None:
            return Finding(name, "note", f"{detail}; torch uses neither")
        return Finding(name, "broken", detail, repair_command())
    damaged = [path for files in owned.values() for path, size in files.items() if not _has_size(path, size)]
    if damaged and wanted is not None:
        return Finding(name, "broken", f"{damaged[0]} is gone or another package's", repair_command())
    return Finding(name, "ok", ", ".join(f"{found} {metadata.version(found)}" for found in sorted(owned)))


def shared_files(owned: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the files that more than one package owns.

    Args:
        owned: Each package's files.
    """
    owners: dict[str, int] = {}
    for files in owned.values():
        for path in set(files):
            owners[path] = owners.get(path, 0) + 1
    return sorted(path for path, count in owners.items() if count > 1)


def repair_command() -> str:
    """Return the command that leaves torch's own NCCL package and no other, whole."""
    wanted = _wanted()
    others = [n for d in metadata.distributions() if _is_nccl(d) and (n := d.metadata["Name"]) != _name(wanted)]
    remove = f"{PIP} uninstall -y {' '.join(sorted(others))}; " if others else ""
    return f"{remove}{PIP} install --force-reinstall --no-deps {wanted}" if wanted else remove.rstrip("; ")


def _wanted() -> str | None:
    """Return torch's own requirement, for example "nvidia-nccl-cu13==2.28.9"; a CPU build has none."""
    try:
        requirements = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        return None
    found = [text.partition(";")[0].strip() for text in requirements if text.startswith(_PREFIX)]
    return found[0].replace(" ", "") if found else None


def _name(requirement: str | None) -> str:
    return (requirement or "").partition("==")[0]


def _is_nccl(distribution: metadata.Distribution) -> bool:
    return (distribution.metadata["Name"] or "").startswith(_PREFIX)


def _files(distribution: metadata.Distribution) -> dict[str, int | None]:
    """Return the absolute paths of a package's libraries and headers, with the sizes they were installed with."""
    files = [file for file in distribution.files or () if file.suffix == ".h" or ".so" in file.name]
    return {str(Path(str(distribution.locate_file(file))).resolve()): file.size for file in files}


def _has_size(path: str, size: int | None) -> bool:
    return Path(path).is_file() and size in (None, Path(path).stat().st_size)
