"""On real GPUs: AdamW in host memory is AdamW on the GPU, and its copies wait for what they must and nothing else."""

from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests import lazy
from tests.distributed.programs import on_program, run_program
from tests.train import cases
from tests.train import test_offload as offload
from tests.train import test_offload_weights as weights

pytestmark = pytest.mark.gpu
SIZES = (1, 0, 4096, 4097, 300_001)
RATES = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.1}
SCALE = 8.0
LONG = 4_000_000_000  # cycles that the GPU sleeps: seconds, where a step takes milliseconds


@on_program(1, on_gpus=True)
def test_equals_the_resident_one():
    for dtype in (torch.float32, torch.bfloat16):
        (host, ours), (resident, wanted) = make(dtype, True), make(dtype, False)
        exact = [torch.nn.Parameter(p.detach().double()) for p in wanted]
        reference = torch.optim.AdamW(exact, **RATES)
        for step in range(4):
            give(wanted, step)
            for p, like, whole in zip(ours, wanted, exact, strict=True):
                p.grad, whole.grad = like.grad.clone(), like.grad.double() / SCALE
            host.step(scale=SCALE)
            resident.step(scale=SCALE)
            reference.step()
            for p, like, whole in zip(ours, wanted, exact, strict=True):
                check(host.state[p], p, resident.state[like], like, whole)
    check_order()
    check_no_wait()


@pytest.mark.parametrize("size", range(1, min(torch.cuda.device_count(), 2) + 1))
def test_trains_and_resumes(size, tmp_path):
    run_program(size, offload.trains_and_resumes, tmp_path, 1e-2, on_gpus=True, seconds=300)


@pytest.mark.parametrize("size", range(1, min(torch.cuda.device_count(), 2) + 1))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_in_host_memory_train_as_those_on_the_gpu(size, dtype, tmp_path):
    run_program(size, _weights_train_alike, tmp_path, dtype, "block+every-2+offload-first-1", on_gpus=True, seconds=300)


@pytest.mark.parametrize("size", range(1, min(torch.cuda.device_count(), 2) + 1))
@pytest.mark.parametrize(
    "policy",
    ["block-keep-attention+offload-first-2+offload-attention-first-1", "block-keep-attention+offload-mlp-first-2"],
)
def test_activations_in_host_memory_too(size, policy, tmp_path):
    run_program(size, _weights_train_alike, tmp_path, "bfloat16", policy, on_gpus=True, seconds=300)


def _weights_train_alike(folder, dtype, policy):
    resident, streamed = (
        weights.trainer(folder, f"run-{streams}", streams, dtype, recompute=policy) for streams in (False, True)
    )
    for _ in range(2):
        ours, wanted = (cases.steps(made, weights.STEPS // 2) for made in (streamed, resident))
        assert np.array(ours) == pytest.approx(np.array(wanted), rel=1e-3)
        assert streamed.evaluate().loss == pytest.approx(resident.evaluate().loss, rel=1e-3)
    assert not any(p.is_cuda for p in streamed.model.model.layers.parameters())
    ours, wanted = cases.held(streamed), cases.held(resident)
    assert ours.keys() == wanted.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor.cpu(), wanted[name].cpu(), rtol=1e-2, atol=1e-3)
    if lazy.bmt.world_size() == 1:  # over two GPUs attention's backward adds in any order
        assert [name for name, tensor in ours.items() if not torch.equal(tensor.cpu(), wanted[name].cpu())] == []


def make(dtype, is_offloaded, piece=4096):
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(size, generator=generator).to(dtype).cuda() for size in SIZES]
    parameters = [torch.nn.Parameter(w) for w in weights if len(w) or is_offloaded]
    with patch("bmburst.optim.adamw.HostAdam", side_effect=partial(lazy.HostAdam, piece=piece, depth=2)) as host:
        optimizer = lazy.AdamW(parameters, **RATES, offload=is_offloaded)
    assert host.called == is_offloaded
    return optimizer, [p for p in optimizer.param_groups[0]["params"] if len(p)]


def give(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = (SCALE * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype).cuda()


def check(state, parameter, other, like, exact):
    master, wanted = (s.get("_param_fp32", p.detach()).cpu() for s, p in ((state, parameter), (other, like)))
    assert all(value.device.type == "cpu" for value in state.values() if isinstance(value, torch.Tensor))
    assert state["step"] == other["step"]
    torch.testing.assert_close(master, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(master.double(), exact.detach().cpu(), rtol=2e-6, atol=2e-6)
    for name in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(state[name], other[name].cpu(), rtol=1e-5, atol=1e-7)
    assert torch.equal(parameter.detach().cpu(), master.to(parameter.dtype))


def check_order():
    """A gradient that is late is waited for, and what reads the weights, before the step or after, reads its own."""
    (host, ours), (again, expected) = make(torch.bfloat16, True), make(torch.bfloat16, True)
    for optimizer, parameters, cycles in ((again, expected, 0), (host, ours, 200_000_000)):
        for step in range(2):
            give(parameters, step)
            torch.cuda.synchronize()
            before = [p.detach().clone() for p in parameters]
            late = [torch.zeros_like(p) for p in parameters]
            given = [p.grad for p in parameters]
            for p, gradient in zip(parameters, late, strict=True):
                p.grad = gradient
            torch.cuda._sleep(cycles + 1)
            read = [p.detach() * 1 for p in parameters]
            for gradient, real in zip(late, given, strict=True):
                gradient.copy_(real)
            optimizer.step(scale=SCALE)
            after = [p.detach() * 1 for p in parameters]
            for gradient in late:
                gradient.zero_()  # as the trainer does at once
            torch.cuda.synchronize()
            assert all(torch.equal(*pair) for pair in zip(read, before, strict=True))
            assert all(torch.equal(one, p.detach()) for one, p in zip(after, parameters, strict=True))
    assert all(torch.equal(one, two) for one, two in zip(ours, expected, strict=True))


def check_no_wait():
    """From the second step on: no copy that blocks the host, no wait for the device, no memory of the GPU."""
    for dtype in (torch.float32, torch.bfloat16):
        host, ours = make(dtype, True)
        give(ours, 0)
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        host.step(scale=SCALE)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() == held
        give(ours, 1)
        torch.cuda.synchronize()
        busy, done = torch.cuda.Stream(), torch.cuda.Event()
        with torch.cuda.stream(busy):
            torch.cuda._sleep(LONG)
            done.record()
        torch.cuda.set_sync_debug_mode("error")
        try:
            host.step(scale=SCALE)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not done.query()
        torch.cuda.synchronize()
