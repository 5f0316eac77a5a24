"""AdamW over ZeRO's shards is torch's AdamW over whole tensors, with weight decay on matrices only."""

from dataclasses import replace
from functools import partial
from importlib import import_module

import pytest
import torch

from bmburst.blocks.kinds import MATRICES, apart
from bmburst.mesh import Mesh
from bmburst.train.config import OptimizerConfig
from tests import lazy, tiny
from tests.distributed.programs import on_program
from tests.refusals import refused
from tests.train.run_program import SHAPE


@on_program(2)
def test_equals_torch():
    from bmburst.optim.norms import GradientNorms

    # Tied: as many storages decay as do not, each of another size.
    untied, with_biases = tiny.config("qwen2", vocab_size=53), ("attention", "norms", "head")
    for config, decayed in ((SHAPE, MATRICES), (replace(SHAPE, tie_embeddings=True), MATRICES), (untied, with_biases)):
        # An eps that is felt: without it Adam cancels a wrong scale of the gradient.
        model = lazy.Llama(config, seed=1, kept_apart=apart(decayed, plus=False))
        shards = lazy.named_shards(model)
        rates = OptimizerConfig(lr=0.02, beta2=0.95, eps=0.1, weight_decay=0.5, weight_decay_on=decayed)
        optimizer, norms = lazy.build_optimizer(model, rates), GradientNorms(model)
        whole = {shard.name: torch.nn.Parameter(lazy.gather(shard)) for shard in shards}
        places = {"embed": "embeddings", "self_attn": "attention", "mlp": "mlp", "lm_head": "head"}
        kinds = {
            name: next(kind for word, kind in places.items() if word in name)
            if p.dim() > 1
            else ("biases" if name.endswith("bias") else "norms")
            for name, p in whole.items()
        }
        groups = [
            {"params": [p for name, p in whole.items() if kinds[name] == kind], "weight_decay": 0.5 * (kind in decayed)}
            for kind in dict.fromkeys(kinds.values())
        ]
        expected = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95), eps=0.1)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for shard in shards:
                gradient = torch.randn(shard.shape, generator=generator)
                whole[shard.name].grad = gradient
                if shard.storage.grad is None:
                    shard.storage.grad = torch.zeros_like(shard.storage)
            expected.step()
            assert optimizer.step(partial(_give, shards, whole), scale=4) == 7.0
        for shard in shards:
            torch.testing.assert_close(lazy.gather(shard), whole[shard.name].detach())
        sums = norms.square_sums(torch.device("cpu"))
        _require_norms(norms.kinds, sums, whole, kinds)


def _require_norms(names, sums, whole, kinds):
    """Check sums of squares of all ranks by kind; gradients were given times 4."""
    (total,) = Mesh.over_bmtrain().world.all_reduce(sums).wait()
    assert {*names} == {*kinds.values()}
    for kind, found in zip(names, total.tolist(), strict=True):
        wanted = sum(p.grad.double().square().sum().item() for name, p in whole.items() if kinds[name] == kind)
        assert found == pytest.approx(16 * wanted, rel=1e-6), kind


@on_program(1)
def test_bf16_weights_take_the_fused_kernel_or_bmtrains():
    """Under BMTrain's OptimManager, with a loss scale; either goes on with the state that the other left."""
    asked = []

    def twin(name, *tensors):
        asked.append(name)
        return import_module(f"bmburst_ops.{name}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lazy.optim, "triton_twin", twin)
        made = {kernel: _managed(lazy.bmt, lazy.optim, kernel) for kernel in lazy.optim.KERNELS}
        for step in range(4):
            for kernel, (optimizer, manager, parameters) in made.items():
                asked.clear()
                generator = torch.Generator().manual_seed(step)
                for parameter in parameters[:-1]:
                    parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                manager.step()
                assert asked == (["triton_elementwise"] if kernel == "auto" else [])
                assert parameters[-1] not in optimizer.state
            _assert_alike(*(optimizer for optimizer, *_ in made.values()))
            if step == 1:
                states = [optimizer.state_dict() for optimizer, *_ in made.values()]
                for (optimizer, *_), state in zip(made.values(), reversed(states), strict=True):
                    optimizer.load_state_dict(state)
        for optimizer, _, parameters in made.values():
            assert [optimizer.state[p]["step"] for p in parameters[:-1]] == [4, 4, 4]
    with refused("optimizer kernel", "'triton'"):
        lazy.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], kernel="triton")


@on_program(1)
def test_gradients_are_clipped_and_scaled_in_fp32():
    """On a GPU's paths and in host memory. A factor in 16 bits would leave few digits of a gradient."""
    scale, most = 4.0, 2e-4
    rates = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.5}
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        start = torch.randn(1025, generator=torch.Generator().manual_seed(3)).to(dtype)
        exact = torch.nn.Parameter(start.double())
        reference = torch.optim.AdamW([exact], **rates)
        made = {}
        for name in ("torch", "triton", "host"):
            parameter = torch.nn.Parameter(start.clone())
            made[name] = parameter, lazy.optim.AdamW([parameter], **rates, offload=name == "host")
        for step in range(4):
            gradient = torch.randn(1025, generator=torch.Generator().manual_seed(step)).div(256).to(dtype)
            norm = gradient.double().norm().item() / scale
            exact.grad = gradient.double() / scale * (most / (norm + 1e-6) if step != 2 else 1)
            reference.step()
            for name, (parameter, optimizer) in made.items():
                parameter.grad = gradient.clone()
                with pytest.MonkeyPatch.context() as patch:
                    if name == "triton":
                        patch.setattr(lazy.optim, "triton_twin", lambda name, *_: import_module(f"bmburst_ops.{name}"))
                    optimizer.clip(norm, most if step != 2 else 2 * norm)
                    optimizer.step(scale=scale)
                    optimizer.zero_grad()
                state = optimizer.state[parameter]
                for key in ("exp_avg", "exp_avg_sq"):
                    wanted = reference.state[exact][key]
                    assert ((state[key].double() - wanted).norm() / wanted.norm()).item() < 1e-6, (name, dtype, key)
                master = state.get("_param_fp32", parameter.detach())
                torch.testing.assert_close(master.double(), exact.detach(), rtol=1e-6, atol=1e-6)
                assert ((parameter - master).abs() <= torch.finfo(dtype).eps * parameter.abs()).all()


@on_program(1)
def test_a_scale_that_grows_too_far_leaves_the_moments_finite():
    """Which BMTrain's own kernel does not: why training refuses it for fp16 weights."""
    for kernel, is_finite in (("auto", True), ("bmtrain", False)):
        parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
        manager = lazy.bmt.optim.OptimManager(loss_scale=8.0, loss_scale_steps=3)
        manager.add_optimizer(lazy.AdamW([parameter], lr=1e-3, betas=(0.1, 0.9), kernel=kernel))
        for _ in range(5):
            parameter.grad = torch.full_like(parameter, 5000).mul_(manager.loss_scale)
            manager.step()
        assert bool(parameter.isfinite().all()) is is_finite, kernel


def _managed(bmt, optim, kernel):
    """Return an optimizer over weights of three kinds, BMTrain's manager around it, and the weights."""
    generator = torch.Generator().manual_seed(9)
    sizes = ((1025, torch.bfloat16), (3, torch.bfloat16), (5, torch.float32), (7, torch.bfloat16))
    parameters = [torch.nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n, dtype in sizes]
    narrow, wide = [p for p in parameters if p.dtype != torch.float32], [parameters[2]]
    groups = [{"params": narrow, "weight_decay": 0.5}, {"params": wide}]
    optimizer = optim.AdamW(groups, lr=0.02, betas=(0.9, 0.999), eps=1e-3, kernel=kernel)
    manager = bmt.optim.OptimManager(loss_scale=8)
    manager.add_optimizer(optimizer)
    return optimizer, manager, parameters


def _assert_alike(ours, theirs):
    lists = ([p for group in each.param_groups for p in group["params"]] for each in (ours, theirs))
    pairs = zip(*lists, strict=True)
    for p, like in (pair for pair in pairs if pair[0] in ours.state):
        assert ours.state[p].keys() == theirs.state[like].keys()
        torch.testing.assert_close(p.float(), like.float(), rtol=2**-7, atol=0)  # the interpreter cuts bf16 off
        for name, value in ours.state[p].items():
            torch.testing.assert_close(value, theirs.state[like][name], rtol=1e-6, atol=1e-7)


def _give(shards, whole):
    """Stands for the closure that computes gradients: they must be there before the first parameter is updated."""
    assert torch.is_grad_enabled()
    for shard in shards:
        lazy.scatter(shard, 4 * whole[shard.name].grad, shard.storage.grad)
    return 7.0
