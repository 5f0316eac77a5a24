"""Learning rates are those of the published formulas, and of transformers where it has the schedule."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bmburst.blocks.kinds import KINDS
from bmburst.blocks.lora import LoRAConfig
from bmburst.train.config import OptimizerConfig, ScheduleConfig, TrainConfig
from bmburst.train.resolve import resolve
from bmburst.train.schedule import learning_rate
from tests.refusals import refused

COSINE = ScheduleConfig(kind="cosine", warmup_steps=10, final_lr_fraction=0.1)
LINEAR = ScheduleConfig(kind="linear", warmup_steps=10, final_lr_fraction=0.1)
WSD = ScheduleConfig(kind="wsd", warmup_steps=10, decay_fraction=0.2, final_lr_fraction=0.1)
EXPONENTIAL = ScheduleConfig(kind="wsd", warmup_steps=10, decay_fraction=0.2, decay="exponential")
CONSTANT = ScheduleConfig(kind="constant", warmup_steps=10)
ALL = pytest.mark.parametrize(
    "config", [COSINE, LINEAR, WSD, EXPONENTIAL, CONSTANT], ids=lambda config: f"{config.kind}-{config.decay}"
)


def transformers_rates(make: Any, total: int) -> list[float]:
    """Return the rates of a schedule of transformers for steps 1 to `total`, whose steps count from 0."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = make(optimizer)
    rates = []
    for _ in range(total):
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    return rates


@pytest.mark.parametrize(
    ("config", "make"),
    [
        (
            {"kind": "linear", "final_lr_fraction": 0.0},
            partial(transformers.get_linear_schedule_with_warmup, num_warmup_steps=7, num_training_steps=97),
        ),
        (
            {"kind": "cosine", "final_lr_fraction": 0.05},
            partial(
                transformers.optimization.get_cosine_with_min_lr_schedule_with_warmup,
                num_warmup_steps=7,
                num_training_steps=97,
                min_lr_rate=0.05,
            ),
        ),
        ({"kind": "constant"}, partial(transformers.get_constant_schedule_with_warmup, num_warmup_steps=7)),
        *(
            (
                {"kind": "wsd", "final_lr_fraction": 0.2, "decay_fraction": 30 / 97, "decay": ours},
                partial(
                    transformers.optimization.get_wsd_schedule,
                    num_warmup_steps=7,
                    num_decay_steps=30,
                    num_training_steps=97,
                    decay_type=theirs,
                    min_lr_ratio=0.2,
                ),
            )
            for ours, theirs in (("linear", "linear"), ("cosine", "cosine"), ("sqrt", "1-sqrt"))
        ),
    ],
)
def test_rates_are_those_of_transformers(config: dict[str, Any], make: Any) -> None:
    wanted = transformers_rates(make, 97)
    # Its warm-up of WSD begins at the minimum, ours at zero.
    first = 7 if config["kind"] == "wsd" else 1
    ours = [learning_rate(ScheduleConfig(warmup_steps=7, **config), 2.0, step, 97) for step in range(first, 98)]
    assert ours == pytest.approx(wanted[first - 1 :], abs=1e-12)


def test_minicpms_decay_halves_the_rate_at_equal_intervals():
    """arXiv:2404.06395, section 4.2: 0.5 ** ((s - S) / T) after S stable steps; 3 half-lives end at an eighth."""
    config = ScheduleConfig(
        kind="wsd", warmup_steps=10, decay_fraction=0.3, final_lr_fraction=0.125, decay="exponential"
    )
    for step in range(70, 101):
        assert learning_rate(config, 3.0, step, 100) == pytest.approx(3.0 * 0.5 ** ((step - 70) / 10))
    assert learning_rate(config, 3.0, 70, 100) == learning_rate(config, 3.0, 40, 100) == 3.0


@pytest.mark.parametrize(("fraction", "steps", "wanted"), [(0.07, 100, 7), (0.03, 90, 3), (0.5, 3, 2), (0.0, 9, 0)])
def test_warm_up_as_a_fraction_follows_the_number_of_steps(fraction: float, steps: int, wanted: int) -> None:
    config = TrainConfig(steps=steps, schedule=ScheduleConfig(kind="constant", warmup_fraction=fraction)).schedule
    assert config.warmup(steps) == wanted and config.warmup_steps is None
    assert learning_rate(config, 1.0, max(wanted, 1), steps) == 1.0
    assert learning_rate(config, 1.0, 1, steps) == pytest.approx(1 / max(wanted, 1))
    assert config.warmup(10 * steps) == math.ceil(10 * steps * fraction - 1e-6)


@ALL
def test_rises_in_a_line_to_the_peak_never_again_and_holds_the_last_rate(config):
    rates = [learning_rate(config, 2.0, step, 97) for step in range(1, 98)]
    assert rates[:10] == pytest.approx([0.2 * step for step in range(1, 11)])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert all(0.2 - 1e-12 <= rate <= 2.0 for rate in rates[9:])
    assert learning_rate(config, 2.0, 500, 97) == rates[-1]
    no_warmup = ScheduleConfig(kind=config.kind, warmup_steps=0)
    assert learning_rate(no_warmup, 2.0, 1, 1000) == pytest.approx(2.0, rel=1e-3)


@ALL
@pytest.mark.parametrize("total", [1, 2, 9, 10, 11, 12])
def test_runs_about_as_short_as_their_warm_up(config, total):
    rates = [learning_rate(config, 1.0, step, total) for step in range(1, total + 1)]
    assert rates[0] == pytest.approx(0.1)
    assert all(0 < rate <= 1 for rate in rates)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_wsd_with_no_and_with_only_decay(fraction):
    config = ScheduleConfig(kind="wsd", warmup_steps=10, decay_fraction=fraction, final_lr_fraction=0.0)
    middle = learning_rate(config, 1.0, 55, 100)
    assert middle == pytest.approx(1.0 if fraction == 0 else 0.5)
    assert learning_rate(config, 1.0, 100, 100) == (1.0 if fraction == 0 else 0.0)


@pytest.mark.parametrize(("step", "total"), [(0, 10), (-1, 10), (1, 0)])
def test_steps_count_from_one(step, total):
    with refused("from 1", f"step {step} of {total}", error=ValueError):
        learning_rate(COSINE, 1.0, step, total)


@pytest.mark.parametrize(
    "values", [{"kind": "cosin"}, {"warmup_steps": -1}, {"decay_fraction": 1.1}, {"final_lr_fraction": -0.1}]
)
def test_bad_schedules_are_refused(values):
    with refused(*values, *values.values(), "known: " if "kind" in values else "allowed: "):
        ScheduleConfig(**values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"warmup_steps": 3, "warmup_fraction": 0.1}, "warmup_steps 3 | warmup_fraction 0.1 | leave one"),
        ({"decay": "sqrt", "kind": "linear"}, "decay sqrt has no effect | kind linear | wsd"),
        ({"decay_fraction": 0.5}, "decay_fraction 0.5 has no effect | kind cosine | wsd | 0.2, the default"),
        (
            {"final_lr_fraction": 0.5, "kind": "constant"},
            "final_lr_fraction 0.5 has no effect | kind constant | linear",
        ),
        (
            {"decay": "exponential", "kind": "wsd", "final_lr_fraction": 0.0},
            "exponential | final_lr_fraction 0 | above 0",
        ),
    ],
)
def test_settings_without_effect_are_refused(values: dict[str, Any], words: str) -> None:
    with refused(words):
        ScheduleConfig(**values)


def test_kinds_that_have_no_weight_decay_are_refused() -> None:
    TrainConfig(optimizer=OptimizerConfig(weight_decay_on=("mlp",)))
    with refused("weight_decay_on mlp has no effect | weight_decay is 0 | fix: --optimizer.weight_decay 0.1"):
        TrainConfig(optimizer=OptimizerConfig(weight_decay_on=("mlp",), weight_decay=0))
    with refused("weight_decay_on mlp,biases has no effect on biases | fix: | embeddings,attention,mlp,head,norms"):
        TrainConfig(optimizer=OptimizerConfig(weight_decay_on=("mlp", "biases")))
    adapters = {"init_from": Path("model"), "model": TrainConfig().model, "lora": LoRAConfig(rank=1)}
    decayed = OptimizerConfig(weight_decay_on=("embeddings",), weight_decay=0.1)
    with refused("weight_decay_on embeddings | no effect | fix: --optimizer.weight_decay_on attention"):
        TrainConfig(**adapters, optimizer=decayed)
    TrainConfig(**adapters, optimizer=replace(decayed, weight_decay_on=KINDS))
    TrainConfig(**{**adapters, "lora": LoRAConfig(rank=1, modules_to_save=("embed_tokens",))}, optimizer=decayed)


def test_files_and_options_agree_with_python() -> None:
    given = {"schedule": {"kind": "wsd", "decay": "exponential", "warmup_fraction": "0.05"}, "steps": 60}
    config = TrainConfig(steps=60, schedule=ScheduleConfig(kind="wsd", decay="exponential", warmup_fraction=0.05))
    assert resolve((), given).schedule == config.schedule and config.schedule.warmup(60) == 3
