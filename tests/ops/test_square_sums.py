"""Sums of squares of many tensors against fp64: the Triton kernels, in the interpreter or on a GPU, and torch's."""

import pytest
import torch

from bmburst_ops import square_sums, triton_square_sums

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kernel", ["torch", "triton"])
def test_each_tensor_alone(kernel, dtype, monkeypatch):
    """Pieces of one storage begin anywhere and may be empty; their neighbours are NaN."""
    monkeypatch.setattr(triton_square_sums, "_CHUNK", 256)
    monkeypatch.setattr(triton_square_sums, "_BLOCK", 128)
    monkeypatch.setattr(triton_square_sums, "_PARTIALS", 2)
    monkeypatch.setattr(square_sums, "triton_twin", lambda *_: triton_square_sums if kernel == "triton" else None)
    sizes = (1, 0, 7, 256, 255, 8, 1024, 3001, 0, 2)
    storage = torch.full((sum(sizes) + 2 * len(sizes),), torch.nan, dtype=dtype, device=DEVICE)
    tensors, at = [], 1
    generator = torch.Generator().manual_seed(1)
    for size in sizes:
        tensors.append(storage[at : at + size])
        tensors[-1].copy_(torch.randn(size, generator=generator))
        at += size + 2
    found = square_sums.square_sums(tensors)
    wanted = torch.stack([each.double().square().sum() for each in tensors])
    assert found.dtype == torch.float64 and found.device == storage.device
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    assert torch.equal(square_sums.square_sums(tensors), found)
    tensors[7][17] = torch.inf
    assert square_sums.square_sums(tensors).isfinite().tolist() == [number != 7 for number in range(len(sizes))]


def test_fp64_and_mixed_tensors():
    tensors = [torch.full((3,), 1e200, dtype=torch.float64), torch.ones(5, dtype=torch.bfloat16)]
    with_small = square_sums.square_sums([tensors[0] * 1e-100, tensors[1]])
    torch.testing.assert_close(with_small, torch.tensor([3e200, 5.0], dtype=torch.float64))
