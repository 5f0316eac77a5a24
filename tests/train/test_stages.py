"""Ranks in stages are one rank: in gradients, losses, skipped steps, evaluations and checkpoints."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch.multiprocessing import ProcessExitedException

from bmburst.checkpoint.files import newest_complete
from tests.distributed.programs import run_program
from tests.pairs import long, selected
from tests.train import run_program as run
from tests.train import stages_program as program
from tests.train.cases import require_near
from tests.train.stages_program import ALONE, SKIPPED, STEPS, Split

SQUARE = Split(2, sequence=2)
SPLITS = [Split(2), SQUARE, *long(Split(4), Split(2, data=2), Split(2, sequence=2, tensor=2))]
BOTH = pytest.mark.parametrize("split", SPLITS, ids=str)
NAMES = pytest.mark.parametrize("name", ["plain", "tied", *long("lora", "offload")])


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    folder, splits, names = tmp_path_factory.mktemp("stages"), selected(request, "split"), selected(request, "name")
    program.write_text(folder)
    for split in (ALONE, *splits):
        run_program(split.ranks, program.compare, folder, split, names, tensor=split.tensor, pipe=split.pipe)
    return folder


@BOTH
@NAMES
def test_gradients_losses_and_weights_are_those_of_one_rank(folder, split, name):
    require_equal(folder, split, name)


def require_equal(folder, split, name):
    one = program.result(folder, ALONE, name)
    for rank in range(split.ranks):
        ours = program.result(folder, split, name, rank)
        assert ours["losses"] == pytest.approx(one["losses"], rel=1e-5, nan_ok=True)
        assert ours["norms"] == pytest.approx(one["norms"], rel=1e-5, nan_ok=True)
        assert ours["tokens"] == one["tokens"]
        assert ours["finite"] == [step != SKIPPED for step in range(1, STEPS + 1)] and ours["skipped"] == 1
        require_near(ours["gradients"], one["gradients"], 1e-5)
        # Adam divides by small gradients. Tensor ranks round moments in bf16 by other random numbers.
        other, kept = name == "offload" and split.tensor > 1, one["gradients"].keys()
        trained = ({key: each["parameters"][key] for key in kept} for each in (ours, one))
        require_near(*trained, 5e-3 if other else 1e-4)
        assert ours["eval"] == one["eval"] | {"loss": pytest.approx(one["eval"]["loss"], rel=1e-5)} | {
            key: pytest.approx(one["eval"][key], rel=1e-5) for key in ("bits_per_byte", "perplexity")
        }


@BOTH
@NAMES
def test_a_rank_holds_the_layers_of_its_stage_only_and_ranks_hold_each_element_once(folder, split, name):
    held = [program.result(folder, split, name, rank)["held"] for rank in range(split.ranks)]
    of_stage, is_tied = split.ranks // split.pipe, program.CASES[name]["model"].tie_embeddings
    for rank, mine in enumerate(held):
        stage = rank // of_stage
        numbers = {int(key.split(".")[2]) for key in mine if ".layers." in key}
        sizes = {2: (4, 1) if is_tied else (3, 2), 4: (2, 1, 1, 1)}[split.pipe]  # tied tables are longer here
        assert numbers == set(range(sum(sizes[:stage]), sum(sizes[: stage + 1])))
        is_first, is_last = stage == 0, stage == split.pipe - 1
        outside = {key for key in mine if ".layers." not in key}
        assert outside == {
            *(["model.embed_tokens.weight"] if is_first or (is_last and is_tied) else []),
            *(["model.norm.weight"] if is_last else []),
            *(["lm_head.weight"] if is_last and not is_tied else []),
        }
    for key, whole in program.result(folder, ALONE, name)["parameters"].items():
        copies = 2 if is_tied and "embed_tokens" in key else 1
        assert sum(mine.get(key, 0) for mine in held) == copies * whole.numel(), key


@pytest.mark.parametrize(("split", "name"), [(SQUARE, "tied")], ids=str)
def test_checkpoint_of_stages_goes_on_in_other_stages_and_without_them(folder, split, name):
    """Saved with 4 and 1 layers, resumed for a step with 3 and 2 layers, and at sequence 4 for the next."""
    one = program.result(folder, ALONE, name)
    runs = [f"{name}-{split}", "even", "without"]
    for number, mesh in enumerate((replace(split, is_even=True), Split(1, sequence=4))):
        run_program(4, program.resume, folder, mesh, name, runs[number], runs[number + 1], pipe=mesh.pipe)
        step = program.SAVED + number
        found = torch.load(folder / f"{runs[number + 1]}.pt")
        assert found == pytest.approx((one["losses"][step], one["norms"][step]), rel=1e-5)
    weights = load_file(folder / "without" / "checkpoints" / f"step-{STEPS:06d}" / "model.safetensors")
    require_near(weights, one["parameters"], 1e-4)


@pytest.mark.long
def test_a_base_in_4_bits_is_read_and_trained_in_stages(tmp_path):
    """Each rank of a stage reads and quantizes the matrices of its stage."""
    program.write_text(tmp_path)
    for split in (ALONE, SQUARE):
        run_program(split.ranks, program.compare, tmp_path, split, ["4bit"], pipe=split.pipe)
    require_equal(tmp_path, SQUARE, "4bit")
    file = f"checkpoints/step-{program.SAVED:06d}/adapter_model.safetensors"
    adapters = [load_file(tmp_path / f"4bit-{split}" / file) for split in (ALONE, SQUARE)]
    require_near(adapters[1], adapters[0], 1e-4)


@pytest.mark.long
def test_a_run_in_stages_that_is_killed_in_a_save_loses_nothing(tmp_path):
    """Checkpoints are written beside training, from the memory of the ranks of both stages."""
    run_program(1, run.train, tmp_path, "whole")
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        run_program(2, program.train_and_die, tmp_path, "stages", pipe=2, fresh=True)
    assert newest_complete(tmp_path / "stages") is not None
    run_program(2, program.go_on, tmp_path, "stages", pipe=2)
    losses, files = [], []
    for name in ("whole", "stages"):
        losses.append({line["step"]: line["loss"] for line in run.lines(tmp_path / name) if "grad_norm" in line})
        folder = tmp_path / name / "checkpoints" / f"step-{run.STEPS:06d}"
        files.append(load_file(folder / "model.safetensors") | load_file(folder / "optimizer.safetensors"))
    assert len(losses[0]) == run.STEPS and losses[1] == pytest.approx(losses[0], rel=1e-5)
    require_near(files[1], files[0], 1e-4)
