"""`bmburst train`: what is settled before ranks start, and what ranks are given."""

import json
import re
from pathlib import Path

import pytest

from bmburst.blocks.presets import PRESETS
from bmburst.cli import main
from bmburst.config import leaves
from bmburst.train.config import TrainConfig
from bmburst.train.resolve import EvalConfig, resolve
from tests.cli.commands import checkpoint, refused, started

# Help


@pytest.mark.parametrize(("command", "config"), [("train", TrainConfig()), ("eval", EvalConfig)])
def test_help_shows_every_field_with_unit_and_default(command, config, capsys):
    main([command, "--help"])
    text = capsys.readouterr().out
    # One entry from its option to the next option or group.
    entries = re.split(r"\n(?=  -|\S)", text)
    for leaf in leaves(config):
        option = "--" + (leaf.name if "." in leaf.name else leaf.name.replace("_", "-"))
        found = [entry for entry in entries if re.match(rf"  (--[\w.-]+, )?{re.escape(option)}\s", entry)]
        assert len(found) == 1, leaf.name
        entry = " ".join(found[0].split())
        assert leaf.spec.help, leaf.name
        assert leaf.spec.help in entry
        assert re.search(r"[\[ ](default|no default)", entry), leaf.name
        assert not leaf.spec.unit or f"[{leaf.spec.unit};" in entry
        assert ("[tokens; also as 64K for 65536;" in entry) == (leaf.spec.unit == "tokens")
        if leaf.annotation in (int, float, int | None, float | None):
            assert leaf.spec.unit or "[no unit;" in entry, leaf.name
    # The other spelling of an option works, but is not shown beside it.
    assert re.search(r"--sequence.length, --sequence.length", text) is None


def test_help_groups_fields_and_shows_short_names(capsys):
    main(["train", "--help"])
    text = capsys.readouterr().out
    assert "\nrun:\n" in text
    assert text.index("\nrun:") < text.index("\nmodel") < text.index("\ndata:") < text.index("\nranks:")
    for short in (
        *("preset", "data", "sequence-length", "steps", "batch-size", "data-parallel", "sequence-parallel", "layout"),
        *("dtype", "seed", "output", "checkpoint-every", "eval-every", "resume", "init-from", "nproc", "config"),
    ):
        assert f"\n  --{short}" in text, short
    assert all(name in text for name in PRESETS)


# A fresh run


def test_the_main_job_starts_two_ranks_in_a_new_folder(launches):
    assert main(["train"]) == 0
    assert launches.spec.nproc == 2
    assert re.fullmatch(r"runs/\d{8}-\d{6}-llama-tiny", str(launches.output()))
    assert resolve((launches.output() / "config.json",)) == TrainConfig()
    assert "--resume" not in launches.command


def test_two_runs_of_the_same_second_get_folders_of_their_own(launches, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda *_: "20250101-000000")
    names = []
    for _ in range(3):
        main(["train"])
        names.append(launches.output().name)
    assert names == [f"20250101-000000-llama-tiny{end}" for end in ("", "-2", "-3")]


def test_options_short_dotted_and_in_either_spelling(launches, tmp_path):
    (tmp_path / "x.txt").write_text("text" * 20)
    (tmp_path / "c.yaml").write_text("steps: 5\nseed: 3\n")
    assert (
        main(
            [
                *("train", "--config", "c.yaml", "--data", "x.txt", "--sequence_length", "64", "--steps=6"),
                *("--parallel.layout", "striped", "--sequence-parallel", "2", "--parallel.data-parallel", "2"),
                *("--batch-size", "4", "--optimizer.clip-norm", "none", "--model.tie_embeddings", "--output", "out"),
                *("--model.num_layers", "1", "--optimizer.beta1", "0.8", "--parallel.deterministic", "false"),
            ]
        )
        == 0
    )
    values = launches.config()
    assert (values["steps"], values["seed"], values["sequence_length"], values["batch_size"]) == (6, 3, 64, 4)
    assert values["data"]["source"] == "x.txt"
    assert values["parallel"] | {"layout": "striped", "data_parallel": 2, "sequence_parallel": 2} == values["parallel"]
    assert values["optimizer"] | {"clip_norm": None, "beta1": 0.8} == values["optimizer"]
    assert values["parallel"]["deterministic"] is False
    assert (values["model"]["num_layers"], values["model"]["tie_embeddings"]) == (1, True)
    assert launches.spec.nproc == 4, "data parallel x sequence parallel"
    assert launches.output() == Path("out")


def test_tokens_may_be_counted_in_k_and_m(launches, tmp_path):
    (tmp_path / "c.yaml").write_text("sequence_length: 64K\nmodel: {max_position_embeddings: 1M}\n")
    argv = ["--sequence-length", "32k", "--mlp-chunk-tokens", "1M", "--loss-chunk-tokens", "2K", "--sample-tokens=0"]
    assert main(["train", "--config", "c.yaml", *argv]) == 0
    values = json.loads((launches.output() / "config.json").read_text())
    assert (values["sequence_length"], values["model"]["max_position_embeddings"]) == (32768, 1048576)
    assert (values["mlp_chunk_tokens"], values["loss_chunk_tokens"], values["sample_tokens"]) == (1048576, 2048, 0)


@pytest.mark.parametrize(
    ("argv", "nproc"),
    [
        ([], 2),
        (["--nproc", "3"], 3),
        (["--data-parallel", "4", "--batch-size", "4"], 4),
        (["--sequence-parallel=5"], 5),
    ],
)
def test_number_of_ranks(launches, argv, nproc):
    assert main(["train", *argv]) == 0
    assert launches.spec.nproc == nproc


def test_all_gpus_are_used_and_no_more(launches, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 7)
    assert main(["train"]) == 0
    assert launches.spec.nproc == 7
    assert "does not divide 7 ranks" in refused(capsys, "train", "--data-parallel", "2", "--batch-size", "2")
    found = len(list(tmp_path.rglob("*")))
    assert "more than the 7 GPU(s)" in refused(capsys, "train", "--nproc", "8")
    assert len(list(tmp_path.rglob("*"))) == found, "a folder was left"
    assert len(launches) == 1


def test_an_empty_folder_may_be_named(launches, tmp_path):
    (tmp_path / "run").mkdir()
    assert main(["train", "--output", "run"]) == 0
    assert main(["train", "--output", "deep/er/run"]) == 0
    assert (tmp_path / "deep/er/run/config.json").is_file()


def test_a_run_that_left_only_its_configuration_can_be_begun_again(launches, tmp_path, capsys):
    assert main(["train", "--output", "run"]) == 0
    assert main(["train", "--output", "run", "--steps", "3"]) == 0
    assert launches.config()["steps"] == 3
    (tmp_path / "run" / "config.json").write_text('{"model_type": "llama"}')
    assert "not empty, it holds config.json" in refused(capsys, "train", "--output", "run")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--preset", "lama-tiny"], "did you mean 'llama-tiny'"),
        (["--presett", "x"], "unknown option '--presett'; did you mean '--preset'"),
        (["--lr", "1"], "did you mean '--optimizer.lr'"),
        (["--optimizer.lrr", "1"], "did you mean '--optimizer.lr'"),
        (["--step", "1"], "did you mean '--steps'"),
        (["--layout", "zig"], "known: balanced, contiguous, striped, zigzag"),
        (["--steps", "0"], "steps: '0'"),
        (["--steps", "-5"], "steps: '-5'"),
        (["--steps", "ten"], "steps: 'ten'"),
        (["--steps", "2K"], "steps: '2K' does not fit\nallowed: an integer at least 1\n"),
        (
            ["--sequence-length", "64G"],
            "sequence_length: '64G' does not fit\nallowed: an integer at least 1, also as 64K for 65536\n",
        ),
        (["--mlp-chunk-tokens", "-1K"], "expected one argument"),
        (
            ["--mlp-chunk-tokens=-1K"],
            "mlp_chunk_tokens: '-1K' does not fit\nallowed: an integer at least 0, also as 64K",
        ),
        (["--steps"], "expected one argument"),
        (["--resume", "maybe"], "resume: 'maybe'"),
        (["--data", "gone.txt"], "data gone.txt: no such file"),
        (["--data", "/dev/zero"], "data /dev/zero: is a device, a pipe or a socket\nallowed: a text"),
        (
            ["--checkpoint-every", "ever"],
            "checkpoint_every: 'ever' does not fit\nallowed: an integer at least 0, or never",
        ),
        (["--data", "latin.txt"], "'latin.txt' is not a text file: byte 4 is not UTF-8"),
        (["--data", "lines.jsonl"], "lines.jsonl:1: no field 'text'\nfields: 'body', 'number'\nname the one"),
        (
            ["--data", "lines.jsonl", "--data.text_field", "number"],
            "field 'number' must be a string, got 5\nname another",
        ),
        (["--data.tokenizer", "full"], "no tokenizer.json in tokenizer directory 'full'"),
        (["--data.tokenizer", "bad.json"], "cannot read tokenizer 'bad.json'"),
        (["--config", "gone.yaml"], "gone.yaml: no such configuration file"),
        (["--config", "bad.yaml"], "malformed YAML at line 2"),
        (["--init-from", "gone"], "init_from gone: no such directory"),
        (["--nproc", "3", "--data-parallel", "2"], "does not divide 3 ranks"),
        (["--nproc", "2", "--sequence-parallel", "3"], "--nproc 3"),
        (["--data-parallel", "2"], "--batch-size 2"),
        (["--sequence-length", "1"], "without a token"),
        (["--output", "full"], "output full: not empty, it holds x"),
        (["--output", "full/x"], "is a file"),
        (
            ["--output", "full/x/run"],
            "output full/x/run: no file can be written there: Not a directory\nfix: give a folder",
        ),
        (["--output", "/proc/none"], "output /proc/none: no file can be written there: No such file"),
        (
            ["--data.cache", "full/x"],
            "data.cache full/x: no file can be written there: Not a directory\nfix: give a folder",
        ),
        (["--data.cache", "full/x/y"], "data.cache full/x/y: no file can be written there: Not a directory"),
        (["--output", "cut/run"], "data.cache cut/tokens: no file can be written there: Not a directory"),
        (["--output", "x" * 5000], "names of at most 255"),
        (["--resume"], "does not say which run"),
        (["--resume", "--output", "gone"], "gone is not a run folder"),
        (["--resume", "--output", "full"], "full is not a run folder"),
        (["--model.num_kv_heads", "3"], "allowed: 1, 2, 4"),
        (["train"], "unexpected argument 'train'"),
    ],
)
def test_bad_input_starts_nothing_and_leaves_nothing(launches, tmp_path, capsys, argv, expected):
    (tmp_path / "bad.yaml").write_text("steps: 1\n  seed: 2\n")
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "latin.txt").write_bytes(b"text\xe9 text")
    (tmp_path / "lines.jsonl").write_text('{"body": "text", "number": 5}\n')
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "tokens").touch()
    found = sorted(tmp_path.rglob("*"))
    assert expected in refused(capsys, "train", *argv)
    assert not launches
    assert sorted(tmp_path.rglob("*")) == found, "something was left"


def test_a_run_folder_is_no_model_but_its_checkpoints_are(launches, tmp_path, capsys):
    checkpoint(started(tmp_path), 4)
    expected = "init_from run: is a run folder\nfix: give one of its checkpoints, such as run/checkpoints/step-000004\n"
    assert expected in refused(capsys, "train", "--init-from", "run")


# Resume


def test_resume_takes_the_runs_own_configuration(launches, tmp_path):
    checkpoint(started(tmp_path, steps="9", seed="5"), 4)
    for argv in (["--output", "run"], ["--config", "run/config.json"], ["--config", "run/config.json", "--output=run"]):
        assert main(["train", "--resume", *argv]) == 0
        assert launches.command[-1] == "--resume"
        assert launches.output() == Path("run")
        assert (launches.config()["seed"], launches.config()["steps"]) == (5, 9)
    assert len(launches) == 3


def test_a_finished_run_says_so_and_a_larger_number_of_steps_goes_on(launches, tmp_path, capsys):
    checkpoint(started(tmp_path, steps="9"), 9)
    assert main(["train", "--resume", "--output", "run"]) == 0
    assert not launches
    assert "run: finished with 9 steps" in capsys.readouterr().err
    assert main(["train", "--resume", "--output", "run", "--steps", "3"]) == 0
    assert not launches
    assert main(["train", "--resume", "--output", "run", "--data.cache", "run/config.json/x"]) == 0, "it has all"
    assert not launches
    assert main(["train", "--resume", "--output", "run", "--steps", "12"]) == 0
    assert launches.config()["steps"] == 12


def test_resume_lays_another_file_over_the_runs_own(launches, tmp_path):
    checkpoint(started(tmp_path, steps="9", seed="5"), 4)
    (tmp_path / "more.yaml").write_text("steps: 11\noutput: run\n")
    before = (tmp_path / "run" / "config.json").read_bytes()
    assert main(["train", "--resume", "--config", "more.yaml", "--optimizer.lr", "0.5"]) == 0
    values = launches.config()
    assert (values["steps"], values["seed"], values["optimizer"]["lr"]) == (11, 5, 0.5)
    # A rank may refuse it yet, and the next --resume begins from the run's own again.
    assert (tmp_path / "run" / "config.json").read_bytes() == before


def test_resume_that_cannot_work(launches, tmp_path, capsys):
    run = started(tmp_path, seed="5")
    before = (run / "config.json").read_text()
    assert "no complete checkpoint" in refused(capsys, "train", "--resume", "--output", "run")
    checkpoint(run, 4)
    (checkpoint(run, 8) / "state.json").write_text('{"format": "bmb')
    assert "seed 6 differs from 5" in refused(capsys, "train", "--resume", "--output", "run", "--seed", "6")
    text = refused(capsys, "train", "--resume", "--output", "run", "--preset", "llama-2-7b")
    assert "changes nothing" in text
    (run / "config.json").write_text("{")
    assert "malformed JSON at line 1" in refused(capsys, "train", "--resume", "--output", "run")
    (run / "config.json").write_text(before)
    assert not launches
    assert main(["train", "--resume", "--output", "run"]) == 0, "the checkpoint before the torn one serves"


def test_begun_without_resume_a_run_is_not_overwritten(launches, tmp_path, capsys):
    checkpoint(started(tmp_path), 4)
    assert "--resume to continue" in refused(capsys, "train", "--output", "run")
    assert "it holds checkpoints" in refused(capsys, "train", "--output", "run", "--resume", "false")
