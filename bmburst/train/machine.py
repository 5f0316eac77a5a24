"""Whether this machine has what a configuration asks for by name: a kernel, a transport. No rank is needed to know."""

import torch

from bmburst.errors import UserError
from bmburst.train.config import TrainConfig
from bmburst_ops.errors import KernelError
from bmburst_ops.flash import Need, able_kernels, queries_ahead, select_kernel


def require_machine(config: TrainConfig, world_size: int, local_rank: int = 0) -> None:
    """Check that ranks on this machine can use the kernel and the transport of a configuration.

    Args:
        config: What is to be trained, valid for so many ranks.
        world_size: Ranks of the run.
        local_rank: Whose GPU is asked, where there are any.

    Raises:
        UserError: They cannot.
    """
    has_gpus = torch.cuda.is_available()
    _require_transport(config.parallel.transport, config.mesh_shape(world_size).sequence, has_gpus)
    if config.parallel.kernel != "auto":  # which finds one; a GPU is not asked needlessly
        _require_kernel(config, torch.device("cuda", local_rank) if has_gpus else torch.device("cpu"))


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
