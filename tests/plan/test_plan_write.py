"""`bmburst plan --init-from DIR` and `--write`: what they read, print and write, also without torch."""

import json
import os
import shlex
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import yaml

from bmburst.blocks.presets import PRESETS
from bmburst.cli.program import NOTHING_FITS, main
from bmburst.cli.recipe import FIRST_LINE, settings_of
from bmburst.plan.candidates import Candidate, Offload, Task
from bmburst.plan.ways import candidates
from bmburst.train.resolve import resolve
from tests import tiny
from tests.refusals import says

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "minicpm")


def directory(path, model):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(model.to_hugging_face()))
    return str(path)


def planned(capsys, *words):
    assert main(["plan", *" ".join(words).split()]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("family", FAMILIES)
def test_a_directory_of_each_family_is_planned_for_training_and_generation(tmp_path, capsys, family):
    where = directory(tmp_path / family, tiny.config(family, max_position_embeddings=4096))
    out = planned(capsys, "--init-from", where, "--sequence-length", "4K", "--nproc", "2")
    words = shlex.split(out.splitlines()[-1])
    assert words[:4] == ["bmburst", "train", "--nproc", "2"] and words[words.index("--init-from") + 1] == where
    assert "--preset" not in words and out.startswith(f"{family}, 4K tokens")
    assert family in planned(capsys, "--generate", "--init-from", where, "--sequence-length", "4K", "--nproc", "1")
    if family == "llama":
        assert family in planned(capsys, "--longest", "--init-from", where, "--nproc", "1")


def test_adapters_of_a_directory_have_checkpoints_and_those_of_a_preset_none(tmp_path, capsys):
    where = directory(tmp_path / "base", PRESETS["llama-3-8b"])
    out = planned(capsys, "--init-from", where, "--sequence-length", "8K", "--nproc", "1", "--lora.rank", "8")
    assert f"--init-from {where}" in out and "--checkpoint-every" not in out
    words = "--preset llama-3-8b --sequence-length 8K --nproc 1 --lora.rank 8"
    assert "--checkpoint-every never" in planned(capsys, words)


@pytest.mark.parametrize("lora", [[], ["--lora.rank", "8"]], ids=["full", "lora"])
def test_preference_training_is_planned_with_its_reference(capsys, lora):
    """Its forward pass takes time and counts in MFU; without adapters its weights take memory; the command names it."""
    given = "--preset llama-3-8b --sequence-length 64K --nproc 8 --hardware h100 --tensor-parallel 1"
    given += " --recompute block --parallel.zero_level 3 --ways 1 --json"
    (full,), (alone,), (ours,) = (
        json.loads(planned(capsys, given, *more))["ways"] for more in ([], lora, [*lora, "--dpo.beta", "0.1"])
    )
    assert alone["parts"]["reference"] == 0 < ours["parts"]["reference"] < alone["seconds"] / 2
    done = [way["mfu"] * way["seconds"] for way in (full, alone, ours)]
    assert done[2] - done[1] == pytest.approx(done[0] / 3)  # the reference has no adapters and no backward pass
    weights = 0 if lora else 2 * PRESETS["llama-3-8b"].num_parameters / 8
    assert ours["memory"]["lines"].get("reference's weights", 0) == weights
    words = shlex.split(ours["command"])
    assert words[words.index("--dpo.beta") + 1] == "0.1" and ("--dpo.reference" in words) == (not lora)
    assert main(["plan", "--generate", "--dpo.beta", "0.1", "--preset", "llama-3-8b", "--sequence-length", "1K"]) == 2
    says(capsys.readouterr().err, "--dpo.beta", "--generate")


@pytest.mark.parametrize("lora", [[], ["--lora.rank", "8"]], ids=["full", "lora"])
def test_a_written_recipe_is_the_printed_command(tmp_path, capsys, lora):
    where, path = directory(tmp_path / "base", PRESETS["llama-3-8b"]), tmp_path / "recipe.yaml"
    words = ["--init-from", where, "--sequence-length", "128K", "--nproc", "2", *lora, "--write", str(path)]
    out = planned(capsys, *words)
    text = path.read_text()
    assert text.startswith(FIRST_LINE) and f"#   bmburst train --config {path}\n" in text
    config = resolve((path,))
    assert (config.nproc, config.sequence_length, config.dtype) == (2, 131072, "bfloat16")
    assert config.model == replace(PRESETS["llama-3-8b"], max_position_embeddings=131072)
    assert str(config.init_from) == where and config.lora.rank == (8 if lora else 0)
    seconds = float(next(line for line in out.splitlines() if line.startswith("time of a step")).split()[4])
    assert f", {seconds:.4g} s a step" in text
    assert planned(capsys, *words) == out and path.read_text() == text  # a recipe is written anew


def test_every_field_of_a_command_comes_through_the_file(tmp_path):
    task = Task(
        model=PRESETS["llama-3-8b"], preset="llama-3-8b", sequence=8192, gpus=8, batch=4, micro_batch=2, host_memory=99
    )
    way = Candidate(
        task=replace(task, loss_chunk=512, mlp_chunk=0),
        data=2,
        tensor=2,
        ulysses_degree=1,
        outer="ring",
        recompute="block+offload",
        offload=Offload.WEIGHTS,
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings_of(way)))
    config = resolve((path,))
    parallel, chunks = config.parallel, (config.loss_chunk_tokens, config.mlp_chunk_tokens)
    assert (parallel.data_parallel, parallel.sequence_parallel, parallel.tensor_parallel) == (2, 2, 2)
    assert (config.batch_size, config.micro_batch_size, *chunks) == (4, 2, 512, 0)
    assert config.optimizer.offload and config.optimizer.offload_weights and config.host_memory == 99
    assert (config.recompute, config.parallel.strategy, config.preset) == ("block+offload", "ring", "llama-3-8b")


def test_several_nodes_are_launched(tmp_path, capsys):
    path = tmp_path / "recipe.yaml"
    planned(capsys, "--preset llama-3-8b --sequence-length 1M --nproc 8 --nodes 2 --write", str(path))
    text = path.read_text()
    assert "#   torchrun --nnodes 2 --nproc-per-node 8 " in text and "on 2 nodes:" in text
    assert "nproc" not in yaml.safe_load(text)


def test_what_cannot_be_written_or_read_is_refused(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("steps: 3\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "gpt2"}')
    good = ["--preset", "llama-tiny", "--sequence-length", "4K", "--nproc", "1"]
    for words, said in (
        ([*good, "--write", str(tmp_path / "a.json")], "--write | .yaml | fix: "),
        ([*good, "--write", str(tmp_path / "mine.yaml")], "--write | mine.yaml | fix: "),
        ([*good, "--write", str(tmp_path / "none" / "a.yaml")], "--write | no such folder | fix: "),
        (["--longest", *good[:2], "--nproc", "1", "--write", "a.yaml"], "--longest | --write | fix: "),
        (["--generate", *good, "--write", "a.yaml"], "--write | fix: "),
        (["--init-from", str(tmp_path / "empty"), *good[2:]], "init_from | no config.json | fix: "),
        (["--init-from", str(tmp_path / "none"), *good[2:]], "init_from | no such directory | fix: "),
        (["--init-from", str(tmp_path / "other"), *good[2:]], "model_type | gpt2 | fix: "),
    ):
        assert main(["plan", *words]) == 2, words
        says(capsys.readouterr().err.strip(), said)
    large = ["--preset", "llama-3-70b", "--sequence-length", "8M", "--nproc", "1"]
    assert main(["plan", *large, "--write", str(tmp_path / "b.yaml")]) == NOTHING_FITS
    says(capsys.readouterr().err.strip(), "--write | memory | fix: ")
    assert (tmp_path / "mine.yaml").read_text() == "steps: 3\n" and not (tmp_path / "b.yaml").exists()


def test_a_directory_is_planned_and_written_without_torch(tmp_path):
    where, path = directory(tmp_path / "base", PRESETS["qwen3-8b"]), tmp_path / "recipe.yaml"
    code = "import sys; sys.modules['torch'] = None\nfrom bmburst.cli import main\nsys.exit(main(sys.argv[1:]))"
    words = ["plan", "--init-from", where, "--sequence-length", "32K", "--nproc", "8", "--write", str(path)]
    found = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert yaml.safe_load(path.read_text())["init_from"] == where


@pytest.mark.parametrize("name", ["qwen2-7b", "qwen3-8b"])
def test_models_that_tensor_ranks_cannot_share_are_not_planned_on_them(name):
    ways = candidates(Task(model=PRESETS[name], preset=name, sequence=32768, gpus=4))
    assert {way.tensor for way in ways} == {1}


def test_a_recipe_goes_into_a_pipe(tmp_path):
    """As a hardware file does: a file in its place would leave the reader waiting."""
    pipe, read = tmp_path / "recipe.yaml", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    assert (
        main(["plan", "--preset", "llama-3-8b", "--sequence-length", "64K", "--nproc", "8", "--write", str(pipe)]) == 0
    )
    reader.join(10)
    assert pipe.is_fifo() and yaml.safe_load(read[0])["sequence_length"] == 65536
