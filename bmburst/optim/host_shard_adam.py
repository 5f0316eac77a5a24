"""AdamW of weights that live in host memory, one block after the other beside the next forward pass.

Of the master weights only what bf16 weights lack is kept, a 16-bit remainder (`bmburst_ops.host_adamw`). The host then
holds 2 + 2 + 8 bytes for a weight and its state, where a master of its own takes 14.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bmburst.comm.host_memory import host_zeros
from bmburst.comm.host_shards import HostShard
from bmburst.optim.host_adam import MASTER, MEAN, SQUARE, STEP
from bmburst_ops.host_adamw import adamw_

REMAINDER = "_param_remainder"


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class ShardUpdate:
    """One shard that is to take a step.

    Attributes:
        shard: Weights and gradient, the latter in `shard.parameter.grad`.
        gradient: Flat, in the dtype of the weights, in host memory; only read.
        factor: Of the gradient, before it is divided by the scale; None for 1.
        state: Moments `exp_avg` and `exp_avg_sq`, fp32; `_param_remainder`, int16, of bf16 weights; `_param_fp32` of
            fp16 weights; and `step`, counted up.
        lr: Learning rate.
        betas: Decay of the moments.
        eps: Added to the root of the second moment.
        weight_decay: Per unit of `lr`; decoupled.
        scale: Gradients are divided by it, in fp32.
    """

    shard: HostShard
    gradient: Tensor
    factor: float | None
    state: dict[str, Any]
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    scale: float


class LateUpdates:
    """Updates shards in a thread of its own, in the order in which the forward pass needs them.

    Who reads a shard's weights or state waits for its update, by `HostShard.settle`.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="host-adam")

    def start(self, updates: Sequence[ShardUpdate]) -> None:
        """Start to update shards; weights, gradients and states must not be touched until they are settled."""
        for each in sorted(updates, key=lambda each: each.shard.order):
            each.state[STEP] += 1
            each.shard.update_with(self._thread.submit(_update, each, each.state[STEP]))


def state_names(weights: Tensor) -> tuple[str, ...]:
    """Return the names of the tensors that are kept for weights in host memory."""
    return {torch.bfloat16: (MEAN, SQUARE, REMAINDER), torch.float16: (MEAN, SQUARE, MASTER)}.get(
        weights.dtype, (MEAN, SQUARE)
    )


def initial_state(weights: Tensor) -> dict[str, Any]:
    """Return the state of weights before their first step."""
    state = {name: host_zeros(weights.shape, torch.float32) for name in (MEAN, SQUARE)}
    if weights.dtype == torch.bfloat16:
        state[REMAINDER] = host_zeros(weights.shape, torch.int16)
    elif weights.dtype == torch.float16:
        state[MASTER] = weights.float()
    return {STEP: 0, **state}


def _update(update: ShardUpdate, step: int) -> None:
    """Update a shard's weights and state; `step` counts from 1."""
    update.shard.wait_for_gradient()
    state = update.state
    with torch.no_grad():
        adamw_(
            update.shard.weights,
            update.gradient,
            (state[MEAN], state[SQUARE]),
            update,
            step=step,
            scale=update.scale,
            factor=update.factor,
            master=state.get(MASTER),
            remainder=state.get(REMAINDER),
        )
