"""The causal convolution and its gradients in Triton against plain torch, which is the definition."""

import pytest
import torch

from bmburst_ops.linear import Pieces, conv, triton_conv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# With 16 tokens a program, pieces begin in front of the edges of programs, at them and behind them.
PIECES = Pieces((0, 15, 16, 17, 30, 32, 47, 48, 50, 57, 77), padding=(3, 8), waiting=(1, 2, 4, 6, 9), exporting=(0,))


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize(("width", "channels", "has_bias"), [(4, 150, True), (3, 20, False), (1, 5, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_equals_torch(width, channels, has_bias, activation, dtype, monkeypatch):
    """Pieces that wait for a halo or do not, some shorter than the convolution, and padding of any values."""
    monkeypatch.setattr(triton_conv, "_TOKENS", 16)
    rng = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=rng).to(dtype)  # noqa: E731
    tokens = PIECES.edges[-1]
    x, halos, weight, grad = (
        draw(tokens, channels),
        draw(len(PIECES.waiting), width - 1, channels),
        draw(channels, width),
        draw(tokens, channels),
    )
    for number in PIECES.padding:
        x[PIECES.span(number)] = torch.nan
    bias = draw(channels) if has_bias else None
    given = [x, halos, weight, *([] if bias is None else [bias])]
    wide = [t.double() for t in given] + ([] if has_bias else [None])
    exact = [conv.causal_conv(*wide, PIECES, activation)]
    exact += [t for t in conv.causal_conv_gradients(grad.double(), *wide, PIECES, activation) if t is not None]
    low = [t.to(DEVICE) for t in given] + ([] if has_bias else [None])
    found = [triton_conv.causal_conv(*low, PIECES, activation)]
    found += [t for t in triton_conv.causal_conv_gradients(grad.to(DEVICE), *low, PIECES, activation) if t is not None]
    assert [t.shape for t in found] == [t.shape for t in exact] and all(t.dtype == dtype for t in found)
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    for name, ours, wanted in zip(("out", "x", "halos", "weight", "bias"), found, exact, strict=False):
        error = float((ours.cpu().double() - wanted).norm() / wanted.norm().clamp(min=1e-6))
        assert error < limit, f"{name}: {error}"
    for number in PIECES.padding:
        assert not found[0][PIECES.span(number)].any() and not found[1][PIECES.span(number)].any()
