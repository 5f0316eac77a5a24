"""ZeRO over all ranks and within nodes, as the planner prices it: time, memory, and the choice of "auto"."""

from dataclasses import replace

import pytest

from bmburst.blocks.presets import PRESETS
from bmburst.cli import main
from bmburst.cli.recipe import settings_of
from bmburst.plan.candidates import Candidate, Offload, Task
from bmburst.plan.counts import vocabulary_matrices
from bmburst.plan.memory import memory_of
from bmburst.plan.search import choose_zero_group, predict, search
from bmburst.plan.step import step_time
from bmburst.schedule.hardware import load_hardware
from bmburst.train.config import ParallelConfig, TrainConfig
from bmburst.train.machine import planned
from tests.refusals import refused

FAST = load_hardware("h200")
SLOW = replace(FAST, inter_bandwidth=2.5e8, inter_lone_bandwidth=2e9)  # one adapter of 16 Gb/s for the 8 GPUs of a node
MODEL = PRESETS["llama-3-8b"]
TASK = Task(model=MODEL, preset="llama-3-8b", sequence=8192, gpus=16, nodes=2, batch=128)
WORLD = Candidate(task=TASK, data=16, recompute="block-keep-attention")
NODE = replace(WORLD, zero_ranks=8)


@pytest.mark.parametrize(("hardware", "ranks"), [(SLOW, 8), (FAST, 16)], ids=["slow links", "fast links"])
def test_slow_links_between_nodes_choose_the_node(hardware, ranks):
    best = search(TASK, hardware, recompute=("block-keep-attention", "none"))[0]
    assert best.candidate.shards == ranks and best.memory.fits
    settings = settings_of(best.candidate)["parallel"]
    assert settings.get("zero_group") == ("node" if ranks == 8 else None)
    choice = choose_zero_group(predict(WORLD, hardware), predict(NODE, hardware))
    assert choice.value == (8 if ranks == 8 else None)
    assert "\n" not in choice.message and ("auto: node" if ranks == 8 else "auto: world") in choice.message


def test_what_does_not_fit_is_not_chosen():
    small = replace(SLOW, memory=memory_of(WORLD, SLOW).total + 1e9)
    choice = choose_zero_group(predict(WORLD, small), predict(NODE, small))
    assert choice.value is None and "does not fit" in choice.message


def test_state_is_divided_by_the_ranks_of_a_group():
    for name in ("weights", "gradients", "optimizer"):
        world, node = (memory_of(way, FAST).lines[name] for way in (WORLD, NODE))
        assert node == pytest.approx(2 * world)
    world, node = (memory_of(replace(way, offload=Offload.WEIGHTS), FAST).host for way in (WORLD, NODE))
    assert node["optimizer"] == pytest.approx(2 * world["optimizer"])
    assert world["optimizer"] == pytest.approx(MODEL.num_parameters / 2 * 12, rel=0.2)


def test_time_is_a_gather_inside_a_node_and_one_sum_a_step():
    """The sum of blocks hides behind the last backward pass, that of embedding and head does not."""
    one_node = replace(WORLD, task=replace(TASK, gpus=8, nodes=1, batch=64), data=8)
    free = replace(FAST, inter_exposed=0.0, inter_latency=0.0)
    shard = vocabulary_matrices(MODEL) * MODEL.vocab_size * MODEL.hidden_size / 8 * 2
    waits = step_time(NODE, free).zero - step_time(one_node, free).zero
    assert waits == pytest.approx(shard / free.inter_bandwidth, rel=0.01)  # 2 (n - 1) / n times, and n is 2
    whole = MODEL.num_parameters / 8 * 2 / SLOW.inter_bandwidth
    again = replace(NODE, task=replace(TASK, batch=256))
    once, twice = (step_time(way, SLOW).zero for way in (NODE, again))
    assert 0.5 * whole < once < 1.1 * whole and twice < once + 0.1 * whole  # not with every micro-batch
    alone = replace(NODE, task=replace(TASK, gpus=2, nodes=2, batch=16), data=2, zero_ranks=1)
    assert step_time(alone, FAST).zero > 0  # nothing to gather


@pytest.mark.parametrize(("group", "ranks"), [("world", 16), ("auto", 16), ("node", 8), (4, 4), (16, 16)])
def test_a_run_is_planned_with_its_group(group, ranks):
    config = TrainConfig(parallel=ParallelConfig(data_parallel=16, zero_group=group), batch_size=16)
    assert planned(config, 16, 2, FAST).shards == ranks


def test_stages_of_a_pipeline_have_no_groups_of_their_own():
    with refused("pipeline_parallel 2", "parallel.zero_group node", "fix: "):
        TrainConfig(parallel=ParallelConfig(pipeline_parallel=2, zero_group="node"))


def test_the_command_line_takes_groups(capsys):
    words = "plan --preset llama-3-8b --sequence-length 8K --batch-size 16 --nproc 8 --nodes 2 --ways 2"
    assert main([*words.split(), "--recompute", "none", "--parallel.zero_group", "node"]) == 0
    said = capsys.readouterr().out
    assert "over 8" in said and "--parallel.zero_group node" in said
    assert main(["plan", "--longest", "--preset", "llama-3-8b", "--nproc", "8", "--parallel.zero_group", "node"]) == 2
    assert "--parallel.zero_group" in capsys.readouterr().err
