"""The choices that fla-core's kernels may try.

fla tunes its kernels when they first run. With all its choices this takes minutes, so each kernel gets the choice that
is nearest to what is usual (`few_choices`); on GPUs with less shared memory, where one may not fit, two.
FLA_CACHE_MODE, fla's own setting, or BMBURST_FLA_TUNING=all leaves them as they are.
"""

import importlib
import math
import os
import sys
from typing import Any

import torch

TUNING = "BMBURST_FLA_TUNING"
"""The environment variable that, set to "all", lets fla try all choices of each kernel."""

HOPPER = 9


def restrict_tuning() -> None:
    """Leave each kernel of fla few choices, unless the environment says otherwise; see the module."""
    if os.environ.get(TUNING) != "all" and "FLA_CACHE_MODE" not in os.environ:
        few_choices()


def few_choices() -> None:
    """Leave each kernel of fla that is imported one or two choices, nearest to 4 warps, 3 stages and blocks of 64."""
    is_small = torch.cuda.is_available() and torch.cuda.get_device_capability() < (HOPPER, 0)
    tuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    for name, module in list(sys.modules.items()):
        if name.startswith("fla."):
            for value in list(vars(module).values()):
                while value is not None and not isinstance(value, tuner):  # heuristics wrap the tuner
                    value = getattr(value, "fn", None)
                if isinstance(value, tuner):
                    value.configs = sorted(value.configs, key=_distance)[: 1 + is_small]


def _distance(config: Any) -> float:
    blocks = [size for size in config.kwargs.values() if isinstance(size, int) and not isinstance(size, bool)]
    near = sum(abs(math.log2(max(size, 1) / 64)) for size in blocks)
    return abs(math.log2(config.num_warps / 4)) + abs(float(config.num_stages) - 3) + near
