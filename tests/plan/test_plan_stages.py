"""The planner's pipeline: the bubble, what a stage holds, its transfers, and the command."""

import dataclasses
import re
import shlex

import pytest

from bmburst.blocks.config import LoRAConfig
from bmburst.blocks.presets import PRESETS
from bmburst.cli import main
from bmburst.plan.candidates import Candidate, Task
from bmburst.plan.counts import CURRENT
from bmburst.plan.memory import memory_of
from bmburst.plan.moments import StepMoments
from bmburst.plan.search import predict, search
from bmburst.plan.stages import kept_by_stage, send_seconds, splitting_layers
from bmburst.plan.step import step_time
from bmburst.schedule.hardware import load_hardware
from bmburst.schedule.pipeline import Compute, PassTimes, PipelineSchedule
from tests.refusals import says

H200 = load_hardware("h200")
MODEL = PRESETS["llama-3-8b"]


def _way(*, pipe: int, batch: int = 8, gpus: int = 4, layers: int = 32, **changes: object) -> Candidate:
    model = dataclasses.replace(MODEL, num_layers=layers)
    task = Task(model=model, preset="llama-3-8b", sequence=8192, gpus=gpus, batch=batch)
    way = Candidate(task=task, pipe=pipe, recompute="block")
    return dataclasses.replace(way.with_strategy(way.sequence, "none"), **changes)


def _makespan(stages: int, micro_batches: int, forward: float, backward: float) -> float:
    """The time of the schedule where transfers take none: each pass begins when its stage and its input are ready."""
    schedule, done, free = PipelineSchedule(stages, micro_batches), {}, [0.0] * stages
    left = [[each for each in schedule.actions(s) if isinstance(each, Compute)] for s in range(stages)]
    while any(left):
        for stage, passes in enumerate(left):
            if not passes:
                continue
            way, number = passes[0].kind, passes[0].micro_batch
            first = stage == 0 if way == "forward" else stage == stages - 1
            source = (stage - 1 if way == "forward" else stage + 1, way, number)
            if not first and source not in done:
                continue
            begin = max(free[stage], 0.0 if first else done[source])
            free[stage] = done[stage, way, number] = begin + (forward if way == "forward" else backward)
            passes.pop(0)
    return max(free)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (2, 32), (4, 4), (4, 12)])
def test_bubble_is_that_of_the_schedule(stages: int, micro_batches: int) -> None:
    way = _even(_way(pipe=stages, batch=micro_batches))
    time = step_time(way, H200)
    work = (time.total - time.pipeline - time.optimizer) / micro_batches
    wanted = _makespan(stages, micro_batches, work / 3, 2 * work / 3)
    assert time.total - time.optimizer == pytest.approx(wanted + send_seconds(way, H200), rel=1e-3)


def _even(way: Candidate) -> Candidate:
    """Return the same of a model whose head takes no time, so that all stages are alike."""
    return dataclasses.replace(
        way, task=dataclasses.replace(way.task, model=dataclasses.replace(way.task.model, vocab_size=8))
    )


def test_bubble_is_shorter_by_the_gradients_of_weights_where_layers_are_not_recomputed() -> None:
    """Two stages wait for F + B - W and not for F + B + W; a third of a layer's products are W."""
    for recompute, lora, times in (("none", None, 2), ("block", None, 0), ("none", LoRAConfig(rank=8), 0)):
        way = _even(_way(pipe=2, recompute=recompute))
        way = dataclasses.replace(way, task=dataclasses.replace(way.task, lora=lora))
        time = step_time(way, H200)
        work = time.total - time.pipeline - time.optimizer
        waits = time.pipeline - send_seconds(way, H200)
        assert waits == pytest.approx((work - times * time.matmul / 3) / 8, rel=1e-3)


def test_planner_counts_the_schedule_of_few_micro_batches_for_many() -> None:
    for splits in (True, False):
        times = [PassTimes(2.0, 3.0, 1.0), PassTimes(1.0, 3.0, 1.5), PassTimes(4.0, 2.0, 2.0)]
        few, many = (PipelineSchedule(3, count, splits).makespan(times) for count in (12, 50))
        assert many == pytest.approx(few + 38 * 8.0)


@pytest.mark.parametrize(("pipe", "zero"), [(1, 3), (2, 3), (2, 2)])
def test_gradients_of_micro_batches_are_added_up(pipe: int, zero: int) -> None:
    """Each but the first: read the sum and the gradient, and write; whole gradients in a pipeline with ZeRO 2."""
    one, four = (_even(_way(pipe=pipe, batch=count, zero=zero)) for count in (pipe, 4 * pipe))
    seconds = [step_time(each, H200).elementwise for each in (one, four)]
    task = four.stages[0].task if pipe > 1 else four.task
    held = task.trained if (pipe, zero) == (2, 2) else task.trained / task.gpus
    # `one` has as many micro-batches as stages, `four` has 4 times as many: 4 (p - 1) and 4 p - 1 sums.
    added = (4 * pipe - 1) - 4 * (pipe - 1)
    assert seconds[1] - 4 * seconds[0] == pytest.approx(added * H200.memory_seconds(3 * 2 * held), rel=1e-6)


def test_slow_head_is_counted_on_the_last_stage() -> None:
    """With a head as long as 40 of 4 layers, the step is the last stage's, and the first stage's beginning and end."""
    way = _way(pipe=2, layers=4, recompute="none")
    long = dataclasses.replace(way.task.model, vocab_size=40 * MODEL.vocab_size)
    way = dataclasses.replace(way, task=dataclasses.replace(way.task, model=long))
    time = step_time(way, H200)
    assert time.matmul / 8 > 0.9 * H200.matmul_seconds(6.0 * way.rows * 40 * MODEL.vocab_size * 4096, 1024)
    assert time.pipeline < 0.1 * time.total


def test_stage_that_splits_holds_inputs_and_gradients_of_its_matrices() -> None:
    """The last of 2 stages: when it computes what two micro-batches left, it holds no activations."""
    way = _way(pipe=2, recompute="none", layers=4)
    model, rows = way.task.model, way.rows
    inputs = 3 * model.hidden_size + model.intermediate_size
    outputs = 2 * model.hidden_size + 2 * 1024 + 2 * model.intermediate_size + model.hidden_size
    moments = StepMoments(way.stages[1], CURRENT)
    assert moments.left_for_later() == 2 * rows * (inputs + outputs)
    alone = kept_by_stage(dataclasses.replace(way, recompute="block"), 1, moments)["micro-batches in flight"]
    assert alone == rows * model.hidden_size * 2  # the stream that it received
    more = kept_by_stage(way, 1, moments)["micro-batches in flight"]
    assert more >= splitting_layers(way, 1) * moments.left_for_later() > 0
    assert splitting_layers(way, 0) == 0


def test_a_stage_holds_its_layers_and_as_many_micro_batches_as_there_are_stages_after_it() -> None:
    """Against a model of the first stage's layers on its GPUs; 4 stages hold 3 more inputs, of as many tokens a rank.

    The head takes as long as 2.1 layers: 2 stages have 17 and 15 layers, 4 stages have 9, 9, 8 and 6.
    """
    whole = _way(pipe=1, gpus=2, layers=17)
    one, two = (memory_of(each, H200).lines for each in (whole, _way(pipe=2)))
    tables = 2 * MODEL.vocab_size * MODEL.hidden_size
    parameters = whole.task.model.num_parameters - tables / 2  # one of the two tables
    for name, nbytes in (("weights", 2), ("gradients", 2)):
        assert two[name] == pytest.approx(nbytes * parameters / 2, rel=1e-6), name
    assert "micro-batches in flight" not in one
    stream = 8192 * MODEL.hidden_size * 2
    four = _way(pipe=4)
    in_flight = {pipe: memory_of(_way(pipe=pipe), H200).lines["micro-batches in flight"] for pipe in (2, 4)}
    # Under "block" a layer keeps its input; each micro-batch in flight also has the output that was sent.
    assert in_flight[4] == 3 * 9 * stream + 4 * stream
    assert in_flight[2] == 1 * 17 * stream / 2 + 2 * stream / 2  # 2 ranks share a sequence
    more = dataclasses.replace(four, task=dataclasses.replace(four.task, batch=64))
    assert memory_of(more, H200).lines["micro-batches in flight"] == in_flight[4]


def test_transfers_and_slow_links_decide() -> None:
    """Where a node's link is slow, ZeRO over all GPUs moves weights through it, and stages move hidden states only."""
    model = dataclasses.replace(MODEL, max_position_embeddings=4096)
    task = Task(model=model, preset="llama-3-8b", sequence=4096, gpus=16, nodes=2, batch=64)
    slow = dataclasses.replace(H200, inter_bandwidth=H200.inter_bandwidth / 100)
    for machine, fastest in ((H200, 1), (slow, 2)):
        found = search(task, machine, recompute=["block"], zero=[2, 3], tensor=[1], pipe=[1, 2])
        assert found[0].candidate.pipe == fastest


def test_command_of_a_pipeline_is_one_of_bmburst_train(capsys: pytest.CaptureFixture[str]) -> None:
    from bmburst.train.resolve import resolve

    argv = "plan --preset llama-3-8b --sequence-length 16K --nproc 4 --batch-size 8 --pipeline-parallel 2"
    assert main(argv.split()) == 0
    said = capsys.readouterr().out
    assert "pipeline  " in said and "micro-batches in flight" in said
    command = shlex.split(next(line for line in said.splitlines() if line.startswith("bmburst train")))
    options = dict(zip(command[2::2], command[3::2], strict=True))
    assert options["--pipeline-parallel"] == "2"
    names = {"pipeline-parallel", "data-parallel", "sequence-parallel", "strategy"}
    given = {re.sub("^--", "", key): value for key, value in options.items() if key != "--nproc"}
    prefix = {key: f"parallel.{key}" if key in names else key for key in given}
    config = resolve((), {prefix[key].replace("-", "_"): value for key, value in given.items()})
    config.validate(4)
    assert config.mesh_shape(4).pipe == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--nproc 4 --batch-size 8 --pipeline-parallel 3", "--pipeline-parallel 3 | 4 GPUs | divisors"),
        ("--nproc 4 --batch-size 1 --pipeline-parallel 2", "--pipeline-parallel 2 | --batch-size 1 | --batch-size 2"),
        ("--nproc 4 --batch-size 8 --pipeline-parallel 2 --recompute block+offload", "2 stages | --recompute block"),
        ("--nproc 4 --batch-size 8 --pipeline-parallel two", "--pipeline-parallel | two"),
    ],
)
def test_impossible_stages_are_refused(options: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"plan --preset llama-3-8b --sequence-length 8K {options}".split()) == 2
    says(capsys.readouterr().err, words)


def test_runs_describe_their_stages() -> None:
    from bmburst.train.config import ParallelConfig, TrainConfig
    from bmburst.train.machine import planned

    config = TrainConfig(parallel=ParallelConfig(pipeline_parallel=2), batch_size=4, recompute="block")
    way = planned(config, 4, 1, H200)
    assert (way.pipe, way.sequence) == (2, 2) and predict(way, H200).time.pipeline > 0
