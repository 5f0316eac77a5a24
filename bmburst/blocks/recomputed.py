"""Activation checkpointing of transformer blocks, one by one or in segments: `recomputed_block`.

A block saves its input, on the GPU or in host memory, and the attention results that its recompute policy keeps. With
"+every-4", only the first of 4 consecutive blocks (a segment) saves its input. When backward reaches the last of them,
the inputs and attention results of all blocks of the segment are recomputed. Each block's are freed after its backward.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bmburst.blocks.lean import BlockWork, KeepOutput, MLPOutputs, whole_tape
from bmburst.errors import UserError
from bmburst.recompute.checkpointing import Recomputation, Tape, recording
from bmburst.recompute.host_store import MLP_OUTPUTS, OffloadGroup
from bmburst_ops.errors import first_order

if TYPE_CHECKING:
    from bmburst.blocks.transformer import Batch, TransformerBlock


def recomputed_block(block: "TransformerBlock", hidden: Tensor, batch: "Batch") -> Tensor:
    """Return the stream after a block, `[batch, tokens, hidden_size]`; backward recomputes its activations.

    Backward overwrites the gradient of the output. Tensor parallelism is not supported.

    Args:
        block: Its recompute policy, host store and segments determine what is kept for backward, and where.
        hidden: The stream before the block, `[batch, tokens, hidden_size]`.
        batch: Rotary tables, length and mask.
    """
    if not torch.is_grad_enabled():
        return BlockWork(block, hidden, batch).forward()
    result: Tensor = _RecomputedBlock.apply(block, batch, hidden, *block.parameters())  # type: ignore[no-untyped-call]
    return result


class _RecomputedBlock(torch.autograd.Function):
    """Saves the parameter objects, not their data: ZeRO-3 frees the data after forward and gathers it for backward."""

    @staticmethod
    def forward(ctx: Any, block: "TransformerBlock", batch: "Batch", hidden: Tensor, *parameters: Tensor) -> Tensor:
        ctx.done = _Pass(block, batch)
        ctx.segment = block.segments.join(ctx.done, hidden)
        saved = () if ctx.segment or ctx.done.offload(hidden) else (hidden,)
        tape: Tape | None = ctx.done.tape
        with recording(tape) if tape else nullcontext():
            result = BlockWork(block, hidden, batch).forward(keep_output=ctx.done.keep_output)
        # Saved tensors are freed after this block's backward; attributes of ctx would live as long as the graph.
        ctx.counts = len(parameters), len(saved)
        ctx.save_for_backward(*parameters, *saved, *(tape.give_up() if tape and not ctx.segment else ()))
        return result

    @staticmethod
    @first_order(UserError)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        done: _Pass = ctx.done
        rest = iter(ctx.saved_tensors)
        parameters, saved = (tuple(islice(rest, count)) for count in ctx.counts)
        if ctx.segment:
            hidden = ctx.segment.take_input(done)
        else:
            done.begin_fetch(ahead=True)
            hidden = saved[0] if saved else done.fetch()
            if done.tape:
                done.tape.hold(rest)
        tape, done.again = done.again, None
        with done.recomputation:
            work = BlockWork(done.block, hidden, done.batch)
            grad_hidden, sums = work.backward(grad.contiguous(), parameters, tape, done.kept_outputs())
        if done.tape:
            done.tape.give_up()
        return None, None, grad_hidden, *(sums.result(each) for each in parameters)


class _Pass:
    """State of one forward pass of a block until its backward.

    Attributes:
        block: The block.
        batch: Its arguments besides the stream.
        tape: The attention results that its policy keeps, if any.
        recomputation: Context manager for its recompute.
        again: All attention results, from the recompute of its segment until its backward.
    """

    def __init__(self, block: "TransformerBlock", batch: "Batch") -> None:
        self.block, self.batch, policy = block, batch, block.recompute
        self._group = None if policy.offload == "nothing" else block.store.new_group()
        self._mlp_group: OffloadGroup | None = None
        self._outputs: list[int] = []  # numbers of gate's and up's outputs in the group, by chunk
        # A segment allows only one backward, so that it can free the kept results group by group.
        self.tape = Tape(policy, self._group, replays_once=policy.in_segment) if policy.attention else None
        self.recomputation = Recomputation(block.forward, self.tape)
        self.again: Tape | None = None

    def offload(self, hidden: Tensor) -> bool:
        """Copy the input to host memory if the policy offloads it; return whether it did."""
        if self._group is None:
            return False
        self._number = self._group.put(hidden)
        return True

    def begin_fetch(self, *, ahead: bool) -> None:
        """Start to copy what is in host memory to the GPU; `ahead`: also that of the block before."""
        for group in (self._mlp_group, self._group):
            if group is not None:
                group.begin(ahead=ahead)

    def fetch(self) -> Tensor:
        """Return the input, whose copy to the GPU has begun."""
        assert self._group is not None
        return self._group.get(self._number)

    @property
    def keep_output(self) -> KeepOutput | None:
        """The function that keeps each output of gate and up of each chunk of tokens, if the policy does."""
        return self._put_output if self.block.recompute.offloads_mlp else None

    def _put_output(self, output: Tensor) -> None:
        if self._mlp_group is None:
            self._mlp_group = self.block.store.new_group(MLP_OUTPUTS)
        self._outputs.append(self._mlp_group.put(output))

    def kept_outputs(self) -> Iterator[MLPOutputs] | None:
        """Return the kept outputs of gate and up, chunk by chunk, whose copy to the GPU has begun; None if not kept."""
        group = self._mlp_group
        if group is None:
            return None
        pairs = zip(self._outputs[::2], self._outputs[1::2], strict=True)
        return ((group.get(gate), group.get(up)) for gate, up in pairs)

    def forward_again(self, hidden: Tensor) -> Tensor:
        """Return the stream after the block, and keep all of attention's results until its backward."""
        with self.recomputation:
            self.again = whole_tape()
            with recording(self.again):
                result = BlockWork(self.block, hidden, self.batch).forward(is_kept=self.tape is not None)
        self.again.rewind()
        return result


class BlockSegments:
    """The recompute segments of a model. Only the first block of a segment saves its input."""

    def __init__(self) -> None:
        self._wrappers: dict[int, Any] = {}
        self._open: _Segment | None = None

    def wrap(self, blocks: Iterable[Any]) -> None:
        """Register the `ShardedBlock` wrappers, which gather the weights of the model's blocks."""
        self._wrappers = {id(each._module): each for each in blocks}

    def join(self, done: _Pass, hidden: Tensor) -> "_Segment | None":
        """Add a pass to its segment and return the segment; None if each block saves its input."""
        policy = done.block.recompute
        if not policy.in_segment:
            return None
        if policy.is_stored:
            self._open = _Segment(self, done, hidden)
            return self._open
        segment = self._open
        if segment is None:
            raise UserError(
                "a block whose input is not stored ran without the blocks before it\n"
                "fix: run the whole model, or take a recompute policy without +every-"
            )
        segment.passes.append(done)
        if not policy.feeds_next:
            self._open = None
        return segment

    @contextmanager
    def gathered(self, block: "TransformerBlock") -> Iterator[None]:
        """Gather a block's weights for the duration of the context, as in its forward pass."""
        with self._wrappers[id(block)].gathered():
            yield


class _Segment:
    """The passes of one segment, in order.

    Args:
        segments: Segments of the model.
        first: Pass of the segment's first block.
        hidden: Input of that block.
    """

    def __init__(self, segments: BlockSegments, first: _Pass, hidden: Tensor) -> None:
        self._segments, self.passes = segments, [first]
        self._inputs: dict[int, Tensor] = {} if first.offload(hidden) else {0: hidden.detach()}
        self._version = hidden._version  # detects in-place changes until backward
        self._is_spent = False

    def take_input(self, done: _Pass) -> Tensor:
        """Return the input of a pass, once. The call for the last pass recomputes the inputs of all passes."""
        if self._is_spent:
            raise UserError(
                f"backward went twice through blocks with recompute policy +every-{len(self.passes)}\n"
                "fix: a policy without +every-, which allows retain_graph=True"
            )
        number = self.passes.index(done)
        if number == len(self.passes) - 1:
            self._compute(number)
        self._is_spent = number == 0
        return self._inputs.pop(number)

    def _compute(self, last: int) -> None:
        for done in self.passes:
            done.begin_fetch(ahead=False)
        if 0 not in self._inputs:
            self._inputs[0] = self.passes[0].fetch()
        elif self._inputs[0]._version != self._version:
            raise RuntimeError("the input of a block was changed in place before its backward\nchange a copy")
        for number, done in enumerate(self.passes[:last]):
            with self._segments.gathered(done.block):
                self._inputs[number + 1] = done.forward_again(self._inputs[number])
