"""The schedule of a pipeline: which stage computes and sends what, in order. It is 1F1B, with a shorter bubble.

A model's blocks are divided into stages, and a batch into micro-batches. Stage s first computes `stages - 1 - s`
forward passes, then forward and backward passes in turn, then the backward passes that are left (PipeDream-Flush,
arXiv:2006.09503). So it holds the activations of at most `stages - s` micro-batches, however many there are, and waits
for `stages - 1` of them a step.

It waits for less where the stages after the first one can split a backward pass (ZB-H1, arXiv:2401.10241). The stage
before needs the gradient of the stream only, so it is sent before the gradients of weights are computed. Stage s leaves
those of the last `s + 1` micro-batches to the end, where the stages before still compute. The first stage sends nothing
back and has no reason to split. Transfers and their order are the same.

A transfer is between neighbouring stages. One that sends and receives does both at the same time, because its peer
does the same: two stages that both send first would wait for each other forever. Messages between two stages are in
the same order on both sides.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from bmburst.errors import UserError


@dataclass(frozen=True, slots=True)
class Compute:
    """A pass of a micro-batch through the blocks of a stage."""

    kind: Literal["forward", "backward", "weights"]
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind[0].upper()}{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Transfer:
    """An exchange with a neighbouring stage: hidden states go to the next stage, their gradients to the previous one.

    Attributes:
        peer: The other stage.
        sends: Number of the micro-batch that is sent; None: nothing.
        receives: Number of the micro-batch that is received; None: nothing.
    """

    peer: int
    sends: int | None = None
    receives: int | None = None

    def __str__(self) -> str:
        sent = "" if self.sends is None else f"{self.sends}>"
        received = "" if self.receives is None else f"<{self.receives}"
        return f"[{sent}{self.peer}{received}]"


Action = Compute | Transfer


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Seconds of a micro-batch on a stage.

    Attributes:
        forward: Forward pass.
        inputs: Gradient of the stage's input, and all else of the backward pass but `weights`.
        weights: Gradients of weights that the stage can compute later.
    """

    forward: float
    inputs: float
    weights: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.forward + self.inputs + self.weights


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    """The actions of all stages in one step. `str` prints a line for each stage.

    `F2` and `B2` are the forward and backward pass of micro-batch 2. A stage that splits leaves gradients of weights in
    `B2`, and computes them in `W2`. `[2>1<0]` sends micro-batch 2 to stage 1 and receives micro-batch 0 from it.

    Attributes:
        stages: Number of stages.
        micro_batches: Micro-batches of a step, at least as many as stages.
        splits: Whether stages split backward passes. Stages may differ in it.

    Raises:
        UserError: There are fewer micro-batches than stages.
    """

    stages: int
    micro_batches: int
    splits: bool = False

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise UserError(f"a pipeline of {self.stages} stages\nfix: at least 1")
        require_micro_batches(self.stages, self.micro_batches)

    def __str__(self) -> str:
        rows = (" ".join(map(str, self.actions(stage))) for stage in range(self.stages))
        return "\n".join(f"stage {stage}: {row}" for stage, row in enumerate(rows))

    def in_flight(self, stage: int) -> int:
        """Return the largest number of micro-batches whose activations a stage holds at once."""
        return min(self.stages - stage, self.micro_batches)

    def makespan(self, times: Sequence[PassTimes]) -> float:
        """Return the seconds of all passes, if transfers take no time. A transfer waits until both stages reach it.

        Args:
            times: Those of each stage.
        """
        left = [deque(self.actions(stage)) for stage in range(self.stages)]
        clocks = [0.0] * self.stages
        while any(left):
            for stage, actions in enumerate(left):
                while actions and isinstance(action := actions[0], Compute):
                    clocks[stage] += self._seconds(action, stage, times[stage])
                    actions.popleft()
                if actions and isinstance(action, Transfer) and left[action.peer]:
                    peer, same = action.peer, Transfer(stage, action.receives, action.sends)
                    if left[peer][0] == same:
                        clocks[stage] = clocks[peer] = max(clocks[stage], clocks[peer])
                        actions.popleft()
                        left[peer].popleft()
        return max(clocks)

    def _seconds(self, action: Compute, stage: int, times: PassTimes) -> float:
        if action.kind == "forward":
            return times.forward
        if action.kind == "weights":
            return times.weights
        return times.inputs + (0.0 if self.splits and stage else times.weights)

    def held(self, stage: int) -> frozenset[tuple[int, int]]:
        """Return what a stage holds during its backward passes, at each of its fullest moments.

        Returns:
            Pairs of the number of micro-batches whose activations it holds, and of those whose gradients of weights it
            has left for later. No pair is at most another one in both numbers.
        """
        alive = later = 0
        found = set()
        for action in self.actions(stage):
            if isinstance(action, Compute):
                alive += action.kind == "forward"
                found.add((alive, later))
                if action.kind == "backward":
                    alive, later = alive - 1, later + (self.splits and stage > 0)
                later -= action.kind == "weights"
        fewer = {one for one in found for other in found if one != other and one[0] <= other[0] and one[1] <= other[1]}
        return frozenset(found - fewer)

    def actions(self, stage: int) -> tuple[Action, ...]:
        """Return the actions of a stage, in order."""
        return tuple(self._of(stage))

    def _of(self, stage: int) -> Iterator[Action]:
        count, ahead = self.micro_batches, self.in_flight(stage) - 1
        before = stage - 1 if stage else None
        after = stage + 1 if stage + 1 < self.stages else None
        for number in range(ahead):
            yield from _with(before, receives=number)
            yield Compute("forward", number)
            yield from _with(after, sends=number)
        yield from _with(before, receives=ahead)
        for number in range(count - ahead):
            yield Compute("forward", number + ahead)
            yield from _with(after, sends=number + ahead, receives=number)
            yield Compute("backward", number)
            following = number + ahead + 1
            yield from _with(before, sends=number, receives=following if following < count else None)
            yield from self._weights(stage, number)
        for number in range(count - ahead, count):
            yield from _with(after, receives=number)
            yield Compute("backward", number)
            yield from _with(before, sends=number)
            yield from self._weights(stage, number)

    def _weights(self, stage: int, number: int) -> Iterator[Compute]:
        """Yield what a stage computes after it has sent the gradient of a micro-batch."""
        if not (self.splits and stage):
            return
        last = self.micro_batches - 1
        first_late = max(0, last - stage)
        if number < first_late:
            yield Compute("weights", number)
        elif number == last:
            yield from (Compute("weights", each) for each in range(first_late, self.micro_batches))


def _with(peer: int | None, sends: int | None = None, receives: int | None = None) -> Iterator[Transfer]:
    if peer is not None:
        yield Transfer(peer, sends, receives)


def leaves_weights(stage: int, *, recomputes: bool, is_frozen: bool) -> bool:
    """Return whether backward of a layer can leave gradients of weights for later, in a pipeline that splits.

    Args:
        stage: Number of the stage.
        recomputes: Whether the layer is recomputed: it would have to keep what it computes again.
        is_frozen: Whether only adapters are trained: most weights have no gradients.
    """
    return stage > 0 and not recomputes and not is_frozen


def stage_layers(layers: int, stages: int, stage: int, head: float = 0.0) -> range:
    """Return the numbers of the layers of a stage.

    The slowest stage is as fast as possible. Each stage has a layer at least. Among the other stages than the last, the
    first ones have one more if the layers cannot be divided evenly.

    Args:
        layers: Layers of the model, at least as many as stages.
        stages: Number of stages.
        stage: Number of the stage.
        head: Time of the head, which the last stage has too, divided by that of a layer.
    """
    others = stages - 1
    if not others:
        return range(layers)

    def costs(last: int) -> tuple[float, float]:
        """Return the time of the slowest stage, and by how much the fastest one is faster."""
        each, rest = divmod(layers - last, others)
        times = [each, each + (rest > 0), last + head]
        return max(times), max(times) - min(times)

    last = min(range(1, layers - others + 1), key=costs)
    if stage == others:
        return range(layers - last, layers)
    each, rest = divmod(layers - last, others)
    first = stage * each + min(stage, rest)
    return range(first, first + each + (stage < rest))


def require_stages(stages: int, layers: int) -> None:
    """Raise UserError unless each stage has a layer."""
    if stages > layers:
        raise UserError(
            f"pipeline_parallel {stages} with a model of {layers} layers: a stage would have none\n"
            f"allowed: 1 to {layers}\nfix: --pipeline-parallel {layers}, or a deeper model"
        )


def default_batch(stages: int, micro_batch: int, data: int = 1) -> int:
    """Return the sequences of a step that is given no batch: a micro-batch for each stage of each data parallel group.

    Args:
        stages: Number of stages.
        micro_batch: Sequences of a micro-batch.
        data: Data parallel degree.
    """
    return stages * data * micro_batch


def require_micro_batches(stages: int, count: int) -> None:
    """Raise UserError unless a step has a micro-batch for each stage."""
    if count < stages:
        raise UserError(
            f"pipeline_parallel {stages} with {count} micro-batches a step: stages would only wait\n"
            f"allowed: batch_size at least {stages} x data_parallel x micro_batch_size\n"
            "fix: a larger --batch-size, a smaller --micro-batch-size, or fewer stages"
        )
