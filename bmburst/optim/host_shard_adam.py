"""AdamW of weights that live in host memory, one block after the other beside the next forward pass.

A bf16 weight is the upper half of its fp32 master weight, so only what is missing of the master is kept: the remainder,
a 16-bit integer. The host then holds 2 + 2 + 8 bytes for a weight and its state, where a master of its own takes 14.

    remainder = bits(master) - bits(weight as fp32)        master = float(bits(weight as fp32) + remainder)

Weights are rounded to nearest even, so that remainders lie in -32768 ... 32768. The largest does not fit in 16 bits: of
a master exactly between two weights, of which the lower one is even, the last bit is lost.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from bmburst.comm.host_shards import HostShard
from bmburst.optim.host_adam import MASTER, MEAN, SQUARE, STEP, adamw_, runs

REMAINDER = "_param_remainder"
PIECE = 1 << 20
"""Numbers that are updated at once: with master and gradient in fp32 they stay in the processor's caches."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class ShardUpdate:
    """One shard that is to take a step.

    Attributes:
        shard: Weights and gradient, the latter in `shard.parameter.grad`.
        gradient: Flat, in the dtype of the weights, in host memory; it is multiplied by `factor` in place.
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
        for _, block in groupby(sorted(updates, key=lambda each: each.shard.order), lambda each: each.shard.order):
            for each in block:
                each.state[STEP] += 1
                each.shard.update_with(self._thread.submit(_update, each, each.state[STEP]))


def state_names(weights: Tensor) -> tuple[str, ...]:
    """Return the names of the tensors that are kept for weights in host memory."""
    return {torch.bfloat16: (MEAN, SQUARE, REMAINDER), torch.float16: (MEAN, SQUARE, MASTER)}.get(
        weights.dtype, (MEAN, SQUARE)
    )


def initial_state(weights: Tensor) -> dict[str, Any]:
    """Return the state of weights before their first step."""
    state = {name: torch.zeros(weights.shape, dtype=torch.float32) for name in (MEAN, SQUARE)}
    if weights.dtype == torch.bfloat16:
        state[REMAINDER] = torch.zeros(weights.shape, dtype=torch.int16)
    elif weights.dtype == torch.float16:
        state[MASTER] = weights.float()
    return {STEP: 0, **state}


def join(weights: Tensor, remainder: Tensor, master: Tensor, bits: Tensor) -> None:
    """Write the master weights of bf16 weights.

    Args:
        weights: bf16 `[n]`.
        remainder: int16 `[n]`.
        master: fp32 `[n]`, written.
        bits: int32 `[n]`, overwritten.
    """
    master.copy_(weights)
    bits.copy_(remainder)
    master.view(torch.int32).add_(bits)


def split(master: Tensor, weights: Tensor, remainder: Tensor, bits: Tensor) -> None:
    """Write the bf16 weights nearest to master weights, and their remainders; the arguments are those of `join`."""
    weights.copy_(master)
    bits.view(torch.float32).copy_(weights)
    torch.sub(master.view(torch.int32), bits, out=bits)
    remainder.copy_(bits.clamp_max_((1 << 15) - 1))


def _update(update: ShardUpdate, step: int) -> None:
    """Update a shard's weights and state; `step` counts from 1."""
    update.shard.wait_for_gradient()
    weights, state = update.shard.weights, update.state
    size = min(PIECE, len(weights))
    gradient_in_fp32, master, bits = (torch.empty(size, dtype=d) for d in (torch.float32, torch.float32, torch.int32))
    with torch.no_grad():
        for run in runs(len(weights), PIECE):
            part, count = weights[run], run.stop - run.start
            gradient = update.gradient[run]
            if update.factor is not None:
                gradient.mul_(update.factor)  # rounded, as where it is clipped on the GPU
            gradient = gradient_in_fp32[:count].copy_(gradient)
            if REMAINDER in state:
                join(part, state[REMAINDER][run], master[:count], bits[:count])
                of_part = master[:count]
            else:
                of_part = state[MASTER][run] if MASTER in state else part
            adamw_(of_part, gradient, state[MEAN][run], state[SQUARE][run], update, step=step, scale=update.scale)
            if REMAINDER in state:
                split(of_part, part, state[REMAINDER][run], bits[:count])
            elif MASTER in state:
                part.copy_(of_part)
