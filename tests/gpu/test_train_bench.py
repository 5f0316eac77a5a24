"""`bmburst bench train` on real GPUs: the same losses by every method, and one step beside its bound and memory."""

import json

import pytest
import torch

from benchmarks.training.cells import METHODS
from benchmarks.training.report import furthest
from bmburst.cli import main

pytestmark = pytest.mark.gpu
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-3}


@pytest.mark.parametrize("gpus", range(2, min(torch.cuda.device_count(), 2) + 1))
def test_methods_train_alike_on_gpus(gpus, tmp_path):
    output = tmp_path / "r.json"
    words = ["--gpus", str(gpus), "--tokens", "1024", "--steps", "6", "--repeats", "2", "--output", str(output)]
    assert main(["bench", "train", *words, "--preset", "tiny-8-heads", "--cells", "loss/*,step/*"]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert all(row["status"] == "ok" for row in rows.values()), rows
    for dtype, tolerance in TOLERANCE.items():
        losses = [r for k, r in rows.items() if k.startswith("loss/") and r["cell"]["dtype"] == dtype]
        (one,) = (row for row in losses if row["cell"]["ranks"] == 1)
        assert len(losses) == 1 + len(METHODS) and one["losses"][-1] < one["losses"][0]
        for row in losses:
            assert furthest(row, one) < tolerance and furthest(row, one, "grad_norms") < 10 * tolerance, row["cell"]
    steps = [row for key, row in rows.items() if key.startswith("step/")]
    assert len(steps) == len(METHODS)
    assert all(row["ratio"] > 1 and row["peak_memory_gib"] >= row["allocated_gib"] > 0 for row in steps)
