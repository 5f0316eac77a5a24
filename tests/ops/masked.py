"""A tile under any mask, with its definition in fp64."""

from functools import lru_cache

import torch

from bmburst_ops.flash import CAUSAL, FULL, BackwardInputs, Scoring
from bmburst_ops.merge import row_dots
from tests.attention.oracle import draw
from tests.ops.masks import attention, visible
from tests.ops.tiles import DEVICE, EPSILON, error


def gradient_bound(kernel):
    """Relative error of a gradient in bf16.

    Weights, dS and the result are rounded. Where a query sees a few keys, dO V^T and delta cancel almost or quite: what
    is left of a delta that went through 16 bits is the rounding.
    """
    return (2 if kernel.takes_delta else 4) * EPSILON[torch.bfloat16]


class Masked:
    """Inputs on the device, and what the definition gives for them."""

    def __init__(
        self, pattern, queries, keys, heads, kv_heads, head_dim, dtype,
        batch=2, softcap=None, spread=1.0, value_dim=None, device=DEVICE,
    ):  # fmt: skip
        self.pattern, self.scale, self.softcap, self.dtype = pattern, head_dim**-0.5, softcap, dtype
        self.mask = visible(pattern, queries, keys)
        sizes = queries, keys, heads, kv_heads, head_dim, batch
        inputs, self.out, self.lse, self.gradients = _defined(
            pattern, *sizes, dtype, self.scale, softcap, spread, value_dim
        )
        self.delta = row_dots(inputs[-1], self.out)
        self.q, self.k, self.v, self.grad = (t.to(device, dtype, copy=True) for t in inputs)
        # Of the definition, as a ring knows them from the whole sequence.
        wide = torch.promote_types(dtype, torch.float32)
        self.statistics = tuple(t.to(device, wide) for t in (self.lse, self.delta))

    def forward(self, kernel, into=None):
        return kernel.forward(self.q, self.k, self.v, self.scoring, into)

    def backward(self, kernel, deterministic=False, into=None):
        given = BackwardInputs(self.grad, self.q, self.k, self.v, *self.statistics)
        return kernel.backward(given, self.scoring, deterministic=deterministic, into=into)

    @property
    def scoring(self):
        return Scoring(self.pattern, self.scale, self.softcap)

    def hold_forward(self, part, most, near=1e-5):
        """Output and log-sum-exp are the definition's, up to a relative error and a distance."""
        out, lse = part
        assert error(out, self.out) < most
        torch.testing.assert_close(lse, self.lse, rtol=near, atol=near, check_dtype=False, check_device=False)

    def hold_backward(self, gradients, most):
        """Each gradient is the definition's, up to a relative error."""
        for name, ours, wanted in zip("qkv", gradients, self.gradients, strict=True):
            assert error(ours, wanted) < most, name

    def hold_blind_rows(self, out, lse, gradients):
        """Nothing where nothing is seen, to the last bit, whatever the dtype."""
        blind, unseen = (~self.mask.any(1)).to(out.device), (~self.mask.any(0)).to(out.device)
        assert not out[:, blind].any() and (lse[:, :, blind] == -torch.inf).all()
        for gradient, empty in zip(gradients, (blind, unseen, unseen), strict=True):
            assert not gradient[:, empty].any() and gradient.isfinite().all()


def tile_of(case, **options):
    """Return a tile of (batch, queries, keys, causal, heads, KV heads, head dim, dtype)."""
    batch, queries, keys, causal, *rest = case
    return Masked(CAUSAL if causal else FULL, queries, keys, *rest, batch=batch, **options)


@lru_cache(maxsize=8)
def _defined(pattern, queries, keys, heads, kv_heads, head_dim, batch, dtype, scale, softcap, spread, value_dim):
    """Return q, k, v and dO in fp64, and out, lse and gradients: kernels are compared with one computation."""
    drawn = heads, kv_heads, head_dim, dtype, spread, value_dim
    k, v = draw(0, batch, keys, *drawn)[1:3]
    q, _, _, grad, _ = draw(1, batch, queries, *drawn)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out, lse = attention(*leaves, pattern, scale, softcap)
    return (q, k, v, grad), out.detach(), lse.detach(), torch.autograd.grad(out, leaves, grad)
