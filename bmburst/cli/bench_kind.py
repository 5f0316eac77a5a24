"""What `bmburst bench` needs to know of each of its benchmarks, and how their options are read."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from bmburst.bench.rows import ResultFile
from bmburst.errors import UserError, require_known, unknown


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A benchmark with its options read.

    Attributes:
        cells: What is to be measured.
        refusal: Returns why a cell cannot run, as far as that is known without ranks, or None.
        jobs: Returns, for a file of results and a deadline, the starts of ranks: how many of them, and their job.
    """

    cells: Sequence[Any]
    refusal: Callable[[Any], str | None]
    jobs: Callable[[str, float], Sequence[tuple[int, Any]]]


class Shown(NamedTuple):
    """How a benchmark shows what it measured.

    Attributes:
        results: The kind of its file.
        markdown: Returns its tables of such a file.
        draw: Draws its pictures, by the path that their names begin with, and returns them.
    """

    results: type[ResultFile[Any]]
    markdown: Callable[[Any], str]
    draw: Callable[[Any, Path], list[Path]]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One benchmark. Its functions import what is heavy.

    Attributes:
        options: Names of the options that it alone has.
        defaults: Of options that both have.
        prepare: Returns the benchmark for the options, a device, "cuda" or "cpu", and numbers of ranks.
        shown: Returns how it is shown.
    """

    options: tuple[str, ...]
    defaults: dict[str, Any]
    prepare: Callable[[argparse.Namespace, str, tuple[int, ...]], Prepared]
    shown: Callable[[], Shown]


def of_jobs(args: argparse.Namespace, output: str, deadline: float) -> dict[str, Any]:
    """Return what the options say of every benchmark's jobs."""
    return {
        "output": output,
        "deadline": deadline,
        "trace": "" if args.trace is None else str(args.trace.absolute()),
        **{name: getattr(args, name) for name in ("again", "repeats", "cell_seconds", "kernel")},
    }


def chosen(globs: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the methods that fit `GLOB,...`, in their own order.

    Raises:
        UserError: A pattern fits none.
    """
    patterns = globs.split(",")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise unknown("method", pattern, names)
    return tuple(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def require_kernel(name: str, device: str) -> None:
    """Check the name of a kernel, and that it is for such a device and installed; cells ask for more.

    Args:
        name: As given.
        device: "cuda" or "cpu"; a GPU that is not here has every kernel.

    Raises:
        UserError: It is not.
    """
    import torch

    from bmburst_ops.flash import KERNELS, NAMES, able_kernels, queries_ahead

    require_known("kernel", name, NAMES)
    if name == "auto" or (device == "cuda" and not torch.cuda.is_available()):
        return  # the latter: --list, of any machine
    kernel = {kernel.name: kernel for kernel in KERNELS}[name]
    half, full = (queries_ahead(torch.device(device), dtype, 64) for dtype in (torch.bfloat16, torch.float32))
    if (reason := kernel.refusal(half, half)) is not None and kernel.refusal(full, full) is not None:
        allowed = ", ".join(("auto", *able_kernels(half, half)))
        raise UserError(f"kernel '{name}' {reason}\nallowed here: {allowed}\nfix: --kernel auto")
