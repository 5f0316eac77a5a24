"""Parts of an optimizer step outside the model: loss scale, exchange of facts, stop signals, skips.

`exchange` is the only all-gather of these facts in a step, and the only point at which the host waits for the device.

The largest fp16 number is 65504, and numbers below 6e-5 are subnormal and lose digits. So BMTrain multiplies the loss,
and thereby all gradients, by a scale, and the optimizer divides by it in fp32. The rules are those of
`bmtrain.optim.OptimManager`: a step whose gradient is not finite is skipped and halves the scale, down to 1; after a
number of steps without a skip the scale doubles. All ranks have the same gradient norm, so they compute the same scale
without communication.
"""

import contextlib
import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from statistics import fmean
from types import FrameType

import torch
from torch import Tensor

from bmburst.comm.communicator import Communicator
from bmburst.errors import RunError
from bmburst.launch.watchdog import handle_signals
from bmburst.optim.config import LOSS_SCALE, LOSS_SCALE_STEPS
from bmburst.train.clock import StepTiming
from bmburst.train.config import TrainConfig

_FACTOR, _LEAST = 2.0, 1.0  # factor of changes and minimum of the loss scale


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts(StepTiming):
    """Facts that one rank contributes to the exchange: facts of this step, and the timing of the previous step.

    Attributes:
        query_key_pairs: Unmasked query-key pairs per head and layer, in the sequences of this data rank.
        memory: Peak allocated bytes since the last exchange; on a CPU, peak of the process so far.
        reserved: Peak reserved bytes; 0 on a CPU.
        stop: Number of the signal that asks this rank to stop; 0: none.
        saved: 1 if the started save of a checkpoint has ended on this rank, else 0.
    """

    query_key_pairs: float = 0.0
    memory: float = 0.0
    reserved: float = 0.0
    stop: float = 0.0
    saved: float = 0.0


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Facts of one step after the exchange, the same on all ranks.

    Attributes:
        step: Number of the step, from 1.
        shares: Each rank's contribution to the loss; the mean over ranks is the loss.
        squares: Each rank's sum of squares of its gradient shards.
        squares_by_kind: The same, summed over all ranks, for each kind of parameter.
        tokens: Number of labels that count in the loss.
        hosts: Facts of each rank.
        rewards: Mean reward margin and accuracy of preference pairs; None without pairs.
    """

    step: int
    shares: tuple[float, ...]
    squares: tuple[float, ...]
    tokens: int
    hosts: tuple[HostFacts, ...]
    rewards: tuple[float, float] | None = None
    squares_by_kind: tuple[float, ...] = ()

    @property
    def query_key_pairs(self) -> float:
        """Query-key pairs summed over all ranks: those of a sequence are counted once per rank that shares it."""
        return sum(host.query_key_pairs for host in self.hosts)

    @property
    def loss(self) -> float:
        """Mean over the labels, in nats."""
        return sum(self.shares) / len(self.shares)

    @property
    def grad_norm(self) -> float:
        """Norm of the whole gradient."""
        return _root(sum(self.squares))

    @property
    def grad_norms(self) -> tuple[float, ...]:
        """Norm of the gradient of each kind of parameter."""
        return tuple(map(_root, self.squares_by_kind))

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient are finite, so that the step is taken."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def _root(square: float) -> float:
    return math.sqrt(square) if square >= 0 else math.nan


def exchange(
    comm: Communicator,
    step: int,
    share: Tensor,
    squares: Tensor,
    tokens: Tensor,
    facts: HostFacts,
    rewards: Tensor | None = None,
) -> StepFacts:
    """All-gather the facts of a step. Every rank calls it. It is the only wait for the device in a step.

    Args:
        comm: All ranks.
        step: Number of the step.
        share: This rank's contribution to the loss, a scalar on its device.
        squares: Sums of squares of its gradient shards by kind of parameter, `[kinds]` on its device.
        tokens: Number of labels of all ranks that count, a scalar on its device.
        facts: Facts on its host.
        rewards: This rank's contributions to reward margin and accuracy, `[2]` on its device; None without pairs.
    """
    on_gpu = share.is_cuda
    host = torch.tensor(astuple(facts), dtype=torch.float64, pin_memory=on_gpu)
    scalars = share, squares.sum(), tokens, *(share.new_zeros(2) if rewards is None else rewards)
    mine = torch.cat(
        [
            torch.stack([scalar.double() for scalar in scalars]),
            host.to(share.device, non_blocking=True),
            squares.double().reshape(-1),
        ]
    )
    (gathered,) = comm.all_gather(mine).wait()
    rows: list[list[float]] = gathered.tolist()
    names = [declared.name for declared in fields(HostFacts)]
    return StepFacts(
        step=step,
        shares=tuple(row[0] for row in rows),
        squares=tuple(row[1] for row in rows),
        tokens=int(rows[0][2]),
        hosts=tuple(HostFacts(**dict(zip(names, row[5 : 5 + len(names)], strict=True))) for row in rows),
        rewards=None if rewards is None else (fmean(row[3] for row in rows), fmean(row[4] for row in rows)),
        squares_by_kind=tuple(map(sum, zip(*(row[5 + len(names) :] for row in rows), strict=True))),
    )


@dataclass(slots=True)
class LossScale:
    """The loss scale and its state.

    Attributes:
        value: The scale of the next step.
        interval: Number of steps without a skip after which it doubles; None: it is constant.
        taken: Number of steps since its last change.
    """

    value: float = 1.0
    interval: int | None = None
    taken: int = 0

    @classmethod
    def of(cls, config: TrainConfig) -> "LossScale":
        """Return the initial scale of a run: constant 1 unless the dtype is fp16."""
        if config.dtype != "float16":
            return cls()
        optimizer = config.optimizer
        return cls(optimizer.loss_scale or LOSS_SCALE, optimizer.loss_scale_steps or LOSS_SCALE_STEPS)

    @property
    def is_dynamic(self) -> bool:
        """Whether the scale can change."""
        return self.interval is not None

    def count(self, *, is_finite: bool) -> None:
        """Update the scale after a step.

        Args:
            is_finite: Whether loss and gradient were finite, so that the step was taken.
        """
        if self.interval is None:
            return
        if not is_finite:
            self.value, self.taken = max(self.value / _FACTOR, _LEAST), 0
            return
        self.taken += 1
        if self.taken >= self.interval:
            self.value, self.taken = self.value * _FACTOR, 0

    def state(self) -> tuple[float, int] | None:
        """Return the state for a checkpoint: the scale and the steps since its last change; None if it is constant."""
        return (self.value, self.taken) if self.is_dynamic else None

    def restore(self, state: tuple[float, int] | None) -> None:
        """Restore a result of `state`."""
        if state is not None and self.is_dynamic:
            self.value, self.taken = state


class StopRequest:
    """Whether this process was asked to stop.

    Attributes:
        signum: Number of the received signal; 0: none.
    """

    def __init__(self) -> None:
        self.signum = 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Record signals inside the block. Has no effect outside the main thread, where Python allows no handlers."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with handle_signals((signal.SIGTERM, signal.SIGUSR1), self._note):
            yield

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        self.signum = signum


def stopped_by(facts: StepFacts, hosts: Sequence[str], *, saves: bool) -> str:
    """Return a message about the rank that was asked to stop, the same on all ranks; empty if there is none.

    Args:
        facts: The exchanged facts of the step.
        hosts: Host name of each rank.
        saves: Whether the run writes checkpoints.
    """
    asked = [(rank, int(host.stop)) for rank, host in enumerate(facts.hosts) if host.stop]
    if not asked:
        return ""
    rank, signum = asked[0]
    end = (
        "the checkpoint is saved, and --resume continues from it"
        if saves
        else "--checkpoint-every never: nothing is saved"
    )
    return (
        f"stopped after step {facts.step} by {signal.Signals(signum).name} on rank {rank} (host {hosts[rank]}); {end}"
    )


class SkippedSteps:
    """Counts skipped steps and ends a run that skips too many in a row. All ranks get the same result.

    Args:
        hosts: Host name of each rank.
        most: Number of skipped steps in a row that ends the run; 0: no limit.

    Attributes:
        total: Skipped steps of the run; a resumed run restores it from its checkpoint.
        message: Why the last step was skipped; empty if it was taken.
    """

    def __init__(self, hosts: Sequence[str], most: int) -> None:
        self._hosts, self._most = tuple(hosts), most
        self._in_row = 0
        self._first = ""
        self._has_taken, self._scale = False, LossScale()
        self.total = 0
        self.message = ""

    def add(self, facts: StepFacts, scale: LossScale) -> None:
        """Count one step.

        Args:
            facts: Facts of the step.
            scale: The loss scale after the step; mentioned in the message only if it is dynamic.
        """
        if facts.is_finite:
            self._in_row, self.message, self._has_taken = 0, "", True
            return
        self.total += 1
        self._in_row += 1
        self.message = f"step {facts.step} is skipped: {self._cause(facts)}"
        self._scale = scale
        if scale.is_dynamic:
            self.message += f"; the loss scale is {scale.value:.0f} now"
        if self._in_row == 1:
            self._first = self.message

    def require(self, has_checkpoint: Callable[[], bool]) -> None:
        """Raise RunError if too many steps in a row were skipped.

        Args:
            has_checkpoint: Returns whether the run can be resumed.
        """
        if self._most and self._in_row >= self._most:
            last = f"; the last: {self.message}" if self._scale.is_dynamic and self._in_row > 1 else ""
            raise RunError(
                f"the run ended because {self._in_row} steps in a row were skipped\n"
                f"the first of them: {self._first}{last}; skipped steps did not change the weights\n"
                f"{self._fix(has_checkpoint())}"
            )

    def _fix(self, has_checkpoint: bool) -> str:
        fix = ""
        if has_checkpoint and (self._has_taken or self._scale.is_dynamic):
            fix = "fix: --resume with a smaller --optimizer.lr continues from the last checkpoint"
        elif self._has_taken:
            fix = "fix: start again with a smaller --optimizer.lr: there is no checkpoint yet"
        elif not self._scale.is_dynamic:
            fix = "fix: no step was taken: check the weights that the run began with, for NaN"
        elif self._scale.value > _LEAST:
            fix = f"fix: no step was taken: start again with --optimizer.loss_scale {self._scale.value:.0f}"
        if not self._scale.is_dynamic:
            return fix
        rest = "the same options"
        if has_checkpoint:
            rest = "the last checkpoint in --init-from, or of adapters in --lora.init_from"
        begin = f"{fix}; " if fix else "fix: "
        return f"{begin}numbers beyond float16's 65504 need a new run with --dtype bfloat16 or float32 and {rest}"

    def _cause(self, facts: StepFacts) -> str:
        """Return what is not finite, and on which ranks. Losses are checked first: gradients are sums over ranks."""
        bad_losses = _where(facts.shares)
        if bad_losses:
            return f"the loss is not finite on {self._ranks(bad_losses)}"
        bad_parts = _where(facts.squares)
        if bad_parts:
            return f"losses are finite, but the gradient is not in the parts of {self._ranks(bad_parts)}"
        return "loss or gradient are finite on each rank, but not their sum"

    def _ranks(self, ranks: Sequence[int]) -> str:
        first = ranks[0]
        more = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
        return f"rank {first} (host {self._hosts[first]}){more}"


def _where(values: Sequence[float]) -> list[int]:
    return [rank for rank, value in enumerate(values) if not math.isfinite(value)]
