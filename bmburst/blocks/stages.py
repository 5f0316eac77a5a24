"""A pipeline stage of a model: which layers it has, over which ranks they are sharded, and what it sends.

A rank builds only the blocks of its stage, with the names that they have in the whole model. ZeRO shards them over the
ranks of the stage. The embedding is on the first stage, final norm and head are on the last one. If they share one
table, both stages have it, and the sum of its two gradients is the gradient of both.

BMTrain's own pipeline (`bmtrain.PipelineTransformerBlockList`) shards every layer over the ranks of each stage, runs
all forward passes before the first backward pass, and sends shapes beside tensors. This one takes its ranks and its
communicators only.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import bmtrain as bmt
import torch
from bmtrain.zero_context import ZeroContext
from torch import Tensor

from bmburst.comm.collectives import FlatStorage, launched_together
from bmburst.schedule.pipeline import require_stages, stage_layers

if TYPE_CHECKING:
    from bmburst.blocks.model import Llama
    from bmburst.blocks.transformer import Batch


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a pipeline.

    Attributes:
        number: Number of the stage.
        count: Number of stages; 1: there is no pipeline.
        layers: Numbers of its layers in the model.
    """

    number: int
    count: int
    layers: range

    @classmethod
    def whole(cls, layers: int) -> "Stage":
        """Return the only stage of a model without a pipeline."""
        return cls(0, 1, range(layers))

    @classmethod
    def of_bmtrain(cls, layers: int, head: float = 0.0) -> "Stage":
        """Return this rank's stage of a model, in the stages of the running BMTrain.

        Args:
            layers: Layers of the model.
            head: See `bmburst.schedule.pipeline.stage_layers`.

        Raises:
            UserError: There are more stages than layers.
        """
        count = bmt.config["pipe_size"]
        require_stages(count, layers)
        number = bmt.config["topology"].stage_id
        return cls(number, count, stage_layers(layers, count, number, head))

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the final norm and the head."""
        return self.number == self.count - 1

    @contextmanager
    def sharding(self) -> Iterator[None]:
        """Let BMTrain shard the parameters that are made inside this context over the ranks of the stage only."""
        if self.count == 1:
            yield
            return
        groups = {"zero_comm": bmt.config["pp_zero_comm"]}
        if bmt.config["tp_size"] > 1:
            groups["tp_zero_comm"] = bmt.config["pp_tp_zero_comm"]
        before = {name: bmt.config[name] for name in groups}
        try:
            for name, group in groups.items():
                bmt.config[name] = group
            yield
        finally:
            for name, group in before.items():
                bmt.config[name] = group


class StageBlocks(bmt.TransformerBlockList):  # type: ignore[misc]  # BMTrain has no types
    """The blocks of a stage, under their numbers in the whole model.

    Args:
        blocks: The blocks, as BMTrain's.
        numbers: Their numbers.
    """

    def __init__(self, blocks: Iterable[bmt.Block], numbers: range) -> None:
        super().__init__(list(blocks))
        self._modules = {str(number): each for number, each in zip(numbers, list(self), strict=True)}

    def forward(self, hidden: Tensor, batch: "Batch") -> Tensor:
        """Return the stream after the last block."""
        for block in self:
            hidden = block(hidden, batch)
        return hidden

    @property
    def leaves_weights(self) -> bool:
        """Whether backward can leave gradients of weights for `finish_backward`."""
        return any(block.later is not None for block in self)

    @contextmanager
    def leaving_weights(self) -> Iterator[None]:
        """Leave gradients of weights in the backward pass inside the `with` block, where blocks can."""
        with ExitStack() as stack:
            for block in self:
                if block.later is not None:
                    stack.enter_context(block.later.collecting())
            yield

    def finish_backward(self) -> None:
        """Compute what the oldest unfinished backward pass left."""
        for block in reversed(list(self)):
            if block.later is not None:
                block.finish_backward()


def exchange(peer: int, sent: Tensor | None, received: Tensor | None) -> None:
    """Send a tensor to the rank with the same place in another stage, receive one from it, or both at the same time.

    Both know its shape: no message has a header, and the host waits for none.
    """
    with launched_together():
        if sent is not None:
            bmt.nccl.send(FlatStorage(sent.detach().contiguous()), peer, bmt.config["pipe_comm"])
        if received is not None:
            bmt.nccl.recv(FlatStorage(received), peer, bmt.config["pipe_comm"])


@contextmanager
def gathered(model: "Llama") -> Iterator[None]:
    """Gather all weights of a stage once for the micro-batches of a step, and reduce their gradients once."""
    tables = (getattr(model.model, "embed_tokens", None), getattr(model, "lm_head", None))
    with ExitStack() as stack:
        for table in filter(None, tables):
            stack.enter_context(table.gathered())
        stack.enter_context(_gathered_blocks(model.model.layers))
        yield


@contextmanager
def _gathered_blocks(blocks: Iterable[bmt.Block]) -> Iterator[None]:
    """BMTrain's hooks do nothing for a block that is gathered already."""
    contexts = []
    for block in blocks:
        contexts.append(ZeroContext(block, block._layer_dict))
        contexts[-1].enter(0, True)
    yield
    for context in reversed(contexts):
        context.exit(0, True)


def settle_gradients(model: "Llama") -> None:
    """Complete the gradients of a stage after the backward passes of a step, also that of a tied table."""
    torch.cuda.current_stream().wait_stream(bmt.config["load_stream"])  # BMTrain reduces gradients there
    stage = model.stage
    if model.config.tie_embeddings and stage.count > 1 and (stage.is_first or stage.is_last):
        table = model.model.embed_tokens._parameters["weight"]
        if table.requires_grad:
            _add_tied_gradients(table, stage)


@torch.no_grad()
def _add_tied_gradients(table: torch.nn.Parameter, stage: Stage) -> None:
    """Add this rank's shard of a tied table's gradient and that of the other stage that has it; both get equal bits."""
    if table.grad is None:
        table.grad = torch.zeros_like(table.data)
    other = torch.empty_like(table.grad)
    exchange(stage.count - 1 if stage.is_first else 0, table.grad, other)
    table.grad += other
