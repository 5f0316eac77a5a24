"""AdamW update for weights and state on the same device: by the fused kernel, or by torch operations."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from bmburst.optim.host_adam import MASTER, MEAN, SQUARE, STEP, Update
from bmburst_ops.host_adamw import pieces

PIECE = 1 << 24
"""Elements of 16-bit weights that torch operations update at once; bounds the fp32 copy of the gradient."""


def step_fused(kernel: Any, updates: Sequence[Update], scale: float) -> None:
    """Update 16-bit weights with `bmburst_ops.triton_elementwise.adamw_`.

    Args:
        kernel: The module `bmburst_ops.triton_elementwise`.
        updates: One per parameter, all on one GPU, with fp32 masters.
        scale: Divisor of the gradients, applied in fp32.
    """
    for update in updates:
        state = update.state
        state[STEP] += 1
        kernel.adamw_(
            *(state[MASTER], update.weights, update.gradient, state[MEAN], state[SQUARE]),
            lr=update.lr,
            betas=update.betas,
            eps=update.eps,
            weight_decay=update.weight_decay,
            step=state[STEP],
            scale=scale,
        )


def step_masters(updates: Sequence[Update], scale: float) -> None:
    """Update 16-bit weights like `step_fused`, with torch operations on their fp32 masters.

    Args:
        updates: See `step_fused`; on any device.
        scale: See `step_fused`.
    """
    for update in updates:
        state = update.state
        tensors = update.weights, update.gradient.reshape(-1), state[MASTER], state[MEAN], state[SQUARE]
        weights, gradient, *kept = (each.view(-1) for each in tensors)
        for run in pieces(len(weights), PIECE):
            master, mean, square = (each[run] for each in kept)
            wide = gradient[run].float().div_(scale)
            _by_torch([master], [wide], [mean], [square], [state[STEP]], _rates(update), foreach=False)
            weights[run].copy_(master)
        state[STEP] += 1


def step_wide(
    parameters: Sequence[Tensor], states: Sequence[dict[str, Any]], group: dict[str, Any], scale: float
) -> None:
    """Update fp32 weights with torch operations.

    Args:
        parameters: Parameters of `group` that have a gradient.
        states: State of each parameter; an empty state is initialized.
        group: Parameter group with the hyperparameters.
        scale: Divisor of the gradients.
    """
    for parameter, state in zip(parameters, states, strict=True):
        if not state:
            state.update({STEP: 0, MEAN: torch.zeros_like(parameter), SQUARE: torch.zeros_like(parameter)})
    gradients = [p.grad if scale == 1 else p.grad / scale for p in parameters if p.grad is not None]
    means, squares, steps = ([state[name] for state in states] for name in (MEAN, SQUARE, STEP))
    _by_torch(list(parameters), gradients, means, squares, steps, group)
    for state in states:
        state[STEP] += 1


def _by_torch(
    weights: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    steps: Sequence[int],
    rates: dict[str, Any],
    *,
    foreach: bool | None = None,
) -> None:
    adamw(
        weights,
        gradients,
        means,
        squares,
        [],
        [torch.tensor(float(step)) for step in steps],
        foreach=foreach,
        amsgrad=False,
        beta1=rates["betas"][0],
        beta2=rates["betas"][1],
        lr=rates["lr"],
        weight_decay=rates["weight_decay"],
        eps=rates["eps"],
        maximize=False,
    )


def _rates(update: Update) -> dict[str, Any]:
    return {"lr": update.lr, "betas": update.betas, "eps": update.eps, "weight_decay": update.weight_decay}
