"""The gradient that ZeRO left on this rank: its norm without waiting for the device, and clipping."""

from collections.abc import Sequence

import torch
from torch import Tensor

_EPS = 1e-6


def gradients_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return this rank's gradients."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return [p.grad for p in parameters if p.grad is not None]


@torch.no_grad()
def square_sum(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the squares of all numbers, each tensor's norm in fp32 or wider; a scalar in fp64."""
    norms = [torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)) for g in gradients]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([norm.double() for norm in norms]).square().sum()


@torch.no_grad()
def clip_(gradients: Sequence[Tensor], norm: float, most: float | None) -> None:
    """Shorten the gradient in place so that its norm is at most `most`, as `torch.nn.utils.clip_grad_norm_` does.

    Args:
        gradients: This rank's.
        norm: Of all ranks' together.
        most: None does not clip.
    """
    if most is not None and most < norm + _EPS and gradients:
        torch._foreach_mul_(list(gradients), most / (norm + _EPS))
