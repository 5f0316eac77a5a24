"""Relative errors of tensors."""

from collections.abc import Hashable, Mapping
from typing import TypeVar

from torch import Tensor

Name = TypeVar("Name", bound=Hashable)


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, relative to the largest element."""
    assert ours.shape == theirs.shape
    return float(((ours - theirs).abs().max() / theirs.abs().max()).detach())


def too_far(ours: Mapping[Name, Tensor], theirs: Mapping[Name, Tensor]) -> dict[Name, float]:
    """Return the relative errors that are more than fp32 rounding, by name; both have the same names."""
    assert ours.keys() == theirs.keys()
    errors = {name: relative_error(tensor, theirs[name]) for name, tensor in ours.items()}
    return {name: error for name, error in errors.items() if not error < 1e-5}
