"""Checks a run against this machine: kernel, transport, strategy, dtype, and host memory as the planner counts it.

Imports no torch at its top. The launcher does not open a GPU, so each rank checks its GPU after BMTrain has started.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING

from bmburst.amounts import GIB, bytes_text
from bmburst.blocks.dtypes import dtype_of
from bmburst.errors import UserError
from bmburst.launch import devices
from bmburst.memory import available_bytes, total_bytes
from bmburst.optim.config import OptimizerConfig, smaller_states
from bmburst.plan.candidates import SETTINGS, Candidate, Offload, Task
from bmburst.plan.memory import HOST_SHARE, host_state, memory_of
from bmburst.plan.ways import with_attention_choice
from bmburst.recompute.policy import AUTO
from bmburst.schedule.hardware import HOST, Hardware, hardware_like
from bmburst.train.config import TrainConfig

if TYPE_CHECKING:
    import torch

    from bmburst_ops.machine import Machine

_UNDECIDED = "block-keep-attention"
_PROCESS = 1 << 27  # bytes that no two ranks share after their imports; measured: 160 MB


def planned(config: TrainConfig, ranks: int, nodes: int, hardware: Hardware) -> Candidate:
    """Return the planner's description of a run. Packed documents are treated as whole sequences.

    Args:
        config: The run, valid for `ranks`. Recompute policy "auto" becomes "block-keep-attention".
        ranks: Number of ranks in total.
        nodes: Number of hosts.
        hardware: Used to choose the fastest attention strategy for strategy "auto".

    Raises:
        UserError: The attention strategy does not work for the run.
    """
    shape, parallel = config.mesh_shape(ranks), config.parallel
    task = Task(
        model=config.model,
        gpus=ranks,
        nodes=nodes,
        lora=config.lora if config.lora.is_on else None,
        pairs=config.dpo.is_on,
        second_model=config.reference is not None,
        **{name: attrgetter(setting)(config) for name, setting in SETTINGS.items()},
    )
    group = {"node": ranks // nodes, "world": ranks, "auto": ranks}.get(str(parallel.zero_group), parallel.zero_group)
    way = Candidate(
        task=task,
        data=shape.data,
        tensor=shape.tensor,
        pipe=shape.pipe,
        recompute=_UNDECIDED if config.recompute == AUTO else config.recompute,
        zero=3 if parallel.zero_level == "auto" else parallel.zero_level,
        zero_ranks=None if group == ranks else int(group),
        transport=_transport(parallel.transport, hardware),
        offload=_offload(config.optimizer),
        block_graphs=parallel.block_graphs == "auto",
    )
    return with_attention_choice(way, parallel.strategy, parallel.head_parallel, hardware)


def _offload(optimizer: OptimizerConfig) -> Offload:
    if optimizer.offload_weights:
        return Offload.WEIGHTS
    return Offload.OPTIMIZER if optimizer.offload else Offload.NOTHING


def _transport(asked: str, hardware: Hardware) -> str:
    """Return the transport inside a node that attention will use for the configured transport."""
    if hardware.name == hardware_like(HOST).name:
        return "gloo"
    return "nccl" if asked in ("nccl", "gloo") else "peer"


@dataclass(frozen=True, slots=True)
class HostBudget:
    """The memory of a host that a run may use, in bytes.

    Attributes:
        has: The free memory, or `host_memory` of the configuration.
        is_given: Whether the configuration sets it.
    """

    has: float
    is_given: bool

    @classmethod
    def of(cls, config: TrainConfig, available: Sequence[int | None]) -> "HostBudget | None":
        """Return the smallest memory of all hosts; None if unknown.

        Args:
            config: The run.
            available: `available_bytes` of each host.
        """
        if config.host_memory is not None:
            return cls(config.host_memory * GIB, is_given=True)
        known = [each for each in available if each is not None]
        return cls(min(known), is_given=False) if known else None

    def require(self, way: Candidate, hardware: Hardware) -> None:
        """Raise UserError unless the memory is sufficient for a run."""
        needed, most = memory_of(way, hardware).in_host, HOST_SHARE * self.has
        if needed <= most:
            return
        what = [f"recompute {way.recompute}"] if way.policy.offloads else []
        what += {Offload.OPTIMIZER: ["optimizer.offload"], Offload.WEIGHTS: ["optimizer.offload_weights"]}.get(
            way.offload, []
        )
        source = "host_memory is" if self.is_given else "free memory is"
        raise UserError(
            f"{' and '.join(what)}: {bytes_text(needed)} of memory are needed on each host\n"
            f"{_allowed(source, self.has)}\n{_fix(way, most)}"
        )


def check_host_memory(config: TrainConfig, ranks: int) -> None:
    """Check the host memory of a run on this host alone, before ranks start.

    Raises:
        UserError: `host_memory` exceeds the memory of this host, or the run needs more than is available: of ranks on
            the CPU all that they hold.
    """
    total = total_bytes()
    if config.host_memory is not None and total is not None and config.host_memory * GIB > total:
        raise UserError(
            f"host_memory {config.host_memory:g} GiB is more than this machine has\n"
            f"allowed: at most {bytes_text(total)}\nfix: --host-memory {int(total / GIB)}G, or leave it out"
        )
    memory = HostBudget.of(config, [available_bytes()])
    if memory is not None:
        hardware = hardware_like(HOST)
        memory.require(planned(config, ranks, 1, hardware), hardware)
    free = available_bytes()
    if free is not None and not devices.gpus():
        _require_room_for_ranks(config, ranks, free)


def _require_room_for_ranks(config: TrainConfig, ranks: int, free: int) -> None:
    """Raise UserError unless CPU ranks fit into the free memory: Linux would kill one of them, or other programs."""
    least = config.replace(recompute="block") if config.recompute == AUTO else config
    memory = memory_of(planned(least, ranks, 1, hardware_like(HOST)), hardware_like(HOST))
    each = _PROCESS + memory.allocated - memory.lines.get("workspace", 0)  # of the GPU's libraries
    needed, most = ranks * each + memory.in_host, HOST_SHARE * free
    if needed > most:
        parts = f"{ranks:,} ranks, {bytes_text(each)} each" if ranks > 1 else "1 rank"
        raise UserError(
            f"on the CPU the run needs {bytes_text(needed)} of memory: {parts}\n"
            f"{_allowed('free memory is', free)}\n"
            f"fix: GPUs, a smaller model, a shorter --sequence-length, or a smaller --nproc"
        )


def _allowed(source: str, has: float) -> str:
    """Return the line that tells how much of a host's memory may be used."""
    most = HOST_SHARE * has
    reserve = f"of which {bytes_text(has - most)} ({1 - HOST_SHARE:.0%}) are kept in reserve"
    return f"allowed: {bytes_text(most)}: {source} {bytes_text(has)}, {reserve}"


def _fix(way: Candidate, most: float) -> str:
    """Return the fix of a run that needs more host memory than is available."""
    if sum(host_state(way).values()) > most:
        out = "--optimizer.offload_weights" if way.offload is Offload.WEIGHTS else "--optimizer.offload"
        for state in smaller_states(way.task.state):
            if sum(host_state(replace(way, task=replace(way.task, state=state))).values()) <= most:
                return f"fix: --optimizer.state {state}, leave {out} out, or use more hosts"
        return f"fix: leave {out} out, use more hosts, or train a smaller model"
    return "fix: --recompute block-keep-attention:0.5, or auto, which takes what fits"


def require_machine(
    config: TrainConfig, world_size: int, local_rank: int = 0, machine: "Machine | None" = None
) -> None:
    """Raise UserError unless ranks on this machine can use kernel, transport and strategy of a configuration.

    Args:
        config: The run, valid for `world_size` ranks.
        world_size: Number of ranks.
        local_rank: Rank whose GPU is checked, if there are GPUs.
        machine: The GPUs and packages for the kernel; default: those of this machine.
    """
    has_gpus = bool(devices.gpus())
    if config.parallel.strategy != "auto":  # "auto" always finds one
        _require_strategy(config, world_size)
    _require_transport(config.parallel.transport, config.mesh_shape(world_size).sequence, has_gpus)
    if config.parallel.kernel != "auto":  # "auto" always finds one, without a query of the GPU
        import torch  # imported here, because most runs do not need it before their ranks start

        _require_kernel(config, torch.device("cuda", local_rank) if has_gpus else torch.device("cpu"), machine)


def _require_strategy(config: TrainConfig, world_size: int) -> None:
    """Check the attention strategy now. Otherwise the error comes in the first step, after the data were read."""
    import torch

    from bmburst.attention.call import head_shapes
    from bmburst.comm.transports import NODE_SWITCH
    from bmburst.schedule.cost import Placement
    from bmburst.schedule.layout import padded_layout
    from bmburst.schedule.mask import Causal
    from bmburst.schedule.strategy import choose_strategy

    shape, model, parallel = config.mesh_shape(world_size), config.model, config.parallel
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "0" if "RANK" in os.environ else str(world_size)))
    on_one_node = here == world_size and NODE_SWITCH not in os.environ
    dtype = dtype_of(config.dtype)
    layout = padded_layout(parallel.layout, shape.sequence, config.sequence_length, Causal())
    q, k = (
        torch.empty(config.micro_batch_size, layout.tokens, heads, model.head_dim, dtype=dtype, device="meta")
        for heads in shape.require_heads(model.num_heads, model.num_kv_heads)
    )
    shapes, nodes = head_shapes(layout, q, k, k), 1 if on_one_node else None
    try:  # whether a strategy works depends on neither transport nor machine
        placement, machine = Placement("gloo", nodes), hardware_like(HOST)
        choose_strategy(parallel.strategy, shapes, config.sequence_length, Causal(), placement, machine)
    except UserError as error:
        reason, *_ = str(error).splitlines()
        raise UserError(f"{reason}\nfix: --strategy auto") from None


def _require_transport(transport: str, sequence: int, has_gpus: bool) -> None:
    allowed = ("auto", "peer", "nccl") if has_gpus else ("auto", "gloo")
    if sequence > 1 and transport not in allowed:  # a single rank does not communicate
        where = "the GPUs here" if has_gpus else "a machine without GPUs"
        raise UserError(
            f"transport {transport} does not work on {where}\nallowed: {', '.join(allowed)}\nfix: --transport auto"
        )


def _require_kernel(config: TrainConfig, device: "torch.device", machine: "Machine | None") -> None:
    from bmburst_ops.errors import KernelError
    from bmburst_ops.flash import KERNELS, Need, able_kernels, kernels_on, queries_ahead, select_kernel

    name, deterministic = config.parallel.kernel, config.parallel.deterministic
    segments: frozenset[Need] = frozenset({"segments"} if config.pack != "stream" else ())
    window: frozenset[Need] = frozenset({"window"} if config.model.sliding_window is not None else ())
    q = queries_ahead(device, dtype_of(config.dtype), config.model.head_dim)
    kernels = KERNELS if machine is None else kernels_on(machine)
    try:
        select_kernel(name, q, q, deterministic, segments | window, kernels=kernels)
    except KernelError as error:
        reason, *_ = str(error).splitlines()
        able = ", ".join(able_kernels(q, q, deterministic, segments | window, kernels))
        raise UserError(f"{reason}\nallowed here: auto, {able}\nfix: --kernel auto") from None


def require_dtype(dtype: str, device: "torch.device", machine: "Machine | None" = None) -> None:
    """Check that a rank's device supports a dtype.

    Args:
        dtype: dtype of weights and activations, as in `TrainConfig`.
        device: Device of this rank.
        machine: Its machine; default: this one.

    Raises:
        UserError: The GPU does not support bfloat16: BMTrain's kernels and tensor cores need Ampere or later.
    """
    if dtype != "bfloat16" or device.type != "cuda":
        return
    from bmburst_ops.machine import HERE  # imports torch, which --help does not need

    machine = machine or HERE
    found = machine.capability(device)
    if found < devices.BFLOAT16:
        raise UserError(
            f"dtype bfloat16 does not work on {machine.gpu(device)} (compute capability "
            f"{'.'.join(map(str, found))})\nallowed: float16, float32\n"
            "fix: --dtype float16, which keeps gradients in range with a loss scale"
        )
