"""Log-probabilities and entropies of the chunked head against all logits at once."""

import pytest
import torch
from torch import Tensor

from bmburst_ops.linear_logprobs import linear_logprobs
from tests.refusals import refused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _problem(tokens: int, features: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, features, dtype=torch.float64, generator=generator).to(DEVICE, dtype).requires_grad_()
    weight = torch.randn(vocabulary, features, dtype=torch.float64, generator=generator)
    return hidden, weight.to(DEVICE, dtype).requires_grad_(), torch.randint(vocabulary, (tokens,)).to(DEVICE)


@pytest.mark.parametrize("uses", ["logps", "entropies", "both"])
@pytest.mark.parametrize(
    ("dtype", "chunk", "temperature"),
    [(torch.float64, 1, 0.7), (torch.float64, 5, 1.0), (torch.float32, 4, 1.3), (torch.bfloat16, 100, 0.9)],
)
def test_equals_all_logits_at_once(dtype: torch.dtype, chunk: int, temperature: float, uses: str) -> None:
    hidden, weight, labels = _problem(13, 5, 17, dtype)
    factors = torch.linspace(-2, 3, 13, dtype=torch.float64, device=DEVICE)

    def loss(logps: Tensor, entropies: Tensor) -> Tensor:
        of_logps, of_entropies = (logps.double() * factors).sum(), (entropies.double() * factors.flip(0)).sum()
        return {"logps": of_logps, "entropies": of_entropies, "both": of_logps + of_entropies}[uses]

    found = linear_logprobs(hidden, weight, labels, temperature=temperature, entropy=True, chunk=chunk)
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    log_p = torch.log_softmax(wide[0] @ wide[1].t() / temperature, -1)
    expected = log_p.gather(-1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    low = dtype is torch.bfloat16
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-12 if dtype is torch.float64 else 1e-5, atol=1e-5)
    for ours, theirs in zip(
        torch.autograd.grad(loss(found[0], found[1]), [hidden, weight]),
        torch.autograd.grad(loss(*expected), wide),
        strict=True,
    ):
        rounding = 1e-2 if low else 1e-5 if dtype is torch.float32 else 1e-13  # of the result; on a GPU of factors too
        assert ours.dtype == dtype and float((ours.double() - theirs).norm() / theirs.norm()) < rounding


@pytest.mark.parametrize("entropy", [False, True])
def test_autocast_changes_nothing(entropy: bool) -> None:
    """Logits in bfloat16 would change a log-probability by a tenth of a nat."""
    hidden, weight, labels = _problem(13, 32, 17, torch.bfloat16)
    found = []
    for is_on in (False, True):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=is_on):
            logps, _ = linear_logprobs(hidden, weight, labels, entropy=entropy)
            found.append([logps, *torch.autograd.grad(logps.sum(), [hidden, weight])])
    for plain, under_autocast in zip(*found, strict=True):
        assert torch.equal(plain, under_autocast) and plain.dtype == under_autocast.dtype


def test_no_token_is_a_gradient_of_zero() -> None:
    """A rank may hold only tokens of prompts, but its backward must run as that of the others."""
    hidden, weight, labels = _problem(0, 5, 17, torch.float32)
    logps, entropies = linear_logprobs(hidden, weight, labels, entropy=True)
    assert entropies is not None and logps.shape == entropies.shape == (0,)
    grads = torch.autograd.grad(logps.sum() + entropies.sum(), [hidden, weight])
    assert [grad.shape for grad in grads] == [hidden.shape, weight.shape] and not any(grad.any() for grad in grads)


def test_what_is_impossible_adds_nothing_to_the_entropy() -> None:
    hidden = torch.tensor([[1.0, 200.0]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, -1.0]])
    (_, entropies) = linear_logprobs(hidden, weight, torch.tensor([0]), entropy=True)
    p = torch.softmax(torch.tensor([1.0, 2.0]), 0)
    torch.testing.assert_close(entropies, -(p * p.log()).sum(0, keepdim=True))
    entropies.sum().backward()
    assert hidden.grad is not None and bool(hidden.grad.isfinite().all())


@pytest.mark.parametrize("options", [{"chunk": 0}, {"temperature": 0.0}])
def test_options(options: dict[str, float]) -> None:
    with refused("at least one token | above 0 | got", error=ValueError):
        linear_logprobs(*_problem(2, 3, 5, torch.float32), **options)  # type: ignore[arg-type]
