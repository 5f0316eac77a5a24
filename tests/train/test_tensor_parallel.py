"""Two ranks that share matrices are one rank: in what they train, save, load, evaluate and say."""

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.programs import run_program
from tests.pairs import long, selected
from tests.train import tensor_program as program
from tests.train.cases import require_near, result

RUNS = pytest.mark.parametrize("name", ["shared", *long("dealt", "bf16", "offload")])  # offload: in bf16, dealt
EXACT = {"rel": 1e-5}
TOLERANCE = {"shared": EXACT, "dealt": EXACT, "bf16": {"rel": 2e-2}, "offload": {"rel": 2e-2}}


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """Runs begun on one rank and on two, each resumed on the other number of ranks."""
    folder, names = tmp_path_factory.mktemp("tensor"), selected(request, "name")
    run_program(1, program.begin, folder, 1, names)
    run_program(2, program.two_ranks, folder, names, tensor=2)
    run_program(1, program.resume, folder, 1, 2, names)
    return folder


@RUNS
def test_trains_evaluates_and_samples_as_one_rank(folder, name):
    one, two = (result(folder, f"{name}-{ranks}") for ranks in (1, 2))
    for ours, wanted in zip(two["steps"], one["steps"], strict=True):
        assert ours == pytest.approx(wanted, **TOLERANCE[name])
    assert one["eval"].pop("data") == two["eval"].pop("data")
    known = {key: value for key, value in one["eval"].items() if value is not None}  # no rewards without pairs
    assert {key: two["eval"][key] for key in known} == pytest.approx(known, **TOLERANCE[name])
    assert TOLERANCE[name] is not EXACT or two["sample"] == one["sample"]


@pytest.mark.parametrize("name", ["shared", *long("dealt")])
def test_weights_and_moments_are_one_ranks(folder, name):
    """After the first steps; the moments hold the gradients, tensor by tensor."""
    for file in ("model", "optimizer"):
        one, two = (saved(folder, f"{name}-{ranks}", file) for ranks in (1, 2))
        require_near(two, one, 1e-5)


def saved(folder, run, file):
    return load_file(folder / run / "checkpoints" / f"step-{program.FIRST:06d}" / f"{file}.safetensors")


@RUNS
def test_checkpoints_hold_whole_tensors_and_load_on_any_degree(folder, name):
    for wrote in (1, 2):
        steps = result(folder, f"{name}-{wrote}")["steps"][program.FIRST :]
        resumed = result(folder, f"{name}-{wrote}-again")["steps"]
        for ours, wanted in zip(resumed, steps, strict=True):
            assert ours == pytest.approx(wanted, **TOLERANCE[name])
        for file in ("model", "optimizer"):
            first, again = (saved(folder, run, file) for run in (f"{name}-{wrote}", f"{name}-{wrote}-again"))
            assert first.keys() == again.keys()
            assert all(torch.equal(first[key], again[key]) for key in first)


def test_an_mlp_in_chunks_is_the_whole_one(folder):
    found = result(folder, "chunks")
    layers = program.DEALT["model"].num_layers
    # Forward and backward; a recomputation leaves the forward out. The whole one does not come here.
    counts = {name: int(gradients.pop("chunks")) for name, gradients in found.items()}
    assert counts == {"whole": 0, "kept": 10 * layers, "recomputed": 10 * layers, "offloaded": 10 * layers}
    whole = found.pop("whole")
    for gradients in found.values():
        require_near(gradients, whole, 1e-5)
    assert all(gradient.any() for gradient in whole.values())
