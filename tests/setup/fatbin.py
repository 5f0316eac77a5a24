"""Writes CUDA's fat binaries, as read by bmburst.setup.bmtrain."""

import struct


def fat_binary(*entries):
    """A container of (kind, architecture) entries, kind 1 for PTX and 2 for machine code, with odd contents."""
    body = b""
    for kind, architecture in entries:
        content = bytes(8 + 8 * (architecture % 3))
        header = struct.pack("<HHIQ12xI", kind, 0x101, 64, len(content), architecture)
        body += header.ljust(64, b"\x11") + content
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body
