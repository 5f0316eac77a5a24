"""Names of stretches of work in a profiler's timeline; they cost nothing where no profiler runs."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function


def traced(name: str) -> AbstractContextManager[Any]:
    """Return a context in which work bears a name in the timeline, if there is one."""
    return record_function(name) if torch._C._autograd._profiler_enabled() else nullcontext()
