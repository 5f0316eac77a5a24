"""`bmburst bench`: finds and runs the benchmarks, which are in a clone of the repository but not in an installation.

`python -m bmburst.cli.bench CLONE FOLDER` runs one rank of the job in FOLDER.
"""

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from bmburst import __version__
from bmburst.errors import UserError

HELP = (
    "Measure speed, memory and accuracy. attention: burst_attention with every strategy and transport, and the methods "
    "of other projects, each relative to one GPU's kernel on the same FLOPs. Suites: sequence (32K to 1M tokens), "
    "batch (1 to 8), block (with projections and rotary), documents (packed), window (4,096 tokens), accuracy (errors "
    "against fp64). train: whole training steps, relative to the time of their attention and matrix products alone. "
    "Suites: step (32K to 2M tokens), loss (losses of all methods agree), curve (loss on real text). inference: first "
    "token, time of a token and memory, relative to their bounds. Suites: prompt (4K to 1M tokens), batch (8 and 32). "
    "paper: the BurstAttention paper's ablations and README tables. Suites: backward, merge, tile, batch, sequence."
)
_PACKAGE = "benchmarks"
_MARK = 'PROJECT = "bmburst"'  # a line of our engine, which other packages of this name do not have


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options.

    Raises:
        UserError: No clone was found.
    """
    _engine(find_clone(), "command").configure(parser)


def run(args: argparse.Namespace) -> int:
    """Run, list or redraw benchmarks, and return the exit status.

    Raises:
        UserError: An option cannot work.
    """
    status: int = _engine(find_clone(), "command").run(args)
    return status


def find_clone() -> Path:
    """Return the clone with the benchmarks: the one that contains this package, or the current directory.

    Raises:
        UserError: Neither is a clone, or the current directory is a clone of another version.
    """
    own, here = Path(__file__).parents[2], Path.cwd()
    if _has_benchmarks(own):
        return own
    if not _has_benchmarks(here):
        raise UserError(
            f"the benchmarks are not part of an installation, and {here} is not a clone of bmburst's repository\n"
            "fix: clone the repository and run bmburst bench inside the clone"
        )
    if f'__version__ = "{__version__}"' not in (here / "bmburst" / "__init__.py").read_text(encoding="utf-8"):
        raise UserError(
            f"the clone in {here} is of another version than the installed bmburst {__version__}\n"
            "fix: pip install --no-build-isolation --editable . inside the clone"
        )
    return here


def _has_benchmarks(folder: Path) -> bool:
    file = folder / _PACKAGE / "engine" / "__init__.py"
    return file.is_file() and _MARK in file.read_text(encoding="utf-8").splitlines()


def _engine(clone: Path, name: str) -> ModuleType:
    """Import a module of the clone's engine, even if another package of its name is on Python's path."""
    folder = clone / _PACKAGE
    if list(getattr(sys.modules.get(_PACKAGE), "__path__", ())) != [str(folder)]:
        spec = importlib.util.spec_from_file_location(
            _PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None  # the file is there
        package = sys.modules[_PACKAGE] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
    return importlib.import_module(f"{_PACKAGE}.engine.{name}")


if __name__ == "__main__":
    _engine(Path(sys.argv[1]), "job").run_rank(Path(sys.argv[2]))
