"""Wraps nvcc and sets the architectures: `python nvcc.py NVCC "90 100" ARGUMENTS...` builds for sm_90 and sm_100.

It replaces the architectures in the arguments. Arguments that name none, for example to print the version, are not
changed. It imports only the standard library, because it is started once for every file that is compiled.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

_OPTIONS = ("-gencode", "--generate-code")


def replace_architectures(arguments: Sequence[str], architectures: Sequence[int]) -> list[str]:
    """Return nvcc's arguments with other architectures: machine code for each, and no PTX.

    Args:
        arguments: As CMake makes them, with the architecture in the same word ("-gencode=...") or in the next.
        architectures: Compute capabilities, major * 10 + minor.
    """
    kept: list[str] = []
    named = follows = False
    for argument in arguments:
        if follows:
            follows = False
        elif argument in _OPTIONS:
            named = follows = True
        elif argument.startswith(tuple(f"{option}=" for option in _OPTIONS)):
            named = True
        else:
            kept.append(argument)
    return kept + [f"-gencode=arch=compute_{sm},code=sm_{sm}" for sm in architectures if named]


def write_wrapper(folder: Path, nvcc: Path, architectures: Sequence[int]) -> Path:
    """Write an executable for CMake to call as nvcc, and return its path."""
    path = folder / "nvcc"
    wanted = " ".join(map(str, architectures))
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{__file__}" "{nvcc}" "{wanted}" "$@"\n')
    path.chmod(0o755)
    return path


def main() -> None:
    """Replace this process by nvcc, with the architectures replaced."""
    nvcc, wanted, *arguments = sys.argv[1:]
    os.execv(nvcc, [nvcc, *replace_architectures(arguments, [int(sm) for sm in wanted.split()])])


if __name__ == "__main__":
    main()
