"""Kinds of benchmarks, what all cells and selections of cells have, and the file of results. Imports no torch."""

import argparse
import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from bmburst.amounts import numbers, tokens
from bmburst.config import read_json
from bmburst.errors import UserError, first_line, require_known, unknown
from bmburst.outputs import replacing

OK, REFUSED, FAILED = "ok", "refused", "failed"
ONE_GPU = "one-gpu"  # the method that runs one GPU's kernel: the reference of the others
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class BaseCell(ABC):
    """One measurement: a method on a shape, with a stable name. A kind of benchmark adds its fields."""

    suite: str
    method: str
    ranks: int  # number of ranks that take part: the first ones of the run
    device: str  # "cuda" or "cpu"
    dtype: str = "bfloat16"  # name of a torch dtype

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the cell, independent of where it runs."""

    @property
    def key(self) -> str:
        """The name with the place: `...@8` on 8 GPUs, `...@2-cpu-float32` on 2 CPU ranks in fp32."""
        device = "" if self.device == "cuda" else f"-{self.device}"
        return f"{self.name}@{self.ranks}{device}" + ("" if self.dtype == "bfloat16" else f"-{self.dtype}")


C = TypeVar("C", bound=BaseCell)


@dataclass(frozen=True, kw_only=True)
class BaseSelection:
    """Selects the cells to list; for None the defaults of the suite apply. A kind of benchmark adds its fields.

    Raises:
        UserError: A length does not divide.
    """

    ranks: tuple[int, ...]  # numbers of ranks
    device: str  # "cuda" or "cpu"
    dtype: str | None = None  # name of a torch dtype, instead of the suite's
    tokens: tuple[int, ...] | None = None  # sequence lengths, instead of the suite's
    methods: tuple[str, ...]  # names of methods, in the order of measurement
    globs: tuple[str, ...] = ("*",)  # patterns for a cell's name or key; a cell is listed if one matches

    def __post_init__(self) -> None:
        for ranks in self.ranks:
            bad = [n for n in self.tokens or () if n % (2 * ranks)]
            if bad:
                raise UserError(
                    f"--tokens {bad[0]} on {ranks} ranks\n"
                    f"allowed: multiples of {2 * ranks}, so that every method cuts the sequence evenly\n"
                    f"fix: for example --tokens {2 * ranks * max(1, bad[0] // (2 * ranks))}"
                )

    @property
    def plain_dtype(self) -> str:
        """The dtype if the suite does not define one: fp32 on CPUs."""
        return self.dtype or ("bfloat16" if self.device == "cuda" else "float32")

    def fits(self, cell: BaseCell) -> bool:
        """Return whether a pattern matches the cell."""
        return any(fnmatchcase(name, glob) for name in (cell.name, cell.key) for glob in self.globs)


@dataclass
class Results(Generic[C]):
    """Rows by cell key, in the order in which they were first tried, and the runs that measured them.

    Only one process may write at a time.

    Attributes:
        runs: Header of each run: versions, hardware, date, command line.
        rows: Rows by cell key. `status` is "ok", "refused" (cannot run) or "failed"; the latter two have a reason.
    """

    kind: "Kind[C]"
    runs: list[dict[str, Any]] = field(default_factory=list)
    rows: dict[str, Row] = field(default_factory=dict)
    running: str | None = None  # key of the cell that is being measured, so that it is known after a crash

    @classmethod
    def read(cls, kind: "Kind[C]", path: Path) -> "Results[C]":
        """Return the results in a file, empty if there is none; UserError if it holds others than this benchmark's."""
        if not path.exists():
            return cls(kind)
        try:
            content = read_json(path)
            found = content.get("format")
            if found != kind.format:
                raise ValueError("it has no format" if found is None else f"its format is {found}, not {kind.format}")
            results = cls(kind, content["runs"], content["rows"], content["running"])
            results.require_rows()
            return results
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = first_line(error)
            raise UserError(
                f"--output {path} is not a results file of this benchmark: {reason}\nfix: name a new file"
            ) from None

    def require_rows(self) -> None:
        """Raise ValueError unless rows and runs read from a file have the format that `put` and headers have."""
        if not isinstance(self.runs, list) or not all(isinstance(run, dict) for run in self.runs):
            raise ValueError("its runs are not a list of objects")
        if not isinstance(self.rows, dict) or not isinstance(self.running, str | None):
            raise ValueError("its rows are not an object")
        for key, row in self.rows.items():
            is_whole = isinstance(row, dict) and isinstance(row.get("cell"), dict)
            if not is_whole or row.get("status") not in (OK, REFUSED, FAILED) or type(row.get("run")) is not int:
                raise ValueError(f"row {key} is invalid")
            self.kind.cell(**row["cell"])

    def write(self, path: Path) -> None:
        """Replace the file atomically."""
        content = {"format": self.kind.format, "running": self.running, "runs": self.runs, "rows": self.rows}
        with replacing(path) as partial:
            partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def put(self, cell: C, row: Row) -> None:
        """Store a row under its cell's key, with the number of the current run."""
        self.rows[cell.key] = {"cell": asdict(cell), "run": len(self.runs) - 1, **row}

    def is_done(self, cell: C, *, again: bool) -> bool:
        """Return whether a cell need not run: it was tried in this run, or measured earlier and not `again`."""
        row = self.rows.get(cell.key)
        if row is None:
            return False
        return row["run"] == len(self.runs) - 1 or (row["status"] == OK and not again)

    def cell_rows(self, *suites: str, status: str = "") -> list[tuple[C, Row]]:
        """Return the rows of suites with their cells; with `status`, only rows of that status."""
        return [
            (self.kind.cell(**row["cell"]), row)
            for row in self.rows.values()
            if row["cell"]["suite"] in suites and status in ("", row["status"])
        ]

    def left(self, cells: Sequence[C], *, again: bool) -> int:
        """Return how many of these cells need a run; see `is_done`."""
        return sum(not self.is_done(cell, again=again) for cell in cells)


KINDS: Mapping[str, str] = MappingProxyType(
    {
        "attention": "benchmarks.attention.kind",
        "train": "benchmarks.training.kind",
        "inference": "benchmarks.inference.kind",
    }
)
"""Modules of the kinds by their names in `bmburst bench NAME`; each module defines `KIND`."""
RUNTIMES = ("torch", "bmtrain")  # runtimes of the ranks


@dataclass(frozen=True, kw_only=True)
class Kind(Generic[C]):
    """One kind of benchmark. Its functions import heavy modules when called, so help and lists are fast.

    Attributes:
        select: Returns the cells that the options select, for a device, "cuda" or "cpu", and numbers of ranks;
            raises UserError for invalid options.
        starts: Returns, for each start of the ranks, the fields of `Job` that the kind decides: cells, ranks,
            options.
        tables: Returns all tables as lines of Markdown; for the notes see `benchmarks.engine.report.grid`.
        draw: Draws every comparison that has a measured cell, to files whose names begin with the given path,
            and returns their paths.
        timelines: Returns the names of the timelines that `--trace` records for a cell; by default its key.
    """

    name: str  # a name of `KINDS`
    format: str  # first value in its files of results
    cell: type[C]  # the class of its cells
    own_options: tuple[str, ...]  # names of the options that only this kind has
    defaults: Mapping[str, Any]  # defaults of options that all kinds have
    configure: Callable[[argparse._ArgumentGroup], None]  # adds the options of this kind to a group of the parser
    select: Callable[[argparse.Namespace, str, tuple[int, ...]], tuple[C, ...]]
    refusal: Callable[[C], str | None]  # returns why a cell cannot run, as far as its fields determine that, or None
    starts: Callable[[argparse.Namespace, Sequence[C], tuple[int, ...]], list[dict[str, Any]]]
    estimate: Callable[[Results[C], C], float]  # returns the approximate seconds of a cell; 0 if unknown
    rank_run: str  # `MODULE:CLASS` of the `RankRun` that runs the cells on a rank
    describe: Callable[[C, Row], str]  # returns a measured row in one line, printed when the cell is done
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
    """Return the arguments of a `BaseSelection`, from the options that all kinds have.

    Of all `methods`, those that match `--methods GLOB,...` are selected, in this order.

    Raises:
        UserError: A pattern matches no method, the kernel is unknown, or a length is invalid.
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
    """Check that a kernel exists, supports the device and is installed. Cells check their own needs.

    Without a GPU on this machine, all kernels are accepted for "cuda".

    Raises:
        UserError: The kernel cannot be used.
    """
    import torch

    from bmburst_ops.flash import KERNELS, NAMES, able_kernels, queries_ahead

    require_known("kernel", name, NAMES)
    if name == "auto" or (device == "cuda" and not torch.cuda.is_available()):
        return  # without a GPU: --list works for any machine
    kernel = {kernel.name: kernel for kernel in KERNELS}[name]
    half, full = (queries_ahead(torch.device(device), dtype, 64) for dtype in (torch.bfloat16, torch.float32))
    if (reason := kernel.refusal(half, half)) is not None and kernel.refusal(full, full) is not None:
        allowed = ", ".join(("auto", *able_kernels(half, half)))
        raise UserError(f"kernel '{name}' {reason}\nallowed here: {allowed}\nfix: --kernel auto")
