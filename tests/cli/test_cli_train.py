"""`bmburst train` and `bmburst eval`: what is settled before ranks start, and what ranks are given."""

import errno
import json
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bmburst.blocks.presets import PRESETS
from bmburst.cli import main
from bmburst.config import leaves
from bmburst.errors import UserError
from bmburst.hugging_face import expected_shapes
from bmburst.train.config import TrainConfig
from bmburst.train.eval_config import EvalConfig
from bmburst.train.resolve import resolve, write_run_config


class Launches(list):
    """The calls of the launcher's stand-in."""

    @property
    def command(self):
        return self[-1][1]

    @property
    def spec(self):
        return self[-1][0]

    def config(self):
        words = self.command
        assert words[:3] == ["-m", "bmburst", "train"]
        return json.loads(Path(words[words.index("--config") + 1]).read_text())

    def output(self):
        return Path(self.command[self.command.index("--output") + 1])


@pytest.fixture
def launches(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "BMBURST_LAUNCH_FOLDER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    calls = Launches()
    monkeypatch.setattr("bmburst.runtime.launch.launch", lambda spec, command: calls.append((spec, command)) or 0)
    return calls


@pytest.fixture
def trained(monkeypatch):
    """Stand in for the trainer and return the configurations it is given."""
    seen = []
    module = types.ModuleType("bmburst.train.trainer")
    module.run = seen.append
    monkeypatch.setitem(sys.modules, "bmburst.train.trainer", module)
    return seen


def checkpoint(folder, step):
    """Write what counts as a complete checkpoint."""
    path = folder / "checkpoints" / f"step-{step:06d}"
    path.mkdir(parents=True)
    state = {"format": "bmburst-checkpoint-1", "step": step, "data": {}, "tokenizer": "bytes", "files": {}}
    (path / "state.json").write_text(json.dumps(state))
    return path


def refused(capsys, *argv):
    capsys.readouterr()
    assert main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"bmburst {argv[0]}: ")
    assert len(err.splitlines()) <= 3
    return err


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
    (tmp_path / "x.txt").write_text("text")
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
        (["--steps"], "expected one argument"),
        (["--resume", "maybe"], "resume: 'maybe'"),
        (["--data", "gone.txt"], "data gone.txt: no such file"),
        (["--config", "gone.yaml"], "gone.yaml: no such configuration file"),
        (["--config", "bad.yaml"], "malformed YAML at line 2"),
        (["--init-from", "gone"], "init_from gone: no such directory"),
        (["--nproc", "3", "--data-parallel", "2"], "does not divide 3 ranks"),
        (["--nproc", "2", "--sequence-parallel", "3"], "--nproc 3"),
        (["--data-parallel", "2"], "--batch-size 2"),
        (["--sequence-length", "1"], "without a token"),
        (["--output", "full"], "output full: not empty, it holds x"),
        (["--output", "full/x"], "is a file"),
        (["--output", "full/x/run"], "cannot be made"),
        (["--output", "x" * 5000], "File name too long"),
        (["--resume"], "does not say which run"),
        (["--resume", "--output", "gone"], "gone is no run folder"),
        (["--resume", "--output", "full"], "full is no run folder"),
        (["--model.num_kv_heads", "3"], "allowed: 1, 2, 4"),
        (["train"], "unexpected argument 'train'"),
    ],
)
def test_bad_input_starts_nothing_and_leaves_nothing(launches, tmp_path, capsys, argv, expected):
    (tmp_path / "bad.yaml").write_text("steps: 1\n  seed: 2\n")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    assert expected in refused(capsys, "train", *argv)
    assert not launches
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["bad.yaml", "full", "x"]


# Resume


def started(tmp_path, **options):
    write_run_config(resolve((), options), tmp_path / "run")
    return tmp_path / "run"


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
    assert main(["train", "--resume", "--output", "run", "--steps", "12"]) == 0
    assert launches.config()["steps"] == 12


def test_resume_lays_another_file_over_the_runs_own(launches, tmp_path):
    checkpoint(started(tmp_path, steps="9", seed="5"), 4)
    (tmp_path / "more.yaml").write_text("steps: 11\noutput: run\n")
    assert main(["train", "--resume", "--config", "more.yaml", "--optimizer.lr", "0.5"]) == 0
    values = launches.config()
    assert (values["steps"], values["seed"], values["optimizer"]["lr"]) == (11, 5, 0.5)


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


# In a rank


@pytest.fixture
def as_rank(monkeypatch, launches):
    def enter(rank, size, launched=False):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(size))
        if launched:
            monkeypatch.setenv("BMBURST_LAUNCH_FOLDER", "x")

    return enter


@pytest.mark.parametrize("argv", [[], ["--steps", "7", "--seed", "3", "--init-from", "hf", "--sequence-length", "64"]])
def test_ranks_train_what_was_settled_before(launches, trained, as_rank, tmp_path, argv):
    values = PRESETS["llama-tiny"].to_hugging_face()
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(values))
    shapes = expected_shapes(PRESETS["llama-tiny"])
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "hf" / "model.safetensors")
    assert main(["train", *argv]) == 0
    words = launches.command[2:]
    (launches.output() / "rank0.log").touch()
    for rank in range(2):
        as_rank(rank, 2, launched=True)
        assert main(words) == 0
    expected = resolve((launches.output() / "config.json",)).replace(output=launches.output())
    assert trained == [expected, expected]
    assert len(launches) == 1


def test_resumed_ranks_get_resume(launches, trained, as_rank, tmp_path):
    run = started(tmp_path)
    checkpoint(run, 4)
    (run / "metrics.jsonl").touch()
    assert main(["train", "--resume", "--output", "run", "--steps", "200"]) == 0
    as_rank(0, 2, launched=True)
    assert main(launches.command[2:]) == 0
    assert (trained[0].resume, trained[0].steps, trained[0].output) == (True, 200, Path("run"))


def test_under_torchrun_the_folder_must_be_named_and_rank_0_writes_the_configuration(
    trained, as_rank, capsys, tmp_path
):
    as_rank(0, 4)
    assert "--output DIR" in refused(capsys, "train")
    assert main(["train", "--output", "out", "--steps", "3"]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["steps"] == 3
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
def test_a_full_disk_ends_a_rank_in_the_users_words(trained, as_rank, capsys, monkeypatch, launched):
    def full(_config):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys.modules["bmburst.train.trainer"], "run", full)
    as_rank(0, 1, launched=launched)
    if launched:  # the launcher shows it
        with pytest.raises(UserError, match="output out: cannot be written: No space left"):
            main(["train", "--output", "out"])
    else:
        assert "output out: cannot be written: No space left" in refused(capsys, "train", "--output", "out")


def test_a_folder_that_may_not_be_written_starts_nothing(launches, capsys, monkeypatch):
    def denied(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("bmburst.cli.train.write_run_config", denied)
    assert "output out: cannot be written: Permission denied" in refused(capsys, "train", "--output", "out")
    assert not launches


# Eval


@pytest.fixture
def held_out(tmp_path):
    (tmp_path / "held.txt").write_text("held-out text")
    (tmp_path / "empty").mkdir()
    return checkpoint(tmp_path / "run", 3)


def test_eval_starts_ranks_with_the_same_options_and_rank_0_prints(launches, held_out, monkeypatch, as_rank, capsys):
    argv = ["eval", "--checkpoint", str(held_out), "--data", "held.txt", "--sequence-length", "64"]
    assert main([*argv, "--max-sequences", "5"]) == 0
    assert launches.spec.nproc == 2
    seen = []
    module = types.ModuleType("bmburst.train.evaluate")
    measured = types.SimpleNamespace(loss=1.0, bits_per_byte=1.4427, perplexity=2.7183, tokens=4096)
    module.run = lambda config: seen.append(config) or measured
    monkeypatch.setitem(sys.modules, "bmburst.train.evaluate", module)
    printed = []
    for rank in range(2):
        as_rank(rank, 2, launched=True)
        assert main(launches.command[2:]) == 0
        printed.append(capsys.readouterr().out)
    expected = EvalConfig(checkpoint=held_out, data="held.txt", sequence_length=64, max_sequences=5, nproc=2)
    assert seen == [expected, expected]
    assert [line.split() for line in printed[0].splitlines()] == [
        ["loss", "1.0000", "nats", "per", "token"],
        ["bits", "per", "byte", "1.4427"],
        ["perplexity", "2.7183"],
        ["tokens", "4,096"],
    ]
    assert printed[1] == ""


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--data", "held.txt"], "checkpoint is missing"),
        (["--checkpoint", "run"], "data is missing"),
        (["--checkpoint", "gone", "--data", "held.txt"], "checkpoint gone: no such directory"),
        (["--checkpoint", "empty", "--data", "held.txt"], "empty holds no complete checkpoint"),
        (["--checkpoint", "run", "--data", "gone.txt"], "data gone.txt: no such file"),
        (["--checkpoint", "run", "--data", "held.txt", "--sequence-length", "1"], "without a token"),
        (["--checkpoint", "run", "--data", "held.txt", "--nproc", "9", "--sequence-length", "8"], "at least 9"),
        (["--checkpoint", "run", "--data", "held.txt", "--sequence_lenght", "8"], "--sequence-length"),
        (["--checkpoint", "run", "--data", "held.txt", "--max-sequences", "0"], "max_sequences: '0'"),
        (["--checkpoint", "run", "--data", "held.txt", "--layout", "x"], "unknown layout 'x'"),
    ],
)
def test_eval_refuses_bad_input(launches, held_out, capsys, argv, expected):
    assert expected in refused(capsys, "eval", *argv)
    assert not launches
