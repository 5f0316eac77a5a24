"""`bmburst train` in a rank, and what it is told about a folder; `bmburst eval`, before ranks start and in one."""

import errno
import json
import os
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bmburst.blocks.presets import PRESETS
from bmburst.checkpoint.hugging_face import expected_shapes, read_config
from bmburst.cli import main
from bmburst.cli.train import run_rank
from bmburst.config import to_dict
from bmburst.data import open_corpus
from bmburst.errors import UserError
from bmburst.launch.launcher import LaunchSpec
from bmburst.train.config import EvalConfig
from bmburst.train.evaluate import EvaluatedModel
from bmburst.train.resolve import resolve
from tests import tiny
from tests.cli.commands import checkpoint, refused
from tests.refusals import says


@pytest.mark.parametrize("argv", [[], ["--steps", "7", "--seed", "3", "--init-from", "hf", "--sequence-length", "64"]])
def test_ranks_train_what_was_settled_before(launches, trained, as_rank, tmp_path, argv):
    values = PRESETS["llama-tiny"].to_hugging_face()
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(values))
    shapes = expected_shapes(PRESETS["llama-tiny"])
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "hf" / "model.safetensors")
    assert main(["train", *argv]) == 0
    for rank in range(2):
        as_rank(rank, 2, launched=True)
        assert launches.run_rank() == 0
    expected = resolve((launches.output() / "config.json",)).replace(output=launches.output())
    assert trained == [expected, expected]
    assert len(launches) == 1


def test_a_run_is_validated_once_before_its_ranks(launches, trained, as_rank, validations, tmp_path):
    (tmp_path / "text.txt").write_text("a text of some length. " * 90)
    argv = ["train", "--data", "text.txt", "--sequence-length", "64", "--output", "out", "--optimizer.offload"]
    assert main([*argv, "--epochs", "2", "--nproc", "3"]) == 0
    for rank in range(3):
        as_rank(rank, 3, launched=True)
        assert launches.run_rank() == 0
    ((config, ranks),) = validations
    (_, _, trained_one) = trained
    changed = {name: getattr(trained_one, name) for name in ("output", "steps", "schedule")}  # the epochs' steps
    assert config.replace(**changed) == trained_one and config.steps != trained_one.steps
    assert trained.valid_for == [ranks] * 3 == [3] * 3


def test_under_torchrun_rank_0_validates_once_for_all(trained, as_rank, validations):
    for rank in range(3):
        as_rank(rank, 3)
        assert main(["train", "--output", "out", "--steps", "3"]) == 0
    assert [(config.replace(output=Path("out")), ranks) for config, ranks in validations] == [(trained[0], 3)]
    assert trained.valid_for == [3] * 3


def test_under_torchrun_the_folder_must_be_named(trained, as_rank, capsys, tmp_path):
    as_rank(0, 4)
    assert "--output DIR" in refused(capsys, "train")
    assert main(["train", "--output", "out", "--steps", "3"]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".lock", ".training.lock", "config.json"]
    (tmp_path / "out" / "rank0.log").touch()  # as torchrun writes with --log-dir
    as_rank(3, 4)
    assert main(["train", "--output", "out", "--steps", "3"]) == 0
    assert trained[0] == trained[1]


def test_under_torchrun_one_rank_speaks_for_all(trained, as_rank, capsys, tmp_path):
    as_rank(0, 3)
    assert "does not divide 3 ranks" in refused(capsys, "train", "--output", "out", "--data-parallel", "2")
    as_rank(1, 3)
    assert main(["train", "--output", "out", "--data-parallel", "2"]) == 2
    assert capsys.readouterr().err == ""
    as_rank(0, 1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").touch()
    assert "not empty, it holds metrics.jsonl" in refused(capsys, "train", "--output", "out")
    assert trained == []


@pytest.mark.parametrize("launched", [True, False])
def test_a_full_disk_ends_a_rank_in_the_users_words(trained, as_rank, capsys, launched):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    trained.work = full
    as_rank(0, 1, launched=launched)
    words = ("output out", "cannot be written", "No space left")
    if launched:  # the launcher shows it
        with pytest.raises(UserError) as caught:
            run_rank({"config": to_dict(resolve((), {"output": "out"})), "verified": None, "ranks": 1})
        says(caught, *words)
    else:
        says(refused(capsys, "train", "--output", "out"), *words)


@pytest.mark.parametrize(
    ("code", "words"),
    [(errno.ENOENT, "No such file | in its place"), (errno.ESTALE, "Stale file handle | mount")],
    ids=["removed", "of another server"],
)
def test_a_folder_that_is_lost_while_a_run_writes_is_named(trained, as_rank, capsys, code, words):
    def lost(_):
        Path("out").rename("elsewhere")
        raise OSError(code, os.strerror(code), "out/metrics.jsonl")

    trained.work = lost
    as_rank(0, 1, launched=False)
    says(refused(capsys, "train", "--output", "out"), "output out | cannot be written", words, "fix:")


def test_a_folder_that_may_not_be_written_starts_nothing(launches, capsys, monkeypatch):
    def denied(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("bmburst.cli.train.write_run_config", denied)
    assert "output out: cannot be written: Permission denied" in refused(capsys, "train", "--output", "out")
    assert not launches


@pytest.fixture
def held_out(tmp_path):
    (tmp_path / "held.txt").write_text("held-out text")
    (tmp_path / "empty").mkdir()
    (tmp_path / "latin.txt").write_bytes(b"text\xe9 text")
    (tmp_path / "lines.jsonl").write_text('{"body": "text"}\n')
    for family, more in (("bert", {}), ("llama", {"intermediate_size": 8, "num_hidden_layers": 1})):
        (tmp_path / family).mkdir()
        shape = {"model_type": family, "hidden_size": 8, "num_attention_heads": 1, "vocab_size": 9} | more
        (tmp_path / family / "config.json").write_text(json.dumps(shape))
    return checkpoint(tmp_path / "run", 3)


@pytest.fixture
def evaluation(held_out, tmp_path, monkeypatch):
    """Options of an evaluation of a tiny model of bytes, without data."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tiny.save(tmp_path / "model", vocab_size=tiny.BYTES)
    return ["eval", "--checkpoint", str(model), "--tokenizer", "bytes", "--sequence-length", "64", "--data"]


def test_eval_starts_ranks_with_the_same_options_and_rank_0_prints(launches, evaluation, monkeypatch, as_rank, capsys):
    argv = [*evaluation, "held.txt"]
    assert main([*argv, "--max-sequences", "5"]) == 0
    assert launches.spec.nproc == 2
    seen = []
    module = types.ModuleType("bmburst.train.evaluate")
    measured = types.SimpleNamespace(loss=1.0, bits_per_byte=1.4427, perplexity=2.7183, tokens=4096)
    model = EvaluatedModel(Path(evaluation[2]), "bytes", read_config(evaluation[2]))
    module.EvaluatedModel = EvaluatedModel
    module.evaluate_checkpoint = lambda *given: (seen.append(given) or measured, [])
    monkeypatch.setitem(sys.modules, "bmburst.train.evaluate", module)
    printed = []
    for rank in range(2):
        as_rank(rank, 2, launched=True)
        assert launches.run_rank() == 0
        printed.append(capsys.readouterr().out)
    options = {"checkpoint": Path(evaluation[2]), "data": "held.txt", "tokenizer": "bytes", "sequence_length": 64}
    assert seen == [(EvalConfig(**options, max_sequences=5, nproc=2), model)] * 2
    assert [line.split() for line in printed[0].splitlines()] == [
        ["loss", "1.0000", "nats", "per", "token"],
        ["bits", "per", "byte", "1.4427"],
        ["perplexity", "2.7183"],
        ["tokens", "4,096"],
    ]
    assert printed[1] == ""


def test_start_timeout_reaches_the_launcher(launches, evaluation, capsys):
    for argv in (["train", "--data", "held.txt", "--sequence-length", "4"], [*evaluation, "held.txt"]):
        assert main([*argv, "--start-timeout", "90", "--hang-timeout", "30"]) == 0
        assert (launches.spec.start_limit, launches.spec.hang_timeout) == (90, 30)
        assert main(argv) == 0
        assert launches.spec.start_limit == LaunchSpec().start_limit
        for wrong in ("0", "-1", "inf", "soon"):
            assert main([*argv, "--start-timeout", wrong]) == 2
            said = capsys.readouterr().err
            assert "start_timeout" in said.replace("-", "_") and wrong in said and len(said.splitlines()) <= 3


def test_eval_refuses_a_cache_that_cannot_be_written(launches, evaluation, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "held.txt"))
    cache = f"XDG_CACHE_HOME {tmp_path}/held.txt/bmburst"
    says(refused(capsys, *evaluation, "held.txt"), cache, "written", "Not a directory", "fix: give a folder")
    assert not launches
    with monkeypatch.context() as patch:  # as a container may run it: nobody has this number, and HOME is not set
        patch.delenv("XDG_CACHE_HOME")
        patch.setattr("os.path.expanduser", lambda path: path)
        says(
            refused(capsys, *evaluation, "held.txt"),
            f"user {os.getuid()} has no home | fix: set HOME, or XDG_CACHE_HOME",
        )
    corpus = open_corpus(tmp_path / "held.txt", "bytes", tmp_path)
    assert main([*evaluation, str(corpus.path)]) == 0, "a token file needs none"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main([*evaluation, "held.txt"]) == 0
    for option in (("--chat-template", "chatml"), ("--roles", "a=b")):  # are for records
        says(refused(capsys, *evaluation, "held.txt", *option), "data held.txt has no such rows | fix: leave")
    assert len(launches) == 2


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--data", "held.txt"], "checkpoint | missing | --checkpoint"),
        (["--checkpoint", "run"], "data | missing | --data"),
        (["--checkpoint", "gone", "--data", "held.txt"], "checkpoint gone | no such directory | allowed: "),
        (["--checkpoint", "empty", "--data", "held.txt"], "empty | no complete checkpoint"),
        (["--checkpoint", "run", "--data", "gone.txt"], "data gone.txt | no such file | allowed: "),
        (["--checkpoint", "run", "--data", "held.txt"], "config.json | No such file | fix: give a directory"),
        (["--checkpoint", "bert", "--data", "held.txt"], "model_type 'bert' | allowed: model_type llama"),
        (["--checkpoint", "llama", "--data", "held.txt"], "no weights | llama | allowed: model.safetensors"),
        (["--checkpoint", "run", "--data", "latin.txt"], "'latin.txt' | text file | byte 4 | UTF-8 | convert"),
        (["--checkpoint", "run", "--data", "lines.jsonl"], "lines.jsonl:1 | 'text' | 'body' | --text-field"),
        (
            ["--checkpoint", "run", "--data", "held.txt", "--sequence-length", "1"],
            "sequence_length 1 | at least 2 | fix: ",
        ),
        (["--checkpoint", "run", "--data", "held.txt", "--nproc", "9", "--sequence-length", "8"], "at least 9"),
        (
            ["--checkpoint", "run", "--data", "held.txt", "--sequence_lenght", "8"],
            "'--sequence_lenght' | '--sequence-length'",
        ),
        (["--checkpoint", "run", "--data", "held.txt", "--max-sequences", "0"], "max_sequences | '0' | at least 1"),
        (["--checkpoint", "run", "--data", "held.txt", "--layout", "x"], "layout | 'x' | known: "),
    ],
)
def test_eval_refuses_bad_input(launches, held_out, capsys, argv, words):
    says(refused(capsys, "eval", *argv), words)
    assert not launches


@pytest.mark.parametrize("command", ["train --output x", "generate --checkpoint x", "eval --checkpoint x", "check"])
def test_nproc_of_a_rank_is_not_ignored(as_rank, monkeypatch, capsys, command):
    """In a container with RANK=0 and WORLD_SIZE=1, `--nproc 8` trained on one of eight GPUs."""
    as_rank(0, 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert main([*command.split(), "--nproc", "8"]) == 2
    says(capsys.readouterr().err, "--nproc 8 | RANK | 4 | fix: leave --nproc out | env -u RANK")
    for nproc in ("4", "2"):
        main([*command.split(), "--nproc", nproc, "--hang-timeout", "-1"])
        assert "hang" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("launcher", "size", "rank"),
    [
        ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
        ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("mpiexec", "PMI_SIZE", "PMI_RANK"),
        ("a PyTorchJob", "PET_NNODES", "PET_NODE_RANK"),
        ("SkyPilot", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK"),
    ],
)
def test_tasks_of_launchers_that_set_no_rank_are_noted_once(as_rank, monkeypatch, capsys, launcher, size, rank):
    """Each of them is a run of its own. torchrun inside of srun is not noted, nor a job of one task."""

    def said(tasks, task):
        monkeypatch.setenv(size, tasks)
        monkeypatch.setenv(rank, task)
        main(["eval", "--checkpoint", "x", "--hang-timeout", "-1"])
        return capsys.readouterr().err

    says(said("2", "0"), f"{launcher} has started | 2 times | torchrun | docs/multi_node.md", lines=9)
    for tasks, task in (("2", "1"), ("1", "0"), ("many", "0")):
        assert "note: " not in said(tasks, task)
    as_rank(0, 2)
    assert "note: " not in said("2", "0")
