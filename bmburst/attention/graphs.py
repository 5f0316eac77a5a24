"""Keeps functions out of the graphs of torch.compile."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def outside_of_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function; where torch.compile meets it, the graph ends, and another one begins after it.

    That is for functions that communicate, compute with NumPy, or read what differs from call to call.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        from bmburst.attention.uncompiled import uncompiled

        found: T = uncompiled(function, *args, **kwargs)
        return found

    return call
