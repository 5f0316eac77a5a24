"""`bmburst doctor`: checks what is installed and usable, and prints the commands that repair the rest."""

import argparse

HELP = (
    "Check Python, torch, GPUs, BMTrain and its machine code, NCCL, attention kernels and packages. Print what is "
    "usable and, for everything missing or broken, the command that repairs it. Exit status: 0 if training can run on "
    "this machine, else 1."
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the findings; return 0 if training can run here, else 1."""
    from bmburst.runtime.doctor import CHECKS, can_train, examine, to_json, to_text

    findings = examine()
    print(to_json(CHECKS, findings) if args.json else to_text(CHECKS, findings))
    return 0 if can_train(CHECKS, findings) else 1
