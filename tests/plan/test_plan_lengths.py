"""A longer sequence takes as much time and memory, also where the host or a link is slower than the kernels."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from bmburst.blocks.config import LoRAConfig
from bmburst.blocks.presets import PRESETS
from bmburst.plan.candidates import Candidate, Offload, Task
from bmburst.plan.memory import KEPT_BY_GRAPHS, memory_of
from bmburst.plan.step import step_time
from bmburst.plan.ways import candidates
from bmburst.schedule.gather_plan import Visibility
from bmburst.schedule.hardware import load_hardware, shipped
from bmburst.schedule.units import Sizes
from tests.pairs import long

LENGTHS = (64, 101, 160, 251, 400, 631, 1000, 1009, 1585, 2048)
GPUS = ((1, 1), (2, 1), (3, 1), (8, 1), (16, 2), (32, 4))
POLICIES = ("none", "block", "block-keep-attention+offload", "block-keep-attention:0.5", "block+first-4")
ROUNDING = 1e-5  # of a step: an order of hops that suits one length better


def _ways(drawn: random.Random, count: int, *, of_trees: bool = False) -> list[Candidate]:
    """Return ways to train a model, without chunks of the MLP: they begin at a length, and save memory from there."""
    found: list[Candidate] = []
    while len(found) < count:
        model, (gpus, nodes) = PRESETS[drawn.choice(sorted(PRESETS))], drawn.choice(GPUS)
        micro = drawn.choice((1, 2))
        task = Task(
            model=model,
            sequence=LENGTHS[-1],
            gpus=gpus,
            nodes=nodes,
            batch=4 * micro,
            micro_batch=micro,
            dtype=drawn.choice(("bfloat16", "float32")),
            mlp_chunk=0,
            lora=drawn.choice((None, None, LoRAConfig(rank=16))),
            pairs=drawn.random() < 0.2,
            shared_prompt=drawn.choice((101, 500)) if of_trees else 0,
            answers=drawn.choice((2, 3, 8)),
        )
        if model.num_layers < 8:
            continue
        way = drawn.choice(candidates(task, recompute=[drawn.choice(POLICIES)], zero=(2, 3)))
        every = tuple(Offload) if way.zero == 3 else (Offload.NOTHING, Offload.OPTIMIZER)
        found.append(replace(way, offload=drawn.choice(every)))
    return found


@pytest.mark.parametrize("seed", [0, *long(*range(1, 9))])
def test_longer_sequences_take_as_much(seed: int) -> None:
    drawn = random.Random(seed)
    for way in _ways(drawn, 24):
        hardware = load_hardware(drawn.choice(shipped()))
        each = [replace(way, task=replace(way.task, sequence=n)) for n in LENGTHS if n >= way.sequence]
        times = [step_time(one, hardware).total for one in each]
        memories = [memory_of(one, hardware) for one in each]  # longer sequences have no graphs of blocks
        nbytes = [memory.total - memory.outside.get(KEPT_BY_GRAPHS, 0.0) for memory in memories]
        told = f"{way.name}, {way.task}, {hardware.name}"
        assert all(longer >= shorter * (1 - ROUNDING) for shorter, longer in pairwise(times)), (told, times)
        assert all(longer >= shorter for shorter, longer in pairwise(nbytes)), (told, nbytes)


def _calls_of_zigzag(sizes: Sizes, visible: Visibility, stops: int, *, backward: bool) -> int:
    return sizes.calls(stops, backward=backward) * len(visible.mask.levels)


@pytest.mark.parametrize("seed", long(*range(5)))
def test_longer_trees_take_about_as_much(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At another length, the chunks of their layout begin elsewhere, which may need fewer tiles, or keys of others.

    Such short sequences wait for the host, so the time follows the number of calls. It is that of zigzag here.
    """
    monkeypatch.setattr("bmburst.schedule.cost.kernel_calls", _calls_of_zigzag)
    drawn = random.Random(seed)
    for way in _ways(drawn, 24, of_trees=True):
        hardware = load_hardware(drawn.choice(shipped()))
        lengths = [n for n in LENGTHS if n >= max(way.sequence, way.task.shared_prompt)]
        each = [replace(way, task=replace(way.task, sequence=n)) for n in lengths]
        times = [step_time(one, hardware).total for one in each]
        nbytes = [memory_of(one, hardware).total for one in each]
        told = f"{way.name}, {way.task}, {hardware.name}"
        assert all(longer >= shorter * 0.99 for shorter, longer in pairwise(times)), (told, times)
        assert all(longer >= shorter for shorter, longer in pairwise(nbytes)), (told, nbytes)


def test_a_pipeline_waits_for_the_last_optimizer() -> None:
    """The first stage has more layers. From 3,019 tokens on, the passes of the other one take longer."""
    model = PRESETS["qwen2-7b"]
    task = Task(model=model, sequence=3018, gpus=2, batch=4, dtype="float32", mlp_chunk=0)
    way = Candidate(task=task, pipe=2, recompute="block-keep-attention+offload", zero=2, offload=Offload.OPTIMIZER)
    times = []
    for length in (2048, 3018, 3019, 4096):
        long_way = replace(way, task=replace(task, sequence=length))
        assert [stage.task.model.num_layers for stage in long_way.stages] == [15, 13]
        times.append(step_time(long_way, load_hardware("h200")))
    assert times[1].optimizer > times[2].optimizer, "another stage is the slowest"
    assert sorted(times, key=lambda time: time.total) == times
