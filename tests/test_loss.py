"""The loss across ranks: token counts, the global mean, labels out of range."""

import pytest
import torch

from bmburst.loss import IGNORE_INDEX, count_valid, global_mean, token_loss_sum
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
    assert total.grad is not None
    assert torch.isfinite(total.grad)


def test_fp64_stays_fp64() -> None:
    mean = global_mean(torch.ones((), dtype=torch.float64), torch.tensor(3), 1)
    assert mean.dtype == torch.float64
    assert mean.item() == pytest.approx(1 / 3, rel=1e-15)


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
