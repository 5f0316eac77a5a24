"""Where this launcher stands in a SLURM step, read from the variables that srun sets."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from bmburst.errors import UserError

# Jobs that share node 0 must not share its port. Below Linux's ephemeral ports (32768 and up), above the services.
_FIRST_PORT, _PORTS = 20000, 12000


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmStep:
    """One launcher's place among the launchers of a step.

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
    """Return this process's place in its SLURM step, or None where srun started no step of several nodes.

    A batch script outside srun also sees SLURM_JOB_NUM_NODES, but it runs on the first node alone: only srun's own
    variables (SLURM_STEP_*) say that every node runs this launcher.

    Raises:
        UserError: srun started several tasks on a node: the launcher starts the ranks itself.
    """
    nnodes = _number(environ, "SLURM_STEP_NUM_NODES")
    if nnodes is None or nnodes < 2:
        return None
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS")
    if tasks is not None and tasks != nnodes:
        raise UserError(
            f"srun started {tasks} tasks on {nnodes} nodes, but one launcher a node starts the ranks\n"
            "use: srun --ntasks-per-node=1 bmburst launch --nproc RANKS_PER_NODE -- SCRIPT"
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
            "give --master-addr HOST, --nnodes and --node-rank"
        )
    return re.sub(r"\[([^\]\-,]*)[^\]]*\]", r"\1", first.group())


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isdigit() else None
