"""Defaults of a new run by this machine's GPUs: dtype, recompute policy, and how ranks share the work.

What a file or an option gives is kept, and so is what a run that is resumed was started with. Without GPUs the defaults
are those of `TrainConfig`. Imports no torch at its top.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from bmburst.errors import UserError
from bmburst.launch.devices import BFLOAT16, Gpu
from bmburst.recompute.policy import AUTO, POLICIES
from bmburst.schedule.hardware import Hardware, hardware_like
from bmburst.schedule.parallelism import divisors
from bmburst.train.config import TrainConfig

if TYPE_CHECKING:
    from bmburst.plan.candidates import Candidate

GAIN = 0.01
"""Fraction of the time that a way must save over simpler ones."""
LEVELS: tuple[Literal[2, 3], ...] = (3, 2)
SPREAD = ("micro_batch_size",)
"""What `spread` chooses beside the degrees of `MESH` and the batch size."""
MESH = tuple(f"parallel.{axis}_parallel" for axis in ("pipeline", "data", "sequence", "tensor", "head"))


def defaults_of(gpus: Sequence[Gpu]) -> dict[str, str]:
    """Return the values of fields that are not given, for a new run on these GPUs."""
    if not gpus:
        return {}
    have_bfloat16 = min(gpu.capability for gpu in gpus) >= BFLOAT16
    return {"recompute": AUTO, **({"dtype": "bfloat16"} if have_bfloat16 else {})}


def spread(config: TrainConfig, given: Collection[str], ranks: int, gpus: Sequence[Gpu]) -> TrainConfig:
    """Return a run with the data and sequence parallel degrees and the micro-batch that are predicted to be fastest.

    The planner compares them by tokens per second, each with its fastest ZeRO stage and recompute policy that fit in
    GPU memory, unless they are given. Of ways that differ by less than `GAIN`, the one with the fewest ranks for a
    sequence is taken, then the smaller micro-batch. Without a given batch size, each group of ranks gets
    `micro_batch_size` sequences a step. With one rank, only the micro-batch is chosen. If nothing fits, the run is
    returned as it is.

    Args:
        config: The run.
        given: Dotted names of the fields that a file or an option gives, which are kept. If one of the parallel degrees
            is among them, all of them are.
        ranks: Number of ranks.
        gpus: The GPUs of each machine; none: the run is returned as it is.
    """
    if not gpus:
        return config
    from bmburst.plan.search import fastest  # here, because --help does not need the planner

    hardware, nodes = hardware_like(gpus[0].name), max(1, -(-ranks // len(gpus)))
    ways = [
        (way, found)
        for way in _ways(config, given, ranks)
        for level in (LEVELS if way.parallel.zero_level == "auto" else (way.parallel.zero_level,))
        if (found := _planned(way, level, ranks, nodes, hardware))
    ]
    policies = POLICIES if config.recompute == AUTO else (config.recompute,)
    resident = [name for name in policies if "offload" not in name]  # the host's memory is not known here
    chosen = fastest([found for _, found in ways], hardware, resident, gain=GAIN)
    return config if chosen is None else ways[chosen][0]


def _ways(config: TrainConfig, given: Collection[str], ranks: int) -> Iterator[TrainConfig]:
    """Yield the run in each way that is not given; first those with few ranks for a sequence."""
    is_placed = ranks == 1 or any(name in given for name in MESH)
    for sequence in [config.parallel.sequence_parallel] if is_placed else divisors(ranks):
        data = config.parallel.data_parallel if sequence is None or is_placed else ranks // sequence
        own = replace(config.parallel, data_parallel=data, sequence_parallel=sequence)
        batch = config.batch_size if is_placed or "batch_size" in given else data * config.micro_batch_size
        micro = [config.micro_batch_size] if "micro_batch_size" in given else divisors(max(1, batch // data))
        for size in micro:
            with suppress(UserError):
                yield config.replace(parallel=own, batch_size=batch, micro_batch_size=size)


def choices_text(config: TrainConfig, given: Collection[str], ranks: int, gpus: Sequence[Gpu]) -> str:
    """Return the line about what was chosen for these GPUs, and how to choose otherwise; empty if nothing was."""
    if not gpus:
        return ""
    chosen = [f"{name} {getattr(config, name)}" for name in defaults_of(gpus) if name not in given]
    if ranks > 1 and not any(name in given for name in MESH):
        shape = config.mesh_shape(ranks)
        chosen.append(f"data_parallel {shape.data} x sequence_parallel {shape.sequence}")
        if "batch_size" not in given:
            chosen.append(f"batch_size {config.batch_size}")
    if (ranks > 1 or config.micro_batch_size > 1) and "micro_batch_size" not in given:
        chosen.append(f"micro_batch_size {config.micro_batch_size}")
    if not chosen:
        return ""
    return f"chosen for {ranks} x {gpus[0].name}: {', '.join(chosen)}; the options of these names choose otherwise"


def _planned(
    config: TrainConfig, level: Literal[2, 3], ranks: int, nodes: int, hardware: Hardware
) -> "Candidate | None":
    from bmburst.train.machine import planned  # here, because --help does not need the planner

    try:
        run = config.with_parallel(zero_level=level)
        run.validate(ranks)
        return planned(run, ranks, nodes, hardware)
    except UserError:  # for example a batch that does not divide by the groups
        return None
