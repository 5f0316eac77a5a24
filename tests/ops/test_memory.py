"""Results are put where they were asked for, and those that are there already stay."""

import pytest
import torch

from bmburst_ops.flash.kernel import deliver


def test_what_lies_where_it_was_asked_for_is_not_copied(monkeypatch):
    """The stride of a batch of one is any: flattened and unflattened it is the same memory. CUDA refuses that copy."""
    target = torch.zeros(1, 12, 6, 4)[:, 5:, 1:3]
    result = target.flatten(0, 1).unflatten(0, (1, 7))
    assert result.stride() != target.stride()
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *_: pytest.fail("copied onto itself"))
    assert deliver(result, target) is target


@pytest.mark.parametrize("cut", [lambda t: t[:, :3], lambda t: t.transpose(0, 1)[:, :4], lambda t: t.view(4, 4).T])
def test_other_memory_is_copied(cut):
    result = torch.arange(16.0).view(4, 4)
    target = torch.zeros(4, 4) if cut(result).shape == (4, 4) else torch.zeros(cut(result).shape)
    assert deliver(cut(result), target) is target
    assert torch.equal(target, cut(result))
