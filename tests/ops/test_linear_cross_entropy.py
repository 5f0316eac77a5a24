"""The chunked head and loss against all logits at once, and its promises about memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bmburst_ops.linear_cross_entropy import linear_cross_entropy, num_chunks, token_cross_entropy
from tests.live_bytes import LiveBytes
from tests.refusals import refused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _problem(tokens: int, features: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, features, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, features, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), generator=generator)
    labels[::3] = -100
    return hidden, weight, labels


def _reference(hidden: Tensor, weight: Tensor, labels: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    loss = F.cross_entropy(hidden @ weight.t(), labels, reduction="sum", ignore_index=-100)
    (loss * factor).backward()
    return loss.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize(("chunk", "gathered"), [(1, 1), (1, 4), (4, 1), (4, 2), (3, 3), (13, 1), (1000, 7)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equals_all_logits_at_once(dtype: torch.dtype, chunk: int, gathered: int) -> None:
    hidden, weight, labels = _problem(13, 5, 17, dtype)
    loss = linear_cross_entropy(hidden, weight, labels, chunk=chunk, gathered=gathered)
    (loss * 0.75).backward()
    expected = _reference(hidden, weight, labels, 0.75)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    # Everything is formed in fp32 or wider, so only the gradients are rounded: at most twice, half a unit each.
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(loss.double(), expected[0], rtol=min(tolerance, 2e-6), atol=0)
    for ours, theirs in zip((hidden.grad, weight.grad), expected[1:], strict=True):
        assert ours.dtype == dtype
        # Terms cancel: an element is as exact as the largest of them, whatever order a machine adds them in.
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max()))


def test_gradients_are_scaled_by_all_digits_of_the_factor() -> None:
    """1 / (valid tokens) has more digits than 16 bits, and would scale the gradients of all weights but the head's."""
    factor = torch.tensor(1 / 1001, device=DEVICE)
    hidden, weight, labels = (x.detach().to(DEVICE) for x in _problem(13, 5, 17, torch.bfloat16))
    gradients = []
    for each in (torch.ones_like(factor), factor):
        given = hidden.clone().requires_grad_()
        (linear_cross_entropy(given, weight, labels) * each).backward()
        gradients.append(given.grad)
    assert torch.equal(gradients[1], (gradients[0].float() * factor).bfloat16())


def test_weight_gradient_is_summed_wide() -> None:
    """4,096 like tokens in chunks of 1: summed in bf16, adding 1 to 256 would change nothing."""
    hidden = torch.ones(4096, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    linear_cross_entropy(hidden, weight, torch.zeros(4096, dtype=torch.int64), chunk=1).backward()
    assert weight.grad.flatten().tolist() == [-2048, 2048]


def test_without_valid_labels_everything_is_exactly_zero() -> None:
    hidden, weight, labels = _problem(7, 5, 11, torch.float32)
    with torch.no_grad():
        hidden[2] = torch.nan  # what padding holds must not matter
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100), chunk=3)
    loss.backward()
    assert loss.item() == 0
    for grad in (hidden.grad, weight.grad):
        assert (grad == 0).all()


def test_an_ignored_token_does_not_spoil_the_others() -> None:
    hidden, weight, labels = _problem(7, 5, 11, torch.float64)
    expected = _reference(hidden, weight, labels, 1.0)
    with torch.no_grad():
        hidden[0], hidden[3] = torch.nan, torch.inf
    linear_cross_entropy(hidden, weight, labels, chunk=4).backward()
    torch.testing.assert_close(hidden.grad, expected[1])
    torch.testing.assert_close(weight.grad, expected[2])


def test_no_tokens_at_all() -> None:
    hidden, weight = torch.zeros(2, 0, 5, requires_grad=True), torch.zeros(3, 5, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.zeros(2, 0, dtype=torch.int64))
    loss.backward()
    assert loss.item() == 0
    assert (weight.grad == 0).all()


def test_huge_logits_do_not_overflow() -> None:
    hidden = torch.tensor([[200.0]], requires_grad=True)
    weight = torch.tensor([[10.0], [-10.0]])
    loss = linear_cross_entropy(hidden, weight, torch.tensor([1]))
    loss.backward()
    assert loss.item() == 4000
    assert hidden.grad.item() == 20


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_frozen_inputs_get_no_gradient(frozen: str) -> None:
    hidden, weight, labels = _problem(6, 4, 9, torch.float64)
    expected = _reference(hidden, weight, labels, 1.0)
    hidden.requires_grad_(frozen == "weight")
    weight.requires_grad_(frozen == "hidden")
    loss = linear_cross_entropy(hidden, weight, labels, chunk=4)
    torch.testing.assert_close(loss.detach(), expected[0])
    if frozen == "both":
        assert not loss.requires_grad
        return
    loss.backward()
    moving = weight if frozen == "hidden" else hidden
    torch.testing.assert_close(moving.grad, expected[2 if frozen == "hidden" else 1])
    assert (hidden if frozen == "hidden" else weight).grad is None


def test_two_backward_passes_give_the_same_gradient() -> None:
    hidden, weight, labels = _problem(6, 4, 9, torch.float64)
    loss = linear_cross_entropy(hidden, weight, labels)
    first = torch.autograd.grad(loss * 2, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, 2 * b)


class _Products(LiveBytes):
    """Counts them, and the bytes of the largest result."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.number = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.nbytes)
        self.number += func._schema.name in ("aten::mm", "aten::addmm_")
        return result


@pytest.mark.parametrize("gathered", [None, 1, 3])
def test_never_all_logits(gathered: int | None) -> None:
    """Nothing larger than the gathered gradients of logits, or than the weight's own, is ever made."""
    tokens, features, words, chunk = 64, 4, 50, 8
    hidden, weight, labels = _problem(tokens, features, words, torch.float32)
    with _Products() as seen:
        linear_cross_entropy(hidden, weight, labels, chunk=chunk, gathered=gathered).backward()
    groups = num_chunks(tokens, chunk * (gathered or 1))
    assert seen.largest == 4 * chunk * words * (gathered or 1)
    assert seen.number == num_chunks(tokens, chunk) + 2 * groups
    with torch.no_grad(), _Products() as seen:
        linear_cross_entropy(hidden, weight, labels, chunk=chunk, gathered=gathered)
    assert seen.largest == 4 * chunk * words
    assert seen.number == num_chunks(tokens, chunk)


@pytest.mark.parametrize("gathered", [1, 3])
def test_one_chunks_logits_live_at_a_time(gathered: int) -> None:
    """With gradients, in the place of those that are gathered; without, one after another."""
    words, chunk = 5000, 8
    hidden, weight, labels = _problem(64, 4, words, torch.float64)
    logits = 8 * chunk * words
    with torch.no_grad(), LiveBytes() as seen:
        linear_cross_entropy(hidden, weight, labels, chunk=chunk, gathered=gathered)
    assert seen.peak == pytest.approx(logits, rel=0.02)
    with LiveBytes() as seen:
        loss = linear_cross_entropy(hidden, weight, labels, chunk=chunk, gathered=gathered)
    assert loss.requires_grad
    assert seen.now == pytest.approx(weight.nbytes + hidden.nbytes, rel=0.02)  # the gradients
    assert seen.peak == pytest.approx(seen.now + gathered * logits, rel=0.02)


def test_number_of_chunks_depends_on_the_number_of_tokens() -> None:
    assert [num_chunks(tokens, 4) for tokens in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


def test_misfits_are_refused() -> None:
    hidden, weight, labels = torch.zeros(2, 3), torch.zeros(5, 3), torch.zeros(2, dtype=torch.int64)
    with refused("(2, 3) | (5, 4)", error=ValueError):
        linear_cross_entropy(hidden, torch.zeros(5, 4), labels)
    with refused("(3,)", error=ValueError):
        linear_cross_entropy(hidden, weight, torch.zeros(3, dtype=torch.int64))
    with refused("one dtype | float32 | float64", error=ValueError):
        linear_cross_entropy(hidden, weight.double(), labels)
    with refused("int64 | int32", error=ValueError):
        linear_cross_entropy(hidden, weight, labels.int())
    with refused("at least one token | 0", error=ValueError):
        linear_cross_entropy(hidden, weight, labels, chunk=0)
    with refused("one is gathered | 0", error=ValueError):
        linear_cross_entropy(hidden, weight, labels, gathered=0)


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_losses_of_each_token_equal_those_of_all_logits(chunk: int) -> None:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(2, 7, 5, dtype=torch.float64, generator=generator)
    weight = torch.randn(11, 5, dtype=torch.float64, generator=generator).requires_grad_()
    labels = torch.randint(0, 11, (2, 7), generator=generator)
    labels[1, 3] = -100
    with torch.no_grad():
        found = token_cross_entropy(hidden, weight, labels, chunk=chunk)
    expected = torch.nn.functional.cross_entropy((hidden @ weight.t()).transpose(1, 2), labels, reduction="none")
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=0)
    assert found[1, 3] == 0
    assert not found.requires_grad
    assert token_cross_entropy(hidden[:, :0], weight, labels[:, :0]).shape == (2, 0)
