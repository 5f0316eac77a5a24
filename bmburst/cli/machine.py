"""`bmburst doctor` and `bmburst build-bmtrain`: examine this machine, and build BMTrain for it."""

import argparse
import sys
from pathlib import Path

from bmburst.cli import Command
from bmburst.errors import UserError

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


def configure_doctor(parser: argparse.ArgumentParser) -> None:
    """Add --json to the parser of `bmburst doctor`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run_doctor(args: argparse.Namespace) -> int:
    """Print the findings; return 0 if training can run here, else 1."""
    from bmburst.runtime.doctor import CHECKS, can_train, examine, to_json, to_text

    findings = examine()
    print(to_json(CHECKS, findings) if args.json else to_text(CHECKS, findings))
    return 0 if can_train(CHECKS, findings) else 1


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
    """Build the wheel, and return the exit status.

    Raises:
        UserError: A tool is missing, or an argument cannot work.
    """
    from bmburst.runtime.build_bmtrain import BuildSpec, build_wheel, check_toolchain, parse_architecture
    from bmburst.runtime.doctor.bmtrain import capabilities

    wanted = sorted({parse_architecture(text) for text in args.arch} if args.arch else set(capabilities()))
    if not wanted:
        raise UserError(
            "this machine has no GPU whose architecture could be detected\n"
            "fix: give --arch, for example 80 (A100), 90 (H100, H200), 100 (B200)"
        )
    spec = BuildSpec(
        architectures=tuple(wanted),
        output=args.output,
        sdist=args.sdist,
        portable=args.portable,
        install=args.install,
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


COMMANDS = {
    "doctor": Command(_DOCTOR_HELP, configure_doctor, run_doctor),
    "build-bmtrain": Command(_BUILD_HELP, configure_build, run_build),
}
