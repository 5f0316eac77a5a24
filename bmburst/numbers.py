"""Whole numbers from what users have them in: lists, arrays, tensors on any device."""

import hashlib
import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bmburst.errors import UserError


def digest(array: NDArray[Any]) -> str:
    """Return a short text that differs for different arrays."""
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=6).hexdigest()


def array_of(what: str, values: Any) -> NDArray[Any]:
    """Return an array of what may be a tensor on any device.

    Raises:
        UserError: It is no array.
    """
    try:
        return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    except (ValueError, TypeError, NotImplementedError):  # the last of a meta tensor
        raise UserError(f"{what} must be an array of numbers, got {brief(values)}") from None


def whole_numbers(what: str, values: Any) -> list[Any]:
    """Return the whole numbers of a sequence, an array, a tensor or a single number.

    Raises:
        UserError: There is anything else in it.
    """
    array = np.atleast_1d(array_of(what, values))
    if array.ndim > 1 or (array.size and array.dtype.kind not in "iu"):
        raise UserError(f"{what} must be whole numbers, one after another, got {brief(values)}")
    found: list[Any] = array.tolist()
    return found


def brief(values: Any) -> str:
    """Return values on one line, of long ones the beginning."""
    text = " ".join(repr(values).split())
    return text if len(text) <= 100 else f"{text[:97]}..."


def whole_number(what: str, value: object, least: int) -> int:
    """Return the number.

    Raises:
        UserError: It is no whole number, or too small.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # what is none raises
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise UserError(f"{what} must be a whole number of at least {least}, got {value!r}")
    return number


def require_flag(what: str, value: object) -> None:
    """Refuse what is neither true nor false.

    Raises:
        UserError: It is not.
    """
    if not isinstance(value, bool):
        raise UserError(f"{what} must be a bool, got {value!r}\nallowed: True or False")
