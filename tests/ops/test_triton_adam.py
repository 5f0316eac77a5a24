"""AdamW's fused kernel against torch's in fp64, and against BMTrain's formula: in Triton's interpreter, or on a GPU."""

import pytest
import torch

from bmburst.host.extension import adam_step
from bmburst_ops.triton_elementwise import adamw_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RATES = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.5}
SCALE = 8.0
UNIT = 2.0**-8 if DEVICE == "cuda" else 2.0**-7  # of bf16; the interpreter cuts it off instead of rounding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [0, 1, 1024, 4099])
def test_equals_torchs_in_fp64(count, dtype):
    generator = torch.Generator().manual_seed(count)
    weights = torch.randn(count, generator=generator).to(DEVICE, dtype)
    state = [weights.float(), torch.zeros(count, device=DEVICE), torch.zeros(count, device=DEVICE)]
    exact = torch.nn.Parameter(weights.double())
    reference = torch.optim.AdamW([exact], **RATES)
    for step in range(1, 5):
        lr = RATES["lr"] / step
        gradient = torch.randn(count, generator=generator).to(DEVICE, dtype)
        before, exact.grad = gradient.clone(), gradient.double() / SCALE
        reference.param_groups[0]["lr"] = lr
        reference.step()
        master, mean, square = state
        adamw_(master, weights, gradient, mean, square, **RATES | {"lr": lr}, step=step, scale=SCALE)
        assert torch.equal(gradient, before)
        torch.testing.assert_close(master.double(), exact.detach(), rtol=1e-6, atol=1e-6)
        for ours, name in ((mean, "exp_avg"), (square, "exp_avg_sq")):
            torch.testing.assert_close(ours.double(), reference.state[exact][name], rtol=1e-6, atol=1e-8)
        assert ((weights.float() - master).abs() <= UNIT * master.abs()).all()
        if DEVICE == "cuda":
            assert torch.equal(weights, master.to(dtype))


def test_equals_bmtrains_to_the_last_bits():
    """The same 1 - beta, which in fp32 is off by 1e-5 for 0.999: in one step the moments are BMTrain's own."""
    count, betas, generator = 3001, (0.9, 0.999), torch.Generator().manual_seed(7)
    numbers = torch.randn(4, count, generator=generator)
    gradient, tensors = numbers[0].bfloat16(), [numbers[1], numbers[2] / 8, numbers[3].square() / 8]
    theirs = [t.clone() for t in tensors]
    low = torch.empty(count, dtype=torch.bfloat16)
    rates = {"eps": 1e-8, "weight_decay": 0.1}
    adam_step(
        count, theirs[0].data_ptr(), low.data_ptr(), gradient.data_ptr(), theirs[1].data_ptr(), theirs[2].data_ptr(),
        betas, rates["eps"], 0.01, 2.0, rates["weight_decay"], (1 - 0.9**5, 1 - 0.999**5), dtype=torch.bfloat16,
    )  # fmt: skip
    ours = [t.to(DEVICE, copy=True) for t in tensors]
    weights = torch.empty(count, dtype=torch.bfloat16, device=DEVICE)
    adamw_(ours[0], weights, gradient.to(DEVICE), *ours[1:], lr=0.01, betas=betas, step=5, scale=2.0, **rates)
    for before, found, wanted in zip(tensors, ours, theirs, strict=True):
        largest = torch.maximum(before.abs(), wanted.abs())  # an update may be many times the weight
        assert ((found.cpu() - wanted).abs() <= 4 * 2.0**-23 * largest).all()
    assert ((weights.cpu().float() - low.float()).abs() <= 2.0**-7 * low.float().abs()).all()
