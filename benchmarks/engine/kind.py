"""A kind of benchmark: what the engine needs to know of it. Another one is a row of `KINDS`."""

import argparse
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic

from benchmarks.engine.results import C, Results, Row
from bmburst.amounts import numbers, tokens
from bmburst.errors import UserError, require_known, unknown

if TYPE_CHECKING:
    from benchmarks.engine.rank import RankRun

KINDS: Mapping[str, str] = MappingProxyType(
    {"attention": "benchmarks.attention.kind", "train": "benchmarks.training.kind"}
)
"""The module of each kind, which has it as `KIND`, by its name in `bmburst bench NAME`."""
RUNTIMES = ("torch", "bmtrain")  # what starts the ranks


@dataclass(frozen=True, kw_only=True)
class Kind(Generic[C]):
    """One kind of benchmark. Its functions import what is heavy, so that help and lists are quick.

    Attributes:
        name: A name of `KINDS`.
        format: First value in its files of results.
        cell: The class of its cells.
        own_options: Names of the options that it alone has.
        defaults: Of options that all kinds have.
        configure: Adds the options that it alone has to a group of the parser.
        select: Returns the cells that the options name, for a device, "cuda" or "cpu", and numbers of ranks; raises
            UserError where something given cannot work.
        refusal: Returns why a cell cannot run, as far as that is known without ranks, or None.
        starts: Returns, for each start of the ranks, what of its `Job` the kind decides: cells, ranks, options.
        estimate: Returns about how many seconds a cell will take; 0 where nothing is known.
        rank_run: Returns what runs the cells on a rank.
        describe: Returns what a measured row says in a line, printed as the cell is done.
        tables: Returns all tables as lines of Markdown; the notes are those of `benchmarks.engine.table.grid`.
        draw: Draws every comparison that has a measured cell, by the path that the pictures' names begin with, and
            returns the pictures' paths.
        timelines: Returns the names of the timelines that `--trace` records of a cell: by default its key.
    """

    name: str
    format: str
    cell: type[C]
    own_options: tuple[str, ...]
    defaults: Mapping[str, Any]
    configure: Callable[[argparse._ArgumentGroup], None]
    select: Callable[[argparse.Namespace, str, tuple[int, ...]], tuple[C, ...]]
    refusal: Callable[[C], str | None]
    starts: Callable[[argparse.Namespace, Sequence[C], tuple[int, ...]], list[dict[str, Any]]]
    estimate: Callable[[Results[C], C], float]
    rank_run: "Callable[[], type[RankRun[C]]]"
    describe: Callable[[C, Row], str]
    tables: Callable[[Results[C], dict[str, int]], list[str]]
    draw: Callable[[Results[C], Path], list[Path]]
    timelines: Callable[[C], tuple[str, ...]] = lambda cell: (cell.key,)


def load_kind(name: str) -> Kind[Any]:
    """Return a kind by its name in `KINDS`."""
    kind: Kind[Any] = importlib.import_module(KINDS[name]).KIND
    return kind


def selection_of(
    args: argparse.Namespace, device: str, ranks: tuple[int, ...], methods: Sequence[str]
) -> dict[str, Any]:
    """Return what the options that all kinds have say of a `BaseSelection`.

    Args:
        args: The options.
        device: "cuda" or "cpu".
        ranks: Numbers of ranks.
        methods: Names of all methods; those that fit `--methods GLOB,...` are selected, in this order.

    Raises:
        UserError: A pattern fits no method, or the kernel or a length is none.
    """
    patterns = args.methods.split(",")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in methods):
            raise unknown("method", pattern, methods)
    require_kernel(args.kernel, device)
    return {
        "ranks": ranks,
        "device": device,
        "dtype": args.dtype,
        "tokens": None if args.tokens is None else numbers("--tokens", args.tokens, tokens),
        "methods": tuple(name for name in methods if any(fnmatchcase(name, pattern) for pattern in patterns)),
        "globs": tuple(args.cells.split(",")),
    }


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
