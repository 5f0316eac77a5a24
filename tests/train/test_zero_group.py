"""ZeRO within groups of ranks, and gradients summed between them, is training on one rank."""

import pytest
from safetensors.torch import load_file

from tests.distributed.programs import run_program
from tests.pairs import long, selected
from tests.train import zero_group_program as program
from tests.train.cases import require_near
from tests.train.run_program import lines

NAMES = pytest.mark.parametrize("name", ["accumulated", "offloaded", *long("across", "adapters", "tensor")])


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("groups")
    names = list(dict.fromkeys(["accumulated", *selected(request, "name")]))
    run_program(1, program.one_rank, folder, names)
    run_program(4, program.four_ranks, folder, [name for name in names if name != "tensor"], seconds=240)
    if "tensor" in names:
        run_program(4, program.tensor_ranks, folder, tensor=2)
    run_program(1, program.one_again, folder)
    return folder


def metrics(folder, run):
    return [(line["loss"], line["grad_norm"]) for line in lines(folder / run)]


def require_equal(folder, run, wanted):
    assert len(metrics(folder, run)) == program.STEPS
    for ours, theirs in zip(metrics(folder, run), metrics(folder, wanted), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    files = sorted((folder / wanted).glob("checkpoints/*/[mo]*.safetensors"))
    assert len(files) == (0 if "adapters" in wanted else 4)
    for file in files:
        require_near(load_file(folder / run / file.relative_to(folder / wanted)), load_file(file), 1e-5)


@NAMES
def test_two_nodes_train_as_one_rank(folder, name):
    require_equal(folder, f"{name}-nodes", f"{name}-one")


@pytest.mark.parametrize("to", ["nodes to world", "nodes to one", "one to nodes"])
def test_checkpoints_go_on_with_other_groups(folder, to):
    require_equal(folder, f"accumulated-{to}", "accumulated-one")
