"""Finds the longest sequence that each mesh can train, the memory that limits it, and its memory by use."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from bmburst.amounts import GIB, gib, short
from bmburst.blocks.config import LoRAConfig
from bmburst.errors import DoesNotFit
from bmburst.plan.candidates import Candidate, Offload, Task
from bmburst.plan.memory import memory_of, reserved_memory
from bmburst.plan.presentation import command
from bmburst.plan.search import Prediction, best, remedy, with_usable_memory
from bmburst.plan.ways import askable, candidates, ending_alike, require_possible, with_policies
from bmburst.recompute.policy import POLICIES
from bmburst.schedule.hardware import Hardware

STEP = 1024
"""Tokens; lengths are multiples of it."""
_MOST = 1 << 40
_MORE = 1.05  # a memory limits the length if a longer sequence fits with this factor on it
_USES = {
    "weights": ("weights", "shards on their way", "gathered weights, gradients", "whole weights (ZeRO-2)"),
    "gradients": ("gradients", "sums of gradients", "gradients of matrices"),
    "optimizer": ("optimizer",),
    "kept for backward": ("kept for backward", "computed again by its segment"),
    "from and to host": ("back from host memory", "not yet let go to host memory"),
    "embedding, head, loss": ("embedding and head", "loss chunk"),
    "outside of tensors": (
        "workspace",
        "context and libraries",
        "NCCL",
        "boxes that peers read",
        "kept by CUDA graphs",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Longest:
    """The longest sequence of a mesh.

    Attributes:
        found: The fastest way to train it.
        limit: The memory that limits the length; for a GPU with the moment of the peak.
    """

    found: Prediction
    limit: str

    @property
    def training(self) -> str:
        """Kind of training: "full" or "lora"."""
        return "lora" if self.found.candidate.task.lora else "full"

    @property
    def tokens(self) -> int:
        """Its length."""
        return self.found.candidate.task.sequence


def longest(
    task: Task,
    hardware: Hardware,
    *,
    recompute: Sequence[str] = POLICIES,
    tensor: Sequence[int] | None = None,
    data: Sequence[int] | None = None,
    sequence: Sequence[int] | None = None,
    offload: Sequence[Offload] = tuple(Offload),
    lora: LoRAConfig | None = None,
) -> list[Longest]:
    """Return the longest sequence that each mesh can train, the longest first. Results with adapters come last.

    Args:
        task: The training task; its `sequence` is ignored.
        hardware: The machine.
        recompute: Recompute policies to try; policies for some of the layers are added.
        tensor: Tensor parallel degrees to try; by default all that fit in a node.
        data: Data parallel degrees to try; by default all.
        sequence: Sequence parallel degrees to try; by default all.
        offload: Kinds of offload to try.
        lora: Adapters to train in additional results.

    Raises:
        DoesNotFit: No mesh can train a sequence of `STEP` tokens per rank.
    """
    found: list[Longest] = []
    shortest = replace(task, sequence=STEP * task.gpus)
    limits: dict[str, Any] = {"zero": (3,), "tensor": tensor, "data": data, "sequence": sequence}
    for asked in (task, *([replace(task, lora=lora, second_model=False)] if lora else [])):
        meshes = defaultdict(list)
        shorter = replace(asked, sequence=STEP * task.gpus)
        for each in askable(candidates(shorter, recompute=recompute[:1], **limits), hardware):
            meshes[each.data, each.tensor].append(each)
        require_possible(recompute, [each for ways in meshes.values() for each in ways])
        found += [one for ways in meshes.values() if (one := _longest(_Fit(ways, recompute, offload), hardware))]
    if not found:
        raise DoesNotFit(
            f"{task.preset} does not fit on {task.gpus} x {hardware.name} at any length\n"
            f"fix: {remedy(shortest, hardware, recompute=recompute, offload=offload, **limits)}"
        )
    return sorted(found, key=lambda each: (each.training, -each.tokens, each.found.seconds))


@dataclass(frozen=True, slots=True)
class _Fit:
    """The ways to train on one mesh.

    Attributes:
        strategies: A candidate for each attention strategy.
        recompute: See `longest`.
        offload: See `longest`.
    """

    strategies: Sequence[Candidate]
    recompute: Sequence[str]
    offload: Sequence[Offload]

    def fitting(self, steps: int, hardware: Hardware) -> Iterator[Candidate]:
        """Yield the ways that fit for a sequence of `steps * STEP` tokens, those with most offload first."""
        task = replace(self.strategies[0].task, sequence=steps * STEP)
        room = with_usable_memory(hardware, hardware.memory - reserved_memory(task, hardware), task)
        for strategy, offload in product(self.strategies, reversed(self.offload)):
            possible = ending_alike(self.recompute, strategy.layout, strategy.sequence)
            ways = with_policies(replace(strategy, task=task, offload=offload), room, possible)
            yield from (each for each in ways if memory_of(each, room).fits)

    def is_possible(self, steps: int, hardware: Hardware) -> bool:
        """Return whether any way fits."""
        return any(True for _ in self.fitting(steps, hardware))


def _longest(fit: _Fit, hardware: Hardware) -> Longest | None:
    least = 2 * fit.strategies[0].sequence // STEP  # steps that may leave ranks without tokens
    low = least
    for strategy in fit.strategies:
        low = _more_steps(replace(fit, strategies=[strategy]), low, hardware)
    if low == least:
        return None
    taken = best(list(fit.fitting(low, hardware)), hardware)
    more = {
        f"GPU memory in {taken.memory.moment}": replace(hardware, memory=_MORE * hardware.memory),
        "host memory": replace(hardware, host_memory=_MORE * hardware.host_memory),
    }
    helps = [name for name, machine in more.items() if fit.is_possible(low + 1, machine)]
    return Longest(found=taken, limit=" and ".join(helps or more))


def _more_steps(fit: _Fit, low: int, hardware: Hardware) -> int:
    """Return the largest number of steps that fits, or `low` if no larger one fits."""
    width = 1
    while low * STEP < _MOST and fit.is_possible(low + width, hardware):
        low, width = low + width, 2 * width
    high = low + width
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit.is_possible(middle, hardware) else (low, middle)
    return low


def where_bytes_lie(found: Prediction) -> dict[str, dict[str, float]]:
    """Return the bytes of a GPU at the peak and the bytes of a host, by use."""
    left = {**found.memory.lines, **found.memory.outside}
    gpu = {use: sum(left.pop(name, 0.0) for name in names) for use, names in _USES.items()}
    gpu["block in work"] = sum(left.values())
    return {"gpu": {use: nbytes for use, nbytes in gpu.items() if nbytes}, "host": dict(found.memory.host)}


def longest_json(found: Sequence[Longest]) -> dict[str, Any]:
    """Return the lengths as plain data for JSON, in tokens, seconds and bytes."""
    return {"longest": [_row(each) for each in found]}


def _row(each: Longest) -> dict[str, Any]:
    way = each.found.candidate
    return {
        "training": each.training,
        "tokens": each.tokens,
        "seconds": each.found.seconds,
        "limit": each.limit,
        "mesh": {"data": way.data, "sequence": way.sequence, "tensor": way.tensor},
        "recompute": way.recompute,
        "offload": way.offload.value,
        "bytes": where_bytes_lie(each.found),
        "command": command(way),
    }


def longest_report(task: Task, hardware: Hardware, found: Sequence[Longest]) -> str:
    """Return the report: a line per mesh, and memory and command of the longest sequence of each kind of training."""
    host = hardware.host_memory / GIB
    lines = [
        f"{task.preset}, longest sequence on {task.gpus} x {hardware.name} with {host:,.0f} GiB of host memory a node",
        "",
        *_table(found),
    ]
    firsts = {each.training: each for each in reversed(found)}
    return "\n".join([*lines, *(line for name in sorted(firsts) for line in _details(firsts[name]))])


def _details(longest: Longest) -> list[str]:
    """Return the lines with the memory by use and the command."""
    memory, lines = longest.found.memory, list[str]()
    for place, uses in where_bytes_lie(longest.found).items():
        used, most = (memory.total, memory.capacity) if place == "gpu" else (memory.in_host, memory.host_capacity)
        name = "a GPU" if place == "gpu" else "a host"
        lines += ["", f"{longest.training}: memory of {name}: {gib(used)} of {gib(most)} GiB"]
        lines += [f"  {use:29} {gib(nbytes):>8} GiB" for use, nbytes in uses.items()]
    return [*lines, "", command(longest.found.candidate)]


def _table(found: Sequence[Longest]) -> list[str]:
    rows = [("training", "tokens", "step s", "GiB", "mesh, policy", "limit")]
    for each in found:
        way = each.found.candidate
        mesh = f"data {way.data} x sequence {way.sequence}" + (f" x tensor {way.tensor}" if way.tensor > 1 else "")
        seconds, memory = f"{each.found.seconds:,.0f}", gib(each.found.memory.total)
        words = f"{mesh}, {way.recompute}"
        rows.append((each.training, short(each.tokens, commas=True), seconds, memory, words, each.limit))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return [
        "  ".join([f"{row[0]:8}", *(f"{row[i]:>{widths[i]}}" for i in (1, 2, 3)), f"{row[4]:{widths[4]}}", row[5]])
        for row in rows
    ]
