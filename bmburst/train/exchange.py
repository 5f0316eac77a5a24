"""The one all-gather of a step: losses, gradient norms and host statistics of all ranks; and gradient clipping.

It is the only point of a step at which the host waits for the device.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import torch
from torch import Tensor

from bmburst.comm.protocol import Communicator
from bmburst.train.clock import Timing

_EPS = 1e-6


def gradients_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return this rank's ZeRO shards of the gradient."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return [p.grad for p in parameters if p.grad is not None]


@torch.no_grad()
def square_sum(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of all elements as an fp64 scalar; norms of tensors are computed in fp32 or wider."""
    norms = [torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)) for g in gradients]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([norm.double() for norm in norms]).square().sum()


@torch.no_grad()
def clip_(gradients: Sequence[Tensor], norm: float, most: float | None) -> None:
    """Scale the gradient in place so that its norm is at most `most`, as `torch.nn.utils.clip_grad_norm_` does.

    Args:
        gradients: This rank's shards.
        norm: Norm of the whole gradient, over all ranks.
        most: The largest norm; None does not clip.
    """
    if most is not None and most < norm + _EPS and gradients:
        torch._foreach_mul_(list(gradients), most / (norm + _EPS))


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts(Timing):
    """What a rank's host knows when it has launched a step's backward, and the timing of the step before.

    Attributes:
        pairs: Scores that attention counts, of a head and layer, in the sequences of this data rank.
        memory: Largest allocated bytes since the last exchange; on a CPU of the process so far.
        reserved: Largest reserved bytes; 0 on a CPU.
        stop: Signal that asks this rank to stop; 0 for none.
    """

    pairs: float = 0.0
    memory: float = 0.0
    reserved: float = 0.0
    stop: float = 0.0


@dataclass(frozen=True, slots=True)
class StepFacts:
    """A step, as all ranks know it: the same on each.

    Attributes:
        shares: Each rank's share of the mean loss; their mean is the loss.
        squares: Each rank's sum of squares of its part of the gradient.
        tokens: Labels that counted.
        hosts: What each rank's host said.
    """

    shares: tuple[float, ...]
    squares: tuple[float, ...]
    tokens: int
    hosts: tuple[HostFacts, ...]

    @classmethod
    def none(cls, ranks: int) -> "StepFacts":
        """Return those of a run that has done no step."""
        return cls((0.0,) * ranks, (0.0,) * ranks, 0, (HostFacts(),) * ranks)

    @property
    def pairs(self) -> float:
        """Scores that attention counts, as often as ranks share a sequence."""
        return sum(host.pairs for host in self.hosts)

    @property
    def loss(self) -> float:
        """Mean over the labels, in nats."""
        return sum(self.shares) / len(self.shares)

    @property
    def grad_norm(self) -> float:
        """Norm of the whole gradient."""
        total = sum(self.squares)
        return math.sqrt(total) if total >= 0 else math.nan

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient are: whether the step may be taken."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def exchange(comm: Communicator, share: Tensor, square: Tensor, tokens: Tensor, facts: HostFacts) -> StepFacts:
    """Return what all ranks give. Every rank calls it; the host waits for the device, and does not otherwise.

    Args:
        comm: All ranks.
        share: This rank's share of the loss, a scalar on its device.
        square: Sum of squares of its part of the gradient, likewise.
        tokens: Labels of all ranks that count, likewise.
        facts: What its host knows.
    """
    on_gpu = share.is_cuda
    host = torch.tensor(astuple(facts), dtype=torch.float64, pin_memory=on_gpu)
    mine = torch.cat(
        [torch.stack([scalar.double() for scalar in (share, square, tokens)]), host.to(share.device, non_blocking=True)]
    )
    (gathered,) = comm.all_gather(mine).wait()
    rows: list[list[float]] = gathered.tolist()
    names = [declared.name for declared in fields(HostFacts)]
    return StepFacts(
        shares=tuple(row[0] for row in rows),
        squares=tuple(row[1] for row in rows),
        tokens=int(rows[0][2]),
        hosts=tuple(HostFacts(**dict(zip(names, row[3:], strict=True))) for row in rows),
    )
