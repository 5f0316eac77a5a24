"""The choices that kernels of fla-core may try, where a benchmark measures them beside ours.

fla tunes its kernels when they first run. With all its choices this takes minutes, so each kernel gets the one that was
the fastest on an H200 (`HOPPER_CHOICES`), else the one that is nearest to what is usual (`few_choices`); on GPUs with
less shared memory, where one may not fit, two.
FLA_CACHE_MODE, fla's own setting, or BMBURST_FLA_TUNING=all leaves them as they are.
"""

import importlib
import math
import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

TUNING = "BMBURST_FLA_TUNING"
"""The environment variable that, set to "all", lets fla try all choices of each kernel."""

HOPPER = 9


class Choice(NamedTuple):
    """A launch configuration of a kernel: its block sizes by name, warps, and stages."""

    blocks: Mapping[str, int]
    warps: int
    stages: int


HOPPER_CHOICES: Mapping[str, Choice] = MappingProxyType(
    {
        "chunk_bwd_kernel_dv_local": Choice({}, 2, 3),
        "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": Choice({"BV": 32}, 4, 2),
        "chunk_gated_delta_rule_fwd_kkt_solve_kernel": Choice({"BK": 32}, 1, 3),
        "chunk_gla_fwd_kernel_o": Choice({"BK": 64, "BV": 128}, 4, 2),
        "chunk_kda_bwd_kernel_intra": Choice({}, 2, 2),
        "chunk_kda_fwd_kernel_inter_solve_fused": Choice({"BK": 32}, 1, 3),
        "chunk_kda_fwd_kernel_intra_token_parallel": Choice({"BH": 4}, 1, 3),
        "chunk_local_cumsum_scalar_kernel": Choice({}, 1, 3),
        "l2norm_bwd_kernel": Choice({"BT": 32}, 8, 3),
        "l2norm_fwd_kernel": Choice({"BT": 16}, 4, 3),
    }
)
"""By the name of the kernel, its fastest choice on an H200 with 64K tokens and 32 heads of 128, where that is not the
usual one. With these, both passes of fla's gated delta rule take 17.6 ms, and 20.1 ms with the usual ones; those of KDA
about 46 ms, and 51.0 ms."""


def restrict_tuning() -> None:
    """Leave each kernel of fla few choices, unless the environment says otherwise; see the module."""
    if os.environ.get(TUNING) != "all" and "FLA_CACHE_MODE" not in os.environ:
        few_choices()


def few_choices() -> None:
    """Leave each kernel of fla that is imported one or two choices; see the module."""
    major, _ = torch.cuda.get_device_capability() if torch.cuda.is_available() else (HOPPER, 0)
    tuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    for name, module in list(sys.modules.items()):
        if name.startswith("fla."):
            for value in list(vars(module).values()):
                while value is not None and not isinstance(value, tuner):  # heuristics wrap the tuner
                    value = getattr(value, "fn", None)
                if isinstance(value, tuner):
                    fastest = HOPPER_CHOICES.get(_name_of(value)) if major == HOPPER else None
                    value.configs = nearest(value.configs, fastest)[: 1 + (major < HOPPER)]


def nearest(configs: Sequence[Any], fastest: Choice | None) -> list[Any]:
    """Return the choices of a kernel, `triton.Config`, in order: the fastest, then by distance from the usual one.

    The usual one has 4 warps, 3 stages and blocks of 64.

    Args:
        configs: The choices that fla has.
        fastest: The one known to be the fastest, if any. It is not used if fla does not have it.
    """
    return sorted(
        configs, key=lambda each: (Choice(each.kwargs, each.num_warps, each.num_stages) != fastest, _distance(each))
    )


def _name_of(tuner: Any) -> str:
    """Return the name of the kernel inside of a tuner and heuristics."""
    while not hasattr(tuner, "__name__"):
        tuner = tuner.fn
    return str(tuner.__name__)


def _distance(config: Any) -> float:
    blocks = [size for size in config.kwargs.values() if isinstance(size, int) and not isinstance(size, bool)]
    near = sum(abs(math.log2(max(size, 1) / 64)) for size in blocks)
    return abs(math.log2(config.num_warps / 4)) + abs(float(config.num_stages) - 3) + near
