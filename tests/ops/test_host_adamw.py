"""AdamW in host memory: the compiled kernel, its torch twin and the formula in fp64 agree."""

import pytest
import torch

from bmburst_ops import host_adamw
from bmburst_ops.errors import KernelError
from tests.pairs import pairwise
from tests.refusals import says

SCALE = 8.0
RATES = host_adamw.Rates(lr=0.02, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.5)
COUNTS = (0, 1, 31, 4099, host_adamw.PIECE + 17)


class Shard:
    """Weights of a dtype, with the state that its kind keeps."""

    def __init__(self, count, dtype, kind, generator):
        self.weights = torch.randn(count, generator=generator).to(dtype)
        self.moments = torch.zeros(count), torch.zeros(count)
        self.master = self.weights.float() if kind == "master" else None
        self.remainder = torch.zeros(count, dtype=torch.int16) if kind == "remainder" else None

    def step(self, gradient, step, kernel, scale=SCALE):
        kept = {"master": self.master, "remainder": self.remainder}
        options = {"step": step, "scale": scale, "kernel": kernel}
        host_adamw.adamw_(self.weights, gradient, self.moments, RATES, **options, **kept)

    def in_fp32(self):
        if self.remainder is not None:
            return host_adamw.joined(self.weights, self.remainder)
        return self.weights if self.master is None else self.master


CASES = [(torch.float32, "alone"), (torch.bfloat16, "master"), (torch.bfloat16, "remainder"), (torch.float16, "master")]


@pytest.mark.parametrize(("count", "dtype", "kind", "kernel"), pairwise(COUNTS, CASES, ["c", "torch"]))
def test_equals_torchs_in_fp64(count, dtype, kind, kernel):
    generator = torch.Generator().manual_seed(count)
    shard = Shard(count, dtype, kind, generator)
    exact = torch.nn.Parameter(shard.weights.double())
    reference = torch.optim.AdamW([exact], lr=0.02, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.5)
    for step in range(1, 5):
        scale = SCALE if step % 2 else SCALE / 0.37  # not a power of 2
        gradient = (SCALE * torch.randn(count, generator=generator)).to(dtype)
        before = gradient.clone()
        exact.grad = gradient.double() / scale
        reference.step()
        shard.step(gradient, step, kernel, scale)
        assert torch.equal(gradient, before)
        master = shard.in_fp32()
        torch.testing.assert_close(master.double(), exact.detach(), rtol=2e-6, atol=2e-6)
        for ours, name in zip(shard.moments, ("exp_avg", "exp_avg_sq"), strict=True):
            torch.testing.assert_close(ours.double(), reference.state[exact][name], rtol=2e-6, atol=2e-7)
        assert torch.equal(shard.weights, master.to(dtype))


def test_a_master_and_a_remainder_are_one_arithmetic():
    """To the last bit, but where a master lies between two weights; and whatever the number of threads."""
    found = {}
    for kind in ("master", "remainder"):
        for threads in (1, 2):
            generator = torch.Generator().manual_seed(5)
            shard = Shard(4099, torch.bfloat16, kind, generator)
            torch.set_num_threads(threads)
            for step in range(1, 9):
                shard.step(torch.randn(4099, generator=generator).bfloat16(), step, "c")
            found[kind, threads] = shard
    first = found["master", 1]
    for shard in found.values():
        assert torch.equal(shard.weights, first.weights)
        assert all(torch.equal(*pair) for pair in zip(shard.moments, first.moments, strict=True))
        assert (shard.in_fp32() - first.master).abs().max() <= 2**-23 * first.master.abs().max()


@pytest.mark.parametrize("kernel", ["c", "torch"])
def test_what_is_not_finite_stays_so(kernel):
    shard = Shard(3, torch.bfloat16, "remainder", torch.Generator().manual_seed(1))
    shard.step(torch.tensor([1.0, torch.nan, torch.inf]).bfloat16(), 1, kernel)
    assert shard.weights.isfinite().tolist() == [True, False, False]


def test_without_a_compiler_torch_does_it(monkeypatch):
    host_adamw._compiled.cache_clear()
    monkeypatch.setenv("PATH", "")
    shard = Shard(8, torch.bfloat16, "remainder", torch.Generator().manual_seed(1))
    before = shard.weights.clone()
    try:
        shard.step(torch.ones(8).bfloat16(), 1, "auto")
        with pytest.raises(KernelError) as error:
            shard.step(torch.ones(8).bfloat16(), 2, "c")
        says(error.value, "C compiler | fix: ")
    finally:
        host_adamw._compiled.cache_clear()
    assert not torch.equal(shard.weights, before)


def test_a_kernel_that_is_not_known_is_refused():
    shard = Shard(1, torch.float32, "alone", torch.Generator().manual_seed(1))
    with pytest.raises(KernelError) as error:
        shard.step(torch.ones(1), 1, "triton")
    says(error.value, "'triton' | auto, c, torch | fix: ")
