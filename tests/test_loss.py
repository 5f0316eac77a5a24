"""The loss across ranks: token counts, the global mean, labels out of range."""

import pytest
import torch

from bmburst.loss import IGNORE_INDEX, count_valid, global_mean, token_logprobs, token_loss_sum
from tests.live_bytes import LiveBytes
from tests.refusals import refused


def test_ranks_average_to_the_token_mean() -> None:
    """BMTrain averages over ranks what `global_mean` gives: that must be the mean over all tokens, ranks uneven."""
    losses = [torch.tensor([1.0, 2.0, 6.0]), torch.tensor([4.0]), torch.tensor([])]
    for valid in (4, torch.tensor(4)):
        averaged = sum(global_mean(rank.sum(), valid, 3) for rank in losses) / 3
        torch.testing.assert_close(averaged, torch.cat(losses).mean())


@pytest.mark.parametrize("none", [0, torch.tensor(0)])
def test_no_valid_label_in_the_world_is_zero_not_nan(none: int | torch.Tensor) -> None:
    total = torch.zeros((), requires_grad=True)
    mean = global_mean(total, none, 2)
    mean.backward()
    assert mean.item() == 0
    assert torch.isfinite(total.grad)


def test_fp64_stays_fp64() -> None:
    mean = global_mean(torch.ones((), dtype=torch.float64), torch.tensor(3), 1)
    assert mean.dtype == torch.float64
    assert mean.item() == pytest.approx(1 / 3, rel=1e-15)


@pytest.mark.parametrize(("dtype", "labels"), [(torch.bfloat16, 1001), (torch.float16, 70_001)])
def test_a_loss_of_16_bits_does_not_round_the_number_of_labels(dtype: torch.dtype, labels: int) -> None:
    total = torch.tensor(60_000.0, dtype=dtype, requires_grad=True)
    mean = global_mean(total, torch.tensor(labels), 3)
    mean.backward()
    torch.testing.assert_close(mean, torch.tensor(total.item() * 3 / labels, dtype=dtype), rtol=0, atol=0)
    torch.testing.assert_close(total.grad, torch.tensor(3 / labels, dtype=dtype), rtol=0, atol=0)


def test_ignored_labels_do_not_count() -> None:
    labels = torch.tensor([[3, IGNORE_INDEX], [IGNORE_INDEX, 0]])
    assert count_valid(labels).item() == 2
    assert count_valid(labels).dtype == torch.int64


def test_sum_over_batch_and_tokens() -> None:
    hidden, weight = torch.randn(2, 5, 3), torch.randn(7, 3)
    labels = torch.randint(7, (2, 5))
    labels[1, 2:] = IGNORE_INDEX
    expected = torch.nn.functional.cross_entropy((hidden @ weight.t()).flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(token_loss_sum(hidden, weight, labels, chunk=3), expected)


@pytest.mark.parametrize("wrong", [7, -1, -101, 10**12])
def test_label_out_of_range(wrong: int) -> None:
    labels = torch.tensor([[0, wrong, IGNORE_INDEX]])
    with refused(f"label {wrong}", "0 to 6", "-100", "fix: ", "vocab_size"):
        token_loss_sum(torch.zeros(1, 3, 2), torch.zeros(7, 2), labels)


def test_an_empty_vocabulary_allows_no_label() -> None:
    with refused("label 0", "vocabulary is empty", "fix: ") as refusal:
        token_loss_sum(torch.zeros(1, 1, 2), torch.zeros(0, 2), torch.tensor([[0]]))
    assert "0 to -1" not in str(refusal.value)


def _problem(dtype: torch.dtype, words: int = 19) -> tuple[torch.Tensor, ...]:
    """Return hidden, weight, labels, and how much each token counts in an objective."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, 7, 6, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(words, 6, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(words, (2, 7), generator=generator)
    labels[1, 2:5] = IGNORE_INDEX
    return hidden, weight, labels, torch.randn(2, 7, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("chunk", [1, 3, 4, 100])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_logprobs_equal_log_softmax(dtype: torch.dtype, chunk: int) -> None:
    hidden, weight, labels, factors = _problem(dtype)
    found = token_logprobs(hidden, weight, labels, chunk=chunk)
    assert found.shape == labels.shape
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    (found.exp() * found.detach().cos() * factors).sum().backward()  # no factor is known in the forward pass

    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    real = labels != IGNORE_INDEX
    every = torch.log_softmax(wide[0] @ wide[1].t(), -1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    wanted = every.masked_fill(~real, 0)
    (wanted.exp() * wanted.detach().cos() * factors).sum().backward()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=min(tolerance, 1e-5), atol=1e-12)
    assert (found[~real] == 0).all()
    for ours, theirs in zip((hidden, weight), wide, strict=True):
        assert ours.grad.dtype == dtype
        scale = float(theirs.grad.abs().max())
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=tolerance, atol=tolerance * scale)


def test_what_an_ignored_token_holds_does_not_reach_the_gradients() -> None:
    hidden, weight, labels, factors = _problem(torch.float64)
    token_logprobs(hidden, weight, labels).mul(factors).sum().backward()
    spoilt = hidden.detach().clone()
    spoilt[1, 2:5] = torch.nan
    spoilt.requires_grad_()
    own = weight.detach().clone().requires_grad_()
    found = token_logprobs(spoilt, own, labels)
    found.backward(factors.masked_fill(labels == IGNORE_INDEX, torch.inf))
    torch.testing.assert_close(spoilt.grad, hidden.grad)
    torch.testing.assert_close(own.grad, weight.grad)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_logprobs_of_frozen_inputs(frozen: str) -> None:
    hidden, weight, labels, factors = _problem(torch.float64)
    token_logprobs(hidden, weight, labels).mul(factors).sum().backward()
    ours = {"hidden": hidden.detach().clone(), "weight": weight.detach().clone()}
    moving = "weight" if frozen == "hidden" else "hidden"
    ours[moving].requires_grad_()
    token_logprobs(ours["hidden"], ours["weight"], labels).mul(factors).sum().backward()
    assert ours[frozen].grad is None
    torch.testing.assert_close(ours[moving].grad, {"hidden": hidden, "weight": weight}[moving].grad)


def test_no_token_and_no_factor() -> None:
    hidden, weight, labels, _ = _problem(torch.float32)
    assert token_logprobs(hidden[:, :0], weight, labels[:, :0]).shape == (2, 0)
    token_logprobs(hidden, weight, labels).mul(0).sum().backward()
    for each in (hidden, weight):
        assert (each.grad == 0).all()


def test_logprobs_never_hold_more_than_a_chunk_of_logits() -> None:
    tokens, words, chunk = 64, 5000, 8
    hidden = torch.randn(1, tokens, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(words, 4, dtype=torch.float64, requires_grad=True)
    labels, logits = torch.randint(words, (1, tokens)), 8 * chunk * words
    with LiveBytes() as seen:
        found = token_logprobs(hidden, weight, labels, chunk=chunk, check=False)
        assert seen.now < 0.05 * logits  # nothing of the vocabulary's size waits for the backward pass
        assert seen.peak == pytest.approx(logits, rel=0.05)
        seen.peak = seen.now
        found.square().sum().backward()
    gradients = weight.nbytes + hidden.nbytes
    assert seen.peak == pytest.approx(logits + gradients, rel=0.05)


def test_a_logprob_of_no_word_is_refused() -> None:
    with refused("label 7", "0 to 6", "fix: "):
        token_logprobs(torch.zeros(1, 1, 2), torch.zeros(7, 2), torch.tensor([[7]]))
