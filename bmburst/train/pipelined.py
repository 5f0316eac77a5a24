"""Runs the micro-batches of a step, or of an evaluation, through the stages of a pipeline.

Every rank of a stage has its tokens of every micro-batch, with their masks, as every other stage has. So only hidden
states and their gradients move between stages, with shapes that both know.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bmburst.comm.waits import traced
from bmburst.schedule.pipeline import Compute, PipelineSchedule, Transfer
from bmburst.train.loading import LocalBatch, token_losses, token_stream

if TYPE_CHECKING:
    from bmburst.blocks.model import Llama


def run_stage(
    model: "Llama", parts: Sequence[LocalBatch], forward: Callable[[LocalBatch, Tensor], Tensor], gathers_once: bool
) -> None:
    """Accumulate the gradient of this rank's stage over the micro-batches of a step.

    Args:
        model: This rank's stage of the model.
        parts: The micro-batches, of equal shapes.
        forward: See `PipelineStep`.
        gathers_once: Whether weights are gathered once and gradients are reduced once (ZeRO-2).
    """
    from bmburst.blocks.stages import gathered, settle_gradients  # they import BMTrain: only after `bmburst.start`

    with gathered(model) if gathers_once else nullcontext():
        PipelineStep(model, parts, forward).run()
    settle_gradients(model)


class PipelineStep:
    """Forward and backward passes of a step on this rank's stage, in the order of `PipelineSchedule`.

    Args:
        model: This rank's stage of the model.
        parts: The micro-batches, of equal shapes.
        forward: Returns the scalar whose gradient is taken, from a micro-batch and the stream of the stage before; only
            called on the last stage.
    """

    def __init__(
        self, model: "Llama", parts: Sequence[LocalBatch], forward: Callable[[LocalBatch, Tensor], Tensor]
    ) -> None:
        self._model, self._parts, self._forward = model, parts, forward
        self._inputs: dict[int, Tensor] = {}  # streams of the stage before, by micro-batch
        self._outputs: dict[int, Tensor] = {}  # results of this stage, until their backward passes
        self._gradients: dict[int, Tensor] = {}  # with respect to the outputs
        self._returned: dict[int, Tensor] = {}  # with respect to the inputs

    def run(self) -> None:
        """Accumulate the gradients of all micro-batches."""
        stage, splits = self._model.stage, self._model.model.layers.leaves_weights
        for action in PipelineSchedule(stage.count, len(self._parts), splits=splits).actions(stage.number):
            if isinstance(action, Transfer):
                self._transfer(action)
            else:
                with traced(action.kind):
                    self._compute(action)

    def _compute(self, action: Compute) -> None:
        number, layers = action.micro_batch, self._model.model.layers
        if action.kind == "weights":
            layers.finish_backward()
            return
        if action.kind == "forward":
            part, stream = self._parts[number], self._inputs.get(number)
            if self._model.stage.is_last:
                assert stream is not None
                self._outputs[number] = self._forward(part, stream)
            else:
                self._outputs[number] = token_stream(self._model, part, stream)
            return
        with layers.leaving_weights():
            torch.autograd.backward(self._outputs.pop(number), self._gradients.pop(number, None))
        if number in self._inputs:
            gradient = self._inputs.pop(number).grad
            assert gradient is not None
            self._returned[number] = gradient

    def _transfer(self, action: Transfer) -> None:
        from bmburst.blocks.stages import exchange  # imports BMTrain: only after `bmburst.start`

        goes_on = action.peer > self._model.stage.number
        sent = None
        if action.sends is not None:
            sent = self._outputs[action.sends] if goes_on else self._returned.pop(action.sends)
        received = None if action.receives is None else self._model.new_stream(self._parts[0].labels)
        exchange(action.peer, sent, received)
        if action.receives is not None and received is not None:
            if goes_on:
                self._gradients[action.receives] = received
            else:
                self._inputs[action.receives] = received.requires_grad_()


def stage_loss(model: "Llama", part: LocalBatch) -> Tensor:
    """Return the sum of this rank's token losses, fp32 or wider, without a graph; 0 on stages without a head."""
    from bmburst.blocks.stages import exchange  # imports BMTrain: only after `bmburst.start`

    stage, stream = model.stage, None
    if not stage.is_first:
        stream = model.new_stream(part.labels)
        exchange(stage.number - 1, None, stream)
    if stage.is_last:
        return token_losses(model, part, stream=stream)
    exchange(stage.number + 1, token_stream(model, part, stream), None)
    return torch.zeros((), device=part.ids.device)
