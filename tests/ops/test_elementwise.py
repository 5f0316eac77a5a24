"""RMSNorm, rotary embedding and SwiGLU against plain torch and Hugging Face's formulas."""

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from bmburst_ops.rms_norm import rms_norm
from bmburst_ops.rotary import apply_rotary
from bmburst_ops.swiglu import swiglu


def _random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _angles(batch: int, tokens: int, pairs: int) -> tuple[Tensor, Tensor]:
    angle = _random(batch, tokens, pairs, seed=9) * 3
    return angle.cos() * 1.25, angle.sin() * 1.25  # a common factor, as yarn's


def test_rms_norm_is_hugging_faces() -> None:
    x, reference = _random(2, 7, 13, dtype=torch.float32), LlamaRMSNorm(13, eps=1e-3)
    with torch.no_grad():
        reference.weight.copy_(_random(13, seed=1))
    torch.testing.assert_close(rms_norm(x, reference.weight, 1e-3), reference(x), rtol=1e-6, atol=1e-6)


def test_rms_norm_of_a_zero_row_is_zero() -> None:
    x = torch.zeros(3, 5, requires_grad=True)
    rms_norm(x, torch.ones(5), 1e-5).sum().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("name", ["rms_norm", "rotary", "swiglu"])
def test_gradients(name: str) -> None:
    cos, sin = _angles(2, 3, 2)
    function, inputs = {
        "rms_norm": (lambda x, w: rms_norm(x, w, 1e-2), (_random(2, 3, 5), _random(5, seed=1))),
        "rotary": (lambda x: apply_rotary(x, cos, sin), (_random(2, 3, 3, 4),)),
        "swiglu": (swiglu, (_random(2, 7), _random(2, 7, seed=1))),
    }[name]
    assert torch.autograd.gradcheck(function, [x.requires_grad_() for x in inputs])


@pytest.mark.parametrize("name", ["rms_norm", "rotary", "swiglu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_rounded_once(name: str, dtype: torch.dtype) -> None:
    """The result is the exact one (fp64, on the rounded inputs), rounded: half a unit in the last place."""
    cos, sin = _angles(2, 9, 4)
    function, inputs = {
        "rms_norm": (lambda x, w: rms_norm(x, w, 1e-5), (_random(2, 9, 24), _random(24, seed=1))),
        "rotary": (
            lambda x: apply_rotary(
                x,
                cos.to(x.dtype if x.dtype.itemsize > 2 else torch.float32),
                sin.float() if x.dtype.itemsize <= 2 else sin,
            ),
            (_random(2, 9, 3, 8),),
        ),
        "swiglu": (swiglu, (_random(9, 31), _random(9, 31, seed=1))),
    }[name]
    narrow = [x.to(dtype) for x in inputs]
    result, exact = function(*narrow), function(*[x.double() for x in narrow])
    assert result.dtype == dtype
    unit = torch.finfo(dtype).eps
    assert ((result.double() - exact).abs() <= 0.501 * unit * exact.abs() + 1e-6).all()


def test_rotary_is_hugging_faces() -> None:
    q, k = _random(2, 7, 3, 8), _random(2, 7, 1, 8, seed=1)
    cos, sin = _angles(2, 7, 4)
    theirs = apply_rotary_pos_emb(
        q.transpose(1, 2), k.transpose(1, 2), torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    )
    for x, expected in zip((q, k), theirs, strict=True):
        torch.testing.assert_close(apply_rotary(x, cos, sin), expected.transpose(1, 2))


def test_like_shapes_are_required() -> None:
    with pytest.raises(ValueError, match="13 features"):
        rms_norm(torch.zeros(2, 13), torch.ones(1), 1e-5)
    with pytest.raises(ValueError, match="even head_dim"):
        apply_rotary(torch.zeros(1, 2, 3, 5), torch.zeros(1, 2, 2), torch.zeros(1, 2, 2))
    with pytest.raises(ValueError, match="tokens"):
        apply_rotary(torch.zeros(1, 2, 3, 4), torch.zeros(1, 1, 2), torch.zeros(1, 1, 2))
    with pytest.raises(ValueError, match="two like tensors"):
        swiglu(torch.zeros(2), torch.zeros(1))
