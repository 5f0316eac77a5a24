"""The 1F1B schedule alone: what each stage computes, what it holds, and that no stage waits forever."""

import itertools

import pytest

from bmburst.blocks.presets import PRESETS
from bmburst.plan.counts import head_layers
from bmburst.schedule.pipeline import Compute, PipelineSchedule, Transfer, stage_layers
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


@pytest.mark.parametrize(("stages", "micro_batches"), _SIZES)
def test_each_micro_batch_goes_forward_then_backward_once_and_no_stage_waits_forever(
    stages: int, micro_batches: int
) -> None:
    schedule = PipelineSchedule(stages, micro_batches)
    for stage in range(stages):
        alive: list[int] = []
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
            else:
                assert stage == stages - 1 or action.micro_batch in arrived[stage + 1]
                alive.remove(action.micro_batch)
            assert len(alive) <= schedule.in_flight(stage) <= stages - stage
        for kind in ("forward", "backward"):
            assert [each.micro_batch for each in computed if each.kind == kind] == list(range(micro_batches))
    assert len(_run(schedule)) == 2 * stages * micro_batches


def test_schedule_is_printed_by_stage() -> None:
    assert str(PipelineSchedule(2, 3)).splitlines() == [
        "stage 0: F0 [0>1] F1 [1>1<0] B0 F2 [2>1<1] B1 [1<2] B2",
        "stage 1: [0<0] F0 B0 [0>0<1] F1 B1 [1>0<2] F2 B2 [2>0]",
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
