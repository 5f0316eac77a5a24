"""Rotary embedding and cache write of new tokens: the Triton kernel, plain torch, and what `apply_rotary` gives."""

import pytest
import torch

from bmburst_ops import decode, triton_decode
from bmburst_ops.decode import append_rotated
from bmburst_ops.rotary import apply_rotary

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 8), (3, 1, 12), (2, 2, 128)])
def test_the_kernel_equals_plain_torch(monkeypatch, heads, kv_heads, head_dim, dtype):
    draws = torch.Generator().manual_seed(head_dim)
    batch, capacity, layers = 3, 7, 2
    joined = torch.randn(batch, (heads + 2 * kv_heads) * head_dim, generator=draws).to(dtype).to(DEVICE)
    sizes = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    q, k, v = (part.unflatten(-1, (-1, head_dim)) for part in joined.split(sizes, -1))
    angles = torch.randn(batch, head_dim // 2, generator=draws).to(DEVICE)
    rows = torch.tensor([0, 6, 3], device=DEVICE)
    caches = [
        torch.full((layers, 2, batch, capacity, kv_heads, head_dim), 5.0, dtype=dtype, device=DEVICE) for _ in "ab"
    ]
    results = []
    for cache, module in zip(caches, (None, "triton"), strict=True):
        monkeypatch.setattr(decode, "triton_twin", lambda *_, module=module: _twin(module))
        results.append(append_rotated(q, k, v, angles.cos(), angles.sin(), *cache[1], rows))
    plain, fused = results
    tables = angles.cos()[:, None], angles.sin()[:, None]
    assert torch.equal(plain, apply_rotary(q[:, None], *tables)[:, 0])
    torch.testing.assert_close(fused, plain, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)
    torch.testing.assert_close(caches[1], caches[0], rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)
    expected = torch.full_like(caches[0], 5.0)
    for sequence, row in enumerate(rows.tolist()):
        expected[1, 0, sequence, row] = apply_rotary(k[:, None], *tables)[sequence, 0]
        expected[1, 1, sequence, row] = v[sequence]
    assert torch.equal(caches[0], expected)


def _twin(module):
    return triton_decode if module else None
