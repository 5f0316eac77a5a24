"""Options of a launch and their checks."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder

from bmburst.errors import UserError

DEFAULT_HANG_TIMEOUT = 1800.0  # seconds; a step of a million tokens and a checkpoint of a large model take minutes
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables with the settings of torch's allocator; the second is the older name of the first."""
EXPANDING = "expandable_segments:True"
"""The setting with which the allocator uses segments that grow."""
DEFAULT_START_TIMEOUT = 3600.0  # seconds; loading a large model from a slow disk and compiling kernels takes long


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSpec:
    """How many ranks on this machine, and how they are watched.

    Args:
        nproc: Ranks, at least 1.
        hang_timeout: Seconds a rank may go without a `watchdog.beat` before the run is ended; 0: for ever.
        start_timeout: Seconds a rank may take to its first `watchdog.beat`. By default 3600, or `hang_timeout` if that
            is more. With `hang_timeout` 0 nothing is watched.
        host_runtime: Without CUDA, let the ranks import bmtrain on the host runtime.

    Raises:
        UserError: A value is outside its range.
    """

    nproc: int = 1
    hang_timeout: float = DEFAULT_HANG_TIMEOUT
    start_timeout: float | None = None
    host_runtime: bool = True

    def __post_init__(self) -> None:
        if self.nproc < 1:
            raise UserError(f"--nproc {self.nproc}\nallowed: at least 1\nfix: --nproc 1, or more")
        if not 0 <= self.hang_timeout < 1e9:
            raise UserError(
                f"--hang-timeout {self.hang_timeout:g}\nallowed: seconds above 0, or 0 for no limit\n"
                f"fix: leave it out for {DEFAULT_HANG_TIMEOUT:g} seconds, or give another"
            )
        if self.start_timeout is not None and not 0 < self.start_timeout < 1e9:
            raise UserError(
                f"--start-timeout {self.start_timeout:g}\nallowed: seconds above 0\n"
                f"fix: leave it out for at least {DEFAULT_START_TIMEOUT:g} seconds, or give another"
            )

    @property
    def start_limit(self) -> float:
        """Seconds from a rank's start to its first beat; 0: no limit."""
        if not self.hang_timeout:
            return 0.0
        return self.start_timeout or max(DEFAULT_START_TIMEOUT, self.hang_timeout)


def require_devices(nproc: int, devices: int) -> None:
    """Refuse more ranks than GPUs: BMTrain gives every rank a GPU of its own, and NCCL refuses two ranks on one.

    Args:
        nproc: Ranks on this node.
        devices: CUDA devices that are visible to this process. 0 without CUDA, which allows any number of ranks.
    """
    if 0 < devices < nproc:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
        raise UserError(
            f"--nproc {nproc} is more than the {devices} GPU(s) of this node{seen}\n"
            f"allowed: 1 to {devices}\nfix: --nproc {devices}, or CUDA_VISIBLE_DEVICES= (empty) to run on the CPU"
        )


def require_command(command: Sequence[str]) -> None:
    """Refuse a command that is neither a Python script nor a module, before any rank starts.

    Args:
        command: `[SCRIPT, ARGS...]` or `["-m", MODULE, ARGS...]`.
    """
    if not command:
        raise UserError("no script was given\nfix: bmburst launch --nproc 2 -- SCRIPT ARGS, or ... -- -m MODULE ARGS")
    if command[0] == "-m":
        if len(command) < 2:
            raise UserError("-m needs the name of a module\nfix: bmburst launch --nproc 2 -- -m MODULE ARGS")
        top = command[1].partition(".")[0]
        # Ranks search the current folder first. Other finders know, for example, packages of `pip install --editable`.
        if PathFinder.find_spec(top, [os.getcwd()]) is None and not any(f.find_spec(top, None) for f in sys.meta_path):
            raise UserError(
                f"no module named '{command[1]}'\n"
                f"searched: {os.getcwd()} and the packages of {sys.executable}\n"
                "fix: install it, or change to the folder that has it"
            )
        return
    script = command[0]
    if script.startswith("-"):
        raise UserError(
            f"'{script}' is an option, where a script must be\n"
            "fix: bmburst launch --nproc 2 -- SCRIPT ARGS, or ... -- -m MODULE ARGS"
        )
    if os.path.isdir(script) and not os.path.exists(os.path.join(script, "__main__.py")):
        raise UserError(f"'{script}' is a folder without __main__.py\nfix: give the path of a Python script")
    if not os.path.exists(script):
        raise UserError(
            f"no such script: '{script}'\nsearched: {os.getcwd()}\nfix: give its path, or -m MODULE for a module"
        )
