"""On real GPUs: each recompute policy gives the same gradients, takes the memory of its formula, and copies aside."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import bmburst
from bmburst.blocks.config import mlp_chunk
from bmburst.blocks.presets import PRESETS
from bmburst.mesh import Mesh
from bmburst.plan.candidates import Candidate, Task
from bmburst.plan.memory import memory_of
from bmburst.recompute import checkpoint
from bmburst.recompute.host_store import HostStore
from bmburst.recompute.policy import POLICIES, Policy
from bmburst.schedule.hardware import load_hardware
from bmburst_ops.gated_mlp import gated_mlp
from tests import lazy, tiny
from tests.distributed.programs import on_program
from tests.gpu.over_gpus import GPUS, NEEDS_FA4

pytestmark = pytest.mark.gpu
LONG = 200_000_000  # cycles that a stream sleeps: 0.1 s, where a copy takes less than a millisecond
TRIED = [*POLICIES, "block-keep-attention+first-2", "block-keep-attention+offload+first-2", "block+first-3"]
SMALL = tiny.config(
    vocab_size=512,
    hidden_size=512,
    intermediate_size=1408,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    max_position_embeddings=1 << 20,
)


@pytest.mark.parametrize("size", range(1, min(GPUS, 2) + 1))
@on_program(on_gpus=True, seconds=300)
def test_every_policy_has_the_same_gradients(size):
    """Offload changes no bit of what its policy gives without; policies differ by the rounding of bf16."""
    tokens = 4001
    mesh, model = make(SMALL, kernel="torch", deterministic=True)
    shard = bmburst.SequenceShard.cut(tokens, layout="zigzag", size=mesh.shape.sequence, rank=mesh.sequence_rank)
    found = {}
    for policy in TRIED:
        use(model, policy, chunk=700)
        found[policy] = [gradients(model, shard, tokens) for _ in range(2)]
    for policy, (first, again) in found.items():
        plain = found[policy.replace("+offload-all", "").replace("+offload", "")][0]
        repeats = [name for name in first if torch.equal(first[name], again[name])]
        assert len(repeats) > len(first) / 2, policy
        assert all(torch.equal(first[name], plain[name]) for name in repeats), policy
        for name, wanted in found["none"][0].items():
            if wanted.numel():
                error = (first[name].double() - wanted.double()).norm() / wanted.double().norm()
                assert error < 2e-2, (policy, name, error.item())


@NEEDS_FA4  # backward of cuDNN takes 2 GiB more
@on_program(1, on_gpus=True, seconds=600)
def test_peaks_are_those_of_the_formulas():
    """Four layers of llama-3-8b at 64K tokens: `torch.cuda.max_memory_allocated` within 5 %, and what moves is used."""
    tokens = 65536
    config = replace(PRESETS["llama-3-8b"], num_layers=4, vocab_size=32000, max_position_embeddings=tokens)
    _, model = make(config)
    optimizer = lazy.AdamW(list({id(s.storage): s.storage for s in lazy.named_shards(model)}.values()), lr=1e-5)
    manager = lazy.bmt.optim.OptimManager(loss_scale=None)
    manager.add_optimizer(optimizer)
    ids = torch.randint(32000, (1, tokens + 1)).cuda()
    positions = torch.arange(tokens, device="cuda")[None]
    task = Task(model=config, sequence=tokens, gpus=1)

    def step():
        manager.backward(model.loss(ids[:, :-1], positions, ids[:, 1:]) / tokens)
        manager.step()
        manager.zero_grad()

    wrong = []
    for policy in TRIED:
        use(model, policy)
        for _ in range(2):
            step()
        store = model.model.layers[0]._module.store
        taken = store.nbytes
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        way = Candidate(task=task, recompute=policy)
        predicted = memory_of(way, load_hardware("h200"))
        measured = torch.cuda.max_memory_allocated()
        error = predicted.allocated / measured - 1
        hosted = predicted.host.get("what blocks keep", 0.0)
        print(  # noqa: T201
            f"{policy:40} {measured / 2**30:7.2f} GiB, predicted {predicted.allocated / 2**30:7.2f} at "
            f"{predicted.moment}: {error:+.1%}; host {taken / 2**30:.2f}, predicted {hosted / 2**30:.2f}",
            flush=True,
        )
        assert store.nbytes == taken, "a step after the first takes no new memory of the host"
        if abs(error) > 0.05:
            wrong.append((policy, f"{error:+.1%}", predicted.moment))
    assert not wrong


def make(config, dtype=torch.bfloat16, **options):
    mesh = Mesh.over_bmtrain()
    return mesh, lazy.Llama(config, attention=partial(lazy.BurstAttention, group=mesh.sequence, **options), dtype=dtype)


def use(model, policy, chunk=None):
    """Let the same model train under another policy."""
    layers = model.model.layers
    for layer, own in zip(layers, Policy.parse(policy).of_layers(len(layers)), strict=True):
        block = layer._module
        block.recompute = own
        block.mlp.chunk = partial(mlp_chunk, wanted=chunk, recomputes=block.recompute.recomputes)


def gradients(model, shard, tokens):
    ids = torch.randint(512, (1, tokens), generator=torch.Generator().manual_seed(2)).cuda()
    batch = shard.batch(ids)
    for each in lazy.named_shards(model):
        each.parameter.grad = each.storage.grad = None
    losses = [model.loss(batch.tokens, batch.positions, batch.labels, tokens) for _ in range(2)]  # two in flight
    (losses[0] + 2 * losses[1]).backward()
    torch.cuda.current_stream().synchronize()
    torch.cuda.synchronize()
    return {s.name: s.storage.grad.clone() for s in lazy.named_shards(model)}


class Chain:
    """Blocks that each keep their input in host memory; `late` makes every copy late."""

    def __init__(self, layers=6, late=False):
        generator = torch.Generator("cuda").manual_seed(0)
        self.weights = [torch.randn(256, 256, device="cuda", generator=generator) / 16 for _ in range(layers)]
        self.x = torch.randn(8192, 256, device="cuda", generator=generator).requires_grad_()
        self.store, self.late = HostStore(), late

    def step(self, policy):
        y = self.x * 1.0
        for weight in self.weights:
            if self.late:
                with torch.cuda.stream(self.store.side(self.x)):
                    torch.cuda._sleep(LONG // 10)
            y = checkpoint(policy, self.block, y, weight, store=self.store)
        return torch.autograd.grad(y.square().sum(), self.x)[0]

    def block(self, y, weight):
        if self.late:
            with torch.cuda.stream(self.store.side(self.x)):
                torch.cuda._sleep(LONG // 10)
        return y + torch.tanh(y @ weight)


@pytest.mark.parametrize("late", [False, True])
def test_copies_that_are_late_are_waited_for(late):
    chain = Chain(late=late)
    wanted = chain.step("block")
    for _ in range(3):
        got = chain.step("block+offload")
        torch.full((8192 * 4, 256), torch.nan, device="cuda")  # takes memory that was given back too early
        assert torch.equal(got, wanted)


def test_the_host_never_waits():
    """No copy blocks it and no memory is pinned anew, so that kernels are launched ahead of the copies."""
    chain = Chain()
    for _ in range(2):
        chain.step("block+offload")
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG * 20)
    done = torch.cuda.Event()
    done.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        chain.step("block+offload")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not done.query()
    torch.cuda.synchronize()


def test_device_memory_does_not_grow_with_blocks():
    peaks = []
    for layers in (4, 24):
        chain = Chain(layers)
        chain.step("block+offload")
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        chain.step("block+offload")
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del chain
    assert peaks[1] <= peaks[0] + chain_input()


def chain_input():
    """Bytes of a block's input, by which the allocator may be off."""
    return 8192 * 256 * 4


def test_an_mlp_in_chunks_takes_their_memory():
    """In bf16 by tensor cores: gradients as near to fp64 as a whole MLP's, and no tensor of all tokens as wide."""
    rows, features, width, chunk = 32768, 1024, 3584, 4096
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((rows, features), (width, features), (width, features), (features, width))
    tensors = [
        (torch.randn(s, device="cuda", generator=generator) / s[1] ** 0.5).bfloat16().requires_grad_() for s in shapes
    ]
    exact = [t.detach().double().requires_grad_() for t in tensors]
    grad = torch.randn(rows, features, device="cuda", generator=generator).bfloat16()
    linear = torch.nn.functional.linear
    whole = linear(torch.nn.functional.silu(linear(exact[0], exact[1])) * linear(exact[0], exact[2]), exact[3])
    wanted = torch.autograd.grad(whole, exact, grad.double())
    del whole

    def errors(chunk):
        found = torch.autograd.grad(gated_mlp(*tensors, chunk=chunk), tensors, grad)
        return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True)]

    for cut, uncut in zip(errors(chunk), errors(rows), strict=True):
        assert cut <= 1.05 * uncut < 0.02
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = gated_mlp(*tensors, chunk=chunk)
    forward = torch.cuda.max_memory_allocated() - before
    assert forward <= out.nbytes + 3.2 * chunk * width * 2
    torch.autograd.grad(out, tensors, grad)
    backward = torch.cuda.max_memory_allocated() - before
    sums, hidden = 3 * features * width * 4, rows * features * 2
    assert backward <= 2 * hidden + sums * 1.5 + 6.2 * chunk * width * 2
