"""Defaults of learning rate, warm-up, beta2 and weight decay, by model and kind of training. Imports no torch.

From scratch, presets use published learning rates, other models `2e-3 * (1e6 / parameters) ** 0.21`. The rule gives
3.0e-4 for LLaMA-3-8B (published 3e-4), 1.9e-4 for 70B (1.5e-4), 7.3e-4 for 125M (GPT-3 6e-4) and 2e-3 for the tiny
preset, for which it was tuned.

From scratch, the warm-up is `10 * (parameters / 1e6) ** 0.59` steps, at most LLaMA 2's 2,000, independent of the number
of steps. It is needed because Adam's first steps change every weight by about the learning rate: llama-3-8b's loss rose
from 12.5 to 19.1 after a first step of 3e-5, a tenth of the peak.

Fine-tuning of `init_from` uses a fifteenth of that rate: LLaMA 2 was fine-tuned with 2e-5 after 3e-4 (arXiv:2307.09288,
section 3.1). Adapters use two thirds: 2e-4 up to 13B, 1e-4 at 65B, beta2 0.999 (QLoRA, arXiv:2305.14314, B.2).
Preference training uses a twentieth of either: 1e-6 instead of 2e-5 (DPO, arXiv:2305.18290, appendix B).
"""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

from bmburst.blocks.config import LlamaConfig
from bmburst.blocks.presets import PRESETS
from bmburst.train.sections import OptimizerConfig, ScheduleConfig

Number = TypeVar("Number", int, float)
FINE_TUNING, ADAPTERS = 1 / 15, 2 / 3  # factors on the learning rate from scratch
PREFERENCE = 1 / 20  # further factor
FEWEST_WARMUP, MOST_WARMUP = 10, 2000  # steps; 2,000 are LLaMA 2's
_TINY, _TINY_LR, _EXPONENT, _WARMUP_EXPONENT = 1e6, 2e-3, 0.21, 0.59


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """Published hyperparameters of training from scratch.

    Attributes:
        lr: Peak learning rate.
        warmup_steps: Steps of linear warm-up; None: `warmup_by_size`.
    """

    lr: float
    warmup_steps: int | None = None


PUBLISHED: Mapping[str, Published] = MappingProxyType(
    {
        "llama-tiny": Published(lr=2e-3, warmup_steps=10),
        # arXiv:2307.09288, section 2.2 and table 1.
        "llama-2-7b": Published(lr=3e-4, warmup_steps=2000),
        "llama-2-13b": Published(lr=3e-4, warmup_steps=2000),
        "llama-2-70b": Published(lr=1.5e-4, warmup_steps=2000),
        # arXiv:2407.21783, table 3.
        "llama-3-8b": Published(lr=3e-4),
        "llama-3-70b": Published(lr=1.5e-4),
        # arXiv:2404.06395, section 3.3: 0.01, divided by hidden_size / dim_model_base for matrices; here for all.
        "minicpm-1b": Published(lr=1.7e-3),
        "minicpm-2b": Published(lr=1.1e-3),
    }
)


def rate_by_size(parameters: int) -> float:
    """Return the peak learning rate from scratch for a model without a published one, rounded to two digits."""
    return float(f"{_TINY_LR * min(1.0, (_TINY / max(1, parameters)) ** _EXPONENT):.2g}")


def warmup_by_size(parameters: int) -> int:
    """Return the warm-up steps from scratch for a model without a published number."""
    return min(MOST_WARMUP, max(FEWEST_WARMUP, round(10 * math.pow(parameters / _TINY, _WARMUP_EXPONENT))))


def published(model: LlamaConfig) -> Published:
    """Return the hyperparameters for training from scratch: those of the preset with the same shape, else by size.

    Context length, rope_theta and rope_scaling may differ from the preset.
    """
    for name, values in PUBLISHED.items():
        known = PRESETS[name]
        longer = {key: getattr(model, key) for key in ("max_position_embeddings", "rope_theta", "rope_scaling")}
        if model == dataclasses.replace(known, **longer):
            return values
    return Published(lr=rate_by_size(model.num_parameters))


def filled(
    model: LlamaConfig,
    steps: int,
    optimizer: OptimizerConfig,
    schedule: ScheduleConfig,
    *,
    is_started: bool,
    has_adapters: bool,
    has_pairs: bool = False,
) -> tuple[OptimizerConfig, ScheduleConfig]:
    """Return both sections with None replaced by defaults.

    Args:
        model: The model.
        steps: Number of steps of the run.
        optimizer: The optimizer section as given.
        schedule: The schedule section as given.
        is_started: Whether training starts from the weights of a trained model.
        has_adapters: Whether adapters are trained instead of the weights.
        has_pairs: Whether training is on preference pairs.
    """
    known = published(model)
    part = ADAPTERS if has_adapters else FINE_TUNING if is_started else 1.0
    part *= PREFERENCE if has_pairs else 1.0
    if is_started:
        warmup = min(MOST_WARMUP, max(FEWEST_WARMUP, steps // 10))
    else:
        warmup = _or(known.warmup_steps, warmup_by_size(model.num_parameters))
    optimizer = dataclasses.replace(
        optimizer,
        lr=_or(optimizer.lr, float(f"{known.lr * part:.2g}")),
        beta2=_or(optimizer.beta2, 0.999 if has_adapters else 0.95),
        weight_decay=_or(optimizer.weight_decay, 0.0 if has_adapters else 0.1),
    )
    return optimizer, dataclasses.replace(schedule, warmup_steps=_or(schedule.warmup_steps, warmup))


def _or(given: Number | None, default: Number) -> Number:
    return default if given is None else given
