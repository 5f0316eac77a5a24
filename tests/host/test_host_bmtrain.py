"""BMTrain on the host runtime trains as plain torch does."""

import os
from pathlib import Path

import pytest
import torch

from tests.distributed.programs import run_program
from tests.distributed.started import run_python
from tests.docs.scripts import run_script
from tests.host.programs import zero
from tests.pairs import long

# Largest distance from plain torch in fp32 over six steps, measured on 1, 2 and 4 ranks, times two. The first loss is
# 13.7, the first norm 67.
PARAMETERS = {"fp32": 1.2e-7, "fp16": 1.8e-3, "bf16": 8e-2}
LOSSES = {"fp32": 4e-6, "fp16": 5.2e-3, "bf16": 7e-2}
NORMS = {"fp32": 1.6e-5, "fp16": 1.7e-2, "bf16": 0.66}


@pytest.mark.parametrize("size", [2, *long(4)])
def test_training_equals_plain_torch(size: int, tmp_path: Path) -> None:
    run_program(size, zero.train, str(tmp_path))
    coupled, decoupled = zero.plain(zero.STEPS)
    for dtype, offload in zero.CASES:
        expected = coupled if dtype == "fp32" else decoupled
        state = torch.load(tmp_path / f"{dtype}-{offload}.model")
        trace = torch.load(tmp_path / f"{dtype}-{offload}.rest")["trace"]
        assert set(state) == set(expected.state)
        distance = max(float((state[name].float() - value).abs().max()) for name, value in expected.state.items())
        assert distance <= PARAMETERS[dtype], (dtype, offload)
        for (loss, norm), true_loss, true_norm in zip(trace, expected.losses, expected.norms, strict=True):
            assert abs(loss - true_loss) <= LOSSES[dtype], (dtype, offload)
            assert abs(norm - true_norm) <= NORMS[dtype], (dtype, offload)
    unchanged = torch.load(tmp_path / "overflow.model")
    for name, value in zero.start_state().items():
        assert torch.equal(unchanged[name], value.half()), f"{name} was changed by a step that overflowed"

    if size == 2:
        (both, _) = zero.plain(zero.STEPS + 2)
        for other in (1, 3):
            run_program(other, zero.resume, str(tmp_path), 2)
            resumed = torch.load(tmp_path / f"resumed-{other}.model")
            for name, value in both.state.items():
                torch.testing.assert_close(resumed[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_a_pipeline_equals_plain_torch(tmp_path: Path) -> None:
    assert run_script(tmp_path, 2, [str(Path(__file__).parent / "programs" / "pipeline.py")]).count("2 stages") == 1


def test_ranks_keep_their_cores() -> None:
    """BMTrain would pin each to its share of them."""
    run_program(2, _compare_cores, sorted(os.sched_getaffinity(0)), fresh=True)


def _compare_cores(cores: list[int]) -> None:
    threads = [int(name) for name in os.listdir("/proc/self/task")]
    assert all(sorted(os.sched_getaffinity(thread)) == cores for thread in threads)


def test_a_rank_keeps_its_number_of_threads(tmp_path: Path) -> None:
    """BMTrain would start as many as there are cores."""
    one = "import torch; torch.set_num_threads(1)"
    program = "import bmburst.launch.start, torch; bmburst.launch.start.start(); assert torch.get_num_threads() == 1"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = run_python("-c", program, cwd=tmp_path, env=environment, first=one)
    assert done.returncode == 0, done.stderr
