"""Memory of a run: recompute and ZeRO "auto", the check of host memory, messages of out-of-memory errors."""

import contextlib
import os
import re
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

import torch

from bmburst.amounts import GIB, bytes_text
from bmburst.comm.communicator import gather_objects
from bmburst.errors import RunError, UserError
from bmburst.launch.spec import ALLOCATOR, EXPANDING
from bmburst.memory import DRIVER_IS_FULL, available_bytes, peak_bytes
from bmburst.mesh import Mesh
from bmburst.optim.config import smaller_states
from bmburst.plan.candidates import Candidate
from bmburst.plan.memory import KEPT, Memory, keeps_graphs, memory_of
from bmburst.plan.rates import call_seconds
from bmburst.plan.search import (
    Choice,
    Prediction,
    choose_recompute,
    choose_zero_group,
    choose_zero_level,
    predict,
    with_usable_memory,
)
from bmburst.plan.ways import first_layer_candidates
from bmburst.recompute.host_store import AT_ONCE, PIECE
from bmburst.recompute.policy import AUTO, POLICIES, Policy
from bmburst.schedule.hardware import HOST, Hardware, hardware_like
from bmburst.train.config import TrainConfig
from bmburst.train.machine import HostBudget, planned

_GPU_BYTES, _CPU_BYTES = 1 << 26, 1 << 20  # of a message that measures links


def zero_group_for(config: TrainConfig, mesh: Mesh, local_size: int) -> Literal["world"] | int:
    """Return the ranks of a ZeRO group, the same on all ranks. Every rank calls it before the model is created.

    For "auto" the links between nodes are measured, and rank 0 prints the choice, unless there is only one node.

    Returns:
        "world", or a smaller number of neighbouring ranks.

    Raises:
        UserError: The ranks cannot be divided into such groups.
    """
    from bmburst.zero_group import ranks_of_node  # imports BMTrain: only after `bmburst.start`

    asked, size = config.parallel.zero_group, mesh.shape.size
    if asked == "world" or mesh.shape.pipe > 1:  # in a pipeline, ZeRO shards over the ranks of a stage
        return "world"
    group = asked if isinstance(asked, int) else ranks_of_node(mesh.world)
    if group == size or (asked == "auto" and group % mesh.shape.tensor):
        return "world"
    mesh.shape.require_zero_group(group)
    if asked != "auto":
        return group
    room, rate = _Room.of(config, mesh, local_size), _rate_between(mesh, group)
    room = replace(room, hardware=replace(room.hardware, inter_bandwidth=rate))
    runs = (config.with_parallel(zero_group=each) for each in ("world", group))
    choice = choose_zero_group(*(room.predict(run, size // group) for run in runs))
    if mesh.rank == 0:
        sys.stderr.write(f"{choice.message} ({bytes_text(rate)}/s a rank between nodes)\n")
    return choice.value or "world"


def zero_level_for(config: TrainConfig, mesh: Mesh, local_size: int) -> Literal[2, 3]:
    """Return the ZeRO stage of a run, the same on all ranks. Every rank calls it before the model is created.

    For "auto" on GPUs, rank 0 prints the choice. The configuration has its ZeRO group already.
    """
    asked, size = config.parallel.zero_level, mesh.shape.size
    if asked != "auto":
        return asked
    ranks = size if config.parallel.zero_group == "world" else config.parallel.zero_group
    gathers = ranks != mesh.shape.tensor and mesh.shape.pipe == 1 and not config.optimizer.offload_weights
    if not gathers or not torch.cuda.is_available():
        return 3
    room = _Room.of(config, mesh, local_size)
    choice = choose_zero_level(*(room.predict(config.with_parallel(zero_level=level), room.nodes) for level in (2, 3)))
    if mesh.rank == 0:
        sys.stderr.write(f"{choice.message}\n")
    return choice.value


def _rate_between(mesh: Mesh, ranks: int) -> float:
    """Return the bytes per second into each rank from another node, while all ranks receive, the same on all ranks.

    Args:
        mesh: All ranks.
        ranks: Ranks of a node.
    """
    device = mesh.world.device
    sent = torch.zeros(_GPU_BYTES if device.type == "cuda" else _CPU_BYTES, dtype=torch.uint8, device=device)
    seconds = call_seconds(lambda: mesh.world.ring(sent, shift=ranks).wait(), device, budget=0)
    slowest: float = max(gather_objects(mesh.world, seconds))
    return sent.nbytes / slowest


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """What a rank has before a run, in bytes.

    Attributes:
        device: Name of its GPU, or `HOST`.
        free: Memory for new tensors on its device.
        taken: Memory of its GPU that other programs use, such as one that is exiting; 0 if it is little.
        host: Free memory of its host; None if unknown.
    """

    device: str = HOST
    free: float
    taken: float = 0.0
    host: int | None = None

    @classmethod
    def now(cls, local_size: int, cuda: Any = torch.cuda) -> "RankMemory":
        """Return what this rank has, one of `local_size` on its host."""
        host = available_bytes()
        if not cuda.is_available():
            return cls(free=(host or 2**40) / local_size, host=host)
        free, total = cuda.mem_get_info()
        others = total - free - cuda.memory_reserved()
        return cls(
            device=cuda.get_device_name(),
            free=free + cuda.memory_reserved() - cuda.memory_allocated(),
            taken=float(others) if others > _LIBRARIES else 0.0,
            host=host,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Room:
    """What all ranks have for a run, the same on all ranks.

    Attributes:
        hardware: The machine of the first rank, with the host memory that the run may use.
        on_gpu: Whether it has a GPU.
        memory: That host memory; None if unknown.
        ranks: Number of ranks.
        per_host: Ranks of a host.
        free: Least free bytes of a GPU.
        taken: Most bytes of a GPU that other programs use.
    """

    hardware: Hardware
    on_gpu: bool
    memory: HostBudget | None
    ranks: int
    per_host: int
    free: float
    taken: float

    @classmethod
    def of(cls, config: TrainConfig, mesh: Mesh, local_size: int, mine: RankMemory | None = None) -> "_Room":
        """Ask all ranks. Every rank must call it."""
        mine = mine or RankMemory.now(local_size)
        found = gather_objects(mesh.world, (mine.free, mine.host, mine.device, local_size, mine.taken))
        free, in_host, devices, sizes, taken = zip(*found, strict=True)
        memory = HostBudget.of(config, in_host)
        # Use those of the first rank: GPUs and hosts may differ, but all ranks must decide alike.
        hardware = hardware_like(devices[0])
        hardware = replace(hardware, host_memory=memory.has) if memory else hardware
        return cls(
            hardware=hardware,
            on_gpu=devices[0] != HOST,
            memory=memory,
            ranks=mesh.shape.size,
            per_host=sizes[0],
            free=min(free),
            taken=max(taken),
        )

    @property
    def nodes(self) -> int:
        """Number of hosts."""
        return 1 if self.ranks % self.per_host else self.ranks // self.per_host

    def recompute(self, way: Candidate, layout: str) -> Choice[str]:
        """Return the choice of `--recompute auto`."""
        policies = POLICIES if self.on_gpu else [name for name in POLICIES if "offload" not in name]
        return choose_recompute(way, self.hardware, self.free, layout=layout, policies=policies, taken=self.taken)

    def predict(self, config: TrainConfig, nodes: int) -> Prediction:
        """Predict a step of a run on nodes of equally many ranks."""
        way = planned(config, self.ranks, nodes, self.hardware)
        if config.recompute == AUTO:
            way = replace(way, recompute=self.recompute(way, config.parallel.layout).value)
        return predict(way, with_usable_memory(self.hardware, self.free, way.task))


def recompute_for(config: TrainConfig, mesh: Mesh, local_size: int, mine: RankMemory | None = None) -> str:
    """Return the recompute policy of a run, the same on all ranks. Every rank calls it before the model is created.

    For "auto", rank 0 prints the chosen policy.

    Args:
        config: The run.
        mesh: Its ranks.
        local_size: Ranks on this host.
        mine: What this rank has; default: what it has now.

    Raises:
        UserError: A host has less memory than the policy offloads.
    """
    is_auto = config.recompute == AUTO
    if not is_auto and not config.optimizer.offload and not Policy.parse(config.recompute).offloads:
        return config.recompute
    room = _Room.of(config, mesh, local_size, mine)
    way = planned(config, room.ranks, room.nodes, room.hardware)
    if is_auto:
        choice = room.recompute(way, config.parallel.layout)
        if mesh.rank == 0:
            sys.stderr.write(f"{choice.message}\n")
        way = replace(way, recompute=choice.value)
    if room.memory is not None:
        room.memory.require(way, room.hardware)
    return way.recompute


def block_graphs_for(config: TrainConfig, ranks: int, per_host: int) -> bool:
    """Return whether the blocks of a run are CUDA graphs; not if the planner cannot estimate it.

    Its ZeRO stage and recompute policy are not "auto".
    """
    if not torch.cuda.is_available():
        return False
    hardware = hardware_like(torch.cuda.get_device_name())
    try:
        return keeps_graphs(planned(config, ranks, max(1, ranks // per_host), hardware), hardware)
    except UserError:
        return False


def expected_memory(config: TrainConfig, ranks: int, per_host: int) -> Memory | None:
    """Return the planner's estimate of a rank's memory on this host; None if the planner cannot estimate it.

    Without GPUs, it is the current memory of the process, including its weights, plus the planner's other tensors.
    Temporary memory of CPU operators is not counted. The recompute policy may not be "auto".
    """
    on_gpu = torch.cuda.is_available()
    hardware = hardware_like(torch.cuda.get_device_name() if on_gpu else HOST)
    try:
        memory = memory_of(planned(config, ranks, max(1, ranks // per_host), hardware), hardware)
    except UserError:
        return None
    if on_gpu:
        return memory
    tensors = {name: nbytes for name, nbytes in memory.lines.items() if name != "weights"}
    return replace(memory, lines=tensors, outside={"process": float(peak_bytes()[0])})


def offloaded_pieces(config: TrainConfig, ranks: int) -> list[int]:
    """Return the sizes in bytes of the pinned allocations of a rank's `HostStore`; the policy may not be "auto"."""
    hardware = hardware_like(HOST)
    hosted = memory_of(planned(config, ranks, 1, hardware), hardware).host.get(KEPT, 0.0) / ranks
    return [AT_ONCE * PIECE] * int(hosted // (AT_ONCE * PIECE))


_LIBRARIES = 4 << 30  # bytes outside torch's allocator that can belong to libraries of this program
_MOST = 8  # settings to show
_SMALL_CHUNK = 256  # tokens
_MORE_RANKS = (2, 4, 8)
_FRAGMENTS = 0.05  # fraction of the GPU that is reserved but not allocated
_LESS = 0.95  # times the prediction for the settings that did not fit
_HOST_IS_FULL = re.compile(r"DefaultCPUAllocator: can't allocate memory: you tried to allocate (\d+) bytes")
_OUTSIDE = 4 * GIB  # of a GPU, outside torch's allocator: more than CUDA, NCCL and kernels of a rank take
_FRUGAL, _DEFAULT = "block", "block-keep-attention"
_STREAMED = "--optimizer.offload --optimizer.offload_weights"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Memory of a GPU when an allocation failed, in bytes.

    Attributes:
        device: Name of the GPU.
        total: Memory of the GPU.
        allocated: Memory of tensors.
        peak: Peak memory of tensors in this step.
        reserved: Memory reserved by torch's allocator.
        free: Memory that the driver could still give to any program; None if unknown.
        host: Free memory of its host; None if unknown.
        expands: Whether torch's allocator uses expandable segments, as set by the launcher.
    """

    device: str
    total: int
    allocated: int
    peak: int
    reserved: int
    free: int | None = None
    host: int | None = None
    expands: bool = False

    @classmethod
    def now(cls) -> "DeviceMemory":
        """Return the memory of the current GPU; zeros without a GPU."""
        if not torch.cuda.is_available():
            return cls(device=HOST, total=0, allocated=0, peak=0, reserved=0)
        return cls(
            device=torch.cuda.get_device_name(),
            total=torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory,
            allocated=torch.cuda.memory_allocated(),
            peak=torch.cuda.max_memory_allocated(),
            reserved=torch.cuda.memory_reserved(),
            free=torch.cuda.mem_get_info()[0],
            host=available_bytes(),
            expands=any(EXPANDING in os.environ.get(name, "") for name in ALLOCATOR),
        )


@contextlib.contextmanager
def explained(config: TrainConfig) -> Iterator[None]:
    """Convert out-of-memory errors to `RunError`; for a GPU, the message lists the memory of each part.

    torch's allocator raises `torch.OutOfMemoryError`. What asks the driver for memory by itself (a stream, a library,
    a kernel that is loaded) raises `RuntimeError` with the driver's words.

    Raises:
        RunError: Out of memory.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or DRIVER_IS_FULL in str(error):
            ranks, here = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
            text = explain(config, ranks, max(1, ranks // max(here, 1)), DeviceMemory.now(), _here(), str(error))
            raise RunError(text, on_all_ranks=False) from error
        asked = _HOST_IS_FULL.search(str(error))
        if asked is None:
            raise
        raise RunError(
            f"{_here()} ran out of host memory: an allocation of {_gib(int(asked[1]))} failed\n"
            "fix: a smaller model or batch, a shorter --sequence-length, or fewer ranks on this host",
            on_all_ranks=False,
        ) from error


def _gib(nbytes: float) -> str:
    """Return bytes as torch's allocator writes them in the first line of the message."""
    return f"{nbytes / GIB:.2f} GiB"


def _here() -> str:
    return f"rank {os.environ.get('RANK', '0')} (host {socket.gethostname()})"


def explain(config: TrainConfig, ranks: int, nodes: int, memory: DeviceMemory, where: str, error: str) -> str:
    """Return the message of an out-of-memory error."""
    hardware = _hardware(memory, config.host_memory)
    lines = [
        f"{where} ran out of GPU memory: {error.splitlines()[0].split('. GPU ')[0] if error else 'no memory was left'}",
        f"  torch: {_gib(memory.allocated)} allocated, {_gib(memory.peak)} at most in this step, "
        f"{_gib(memory.reserved)} reserved, of {_gib(memory.total)}",
    ]
    if memory.free is not None and (outside := memory.total - memory.free - memory.reserved) > _OUTSIDE:
        lines.append(
            f"  {_gib(outside)} of it are outside torch's allocator: other programs on this GPU, see nvidia-smi"
        )
    if not memory.expands and memory.total and memory.reserved - memory.allocated > _FRAGMENTS * memory.total:
        lines.append(f"  much is reserved and not allocated: {ALLOCATOR[0]}={EXPANDING} may help")
    predicted = _memory(config, ranks, nodes, hardware)
    if predicted is None:
        return "\n".join([*lines, "the planner cannot say what uses the memory: bmburst plan --help"])
    lines.append(f"a step of this configuration at its fullest moment ({predicted.moment}), as bmburst plan predicts:")
    parts = {**predicted.lines, **predicted.outside}
    lines += [f"  {_gib(size):>11}  {name}" for name, size in sorted(parts.items(), key=lambda part: -part[1])]
    lines.append(f"  {_gib(predicted.total):>11}  total")
    return "\n".join([*lines, *_settings(config, ranks, nodes, hardware, predicted.total)])


def _settings(config: TrainConfig, ranks: int, nodes: int, hardware: Hardware, now: float) -> list[str]:
    fitting = []
    limit = min(hardware.memory, _LESS * now)  # if the prediction is too low, it is too low for all settings
    for words, changed, times in chain(_first_layers(config, ranks, nodes, hardware, limit), _changes(config)):
        memory = _memory(changed, ranks * times, nodes * times, hardware)
        if memory is None or memory.total > limit or memory.in_host > memory.host_capacity:
            continue
        hosted = f", and {_gib(memory.in_host)} of each host" if memory.in_host else ""
        fitting.append(f"  {_gib(memory.total):>11}  {words}{hosted}")
    if not fitting:
        return [
            "none of recompute, offload, loss chunk and up to 8 times the ranks would fit: shorten --sequence-length"
        ]
    return ["settings that would fit, as predicted (they need a few percent to spare):", *fitting[:_MOST]]


def _first_layers(
    config: TrainConfig, ranks: int, nodes: int, hardware: Hardware, limit: float
) -> Iterator[tuple[str, TrainConfig, int]]:
    """Yield the default policy for the smallest number of first layers that fits a limit, in the form of `_changes`.

    It recomputes less than a policy for all layers.
    """
    try:
        way = planned(config, ranks, nodes, hardware)
    except UserError:
        return
    for each in first_layer_candidates(way, replace(hardware, memory=limit), ("none", _DEFAULT)):
        yield f"--recompute {each.recompute}", config.replace(recompute=each.recompute), 1


def _changes(config: TrainConfig) -> Iterator[tuple[str, TrainConfig, int]]:
    """Yield (options, configuration with them, factor on the number of ranks), the cheapest changes first."""
    single: list[tuple[str, TrainConfig]] = []
    has_stages = config.parallel.pipeline_parallel > 1
    for policy in sorted(POLICIES, key=lambda name: -Policy.parse(name).attention):
        is_possible = not has_stages or Policy.parse(policy).allows_stages()
        if policy not in ("none", config.recompute) and is_possible:
            single.append((f"--recompute {policy}", config.replace(recompute=policy)))
    if config.parallel.zero_group != "world":
        single.append(("--parallel.zero_group world", config.with_parallel(zero_group="world")))
    if config.parallel.zero_level == 2:
        single.append(("--parallel.zero-level 3", config.with_parallel(zero_level=3)))
    if config.loss_chunk_tokens > _SMALL_CHUNK:
        single.append((f"--loss-chunk-tokens {_SMALL_CHUNK}", config.replace(loss_chunk_tokens=_SMALL_CHUNK)))
    if not config.optimizer.offload:
        single.append(("--optimizer.offload", _offloaded(config)))
    can_stream = config.parallel.zero_level != 2 and not has_stages
    if not config.optimizer.offload_weights and can_stream:
        single.append((_STREAMED, _offloaded(config, weights=True)))
    yield from ((words, changed, 1) for words, changed in single)
    frugal = _offloaded(config).replace(recompute=_FRUGAL)
    both = f"--optimizer.offload --recompute {_FRUGAL}"
    yield both, frugal, 1
    if can_stream:
        yield f"{_STREAMED} --recompute {_FRUGAL}", _offloaded(frugal, weights=True), 1
    smallest = frugal.replace(loss_chunk_tokens=min(config.loss_chunk_tokens, _SMALL_CHUNK))
    all_three = f"{both} --loss-chunk-tokens {smallest.loss_chunk_tokens}"
    yield all_three, smallest, 1
    for state in smaller_states(config.optimizer.state) if config.optimizer.kernel == "auto" else ():
        yield f"--optimizer.state {state}", config.replace(optimizer=replace(config.optimizer, state=state)), 1
    for times in _MORE_RANKS:
        yield f"{times} times the ranks, all of them in --sequence-parallel", _spread(config, times), times
    for times in _MORE_RANKS:
        yield f"{times} times the ranks in --sequence-parallel, {all_three}", _spread(smallest, times), times


def _offloaded(config: TrainConfig, *, weights: bool = False) -> TrainConfig:
    weights = weights or config.optimizer.offload_weights
    # The kernel is for weights that stay on the GPU.
    optimizer = replace(config.optimizer, offload=True, offload_weights=weights, kernel="auto")
    return config.replace(optimizer=optimizer)


def _spread(config: TrainConfig, times: int) -> TrainConfig:
    sequence = config.parallel.sequence_parallel
    return config.with_parallel(sequence_parallel=None if sequence is None else sequence * times)


def _hardware(memory: DeviceMemory, host_memory: float | None) -> Hardware:
    known = hardware_like(memory.device)
    host = known.host_memory if memory.host is None else float(memory.host)
    if host_memory is not None:  # on a virtual machine whose memory grows, the free memory may be less
        host = host_memory * GIB
    return replace(known, memory=float(memory.total) or known.memory, host_memory=host)


def _memory(config: TrainConfig, ranks: int, nodes: int, hardware: Hardware) -> Memory | None:
    """Return the memory of a step, or None if the configuration is not possible."""
    try:
        config.validate(ranks)
        return memory_of(planned(config, ranks, nodes, hardware), hardware)
    except UserError:
        return None
