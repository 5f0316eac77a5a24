"""A run with weights, gradients and optimizer in host memory is the run with the optimizer alone there."""

import time
from concurrent.futures import Future

import pytest
import torch

from bmburst.comm.host_memory import HostMemory, HostShard, ShardCopies, host_block
from bmburst.train.config import OptimizerConfig, ParallelConfig
from bmburst_ops.host_adamw import Rates, joined, split
from tests import lazy
from tests.copies import FromElsewhere
from tests.distributed.programs import on_program, run_program
from tests.pairs import long
from tests.train import run_program as program
from tests.train.cases import held, require_equal, steps
from tests.train.lazy_streams import late_copies

STEPS = 4  # equal bit by bit: a difference shows at the second step, or never


def trainer(folder, name, streams, dtype, **changes):
    optimizer = OptimizerConfig(offload=True, offload_weights=streams, clip_norm=1.0, lr=0.01)  # some steps
    changes.setdefault("parallel", ParallelConfig())
    return program.trainer(folder, name, dtype=dtype, optimizer=optimizer, steps=STEPS, **changes)


CASES = [
    (1, "bfloat16", "block+every-2+keep-attention-last-1", {"micro_batch_size": 1}),
    pytest.param(2, "float32", "none", {}, marks=pytest.mark.long),
    pytest.param(3, "bfloat16", "block-keep-attention+offload", {}, marks=pytest.mark.long),
    (2, "float32", "block+every-2", {"micro_batch_size": 2}),
    (2, "bfloat16", "block", {"parallel": ParallelConfig(data_parallel=2)}),
    pytest.param(2, "float32", "none", {"parallel": ParallelConfig(tensor_parallel=2)}, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("size", "dtype", "policy", "changes"), CASES)
def test_steps_are_equal(tmp_path, size, dtype, policy, changes):
    tensor = changes.get("parallel", ParallelConfig()).tensor_parallel
    run_program(size, _steps_are_equal, tmp_path, dtype, policy, changes, tensor=tensor)


def _steps_are_equal(folder, dtype, policy, changes):
    resident, streamed = (
        trainer(folder, f"run-{streams}", streams, dtype, recompute=policy, **changes) for streams in (False, True)
    )
    for _ in range(2):
        assert steps(streamed, STEPS // 2) == steps(resident, STEPS // 2)
        assert streamed.evaluate().loss == resident.evaluate().loss
    require_equal(held(streamed), held(resident))


@pytest.mark.parametrize("dtype", ["bfloat16", *long("float32")])
@on_program(2)
def test_either_reads_the_checkpoint_of_the_other(tmp_path, dtype):
    for wrote in (False, True):
        name = f"{dtype}-{wrote}"
        made = trainer(tmp_path, name, wrote, dtype)
        made.save()  # before its first step there is no state
        fresh = trainer(tmp_path, name, wrote, dtype, resume=True)
        fresh.restore()
        require_equal(held(fresh), held(made))
        steps(made, 2)
        made.save()  # while weights are being updated
        other = trainer(tmp_path, name, not wrote, dtype, resume=True)
        if not wrote:
            other.model.model.layers[0].prefetch()  # old weights
        other.restore()
        require_equal(held(other), held(made))
        assert steps(other, 2) == steps(made, 2)
        require_equal(held(other), held(made))


@on_program(2)
def test_bmtrain_saves_loads_and_initializes_it(tmp_path):
    streamed, resident = (trainer(tmp_path, f"run-{streams}", streams, "bfloat16") for streams in (True, False))
    for made in (streamed, resident):
        steps(made, 2)
        lazy.bmt.save(made.model, str(tmp_path / f"{made is streamed}.pt"))
    ours, wanted = (torch.load(tmp_path / f"{is_ours}.pt", weights_only=True) for is_ours in (True, False))
    require_equal(ours, wanted)
    other = trainer(tmp_path, "other", True, "bfloat16", seed=3)
    steps(other, 1)
    other.model.model.layers[0].prefetch()  # old weights
    lazy.bmt.load(other.model, str(tmp_path / "False.pt"))
    require_equal(weights(other), weights(resident))
    batch = resident.next_batch()
    assert other.backward(batch).loss == resident.backward(batch).loss
    for made in (other, resident):
        for number, layer in enumerate(made.model.model.layers):
            for info in layer._param_info:
                info["parameter"]._init_method = lambda tensor, by=number: tensor.fill_(by + 0.5)
            layer.init_parameters()
    require_equal(weights(other), weights(resident))


def weights(made):
    return {name: tensor for name, tensor in held(made).items() if name.endswith("weight")}


@on_program(1)
def test_reads_after_a_step_wait_for_the_update(tmp_path):
    update, made = lazy.updates._update, {}
    with pytest.MonkeyPatch.context() as patch:
        for is_late in (False, True):
            made[is_late], order = trainer(tmp_path, f"run-{is_late}", True, "bfloat16"), []

            def late(*args, wait=0.02 * is_late, order=order):
                time.sleep(wait)
                order.append(args[0].shard.order)
                update(*args)

            patch.setattr(lazy.updates, "_update", late)
            steps(made[is_late], 2)
            made[is_late].evaluate()
            assert order == 2 * [0, 0, 1, 1]  # as forward needs them
        require_equal(held(made[True]), held(made[False]))
        steps(made[True], 1), steps(made[False], 1)
        assert made[True].evaluate() == made[False].evaluate()
        steps(made[True], 1), steps(made[False], 1)
        assert made[True].backward(made[True].next_batch()).loss == made[False].backward(made[False].next_batch()).loss


@on_program(1)
def test_weights_on_the_gpu_are_updated_before_the_others_begin(tmp_path):
    """Both at once would share the host's memory bandwidth, and only the first hold up the GPU."""
    from bmburst.optim.updates import LateUpdates

    made, order = trainer(tmp_path, "run", True, "bfloat16"), []

    def recorded(function):
        def call(self, updates, *args):
            order.extend([function.__qualname__] * bool(updates))
            function(self, updates, *args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lazy.HostAdam, "step", recorded(lazy.HostAdam.step))
        patch.setattr(LateUpdates, "start", recorded(LateUpdates.start))
        steps(made, 2)
    assert order == 2 * ["HostAdam.step", "LateUpdates.start"]


@on_program(1)
def test_an_error_in_an_update_ends_the_run(tmp_path):
    def fails(*_):
        raise MemoryError("no room")

    made = trainer(tmp_path, "run", True, "bfloat16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lazy.updates, "_update", fails)
        steps(made, 1)
        with pytest.raises(MemoryError, match="no room"):
            made.evaluate()


@on_program(2)
def test_gradients_that_are_not_finite_change_nothing(tmp_path):
    made = trainer(tmp_path, "run", True, "bfloat16")
    steps(made, 1)
    before = held(made)
    if lazy.bmt.rank() == 1:
        made.optimizer.gradients()[0].fill_(torch.nan)  # backward adds to it
    facts = made.backward(made.next_batch())
    assert not facts.is_finite
    made.update(facts)
    require_equal(held(made), before)
    assert made.step().grad_norm > 0


@on_program(1)
def test_copies_that_come_late_are_waited_for():
    from bmburst.optim import states
    from bmburst.optim.updates import ShardUpdate

    with late_copies():
        streams, made = [], torch.cuda.Stream
        torch.cuda.Stream = lambda: streams.append(made()) or streams[-1]
        copies, reader = ShardCopies(), made()

        def block_of(number):
            weights = [torch.nn.Parameter(torch.full((size,), float(number))) for size in (5, 3)]
            return [HostShard(each, number, copies.memory) for each in weights]

        blocks, read = [block_of(number) for number in range(4)], []
        for n, block in enumerate([*blocks, *reversed(blocks)]):
            copies.show(block, reader)
            for shard in block:
                seen = shard.parameter.data
                assert seen.data_ptr() != shard.weights.data_ptr()
                reader.add(lambda seen=seen: read.append(seen.clone()))
            copies.hide(block, reader)
            assert all(shard.parameter.data_ptr() == shard.weights.data_ptr() for shard in block)
            copies.prefetch(blocks[min(n + 1, 3)])
        for stream in (*streams, reader):  # copies run as early as they may
            stream.run_to(len(stream.work))
        wanted = [0, 0, 1, 1, 2, 2, 3, 3]
        assert [tensor.unique().item() for tensor in read] == [*wanted, *reversed(wanted)]
        # What was prefetched is not taken after an update.
        copies.prefetch(blocks[0])
        for shard in blocks[0]:
            update = Future()
            shard.update_with(update)
            update.set_result(shard.weights.fill_(7.0))
        copies.show(blocks[0], torch.cuda.current_stream())
        assert [shard.parameter.data.unique().item() for shard in blocks[0]] == [7, 7]
        copies.hide(blocks[0], reader)
        # BMTrain adds a gradient to the one before, which may still be on its way.
        for block in (*blocks[1:], *blocks[1:], blocks[3]):
            copies.bring_gradients(block)
            for shard in block:
                before, shard.parameter.grad = shard.parameter.grad, torch.zeros_like(shard.weights)
                total = shard.order + (0 if before is None else before[0].item())
                reader.add(lambda made=shard.parameter.grad, total=total: made.fill_(total))
            copies.send_gradients(block, reader)
        for block in blocks[1:]:
            for shard in block:
                shard.wait_for_gradient()
                assert shard.parameter.grad.unique().item() == shard.order * (3 if block is blocks[3] else 2)
        # An update waits for the gradient.
        copies.bring_gradients(blocks[0])
        for shard in blocks[0]:
            shard.parameter.grad = torch.zeros_like(shard.weights)
            reader.add(lambda made=shard.parameter.grad: made.fill_(2.0))
        copies.send_gradients(blocks[0], reader)
        parts = states.part_of_all(len(shard.weights), "")
        state = states.initial_state(shard.weights, shard.weights.device, "float32", parts, with_weights=True)
        given = {"weights": shard.weights, "parts": parts, "rates": Rates(1.0, (0.5, 0.5), 0.0, 0.0), "scale": 2.0}
        late = lazy.updates.LateUpdates()
        late.start([ShardUpdate(shard=shard, gradient=shard.parameter.grad, state=state, **given)])
        shard.settle()
        assert state["exp_avg"].unique().item() == 0.5
        assert shard.weights.unique().item() == 6.0


@on_program(2)
def test_an_input_without_gradient_is_no_exception():
    from bmburst.blocks.streamed import StreamedBlock

    found = []
    for streams in (False, True):
        copies, memory, sizes = (
            ShardCopies(),
            lazy.GatherMemory(),
            [(4, 6), (6, 4), (4, 4)],
        )  # buffers of different sizes
        linears = [lazy.Linear(a, b, dtype=torch.float32) for a, b in sizes]
        blocks = [
            StreamedBlock(each, copies, number, memory) if streams else lazy.bmt.Block(each, use_checkpoint=False)
            for number, each in enumerate(linears)
        ]
        model = lazy.bmt.TransformerBlockList(blocks)
        for shard in lazy.named_shards(model):
            shard.local().copy_(torch.linspace(-1, 1, shard.count))
        for _ in range(2):
            model(torch.ones(3, 4)).square().sum().backward()
        found.append([lazy.gather(shard, lazy.gradient_of(shard)) for shard in lazy.named_shards(model)])
    for ours, wanted in zip(found[1], found[0], strict=True):
        assert wanted.abs().sum() > 0
        assert torch.equal(ours, wanted)


@on_program(1)
def test_halves_are_the_master_but_for_ties():
    low = torch.arange(1 << 16, dtype=torch.int32)
    for high in (*range(0, 1 << 16, 251), 0x7F7F, 0x7F80, 0xFF80, 0x0000, 0x8000, 0x3F80, 0x3F81):
        bits = (high - (1 << 16) if high > 0x7FFF else high) * (1 << 16) + low
        master = bits.view(torch.float32)
        if master.isnan().all():
            continue
        weights, remainder = torch.empty(1 << 16, dtype=torch.bfloat16), torch.empty(1 << 16, dtype=torch.int16)
        split(master, weights, remainder)
        nan = master.isnan()
        assert torch.equal(weights[~nan], master.bfloat16()[~nan])
        found = joined(weights, remainder)
        assert torch.equal(found.isnan(), nan)
        off = (found.view(torch.int32) - bits)[~nan]
        is_tie = (low == 1 << 15)[~nan] & (weights.view(torch.int16) == high - (1 << 16 if high > 0x7FFF else 0))[~nan]
        assert torch.equal(off, -is_tie.to(torch.int32))


@on_program(2)
def test_weights_that_nobody_has_written_are_not_copied():
    memory = HostMemory(lambda size, device: host_block(size, device).fill_(5))
    model = lazy.Llama(program.SHAPE, offload_weights=True, host_memory=memory, seed=None)
    for layer in model.model.layers:
        assert all((each.weights.view(torch.uint8) == 5).all() for each in layer._shards)
    drawn = lazy.Llama(program.SHAPE, offload_weights=True, seed=0)
    assert all(shard.local().abs().sum() > 0 for shard in lazy.named_shards(drawn) if shard.count)


@on_program(2)
def test_weights_go_to_host_memory_in_their_own_dtype(tmp_path):
    """A copy from a GPU that converts does so on the host, in new memory for each matrix."""
    made = trainer(tmp_path, "run", True, "bfloat16")
    for shard in lazy.named_shards(made.model):
        if shard.count:
            with FromElsewhere() as seen:
                lazy.scatter(shard, torch.empty(shard.shape, dtype=torch.float32, device="meta"))
            assert seen.copies == [(shard.count, torch.bfloat16, torch.bfloat16)]


@on_program(2)
def test_memory_and_state_are_prepared_while_other_work_goes_on(tmp_path):
    memory = HostMemory()
    model = lazy.Llama(program.SHAPE, offload_weights=True, host_memory=memory)
    shards = [each for layer in model.model.layers for each in layer._shards]
    assert memory.nbytes == 2 * sum(each.weights.nbytes for each in shards)  # weights and gradients, no more
    tokens = torch.arange(24).view(1, -1)
    for _ in range(2):
        model.loss(tokens, tokens, tokens).backward()
    assert memory.nbytes == 2 * sum(each.weights.nbytes for each in shards)
    addresses = {tensor.data_ptr() for each in shards for tensor in (each.weights, each.parameter.grad)}
    assert len(addresses) == 2 * len(shards)
    # The state that is prepared is the one that a step makes.
    ready, other = (trainer(tmp_path, f"run-{number}", True, "bfloat16") for number in range(2))
    order = []
    ready.optimizer.prepare(after=lambda: order.append("memory"))
    prepared = {id(future.result()[lazy.updates.MEAN]) for future in ready.optimizer._coming.values()}
    assert order == ["memory"]
    assert steps(ready, 2) == steps(other, 2)
    require_equal(held(ready), held(other))
    assert {id(state[lazy.updates.MEAN]) for state in ready.optimizer.state.values()} == prepared
    ready.optimizer.prepare()  # nothing is missing
    lazy.AdamW(torch.nn.Linear(2, 2).parameters()).prepare()  # nothing is in host memory
