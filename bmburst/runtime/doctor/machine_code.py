"""Which GPUs a binary was compiled for: the machine code and PTX in CUDA's fat binaries.

A fat binary (in the section .nv_fatbin of a shared object, or a file of its own) is a 16-byte header, magic number
0xba55ed50, version 1, its own size and that of what follows; then entries, each with a header that says what it is
(1: PTX, 2: an ELF cubin), its header's and its content's size, and the architecture it is for. Read from binaries of
CUDA 11 and 13 and compared with what cuobjdump lists; NVIDIA documents the format nowhere.
"""

import struct
from dataclasses import dataclass, field

_CONTAINER = struct.Struct("<IHHQ")  # magic, version, header size, size of the entries
_ENTRY = struct.Struct("<HHIQ12xI")  # kind, version, header size, content size, ..., architecture
_MAGIC = struct.pack("<IHH", 0xBA55ED50, 1, 16)
_PTX, _CUBIN = 1, 2


@dataclass(frozen=True, slots=True)
class MachineCode:
    """The architectures in a binary, as CUDA numbers them: 90 is sm_90, of compute capability 9.0.

    Attributes:
        cubins: Machine code, which runs on its own generation of the same or a higher minor number.
        ptx: Assembly that the driver compiles for its own and every later architecture.
    """

    cubins: frozenset[int] = field(default_factory=frozenset)
    ptx: frozenset[int] = field(default_factory=frozenset)

    def runs_on(self, capability: int) -> bool:
        """Whether a GPU of this compute capability (major * 10 + minor) can run it."""
        own = any(sm // 10 == capability // 10 and sm <= capability for sm in self.cubins)
        return own or any(sm <= capability for sm in self.ptx)

    def __str__(self) -> str:
        """Return "sm_80 sm_90, PTX compute_90", the notation of nvcc."""
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
        if end > len(binary):  # the magic number by chance, or a truncated file
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
