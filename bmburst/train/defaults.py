"""Learning rate, warm-up, beta2 and weight decay where none are given: by model, and by what is trained. No torch.

From scratch, published values hold for presets and `2e-3 * (1e6 / parameters) ** 0.21` for other models. The rule gives
3.0e-4 for LLaMA-3-8B (published 3e-4), 1.9e-4 for 70B (1.5e-4), 7.3e-4 for 125M (GPT-3 6e-4) and 2e-3 for the tiny
preset, for which it was tuned.

From scratch the warm-up is `10 * (parameters / 1e6) ** 0.59` steps, at most LLaMA 2's 2,000, for any number of steps:
Adam's first steps move all weights one way, by the learning rate each. llama-3-8b's loss rose from 12.5 to 19.1 after a
first step of 3e-5, a tenth of the peak.

Weights of `init_from` begin at a fifteenth of that: LLaMA 2 was fine-tuned with 2e-5 after 3e-4 (arXiv:2307.09288,
section 3.1). Adapters begin at two thirds: 2e-4 up to 13B, 1e-4 at 65B, beta2 0.999 (QLoRA, arXiv:2305.14314, B.2).
Preference training takes a twentieth of either: 1e-6 of 2e-5 (DPO, arXiv:2305.18290, appendix B).
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
FINE_TUNING, ADAPTERS = 1 / 15, 2 / 3  # of the learning rate from scratch
PREFERENCE = 1 / 20  # of that
FEWEST_WARMUP, MOST_WARMUP = 10, 2000  # steps; 2,000 are LLaMA 2's
_TINY, _TINY_LR, _EXPONENT, _WARMUP_EXPONENT = 1e6, 2e-3, 0.21, 0.59


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """What a model was trained with from scratch.

    Attributes:
        lr: Peak learning rate.
        warmup_steps: Steps of linear warm-up; None follows the model's size.
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
    """Return the peak learning rate from scratch of a model without a published one, to two digits."""
    return float(f"{_TINY_LR * min(1.0, (_TINY / max(1, parameters)) ** _EXPONENT):.2g}")


def warmup_by_size(parameters: int) -> int:
    """Return the steps of warm-up from scratch of a model without published ones."""
    return min(MOST_WARMUP, max(FEWEST_WARMUP, round(10 * math.pow(parameters / _TINY, _WARMUP_EXPONENT))))


def published(model: LlamaConfig) -> Published:
    """Return what a model is trained with from scratch: the values of the preset of its shape, else by size.

    The context may be longer than the preset's.
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
    """Return both sections with numbers in place of None.

    Args:
        model: What is trained.
        steps: Steps of the run.
        optimizer: As given.
        schedule: As given.
        is_started: Whether the weights are those of a trained model.
        has_adapters: Whether adapters are trained in place of the weights.
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
