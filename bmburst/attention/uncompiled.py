"""Runs a function outside of torch.compile's graph: the compiler ends its graph before it and begins another after it.

Importing this module takes the seconds that torch's compiler takes to import.
"""

from collections.abc import Callable
from typing import Any

import torch


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


uncompiled: Callable[..., Any] = torch.compiler.disable(_call)
"""Returns `function(*args, **kwargs)` for `uncompiled(function, *args, **kwargs)`, outside of the graph."""
