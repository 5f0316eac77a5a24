"""Ranks in stages are one rank: in gradients, losses, skipped steps, evaluations and checkpoints."""

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.programs import run_program
from tests.pairs import long, selected
from tests.train import stages_program as program
from tests.train.stages_program import ALONE, CASES, FIRST, LAYERS, SKIPPED, STEPS, Split

SPLITS = [
    Split(2),
    Split(2, sequence=2),
    Split(4),
    *long(Split(2, data=2), Split(2, tensor=2), Split(2, sequence=2, tensor=2), Split(5)),
]
BOTH = pytest.mark.parametrize("split", SPLITS, ids=str)
NAMES = pytest.mark.parametrize("name", list(CASES))


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    folder, splits = tmp_path_factory.mktemp("stages"), selected(request, "split")
    program.write_text(folder)
    for split in (ALONE, *splits):
        run_program(split.ranks, program.compare, folder, split, list(CASES), tensor=split.tensor, pipe=split.pipe)
    return folder


@BOTH
@NAMES
def test_gradients_losses_and_weights_are_those_of_one_rank(folder, split, name):
    one = program.result(folder, ALONE, name)
    for rank in range(split.ranks):
        ours = program.result(folder, split, name, rank)
        assert ours["losses"] == pytest.approx(one["losses"], rel=1e-5, nan_ok=True)
        assert ours["norms"] == pytest.approx(one["norms"], rel=1e-5, nan_ok=True)
        assert ours["tokens"] == one["tokens"]
        assert ours["finite"] == [step != SKIPPED for step in range(1, STEPS + 1)] and ours["skipped"] == 1
        assert ours["gradients"].keys() == one["gradients"].keys()
        for key in one["gradients"]:
            for kind, limit in (("gradients", 1e-5), ("parameters", 1e-4)):  # Adam divides by small gradients
                found, wanted = ours[kind][key], one[kind][key]
                assert (found - wanted).norm() <= limit * wanted.norm(), (kind, key)
        assert ours["eval"] == one["eval"] | {"loss": pytest.approx(one["eval"]["loss"], rel=1e-5)} | {
            key: pytest.approx(one["eval"][key], rel=1e-5) for key in ("bits_per_byte", "perplexity")
        }
