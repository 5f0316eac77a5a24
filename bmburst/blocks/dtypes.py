"""Data types of weights and activations, by name. Imports torch only for torch's own types."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    import torch

DtypeName = Literal["float32", "bfloat16", "float16"]
DTYPE_NAMES: tuple[DtypeName, ...] = get_args(DtypeName)
ITEMSIZE: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})
"""Bytes of a number."""


def dtype_of(name: str) -> "torch.dtype":
    """Return torch's type of one of `DTYPE_NAMES`; KeyError for another name."""
    import torch

    if name not in DTYPE_NAMES:
        raise KeyError(name)
    found: torch.dtype = getattr(torch, name)
    return found
