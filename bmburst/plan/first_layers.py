"""Of the policies of a model's first layers those worth trying: of each kind the one that names the fewest and fits.

It is the fastest of its kind, since each layer that it names is computed again, and takes what memory there is: so it
is the one of which some is left for what the formulas do not know.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from bmburst.plan.candidates import Candidate
from bmburst.plan.memory import block_bytes, memory_of, taken
from bmburst.plan.task import Task
from bmburst.recompute.policy import FIRST, MIXED
from bmburst.schedule.hardware import Hardware

MARGIN = 0.05
"""Of the free memory: fragments, and how far formulas may be off."""


def with_margin(hardware: Hardware, free: float, task: Task) -> Hardware:
    """Return a machine whose GPUs have what may be planned with.

    Args:
        hardware: The machine.
        free: Bytes of a GPU that a run's tensors can have.
        task: The run.
    """
    return replace(hardware, memory=free * (1 - MARGIN) + taken(task, hardware))


def of_first_layers(way: Candidate, room: Hardware, policies: Sequence[str]) -> list[Candidate]:
    """Return the ways between "none" and policies of `MIXED` that are tried too; none where "none" itself fits.

    Args:
        way: All but the policy.
        room: What it must fit: `with_margin`.
        policies: That are tried.
    """
    whole = replace(way, recompute="none")
    if "none" not in policies or way.task.model.num_layers == 1:
        return []
    memory = memory_of(whole, room)
    if memory.fits:
        return []
    found: list[Candidate] = []
    for row in MIXED:
        ways = [_fewest(whole, name, memory.total, room) if name in policies else None for name in row]
        resident, *hosted = ways
        found += [one for one in ([resident] if resident else hosted) if one]
    return found


def _fewest(whole: Candidate, name: str, total: float, room: Hardware) -> Candidate | None:
    """Return the way that computes the fewest layers again by a policy and fits; None: there is none.

    Args:
        whole: The way that computes none again.
        name: The policy.
        total: Bytes of the GPU that `whole` takes.
        room: See `of_first_layers`.
    """
    each = replace(whole, recompute=name)
    # The peak is where all layers are done with their forward: each that it names leaves it so much lower.
    fewest = max(1, math.ceil((total - room.memory) / (_kept(whole) - _kept(each))))
    counts = range(fewest, min(fewest + 2, whole.task.model.num_layers))
    tried = (replace(whole, recompute=f"{name}{FIRST}{count}") for count in counts)
    return next((one for one in tried if memory_of(one, room).fits), None)


def _kept(way: Candidate) -> float:
    """Return what a layer keeps of its forward, in bytes."""
    return way.policy.kept(block_bytes(way))
