"""Defaults of a new run by this machine's GPUs: dtype, recompute policy, and how ranks share the work.

What a file or an option gives is kept, and so is what a run that is resumed was started with. Without GPUs the defaults
are those of `TrainConfig`. Imports no torch at its top.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from bmburst.errors import UserError
from bmburst.launch import devices
from bmburst.recompute.policy import AUTO
from bmburst.schedule.hardware import Hardware, hardware_like
from bmburst.schedule.parallelism import divisors
from bmburst.train.config import TrainConfig

_AMPERE = (8, 0)
MESH = tuple(f"parallel.{axis}_parallel" for axis in ("pipeline", "data", "sequence", "tensor", "head"))


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of this machine.

    Attributes:
        count: Number of GPUs that torch sees.
        name: Name of the first one.
        capability: The smallest compute capability.
    """

    count: int
    name: str
    capability: tuple[int, int]

    @classmethod
    def here(cls) -> "Gpus | None":
        """Return the GPUs of this machine; None without one."""
        if not (found := devices.gpus()):
            return None
        return cls(len(found), found[0].name, min(gpu.capability for gpu in found))

    @property
    def has_bfloat16(self) -> bool:
        """Whether all of them compute in bfloat16."""
        return self.capability >= _AMPERE


def defaults_of(gpus: Gpus | None) -> dict[str, str]:
    """Return the values of fields that are not given, for a new run on these GPUs."""
    if gpus is None:
        return {}
    return {"recompute": AUTO, **({"dtype": "bfloat16"} if gpus.has_bfloat16 else {})}


def spread(config: TrainConfig, given: Collection[str], ranks: int, gpus: Gpus | None) -> TrainConfig:
    """Return a run whose sequences are on as few ranks as they fit on, with data parallelism over the others.

    Without a given batch size, each group of ranks gets `micro_batch_size` sequences a step.

    Args:
        config: The run.
        given: Dotted names of the fields that a file or an option gives. If one of the parallel degrees is among them,
            the run is returned as it is.
        ranks: Number of ranks.
        gpus: The GPUs of each machine; None: the run is returned as it is.
    """
    if gpus is None or ranks == 1 or any(name in given for name in MESH):
        return config
    hardware, nodes = hardware_like(gpus.name), max(1, -(-ranks // gpus.count))
    for sequence in divisors(ranks):
        data = ranks // sequence
        parallel = replace(config.parallel, data_parallel=data, sequence_parallel=sequence)
        changes: Mapping[str, object] = {"parallel": parallel}
        if "batch_size" not in given:
            changes = {**changes, "batch_size": data * config.micro_batch_size}
        way = config.replace(**changes)
        if _fits(way, ranks, nodes, hardware):
            return way
    return config


def explained(config: TrainConfig, given: Collection[str], ranks: int, gpus: Gpus | None) -> str:
    """Return the line about what was chosen for these GPUs, and how to choose otherwise; empty if nothing was."""
    if gpus is None:
        return ""
    chosen = [f"{name} {getattr(config, name)}" for name in defaults_of(gpus) if name not in given]
    if ranks > 1 and not any(name in given for name in MESH):
        shape = config.mesh_shape(ranks)
        chosen.append(f"data_parallel {shape.data} x sequence_parallel {shape.sequence}")
        if "batch_size" not in given:
            chosen.append(f"batch_size {config.batch_size}")
    if not chosen:
        return ""
    return f"chosen for {ranks} x {gpus.name}: {', '.join(chosen)}; the options of these names choose otherwise"


def _fits(config: TrainConfig, ranks: int, nodes: int, hardware: Hardware) -> bool:
    from bmburst.plan.memory import memory_of  # here, because --help does not need the planner
    from bmburst.train.machine import planned

    try:
        return memory_of(planned(config, ranks, nodes, hardware), hardware).fits
    except UserError:  # for example a batch that does not divide by the groups
        return False
