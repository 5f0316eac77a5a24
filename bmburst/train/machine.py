"""Whether this machine has what a run asks for by name: kernel, transport, strategy. No rank is needed to know."""

import os

import torch

from bmburst.attention.call import head_shapes
from bmburst.comm.transports import NODE_SWITCH
from bmburst.errors import UserError
from bmburst.schedule.cost import Placement
from bmburst.schedule.hardware import HOST, hardware_like
from bmburst.schedule.layout import padded_layout
from bmburst.schedule.mask import Causal
from bmburst.schedule.strategy import choose_strategy
from bmburst.train.config import TrainConfig
from bmburst_ops.errors import KernelError
from bmburst_ops.flash import Need, able_kernels, queries_ahead, select_kernel


def require_machine(config: TrainConfig, world_size: int, local_rank: int = 0) -> None:
    """Check that ranks on this machine can use the kernel, the transport and the strategy of a configuration.

    Args:
        config: What is to be trained, valid for so many ranks.
        world_size: Ranks of the run.
        local_rank: Whose GPU is asked, where there are any.

    Raises:
        UserError: They cannot.
    """
    has_gpus = torch.cuda.is_available()
    if config.parallel.strategy != "auto":  # which finds one
        _require_strategy(config, world_size)
    _require_transport(config.parallel.transport, config.mesh_shape(world_size).sequence, has_gpus)
    if config.parallel.kernel != "auto":  # which finds one; a GPU is not asked needlessly
        _require_kernel(config, torch.device("cuda", local_rank) if has_gpus else torch.device("cpu"))


def _require_strategy(config: TrainConfig, world_size: int) -> None:
    """Refuse what attention would in the first step, once ranks have started and the text is read."""
    shape, model, parallel = config.mesh_shape(world_size), config.model, config.parallel
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "0" if "RANK" in os.environ else str(world_size)))
    on_one_node = here == world_size and NODE_SWITCH not in os.environ
    dtype: torch.dtype = getattr(torch, config.dtype)
    layout = padded_layout(parallel.layout, shape.sequence, config.sequence_length, Causal())
    q, k = (
        torch.empty(config.micro_batch_size, layout.tokens, heads, model.head_dim, dtype=dtype, device="meta")
        for heads in shape.require_heads(model.num_heads, model.num_kv_heads)
    )
    shapes, nodes = head_shapes(layout, q, k), 1 if on_one_node else None
    try:  # neither transport nor machine matters to whether a strategy works
        placement, machine = Placement("gloo", nodes), hardware_like(HOST)
        choose_strategy(parallel.strategy, shapes, config.sequence_length, Causal(), placement, machine)
    except UserError as error:
        reason, *_ = str(error).splitlines()
        raise UserError(f"{reason}\nfix: --strategy auto") from None


def _require_transport(transport: str, sequence: int, has_gpus: bool) -> None:
    allowed = ("auto", "peer", "nccl") if has_gpus else ("auto", "gloo")
    if sequence > 1 and transport not in allowed:  # one rank moves nothing
        where = "the GPUs here" if has_gpus else "a machine without GPUs"
        raise UserError(
            f"transport {transport} moves nothing between ranks on {where}\n"
            f"allowed: {', '.join(allowed)}\nfix: --transport auto"
        )


def _require_kernel(config: TrainConfig, device: torch.device) -> None:
    name, deterministic = config.parallel.kernel, config.parallel.deterministic
    segments: frozenset[Need] = frozenset({"segments"} if config.pack == "documents" else ())
    window: frozenset[Need] = frozenset({"window"} if config.model.sliding_window is not None else ())
    q = queries_ahead(device, getattr(torch, config.dtype), config.model.head_dim)
    try:
        select_kernel(name, q, q, deterministic, segments | window)
    except KernelError as error:
        reason, *_ = str(error).splitlines()
        able = ", ".join(able_kernels(q, q, deterministic, segments | window))
        raise UserError(f"{reason}\nallowed here: auto, {able}\nfix: --kernel auto") from None
