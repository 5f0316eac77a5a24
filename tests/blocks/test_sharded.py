"""Blocks that share memory for gathered weights: as BMTrain's own blocks, with fewer gathers and less work of the host.

The reference is `bmtrain.Block`, whose gradients must be equal to the bit: both add the same numbers in the same order.
"""

from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from math import prod

import pytest
import torch
from torch.overrides import TorchFunctionMode

from bmburst_ops.linears import LaterProducts
from tests import lazy
from tests.distributed.programs import run_program

WIDTHS = [18, 13, 19, 17, 12]  # 4 blocks of different sizes
ALIKE = [18] * 6  # 5 blocks that can use each other's memory
BATCHES = 2


def test_blocks_are_those_of_bmtrain(tmp_path):
    run_program(2, _blocks_are_those_of_bmtrain)
    run_program(1, _blocks_are_those_of_bmtrain)


def _blocks_are_those_of_bmtrain():
    for widths in (WIDTHS, ALIKE):
        wanted = _gradients(_blocks(widths, None))
        assert all(gradient.abs().sum() > 0 for gradient in wanted)
        for level in (2, 3):
            for is_step in (False, True):
                found = _gradients(_blocks(widths, level), is_step=is_step)
                assert all(map(torch.equal, found, wanted)), (level, is_step)
        with _calls() as calls, Made() as made:
            for level, is_step, gathers in (
                (3, False, BATCHES * (2 * 5 - 2)),  # backward finds the last two blocks
                (2, False, BATCHES * 5),
                (2, True, 5),
                (3, True, 5 + 3 + 3 + 3),  # each pass finds the last two blocks of the one before
            ):
                blocks = _blocks(ALIKE, level)
                calls.clear(), made.counts.clear()
                _gradients(blocks, is_step=is_step)
                assert calls == {"allGather": gathers, "reduceScatter": BATCHES * 5}, (level, is_step)
                assert made.counts == {}, (level, is_step)
    _weights_are_never_old()
    _gradients_are_put_aside()
    _gradients_are_left_for_later()
    _gradients_are_written_where_they_are_scattered_from()
    _gradients_of_two_forward_passes_are_added()


def _gradients_of_two_forward_passes_are_added():
    """One backward pass goes through both; autograd adds their gradients when it has come to the second one."""
    found = []
    for level in (None, 2, 3):
        for widths in (ALIKE, WIDTHS):
            model = _blocks(widths, level, bias=True)
            first, second = (torch.linspace(at, 1, 3 * 18).view(3, 18).requires_grad_() for at in (-1, 0))
            (model(first).square().sum() + 2 * model(second).square().sum()).backward()
            found.append(_shards(model))
    for at, gradients in enumerate(found):
        assert all(map(torch.equal, gradients, found[at % 2])), at


def _gradients_are_written_where_they_are_scattered_from():
    """Backward copies biases alone. It writes the other gradients to two memories that take turns."""
    from bmburst.blocks import gathering

    wanted, model, written = _gradients(_blocks(ALIKE, None, bias=True)), _blocks(ALIKE, 3, bias=True), []
    with pytest.MonkeyPatch.context() as patch:
        collect = gathering.GradientMemory.collect

        def seen(memory, gradients):
            matrix, bias = (each.data_ptr() for each in gradients)
            assert memory.views[0].data_ptr() == matrix != bias
            written.append(matrix)
            collect(memory, gradients)

        patch.setattr(gathering.GradientMemory, "collect", seen)
        assert all(map(torch.equal, _gradients(model), wanted))
    assert len(written) == 5 * BATCHES and not any("gradient_memory" in each.__dict__ for each in model.parameters())
    assert all(one != other for at, (one, other) in enumerate(pairwise(written), 1) if at % 5)


def _gradients_are_left_for_later():
    """Those of weights come after other passes, in the order of their passes; those of biases wait for them."""
    for widths in (WIDTHS, ALIKE):
        wanted = _gradients(_blocks(widths, None, bias=True))
        for level in (2, 3):
            model = _blocks(widths, level, bias=True, leaves=True)
            assert not any(each is not None for each in _gradients(model, around=partial(_leaving, model)))
            for _ in range(BATCHES):
                for block in reversed(list(model)):
                    block.finish_backward()
            assert all(map(torch.equal, _shards(model), wanted)), level


@contextmanager
def _leaving(model):
    with ExitStack() as stack:
        for block in model:
            stack.enter_context(block.later.collecting())
        yield


def _gradients_are_put_aside():
    """The next gradient is written to the same memory, and nothing of the one before is in it."""
    wanted, model = _gradients(_blocks(ALIKE, None)), _blocks(ALIKE, 3)
    _gradients(model)
    before = [each.grad.fill_(7) for each in model.parameters()]
    for block in model:
        block.put_gradient_aside()
    assert all(each.grad is None for each in (*model.parameters(), *model["0"]._module._parameters.values()))
    assert all(map(torch.equal, _gradients(model), wanted))
    assert [each.grad.data_ptr() for each in model.parameters()] == [each.data_ptr() for each in before]


def _weights_are_never_old():
    for level in (2, 3):
        model, batch = _blocks(ALIKE, level), torch.ones(3, 18)
        for number in range(1, 4):
            with torch.no_grad():
                for each in model.parameters():
                    each.data.fill_(number / 30)
            wanted = torch.full((3, 18), (18 * number / 30) ** 5)
            torch.testing.assert_close(model(batch), wanted)  # never differentiated
            with torch.no_grad():
                torch.testing.assert_close(model(batch), wanted)
            model["2"]._module.fails = True
            with pytest.raises(ValueError, match="a failure"):
                model(batch)
            del model["2"]._module.fails
        kept = [slot for slot in model["0"]._memory._slots if slot.is_busy]
        assert len(kept) == 1  # of the block after the one that failed


class Made(TorchFunctionMode):
    """Counts the tensors that are made of a list or over a storage."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.tensor, torch.Tensor.set_):
            self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def _calls():
    """Count collectives."""
    calls = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("allGather", "reduceScatter"):
            patch.setattr(lazy.bmt.nccl, name, _counted(getattr(lazy.bmt.nccl, name), name, calls))
        yield calls


def _counted(function, name, calls):
    def count(*args):
        calls[name] += 1
        return function(*args)

    return count


def _blocks(widths, level, *, bias=False, leaves=False):
    """Return a list of linear blocks, of BMTrain's class if `level` is None; `leaves`: they can leave gradients."""
    from bmburst.blocks.sharded import ShardedBlock

    class Failing(lazy.Linear):
        def forward(self, hidden):
            if hasattr(self, "fails"):
                raise ValueError("a failure")
            return super().forward(hidden)

    linears = [Failing(a, b, dtype=torch.float32, bias=bias) for a, b in pairwise(widths)]
    memory = lazy.GatherMemory(len(linears) if level == 2 else 2)
    model = lazy.bmt.TransformerBlockList(
        [
            lazy.bmt.Block(each, use_checkpoint=False)
            if level is None
            else ShardedBlock(each, zero_level=level, memory=memory, later=LaterProducts() if leaves else None)
            for each in linears
        ]
    )
    for shard in lazy.named_shards(model):
        shard.local().copy_(torch.linspace(-1, 1, prod(shard.shape))[shard.begin : shard.end])
    return model


def _gradients(model, *, is_step=False, around=nullcontext):
    """Return the shards of the gradients of several batches; `is_step`: weights stay gathered from one to the next.

    `around` returns a context for each batch.
    """
    memory = getattr(model["0"], "_memory", None) if is_step else None
    with memory.unchanged() if memory else nullcontext():
        for number in range(BATCHES):
            batch = torch.linspace(number - 1, 1, 3 * 18 * (lazy.bmt.rank() + 1))[-54:].view(3, 18).requires_grad_()
            with around():
                model(batch).square().sum().backward()
    return _shards(model)


def _shards(model):
    torch.cuda.current_stream().wait_stream(lazy.bmt.config["load_stream"])
    storages = [storage for block in model for storage in block._storage_params.values()]
    return [None if storage.grad is None else storage.grad.clone() for storage in storages]
