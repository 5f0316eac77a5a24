import math

import pytest

from bmburst.train.config import ScheduleConfig
from bmburst.train.schedule import learning_rate
from tests.refusals import refused

COSINE = ScheduleConfig(kind="cosine", warmup_steps=10, final_lr_fraction=0.1)
WSD = ScheduleConfig(kind="wsd", warmup_steps=10, decay_fraction=0.2, final_lr_fraction=0.1)
CONSTANT = ScheduleConfig(kind="constant", warmup_steps=10)
ALL = pytest.mark.parametrize("config", [COSINE, WSD, CONSTANT], ids=lambda config: config.kind)


@ALL
def test_warm_up_is_linear_starts_above_zero_and_reaches_the_peak(config):
    rates = [learning_rate(config, 2.0, step, 100) for step in range(1, 11)]
    assert rates == pytest.approx([0.2 * step for step in range(1, 11)])


@ALL
def test_without_warm_up_the_first_step_is_near_the_peak(config):
    no_warmup = ScheduleConfig(kind=config.kind, warmup_steps=0)
    assert learning_rate(no_warmup, 2.0, 1, 1000) == pytest.approx(2.0, rel=1e-4)


def test_cosine_corners():
    assert learning_rate(COSINE, 1.0, 10, 110) == 1.0
    assert learning_rate(COSINE, 1.0, 60, 110) == pytest.approx(0.55)
    assert learning_rate(COSINE, 1.0, 35, 110) == pytest.approx(0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)
    assert learning_rate(COSINE, 1.0, 110, 110) == pytest.approx(0.1)


def test_wsd_corners():
    rates = {step: learning_rate(WSD, 1.0, step, 100) for step in range(1, 101)}
    assert all(rates[step] == 1.0 for step in range(10, 81))
    assert rates[81] == pytest.approx(1 - 0.9 / 20)
    assert rates[90] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)


def test_constant_stays():
    assert {learning_rate(CONSTANT, 0.3, step, 100) for step in range(10, 101)} == {0.3}


@ALL
def test_never_rises_after_warm_up_nor_leaves_its_range(config):
    rates = [learning_rate(config, 1.0, step, 97) for step in range(10, 98)]
    assert rates == sorted(rates, reverse=True)
    assert all(0.1 - 1e-12 <= rate <= 1.0 for rate in rates)


@ALL
@pytest.mark.parametrize("total", [1, 2, 9, 10, 11, 12])
def test_runs_about_as_short_as_their_warm_up(config, total):
    rates = [learning_rate(config, 1.0, step, total) for step in range(1, total + 1)]
    assert rates[0] == pytest.approx(0.1)
    assert all(0 < rate <= 1 for rate in rates)


@ALL
def test_beyond_the_end_the_last_rate_holds(config):
    assert learning_rate(config, 1.0, 500, 100) == learning_rate(config, 1.0, 100, 100)


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
