"""What would make a task fit into memory: more host memory, or a smaller type of optimizer state."""

from dataclasses import replace
from typing import Any

from bmburst.amounts import GIB
from bmburst.optim.config import MOMENT_BYTES, State
from bmburst.plan.candidates import Task
from bmburst.plan.memory import HOST_SHARE
from bmburst.plan.search import search
from bmburst.schedule.hardware import Hardware

_PLENTY = 1 << 50
"""Bytes of host memory that are enough for any model."""


def remedy(task: Task, hardware: Hardware, **tried: Any) -> str:
    """Return what a task that does not fit needs, for "it needs ...". The arguments are those of `search`."""

    def fitting(asked: Task, machine: Hardware) -> list[float]:
        return [each.memory.in_host for each in search(asked, machine, **tried) if each.memory.fits]

    words = []
    if hosts := fitting(task, replace(hardware, host_memory=float(_PLENTY))):
        more = min(hosts) / HOST_SHARE - hardware.host_memory
        words.append(f"{more / GIB:,.0f} GiB more of host memory" + (" a node" if task.nodes > 1 else ""))
    for state in smaller_states(task.state):
        if fitting(replace(task, state=state), hardware):
            words.append(f"--optimizer.state {state}")
            break
    return ", or ".join(words) or "more GPUs, a shorter sequence or a smaller model"


def smaller_states(state: State) -> list[State]:
    """Return the types of optimizer state that take fewer bytes, the largest first."""
    return [name for name, nbytes in MOMENT_BYTES.items() if nbytes < MOMENT_BYTES[state]]
