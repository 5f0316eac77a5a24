"""Runs a function outside of torch.compile's graphs, by a graph break.

Importing this module imports torch's compiler, which takes seconds.
"""

from collections.abc import Callable
from typing import Any

import torch


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


uncompiled: Callable[..., Any] = torch.compiler.disable(_call)
"""`uncompiled(function, *args, **kwargs)` returns `function(*args, **kwargs)`, run outside of the graph."""
