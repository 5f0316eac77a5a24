"""RMSNorm, rotary embedding and SwiGLU against plain torch and Hugging Face's formulas."""

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from bmburst_ops.rms_norm import rms_norm, stream_norm
from bmburst_ops.rotary import apply_rotary, apply_rotary_to
from bmburst_ops.swiglu import swiglu
from tests.refusals import refused


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


@pytest.mark.parametrize("factor", [None, 1.0, 0.75])
def test_the_norm_of_a_stream_is_sum_and_norm(factor: float | None) -> None:
    """Two results that are used, or one of them; where nothing is added the stream is what was given."""
    x, added = (_random(2, 3, 5, seed=seed).requires_grad_() for seed in range(2))
    weight = _random(5, seed=2).requires_grad_()
    leaves = (x, weight) if factor is None else (x, weight, added)

    def ours(x: Tensor, weight: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return stream_norm(x, added, weight, 1e-2, factor=factor or 1.0)

    stream = x if factor is None else x + factor * added
    expected = stream, rms_norm(stream, weight, 1e-2)
    results, grads = ours(*leaves), [_random(2, 3, 5, seed=seed) for seed in (3, 4)]
    torch.testing.assert_close(results, expected)
    for used in (slice(None), slice(1), slice(1, 2)):
        found, wanted = (
            torch.autograd.grad(of[used], leaves, grads[used], retain_graph=True, materialize_grads=True)
            for of in (results, expected)
        )
        torch.testing.assert_close(found, wanted)
    assert torch.autograd.gradcheck(ours, leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_a_stream_are_rounded_once(dtype: torch.dtype) -> None:
    """The norm's and the stream's together: half a unit in the last place, where two roundings take more."""
    x, weight, *grads = (
        _random(*shape, seed=seed).to(dtype) for seed, shape in enumerate([(99, 24), (24,), (99, 24), (99, 24)])
    )
    leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    (found,) = torch.autograd.grad(stream_norm(leaf, None, weight, 1e-5), leaf, grads)
    (wanted,) = torch.autograd.grad(
        stream_norm(exact, None, weight.double(), 1e-5), exact, [grad.double() for grad in grads]
    )
    assert ((found.double() - wanted).abs() <= 0.501 * torch.finfo(dtype).eps * wanted.abs() + 1e-6).all()


@pytest.mark.parametrize("name", ["rms_norm", "rotary", "swiglu"])
def test_gradients(name: str) -> None:
    cos, sin = _angles(2, 3, 2)
    function, inputs = {
        "rms_norm": (lambda x, w: rms_norm(x, w, 1e-2), (_random(2, 3, 5), _random(5, seed=1))),
        "rotary": (lambda *heads: apply_rotary_to(heads, cos, sin), (_random(2, 3, 3, 4), _random(2, 3, 1, 4, seed=1))),
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
    both = apply_rotary_to((q.requires_grad_(), k.requires_grad_()), cos, sin)
    for x, found, expected in zip((q, k), both, theirs, strict=True):
        torch.testing.assert_close(found, expected.transpose(1, 2))
        assert torch.equal(apply_rotary(x, cos, sin), found)
    (alone,) = torch.autograd.grad(apply_rotary(q, cos, sin).square().sum(), q)
    of_q, of_k = torch.autograd.grad(both[0].square().sum(), (q, k), allow_unused=True)
    assert torch.equal(of_q, alone) and of_k is None


def test_like_shapes_are_required() -> None:
    with refused("13 features", error=ValueError):
        rms_norm(torch.zeros(2, 13), torch.ones(1), 1e-5)
    with refused("13 features", error=ValueError):
        stream_norm(torch.zeros(2, 13), None, torch.ones(1), 1e-5)
    with refused("added like x", error=ValueError):
        stream_norm(torch.zeros(2, 13), torch.zeros(1, 13), torch.ones(13), 1e-5)
    with refused("even head_dim", error=ValueError):
        apply_rotary(torch.zeros(1, 2, 3, 5), torch.zeros(1, 2, 2), torch.zeros(1, 2, 2))
    with refused("tokens", error=ValueError):
        apply_rotary(torch.zeros(1, 2, 3, 4), torch.zeros(1, 1, 2), torch.zeros(1, 1, 2))
    with refused("two like tensors", error=ValueError):
        swiglu(torch.zeros(2), torch.zeros(1))
