"""ZeRO stage "auto": whole weights where they fit and nothing else must give way for them."""

from dataclasses import replace

import pytest

from bmburst.blocks.presets import PRESETS
from bmburst.plan.candidates import Candidate, Task
from bmburst.plan.search import choose_recompute, choose_zero_level, predict
from bmburst.schedule.hardware import load_hardware

HARDWARE = load_hardware("h200")
FREE = HARDWARE.memory - 3e9


def predicted(level, gpus, tokens):
    task = Task(model=PRESETS["llama-3-8b"], sequence=tokens, gpus=gpus)
    way = Candidate(task=task, data=1, ulysses_degree=gpus, zero=level)
    return predict(replace(way, recompute=choose_recompute(way, HARDWARE, FREE, layout="zigzag").value), HARDWARE)


@pytest.mark.parametrize(
    ("gpus", "tokens", "level"),
    [
        (4, 1 << 10, 2),  # the host is slower than the GPUs with both
        (4, 1 << 13, 2),
        (2, 1 << 15, 3),  # whole weights fit, if more is recomputed
        (4, 1 << 17, 3),
    ],
)
def test_stage_2_where_nothing_is_recomputed_for_it(gpus, tokens, level):
    kept, gathered = (predicted(each, gpus, tokens) for each in (2, 3))
    assert kept.memory.fits and gathered.memory.fits
    choice = choose_zero_level(kept, gathered)
    assert choice.value == level
    assert "\n" not in choice.message and f"auto: {level}" in choice.message
    if level == 2:
        assert kept.time.zero < gathered.time.zero
        assert kept.candidate.recompute == gathered.candidate.recompute == "none"
    else:
        assert kept.time.recompute > gathered.time.recompute


def test_what_does_not_fit_is_not_chosen():
    kept, gathered = (predicted(level, 2, 1 << 13) for level in (2, 3))
    small = replace(HARDWARE, memory=gathered.memory.total + 1e9)
    choice = choose_zero_level(*(predict(each.candidate, small) for each in (kept, gathered)))
    assert choice.value == 3 and "not fit" in choice.message
