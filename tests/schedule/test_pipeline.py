"""The schedule of a pipeline alone: what each stage computes, what it holds, and that no stage waits forever."""

import itertools

import pytest

from bmburst.blocks.presets import PRESETS
from bmburst.plan.counts import head_layers
from bmburst.schedule.pipeline import Compute, PassTimes, PipelineSchedule, Transfer, stage_layers
from tests.refusals import refused

_SIZES = [(p, m) for p, m in itertools.product((1, 2, 3, 4, 7), (1, 2, 3, 4, 5, 7, 12)) if m >= p]


def _run(schedule: PipelineSchedule) -> list[Compute]:
    """Return all passes in an order in which they can run; a transfer is done when both stages have reached it.

    This is what a send does that waits for its receive, the strictest transport.
    """
    left = [list(schedule.actions(stage)) for stage in range(schedule.stages)]
    done = []
    while any(left):
        for stage, actions in enumerate(left):
            if not actions:
                continue
            match actions[0]:
                case Compute() as computed:
                    done.append(computed)
                    actions.pop(0)
                    break
                case Transfer(peer, sends, receives):
                    if left[peer] and left[peer][0] == Transfer(stage, receives, sends):
                        actions.pop(0), left[peer].pop(0)
                        break
        else:
            raise AssertionError(f"all stages wait: {[actions[:1] for actions in left]}")
    return done


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize(("stages", "micro_batches"), _SIZES)
def test_each_micro_batch_goes_forward_then_backward_once_and_no_stage_waits_forever(
    stages: int, micro_batches: int, splits: bool
) -> None:
    schedule = PipelineSchedule(stages, micro_batches, splits)
    for stage in range(stages):
        alive: list[int] = []
        left: list[int] = []
        arrived: dict[int, set[int | None]] = {stage - 1: set(), stage + 1: set()}
        computed = []
        for action in schedule.actions(stage):
            if isinstance(action, Transfer):
                assert abs(action.peer - stage) == 1 and (action.sends, action.receives) != (None, None)
                kind = "forward" if action.peer > stage else "backward"
                assert action.sends is None or Compute(kind, action.sends) in computed  # it exists
                arrived[action.peer].add(action.receives)
                continue
            computed.append(action)
            if action.kind == "forward":
                assert not stage or action.micro_batch in arrived[stage - 1]
                alive.append(action.micro_batch)
            elif action.kind == "weights":
                left.remove(action.micro_batch)
            else:
                assert stage == stages - 1 or action.micro_batch in arrived[stage + 1]
                alive.remove(action.micro_batch)
                left += [action.micro_batch] if splits and stage else []
            assert len(alive) <= schedule.in_flight(stage) <= stages - stage
            assert len(alive) + len(left) <= stages
            assert any(len(alive) <= first and len(left) <= later + 1 for first, later in schedule.held(stage))
        kinds = ("forward", "backward", "weights") if splits and stage else ("forward", "backward")
        for kind in kinds:
            assert [each.micro_batch for each in computed if each.kind == kind] == list(range(micro_batches))
        assert len(computed) == len(kinds) * micro_batches and not left
        moves = [
            [each for each in s.actions(stage) if isinstance(each, Transfer)] for s in (schedule, _whole(schedule))
        ]
        assert moves[0] == moves[1]  # so a stage that splits and one that does not can be neighbours
    assert len(_run(schedule)) == (3 * stages - 1 if splits else 2 * stages) * micro_batches


def _whole(schedule: PipelineSchedule) -> PipelineSchedule:
    return PipelineSchedule(schedule.stages, schedule.micro_batches)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 5), (2, 2), (2, 8), (3, 6), (4, 4), (4, 12)])
def test_time_of_a_step_is_counted(stages: int, micro_batches: int) -> None:
    """1F1B waits for a micro-batch on every other stage; stages that split wait for a forward pass and little more."""
    times, work = [PassTimes(1.0, 1.0, 1.0)] * stages, 3.0 * micro_batches
    assert PipelineSchedule(stages, micro_batches).makespan(times) == work + 3.0 * (stages - 1)
    splits = PipelineSchedule(stages, micro_batches, splits=True).makespan(times) - work
    assert splits == stages - 1 if stages <= 2 else stages - 1 <= splits <= stages
    # A slow last stage waits for F0 and is waited for in B7. A slow first stage waits for F0 and B0, less its own F1.
    fast, slow = PassTimes(1.0, 2.0), PassTimes(2.0, 3.0)
    assert PipelineSchedule(2, 8).makespan([fast, slow]) == 1 + 8 * 5.0 + 2
    assert PipelineSchedule(2, 8).makespan([slow, fast]) == 8 * 5.0 + 3 - 2


def test_stages_that_split_hold_no_more_micro_batches_than_the_first_one() -> None:
    assert PipelineSchedule(3, 8).held(1) == {(2, 0)}
    held = [PipelineSchedule(3, 8, splits=True).held(stage) for stage in range(3)]
    assert held == [{(3, 0)}, {(2, 0), (1, 1), (0, 2)}, {(1, 2), (0, 3)}]


def test_schedule_is_printed_by_stage() -> None:
    assert str(PipelineSchedule(2, 3)).splitlines() == [
        "stage 0: F0 [0>1] F1 [1>1<0] B0 F2 [2>1<1] B1 [1<2] B2",
        "stage 1: [0<0] F0 B0 [0>0<1] F1 B1 [1>0<2] F2 B2 [2>0]",
    ]
    assert str(PipelineSchedule(2, 3, splits=True)).splitlines() == [
        "stage 0: F0 [0>1] F1 [1>1<0] B0 F2 [2>1<1] B1 [1<2] B2",
        "stage 1: [0<0] F0 B0 [0>0<1] W0 F1 B1 [1>0<2] F2 B2 [2>0] W1 W2",
    ]


@pytest.mark.parametrize("head", [0.0, 0.4, 1.0, 2.24, 9.0])
@pytest.mark.parametrize(("layers", "stages"), [(5, 1), (4, 2), (5, 2), (7, 3), (3, 3), (11, 4)])
def test_slowest_stage_is_as_fast_as_any_division_allows(layers: int, stages: int, head: float) -> None:
    parts = [stage_layers(layers, stages, stage, head) for stage in range(stages)]
    assert [layer for part in parts for layer in part] == list(range(layers))
    sizes = [len(part) for part in parts]
    assert min(sizes) >= 1 and sizes[:-1] == sorted(sizes[:-1], reverse=True)
    every = (sizes for sizes in itertools.product(range(1, layers + 1), repeat=stages) if sum(sizes) == layers)
    assert max(*sizes[:-1], sizes[-1] + head, 0) == min(max(*each[:-1], each[-1] + head, 0) for each in every)


def test_layers_without_a_head_are_divided_evenly_and_a_head_counts_as_its_layers() -> None:
    def sizes(layers: int, stages: int, head: float) -> list[int]:
        return [len(stage_layers(layers, stages, stage, head)) for stage in range(stages)]

    assert (sizes(5, 2, 0.0), sizes(7, 3, 0.0)) == ([3, 2], [3, 2, 2])
    model = PRESETS["llama-3-8b"]
    heads = [head_layers(model, tokens) for tokens in (4096, 16384, 131072)]
    assert [sizes(32, 2, head) for head in heads] == [[17, 15], [17, 15], [16, 16]]
    assert [sizes(32, 4, head) for head in heads] == [[9, 9, 8, 6], [9, 8, 8, 7], [8, 8, 8, 8]]
    # 2 FLOPs a weight and token; causal attention has 4 a feature and pair, and half of the pairs.
    layer = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4 * 4096 * 4096 / 2
    assert heads[0] == pytest.approx(2 * 128256 * 4096 / layer)


def test_fewer_micro_batches_than_stages_are_refused() -> None:
    with refused("pipeline_parallel 4", "3 micro-batches", "--batch-size"):
        PipelineSchedule(4, 3)
