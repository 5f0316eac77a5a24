"""Options of a launch, their checks, and their values in a SLURM step."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder

from bmburst.errors import UserError
from bmburst.runtime.stores import LOOPBACK

DEFAULT_HANG_TIMEOUT = 1800.0  # seconds; a step of a million tokens and a checkpoint of a large model take minutes
DEFAULT_PORT = 29500  # the default of torchrun and of most clusters' scripts
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables with the settings of torch's allocator; the second is the older name of the first."""
EXPANDING = "expandable_segments:True"
"""The setting with which the allocator uses segments that grow."""


DEFAULT_START_TIMEOUT = 3600.0  # seconds; loading a large model from a slow disk and compiling kernels takes long


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreAddress:
    """Where the ranks of this node find the run's store.

    Attributes:
        host: Address on this node.
        port: TCP port.
        run: A random name of the run, the same on every node.
    """

    host: str
    port: int
    run: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSpec:
    """How many ranks on which nodes, and how they are watched.

    Args:
        nproc: Ranks on this node, at least 1.
        nnodes: Nodes of the run. Each starts its own launcher with the same `nproc`.
        node_rank: This node's number, in [0, nnodes).
        master_addr: Host name or address of node 0; needed with several nodes.
        master_port: TCP port on node 0. 0: with one node a free one, with several 29500.
        hang_timeout: Seconds a rank may go without a `watchdog.beat` before the run is ended; 0: for ever.
        start_timeout: Seconds a rank may take to its first `watchdog.beat`. By default 3600, or `hang_timeout` if that
            is more. With `hang_timeout` 0 nothing is watched.
        host_runtime: Without CUDA, let the ranks import bmtrain on the host runtime.
        job: Name of the run, for example a SLURM job id. A launcher with another name cannot join.

    Raises:
        UserError: A value is outside its range, or several nodes lack the address of node 0.
    """

    nproc: int = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = ""
    master_port: int = 0
    hang_timeout: float = DEFAULT_HANG_TIMEOUT
    start_timeout: float | None = None
    host_runtime: bool = True
    job: str = "bmburst"

    def __post_init__(self) -> None:
        _at_least_one("--nproc", self.nproc)
        _at_least_one("--nnodes", self.nnodes)
        if not 0 <= self.node_rank < self.nnodes:
            raise UserError(
                f"--node-rank {self.node_rank} is out of range for --nnodes {self.nnodes}\n"
                f"allowed: 0 to {self.nnodes - 1}\nfix: give every node its own --node-rank"
            )
        if not 0 <= self.master_port <= 65535:
            raise UserError(
                f"--master-port {self.master_port} is not a TCP port\nallowed: 1 to 65535, or 0 for a free one\n"
                "fix: leave --master-port out, or give another"
            )
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
        if self.nnodes > 1 and not self.master_addr:
            raise UserError(
                f"--nnodes {self.nnodes} needs the address of node 0\n"
                "fix: give every node the same --master-addr HOST and --master-port PORT"
            )

    @property
    def world_size(self) -> int:
        """Ranks of the whole run."""
        return self.nproc * self.nnodes

    @property
    def first_rank(self) -> int:
        """The rank in the run of local rank 0 of this node."""
        return self.node_rank * self.nproc

    @property
    def start_limit(self) -> float:
        """Seconds from a rank's start to its first beat; 0: no limit."""
        if not self.hang_timeout:
            return 0.0
        return self.start_timeout or max(DEFAULT_START_TIMEOUT, self.hang_timeout)

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port that node 0 listens at: with one node loopback; port 0 lets the system choose a free one."""
        if self.nnodes == 1:
            return LOOPBACK, self.master_port
        return self.master_addr, self.master_port or DEFAULT_PORT


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


def _at_least_one(option: str, value: int) -> None:
    if value < 1:
        raise UserError(f"{option} {value}\nallowed: at least 1\nfix: {option} 1, or more")


# Jobs that share node 0 need different ports. The range lies below Linux's ephemeral ports (32768 and up).
_FIRST_PORT, _PORTS = 20000, 12000


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmStep:
    """The place of a launcher in a SLURM step.

    Attributes:
        nnodes: Nodes of the step.
        node_rank: This node's number in it.
        master_addr: Host name of node 0.
        master_port: A port derived from the job's number, so that every node computes the same one.
        job: The job's number and the step's.
    """

    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int
    job: str


def read_step(environ: Mapping[str, str]) -> SlurmStep | None:
    """Return the place of this process in its SLURM step, or None if it is in no step of several nodes.

    A batch script outside of srun also has SLURM_JOB_NUM_NODES, but it runs on the first node only. Only srun sets
    SLURM_STEP_*, and then every node runs this launcher.

    Raises:
        UserError: srun started several tasks on a node. The launcher starts the ranks itself.
    """
    nnodes = _number(environ, "SLURM_STEP_NUM_NODES")
    if nnodes is None or nnodes < 2:
        return None
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS")
    if tasks is not None and tasks != nnodes:
        raise UserError(
            f"srun started {tasks} tasks on {nnodes} nodes, but one launcher per node starts the ranks\n"
            "fix: srun --ntasks-per-node=1 bmburst launch --nproc RANKS_PER_NODE -- SCRIPT"
        )
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    job = environ.get("SLURM_JOB_ID", "0")
    return SlurmStep(
        nnodes=nnodes,
        node_rank=_number(environ, "SLURM_NODEID") or 0,
        master_addr=first_host(nodes),
        master_port=_FIRST_PORT + (int(job) if job.isdigit() else 0) % _PORTS,
        job=f"{job}.{environ.get('SLURM_STEP_ID', '0')}",
    )


def first_host(nodelist: str) -> str:
    """Return the first host of SLURM's compressed list.

    "gpu[07-09,12],login1" -> "gpu07"; "rack[1-2]node[3,5]" -> "rack1node3"; "solo" -> "solo".

    Raises:
        UserError: The list is empty.
    """
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", nodelist.strip())
    if first is None:
        raise UserError(
            f"SLURM's list of nodes is '{nodelist}': the address of node 0 is unknown\n"
            "fix: give --master-addr HOST, --nnodes and --node-rank"
        )
    return re.sub(r"\[([^\]\-,]*)[^\]]*\]", r"\1", first.group())


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isdigit() else None
