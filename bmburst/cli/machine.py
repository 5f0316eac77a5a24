"""`bmburst doctor`, `build-bmtrain`, `launch` and `bench`: check this machine, and start programs on it.

The benchmarks are in a clone of the repository but not in an installation. `python -m bmburst.cli.machine CLONE FOLDER`
runs one rank of the benchmark job in FOLDER.
"""

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from bmburst import __version__
from bmburst.cli.program import Command, add_time_limits, ranks_to_start
from bmburst.config import write_json
from bmburst.errors import UserError
from bmburst.outputs import explained_write, require_file

if TYPE_CHECKING:
    from bmburst.setup.doctor import Check

_DOCTOR_HELP = (
    "Check Python, torch, GPUs, BMTrain and its machine code, NCCL, attention kernels and packages. Print what is "
    "usable and, for everything missing or broken, the command that repairs it. Exit status: 0 if training can run on "
    "this machine, else 1."
)
_BUILD_HELP = (
    "Build BMTrain's unmodified source package for this Python and CUDA and for the GPUs of this machine or of --arch, "
    "against the NCCL library of torch. Needs nvcc, cmake and a C++ compiler; for each one missing, prints the command "
    "that installs it."
)
_LAUNCH_HELP = (
    "Start a BMTrain script on N ranks, with torchrun's environment, and supervise them. Ctrl-C ends all ranks. The "
    "error of the first rank that fails is shown once and ends the others. Ranks end with their launcher. A rank that "
    "takes no optimizer step for --hang-timeout seconds ends the run, and its stack is shown."
)
_LAUNCH_USAGE = "bmburst launch [OPTIONS] -- SCRIPT ARGS\n       bmburst launch [OPTIONS] -- -m MODULE ARGS"
_LAUNCH_EPILOG = (
    "OMP_NUM_THREADS and NCCL variables keep values that are already set. "
    "Without CUDA, an installed BMTrain runs on the CPU (host runtime). "
    "Several nodes: torchrun. "
    "Exit status: the script's own; 1 after an error in a rank, 2 for bad input, 130 after Ctrl-C."
)
_BENCH_HELP = (
    "Measure speed, memory and accuracy. attention: burst_attention with every strategy and transport, and the methods "
    "of other projects, each relative to one GPU's kernel on the same FLOPs. Suites: sequence (32K to 1M tokens), "
    "batch (1 to 8), block (with projections and rotary), documents (packed), window (4,096 tokens), accuracy (errors "
    "against fp64). train: whole training steps, relative to the time of their attention and matrix products alone. "
    "Suites: step (32K to 2M tokens), loss (losses of all methods agree), curve (loss on real text). inference: first "
    "token, time of a token and memory, relative to their bounds. Suites: prompt (4K to 1M tokens), batch (8 and 32)."
)
_BENCHMARKS = "benchmarks"
_MARK = 'PROJECT = "bmburst"'  # a line of our engine, which other packages of this name do not have


def configure_doctor(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bmburst doctor`."""
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object instead of text")
    add(
        "--report",
        type=Path,
        nargs="?",
        const=Path("bmburst-report.json"),
        metavar="FILE",
        help="write versions, topology, options and the last error to a file, without paths, names and data, to send "
        "along with a question (default: bmburst-report.json)",
    )
    add("--run", type=Path, metavar="DIR", help="with --report: a run folder whose settings are reported too")


def run_doctor(args: argparse.Namespace, checks: "Sequence[Check] | None" = None) -> int:
    """Print the findings, or write them; return 0 if training can run here or the report is written, else 1.

    Args:
        args: The options.
        checks: What is checked; default: everything.

    Raises:
        UserError: The report cannot be written, or the run folder has no settings.
    """
    from bmburst.setup.doctor import CHECKS, can_train, examine, to_json, to_text

    if args.run is not None and args.report is None:
        raise UserError("--run without --report\nfix: add --report, or leave --run out")
    if args.report is not None:
        require_file(
            "--report", args.report, "a report of bmburst", lambda file: b"bmburst-report-" in file.read_bytes()
        )
    checks = CHECKS if checks is None else checks
    findings = examine(checks)
    if args.report is not None:
        from bmburst.cli import report

        values = report.report(checks, findings, args.run)
        with explained_write("--report", args.report):
            write_json(args.report, values)
        print(f"wrote {args.report}, without paths, names and data; read it before you send it")
        return 0
    print(to_json(checks, findings) if args.json else to_text(checks, findings))
    return 0 if can_train(checks, findings) else 1


def configure_build(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bmburst build-bmtrain`."""
    add = parser.add_argument
    add("--arch", nargs="+", metavar="SM", help="GPU architectures, such as 90 or 9.0 (default: those of this machine)")
    add("--output", type=Path, metavar="DIR", default=Path("dist"), help="folder for the wheel (default: dist)")
    add("--sdist", type=Path, metavar="FILE", help="source package of BMTrain (default: download it)")
    add(
        "--install",
        action="store_true",
        help="install the wheel for this Python, without the NCCL package that BMTrain depends on",
    )
    cpu = parser.add_mutually_exclusive_group()
    cpu.add_argument(
        "--portable",
        dest="portable",
        action="store_true",
        default=None,
        help="build for any CPU with AVX-512, as PyPI's wheels (default where this CPU has it)",
    )
    cpu.add_argument(
        "--native", dest="portable", action="store_false", help="build for the CPU type of this machine only"
    )


def run_build(args: argparse.Namespace) -> int:
    """Build the wheel, and return the exit status."""
    from bmburst.setup.bmtrain import capabilities
    from bmburst.setup.build_bmtrain import BuildSpec, build_wheel, check_toolchain, parse_architecture

    wanted = sorted({parse_architecture(text) for text in args.arch} if args.arch else set(capabilities()))
    if not wanted:
        raise UserError(
            "this machine has no GPU whose architecture could be detected\n"
            "fix: give --arch, for example 80 (A100), 90 (H100, H200), 100 (B200)"
        )
    spec = BuildSpec(
        architectures=tuple(wanted), output=args.output, sdist=args.sdist, portable=args.portable, install=args.install
    )
    tools = check_toolchain(spec)
    names = " ".join(f"sm_{sm}" for sm in wanted)
    print(f"building BMTrain for Python {sys.version_info[0]}.{sys.version_info[1]} and {names}", file=sys.stderr)
    try:
        wheel = build_wheel(spec, tools)
    except RuntimeError as error:
        print(f"bmburst build-bmtrain: {error}", file=sys.stderr)
        return 1
    print(wheel)
    if not args.install:
        print(f"install it: {sys.executable} -m pip install --no-deps --force-reinstall {wheel}", file=sys.stderr)
    return 0


def configure_launch(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bmburst launch`, and the script to run."""
    parser.usage, parser.epilog = _LAUNCH_USAGE, _LAUNCH_EPILOG
    add = parser.add_argument
    add("--nproc", type=int, metavar="N", help="ranks on this machine (default: one a GPU, or 1 without CUDA)")
    add_time_limits(parser, "step")
    add("--no-host-runtime", action="store_true", help="without CUDA, do not install the host runtime")
    add("--dry-run", action="store_true", help="print the settings and the torchrun command without starting it")
    add("command", nargs=argparse.REMAINDER, metavar="-- SCRIPT ARGS", help="Python script, or -m MODULE, to run")


def run_launch(args: argparse.Namespace) -> int:
    """Start the ranks and return the exit status."""
    from bmburst.launch.launcher import LaunchSpec, described, launch

    command = _script_command(args.command)
    spec = LaunchSpec(
        nproc=ranks_to_start(None, 1) if args.nproc is None else args.nproc,
        hang_timeout=args.hang_timeout,
        start_timeout=args.start_timeout,
        host_runtime=not args.no_host_runtime,
    )
    if args.dry_run:
        print(described(spec, command))
        return 0
    return launch(spec, command)


def _script_command(words: list[str]) -> list[str]:
    """Return the words after the `--`; UserError without one: it tells the script's options from the launcher's."""
    if words and words[0] != "--":
        raise UserError(
            f"'{words[0]}' is not an option, and there is no -- before it\n"
            f"fix: bmburst launch --nproc 2 -- {words[0]} ..."
        )
    return words[1:]


def configure_bench(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bmburst bench`."""
    _engine(_find_clone(), "command").configure(parser)


def run_bench(args: argparse.Namespace) -> int:
    """Run, list or redraw benchmarks, and return the exit status."""
    status: int = _engine(_find_clone(), "command").run(args)
    return status


def _find_clone() -> Path:
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
    file = folder / _BENCHMARKS / "engine" / "__init__.py"
    return file.is_file() and _MARK in file.read_text(encoding="utf-8").splitlines()


def _engine(clone: Path, name: str) -> ModuleType:
    """Import a module of the clone's engine, even if another package of its name is on Python's path."""
    folder = clone / _BENCHMARKS
    if list(getattr(sys.modules.get(_BENCHMARKS), "__path__", ())) != [str(folder)]:
        spec = importlib.util.spec_from_file_location(
            _BENCHMARKS, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None  # the file is there
        package = sys.modules[_BENCHMARKS] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
    return importlib.import_module(f"{_BENCHMARKS}.engine.{name}")


COMMANDS = {
    "doctor": Command(_DOCTOR_HELP, configure_doctor, run_doctor),
    "build-bmtrain": Command(_BUILD_HELP, configure_build, run_build),
    "launch": Command(_LAUNCH_HELP, configure_launch, run_launch),
    "bench": Command(_BENCH_HELP, configure_bench, run_bench),
}

if __name__ == "__main__":
    _engine(Path(sys.argv[1]), "job").run_rank(Path(sys.argv[2]))
