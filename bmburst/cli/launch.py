"""`bmburst launch`: starts any BMTrain script on all ranks of this node and supervises them."""

import argparse
import os
from typing import Any

from bmburst.cli import ranks_to_start
from bmburst.errors import UserError

HELP = (
    "Start a BMTrain script on N ranks, with torchrun's environment, and supervise them. Ctrl-C ends all ranks. The "
    "error of the first rank that fails is shown once and ends the others. Ranks end with their launcher. A rank that "
    "takes no optimizer step for --hang-timeout seconds ends the run, and its stack is shown."
)
_USAGE = "bmburst launch [OPTIONS] -- SCRIPT ARGS\n       bmburst launch [OPTIONS] -- -m MODULE ARGS"
_EPILOG = (
    "In a SLURM step on several nodes, --nnodes, --node-rank, --master-addr and --master-port are read from SLURM's "
    "variables: srun --ntasks-per-node=1 bmburst launch --nproc 8 -- SCRIPT. "
    "OMP_NUM_THREADS and NCCL variables keep values that are already set. "
    "Without CUDA, an installed BMTrain runs on the CPU (host runtime). "
    "Exit status: the script's own; 1 after an error in a rank, 2 for bad input, 130 after Ctrl-C."
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options and the command to run."""
    from bmburst.runtime.launch.spec import DEFAULT_HANG_TIMEOUT, DEFAULT_PORT, DEFAULT_START_TIMEOUT

    parser.usage, parser.epilog = _USAGE, _EPILOG
    add = parser.add_argument
    add("--nproc", type=int, metavar="N", help="ranks on this node (default: one a GPU, or 1 without CUDA)")
    add("--nnodes", type=int, metavar="N", help="number of nodes; start this command on each of them (default: 1)")
    add("--node-rank", type=int, metavar="R", help="rank of this node, from 0 (default: 0)")
    add("--master-addr", metavar="HOST", help="host name or address of node 0")
    add(
        "--master-port",
        type=int,
        metavar="P",
        help=f"port on node 0 (default: a free port; {DEFAULT_PORT} with several nodes)",
    )
    add(
        "--hang-timeout",
        type=float,
        metavar="SECONDS",
        default=DEFAULT_HANG_TIMEOUT,
        help=f"time without progress of a rank after which the run ends; 0: never (default: {DEFAULT_HANG_TIMEOUT:g})",
    )
    add(
        "--start-timeout",
        type=float,
        metavar="SECONDS",
        help=f"time until a rank's first step (default: {DEFAULT_START_TIMEOUT:g}, or --hang-timeout)",
    )
    add("--no-host-runtime", action="store_true", help="without CUDA, do not install the host runtime")
    add("--dry-run", action="store_true", help="print the settings and the torchrun command without starting it")
    add("command", nargs=argparse.REMAINDER, metavar="-- SCRIPT ARGS", help="Python script, or -m MODULE, to run")


def run(args: argparse.Namespace) -> int:
    """Start the ranks and return the exit status.

    Raises:
        UserError: The arguments cannot work on this machine.
    """
    from bmburst.runtime.launch import LaunchSpec, check_launch, launch

    command = script_command(args.command)
    spec = LaunchSpec(
        nproc=ranks_to_start(None, 1) if args.nproc is None else args.nproc,
        hang_timeout=args.hang_timeout,
        start_timeout=args.start_timeout,
        host_runtime=not args.no_host_runtime,
        **placement(args),
    )
    if args.dry_run:
        print(check_launch(spec, command))
        return 0
    return launch(spec, command)


def script_command(words: list[str]) -> list[str]:
    """Return the words after the `--`.

    Raises:
        UserError: There is no `--`, so the script's options cannot be told from the launcher's.
    """
    if words and words[0] != "--":
        raise UserError(
            f"'{words[0]}' is not an option, and there is no -- before it\n"
            f"fix: bmburst launch --nproc 2 -- {words[0]} ..."
        )
    return words[1:]


def placement(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of LaunchSpec about nodes: the given ones, or else SLURM's."""
    from bmburst.runtime.launch.spec import read_step

    names = ("nnodes", "node_rank", "master_addr", "master_port")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    step = None if "nnodes" in given else read_step(os.environ)
    if step is None:
        return given
    return {name: getattr(step, name) for name in (*names, "job")} | given
