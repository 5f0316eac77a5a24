"""Recipes: each is taken, its numbers are the planner's, and the toys train."""

import json
import math
import os
import re
from pathlib import Path

import pytest
import yaml

from benchmarks import train_jobs
from bmburst.blocks.presets import PRESETS
from bmburst.cli import main
from bmburst.cli.recipe import FIRST_LINE
from bmburst.plan.search import predict
from bmburst.schedule.hardware import load_hardware
from bmburst.train.machine import planned
from bmburst.train.resolve import check_paths, read_hugging_face_config, resolve
from bmburst.train.sources import PLACEHOLDER
from tests.distributed.programs import run_program
from tests.refusals import refused, says
from tests.train.run_program import lines

ROOT = Path(__file__).parents[2]
JOBS = {job.name: job for job in train_jobs.JOBS}
TOYS = ("pretrain", "continue", "extend_1", "extend_2", "chat", "chat_lora")


def directory(folder, model):
    """Write a Hugging Face directory without weights."""
    path = folder / model
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(PRESETS[model].to_hugging_face()))
    return path


def test_every_recipe_is_taken_and_its_numbers_are_the_planners(tmp_path):
    """Relative tolerance 1e-3, and of GiB half the last digit: what rounding in the comments leaves."""
    written = {path.stem for path in train_jobs.FOLDER.glob("*.yaml") if not path.name.startswith("toy_")}
    assert written == set(JOBS)
    for name in written:
        job, path = JOBS[name], train_jobs.FOLDER / f"{name}.yaml"
        config = resolve((path,), {"init_from": str(directory(tmp_path, job.model))})
        assert config.nproc == job.gpus and config.sequence_length == job.tokens and config.batch_size == job.batch
        assert config.lora.is_on == job.lora and config.optimizer.lr == (1e-4 if job.lora else 1e-5), name
        assert config.model.max_position_embeddings >= job.tokens
        hardware, text = load_hardware(job.hardware), path.read_text()
        found = predict(planned(config, job.gpus, 1, hardware), hardware)
        said = train_jobs.expectation(text)
        assert found.memory.fits and f"on {job.gpus} x {hardware.name}:" in text, name
        assert found.tokens_per_second * job.gpus == pytest.approx(said["tokens/s"], rel=1e-3), name
        assert found.seconds == pytest.approx(said["seconds"], rel=1e-3), name
        assert found.memory.total / 2**30 == pytest.approx(said["gpu"], abs=0.06), name
        assert found.memory.in_host / 2**30 == pytest.approx(said["host"], abs=0.06), name
        assert f"bmburst train --config recipes/{path.name} --init-from DIR --data FILE" in text


def test_the_table_of_the_page_is_that_of_the_recipes():
    assert train_jobs.recipes_table() in train_jobs.PAGE.read_text()


def test_the_commands_of_the_page_name_recipes():
    named = re.findall(r"--config recipes/(\S+)\.yaml", train_jobs.PAGE.read_text())
    assert len(named) > 4 and all((train_jobs.FOLDER / f"{name}.yaml").is_file() for name in named)


def test_a_recipe_is_made_again_as_it_is():
    name = "pretrain_minicpm5-1b_128k_1xh200"
    assert train_jobs.text_of_recipe(JOBS[name]) == (train_jobs.FOLDER / f"{name}.yaml").read_text()


def test_placeholders_are_refused_by_name(tmp_path, capsys):
    recipe = train_jobs.FOLDER / "pretrain_llama-3-8b_32k_1xh100.yaml"
    assert main(["train", "--config", str(recipe)]) == 2
    says(capsys.readouterr().err.strip(), f"{PLACEHOLDER}llama-3-8b | placeholder of a recipe | fix: add --init-from")
    options = {"init_from": str(directory(tmp_path, "llama-3-8b"))}
    with refused(f"{PLACEHOLDER}TEXT", "placeholder of a recipe", "fix: add --data FILE"):
        check_paths(resolve((recipe,), options))
    (tmp_path / "text").write_text("some text")
    with refused(f"{PLACEHOLDER}llama-3-8b", "data.tokenizer", "fix: add --data.tokenizer DIR"):
        check_paths(resolve((recipe,), {**options, "data.source": str(tmp_path / "text")}))
    with refused(f"dpo.reference {PLACEHOLDER}base", "fix: add --dpo.reference DIR"):
        read_hugging_face_config(Path(f"{PLACEHOLDER}base"), "dpo.reference")


def test_a_recipe_that_is_missing_says_where_recipes_are(capsys):
    assert main(["train", "--config", "recipes/none.yaml"]) == 2
    says(capsys.readouterr().err.strip(), "recipes/none.yaml | no such | recipes of bmburst's repository | fix: ")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder like the repository's, where all toys have trained."""
    folder = tmp_path_factory.mktemp("toys")
    for name in ("README.md", "recipes"):
        (folder / name).symlink_to(ROOT / name)
    run_program(2, _train, folder, seconds=300)
    return folder


def _train(folder):
    from bmburst.train.trainer import run

    os.chdir(folder)
    for name in TOYS:
        run(resolve((Path(f"recipes/toy_{name}.yaml"),)))


def test_every_toy_is_tested():
    assert sorted(path.stem for path in train_jobs.FOLDER.glob("toy_*")) == sorted(f"toy_{name}" for name in TOYS)


@pytest.mark.long
@pytest.mark.parametrize("name", TOYS)
def test_a_toy_trains(trained, name):
    path = train_jobs.FOLDER / f"toy_{name}.yaml"
    text, values = path.read_text(), yaml.safe_load(path.read_text())
    assert f"#   bmburst train --config recipes/{path.name}\n" in text and not text.startswith(FIRST_LINE)
    run = trained / values["output"]
    losses = [line["loss"] for line in lines(run) if "loss" in line]
    assert len(losses) == values["steps"]
    if name in ("continue", "extend_1", "extend_2"):  # from trained weights: of random ones the first loss is log(320)
        assert max(losses) < math.log(320) - 0.5
    else:
        assert losses[-1] < losses[0] - 0.1
    saved = run / "checkpoints" / f"step-{values['steps']:06d}"
    kind = "adapter_model.safetensors" if "lora" in values else "config.json"
    assert (saved / kind).is_file()
    if name.startswith("extend"):
        there = json.loads((saved / "config.json").read_text())
        assert there["max_position_embeddings"] == values["sequence_length"]
        assert there["rope_scaling"]["factor"] == values["sequence_length"] / 256
