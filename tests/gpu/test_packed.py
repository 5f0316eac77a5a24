"""Training on packed documents on real GPUs is what it is on a CPU, where `tests/train` holds it to the definition."""

import pytest
import torch

from tests.train import packed_program as program
from tests.train.cases import result, run_cases
from tests.train.test_packed import prepare

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("size", range(1, min(torch.cuda.device_count(), 3) + 1))
def test_equals_a_cpu(size, tmp_path):
    folders = [tmp_path / "cpu", tmp_path / "gpus"]
    for folder in folders:
        folder.mkdir()
        prepare(folder)
    cases = [case for case in (*program.CASES, *program.MORE) if case.group == (size, 1)]
    run_cases(program.train, folders[0], program.CASES[:1], seconds=300)
    run_cases(program.train, folders[1], cases, seconds=300, on_gpus=True)
    expected = result(folders[0], program.CASES[0])
    for case in cases:
        got = result(folders[1], case)
        for name, wanted in expected["gradients"].items():
            assert ((got["gradients"][name].cpu() - wanted).norm() / wanted.norm()).item() < 1e-5, (case, name)
        for what in ("losses", "norms", "evaluated", "text loss"):
            assert got[what] == pytest.approx(expected[what], rel=1e-3), (case, what)
