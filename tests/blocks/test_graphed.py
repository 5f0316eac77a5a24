"""Blocks whose parts run as CUDA graphs, against the same blocks without graphs; GPUs are in tests/gpu.

There is no graph on a CPU. What stands in for one runs its work again at each replay, and writes the results to where
the capture has left them: a part that reads anything but its fixed memory has other numbers.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import bmburst
from bmburst.blocks.config import LoRAConfig
from bmburst.errors import UserError
from bmburst.mesh import Mesh
from tests import lazy, tiny
from tests.distributed.programs import on_program, run_program

TOKENS, LAYERS = 37, 3
CONFIG = tiny.config(num_layers=LAYERS)
MODELS = {
    "llama": (CONFIG, {}),
    "qwen2": (replace(CONFIG, qkv_bias=True), {}),
    "qwen3": (replace(CONFIG, qk_norm=True), {"zero_level": 2}),
    "minicpm": (replace(CONFIG, num_kv_heads=4, **tiny.MINICPM), {}),
    "lora": (CONFIG, {"lora": LoRAConfig(rank=4, targets=("q_proj", "down_proj"))}),
}
OF_RANKS = {1: MODELS, 2: ("llama", "lora"), 3: ("qwen3",)}
MUCH = 1 << 40


class Replay:
    """Of a graph that its replay writes the results of some work to where they were."""

    def __init__(self, work, results):
        self.work, self.results, self.count = work, results, 0

    def replay(self):
        self.count += 1
        if self.count == 1:  # the capture has run the work, on the same inputs
            return
        for place, tensor in zip(self.results, self.work(), strict=True):
            if place is not None:
                place.data.copy_(tensor)


def graphs_of(model, *, free=MUCH):
    """Give a model graphs on a CPU with some free memory; return the replays, which are listed when they are made."""
    from bmburst.blocks.graphed import BlockGraphs

    made = []

    class Graphs(BlockGraphs):
        def record(self, work):
            results = work()
            made.append(Replay(work, [None if each is None else each.detach() for each in results]))
            return made[-1], results

    cuda = SimpleNamespace(
        memory_allocated=lambda: 0,
        memory_reserved=lambda: 0,
        mem_get_info=lambda: (free, MUCH),
        get_per_process_memory_fraction=lambda: 1.0,
        get_allocator_backend=lambda: "native",
        empty_cache=lambda: None,
        Stream=object,
        MemPool=object,
    )
    model.graphs = Graphs(model.model.gather_memory, cuda)
    return made


def loss_of(model, number, *, tokens=TOKENS):
    """Return the loss of a batch, which depends on a number."""
    generator = torch.Generator().manual_seed(number)
    ids, labels = (torch.randint(CONFIG.vocab_size, (2, tokens), generator=generator) for _ in range(2))
    positions = torch.arange(tokens).expand(2, tokens)
    group = Mesh.over_bmtrain().sequence
    parts = [
        bmburst.shard(each, group=group, pad_value=pad) for each, pad in ((ids, 0), (positions, 0), (labels, -100))
    ]
    return model.loss(*parts, tokens)


def gradients_of(model):
    """Return the shards of all gradients, and clear them."""
    torch.cuda.current_stream().wait_stream(lazy.bmt.config["load_stream"])
    found = {}
    for shard in lazy.named_shards(model):
        if shard.parameter.requires_grad:
            if shard.parameter.grad is not None:
                found[shard.name] = shard.parameter.grad.clone()
            shard.parameter.grad = shard.storage.grad = None
    return found


def made(name="llama", **options):
    config, chosen = MODELS[name]
    model = lazy.Llama(config, seed=1, **chosen, **options)
    if name == "lora":  # B is zero: A would have no gradient
        for shard in lazy.named_shards(model):
            if shard.name.endswith("lora_B") and shard.count:
                shard.local().copy_(torch.linspace(-1, 1, shard.count))
    return model


def passes(model, numbers, **options):
    """Return losses and gradients of batches, each with its own backward pass."""
    found = []
    for number in numbers:
        loss = loss_of(model, number, **options)
        loss.backward()
        found.append((loss.item(), gradients_of(model)))
    return found


def same(found, wanted):
    """Whether losses and gradients are equal to the bit, and there are any."""
    for (loss, gradients), (other, others) in zip(found, wanted, strict=True):
        assert loss == other and gradients.keys() == others.keys()
        for name, gradient in gradients.items():
            assert torch.equal(gradient, others[name]), name
            assert gradient.abs().sum() > 0 or not gradient.numel(), name


@pytest.mark.parametrize("size", OF_RANKS)
def test_graphs_change_no_bit(size):
    run_program(size, _graphs_change_no_bit, size)


def _graphs_change_no_bit(size):
    for name in OF_RANKS[size]:
        wanted = passes(made(name), range(6))
        model = made(name)
        graphs = graphs_of(model)
        same(passes(model, range(6)), wanted)
        assert [each.count for each in graphs] == [4] * 4 * LAYERS, name
    if size == 1:  # what follows has nothing to do with other ranks, but for the micro-batches
        _other_shapes_have_no_graph()
        _two_passes_in_flight()
        _a_pass_without_backward()
        _gradients_elsewhere()
        _weights_elsewhere()
        _evaluation_between_steps()
    _micro_batches()


def _micro_batches():
    """Weights stay gathered from one micro-batch to the next, and gradients are summed."""

    def step(model, numbers):
        with model.model.gather_memory.unchanged():
            losses = []
            for number in numbers:
                loss = loss_of(model, number)
                loss.backward()
                losses.append(loss.item())
        return sum(losses), gradients_of(model)

    steps = [range(3), range(3, 5), range(5, 8)]
    wanted, model = [step(made(), numbers) for numbers in steps], made()
    graphs = graphs_of(model)
    same([step(model, numbers) for numbers in steps], wanted)
    assert {each.count for each in graphs} == {6}


def _other_shapes_have_no_graph():
    model, reference = made(), made()
    graphs = graphs_of(model)
    passes(model, range(3))
    same(passes(model, [7], tokens=29), passes(reference, [7], tokens=29))
    same(passes(model, [8]), passes(reference, [8]))
    assert {each.count for each in graphs} == {2}


def _two_passes_in_flight():
    """The second forward pass must not overwrite the activations of the first, and autograd adds their gradients.

    In one backward pass the memory of gradients is taken by the second one, so that the first has no graph of its own.
    """
    for together in (False, True):
        found = []
        for has_graphs in (False, True):
            model = made()
            graphs = graphs_of(model) if has_graphs else []
            passes(model, range(3))
            first, second = loss_of(model, 3), loss_of(model, 4)
            if together:
                (first + second).backward()
            else:
                first.backward()
                second.backward()
            found.append((first.item() + second.item(), gradients_of(model)))
            assert not has_graphs or {each.count for each in graphs} == ({1, 2} if together else {2})
        same(found[1:], found[:1])


def _a_pass_without_backward():
    model, reference = made(), made()
    graphs = graphs_of(model)
    passes(model, range(3))
    for number in (3, 4):
        loss_of(model, number)
    same(passes(model, [5]), passes(reference, [5]))
    assert {each.count for each in graphs} == {2, 4}


def _gradients_elsewhere():
    """A part whose gradients have other memory than at capture computes its backward pass without its graph."""
    model, reference = made(), made()
    graphs = graphs_of(model)
    passes(model, range(3))
    loss = loss_of(model, 3)
    model.model.gather_memory._gradients.clear()
    kept = [torch.empty(1 << 16) for _ in range(8)]  # so that they cannot be where they were
    loss.backward()
    del kept
    same([(loss.item(), gradients_of(model))], passes(reference, [3]))
    assert {each.count for each in graphs} == {1, 2}


def _weights_elsewhere():
    """A part whose weights are gathered to other memory in backward than at capture does not read the old memory."""
    model, reference = made(), made()
    graphs, memory = graphs_of(model), model.model.gather_memory
    passes(model, range(3))
    loss = loss_of(model, 3)
    memory._forget()
    memory._slots.reverse()
    loss.backward()
    same([(loss.item(), gradients_of(model))], passes(reference, [3]))
    assert {each.count for each in graphs} == {1, 2}


def _evaluation_between_steps():
    """It gathers an odd number of blocks, without gradients, and has no graph."""
    model, reference = made(), made()
    graphs = graphs_of(model)
    for number in range(4):
        with torch.no_grad():
            assert loss_of(model, 9).item() == loss_of(reference, 9).item()
        same(passes(model, [number]), passes(reference, [number]))
    assert {each.count for each in graphs} == {2}


@on_program(1)
def test_hooks_and_autocast_are_not_passed_over():
    model, reference = made(), made()
    graphs = graphs_of(model)
    passes(model, range(3))
    seen = []
    for each in (model, reference):
        attention = each.model.layers["1"].self_attn
        attention.o_proj.register_forward_hook(lambda _module, _given, out: seen.append(out.sum().item()))
        attention.register_forward_hook(lambda _module, _given, out: 2 * out)
    same(passes(model, [3]), passes(reference, [3]))
    assert len(seen) == 2 and seen[0] == seen[1]
    assert {each.count for each in graphs} == {1, 2}  # the block before has its graphs of forward
    for each in (model, reference):
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="bfloat16"):
            loss_of(each, 4)


@on_program(1)
def test_one_pass_captures_all_parts():
    """The memory of activations is used again in backward: by a part that is captured later, and by others at once."""
    model, reference = made(), made()
    graphs = graphs_of(model)
    hook = model.model.layers["1"].self_attn.o_proj.register_forward_hook(lambda *_: None)
    passes(model, range(3))
    count = len(graphs)
    hook.remove()
    same(passes(model, range(3, 5)), passes(reference, range(3, 5)))
    assert len(graphs) == count < 4 * LAYERS


@on_program(1)
def test_without_room_there_are_no_graphs():
    model = made()
    graphs = graphs_of(model, free=(1 << 30) - 1)
    assert model.model.gather_memory.stays
    same(passes(model, range(4)), passes(made(), range(4)))
    assert not graphs and not model.model.gather_memory.stays


@on_program(1)
def test_steps_need_the_memory_that_they_had_without_graphs():
    """What the loss needs, for example: the allocator has it in its cache until then."""
    for more, has_graphs in ((0, True), (1, False)):
        model = made()
        graphs = graphs_of(model, free=(3 << 30) - more)
        model.graphs._cuda.memory_reserved = lambda: 2 << 30
        passes(model, range(3))
        assert bool(graphs) is has_graphs


@on_program(1)
def test_memory_that_a_pass_does_not_keep_is_not_counted():
    """States of the optimizer, which are allocated after the first pass, before an evaluation."""
    model, allocated = made(), [0]
    graphs, cuda = graphs_of(model, free=(1 << 30) + 2), model.graphs._cuda
    cuda.memory_allocated = cuda.memory_reserved = lambda: allocated[0]
    passes(model, [0])
    allocated[0] = 1 << 30
    with torch.no_grad():
        loss_of(model, 1)
    passes(model, range(1, 4))
    assert graphs


@on_program(1)
def test_a_backward_pass_whose_activations_are_gone_is_refused():
    model = made()
    graphs_of(model)
    passes(model, range(3))
    loss = loss_of(model, 3)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"(?s)second time.*fix: "):
        loss.backward()


@on_program(1)
def test_what_cannot_have_graphs_is_refused():
    for options in ({"recompute": "block"}, {"offload_weights": True}):
        with pytest.raises(UserError, match=r"(?s)block_graphs.*fix: "):
            lazy.Llama(CONFIG, block_graphs=True, **options)
