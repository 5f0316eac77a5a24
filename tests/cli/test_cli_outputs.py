"""What a command would write at its end is tried before its work begins, and nothing of the user's is written over."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from bmburst.cli import main
from bmburst.errors import UserError
from bmburst.outputs import require_file, require_folder, require_own
from tests.cli.commands import refused


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    return tmp_path


OURS = ("text", lambda path: path.read_text() == "mine")


def test_a_file_that_can_be_written_is_neither_made_nor_changed(here):
    require_file("--output", Path("new"), *OURS)
    require_file("--output", Path("file"), *OURS)
    assert (here / "file").read_text() == "mine"
    assert not (here / "new").exists()


@pytest.mark.parametrize("path", ["folder", "x" * 300, f"{'x' * 300}/file", "/proc/none"])
def test_a_file_that_cannot_be_written(here, path):
    with pytest.raises(UserError, match=r"^--output .*: cannot be written: .*\nfix: .*write permission"):
        require_file("--output", Path(path), *OURS)


@pytest.mark.parametrize("path", ["gone/file", "file/file"])
def test_a_file_in_no_folder(here, path):
    with pytest.raises(UserError, match=f"^--output {path}: there is no such folder\nfix: "):
        require_file("--output", Path(path), *OURS)


def test_a_pipe_is_not_waited_for(here):
    os.mkfifo("pipe")
    require_file("--output", Path("pipe"), *OURS)


def test_folders(here):
    found = sorted(here.rglob("*"))
    for path in ("a/b", "folder", "."):
        require_folder("--trace", Path(path))
    assert sorted(here.rglob("*")) == found, "something was left"
    (here / "nowhere").symlink_to("gone")
    for path in ("file", "file/folder", "/proc/none", "nowhere", "nowhere/folder", f"{'x' * 300}/b"):
        with pytest.raises(UserError, match=r"^--trace .*: no file can be written there: .*\nfix: .*write permission"):
            require_folder("--trace", Path(path))


def test_only_files_of_the_same_kind_are_replaced(here):
    (here / "empty").touch()
    (here / "theirs").write_bytes(b"\xff")
    for name in ("file", "empty", "new", "folder"):
        require_own("--output", Path(name), *OURS)
    for is_own in (OURS[1], lambda _: False):
        with pytest.raises(UserError, match="--output theirs: this file exists and is not text\nfix: "):
            require_own("--output", Path("theirs"), "text", is_own)


def test_outputs_are_made_again_and_others_kept(here, capsys, monkeypatch):
    """Each command replaces what it wrote itself, and nothing else, not even of its own format."""
    from matplotlib.figure import Figure

    from bmburst.plan.calibrate import complete, render
    from bmburst.schedule.hardware import read_facts

    facts = render("here", complete({}, read_facts("h200"), "h200"), "Measured by bmburst plan --calibrate")
    monkeypatch.setattr("bmburst.plan.calibrate.calibrate", lambda *_: facts)
    plan, calibrate = ["plan", *PLAN, "--output", "plan.png"], ["plan", "--calibrate", "--output", "machine.toml"]
    for command in (plan, calibrate):
        for _ in range(2):
            assert main(command) == 0
    Figure().savefig("plan.png")
    (here / "machine.toml").write_text("[tool.ruff]\n")
    (here / "report.json").write_text('{"verdict": "mine"}')
    (here / "results.json").write_text('{"format": "mine"}')
    (here / "README.md").write_text("mine")
    Figure().savefig("drawn-steps.png")
    found = {path: path.read_bytes() for path in here.iterdir() if path.is_file()}
    bench = ("bench", "attention", "--ranks", "2", "--tokens", "1K", "--output")
    for command, name in (
        (plan, "plan.png"),
        (calibrate, "machine.toml"),
        (("check", "--json", "report.json"), "report.json"),
        ((*bench, "results.json"), "results.json"),
        ((*bench, "README.json"), "README.md"),
        ((*bench, "drawn.json"), "drawn-steps.png"),
    ):
        assert f"{name}: this file exists and is not " in refused(capsys, *command)
    assert {path: path.read_bytes() for path in here.iterdir() if path.is_file()} == found


@pytest.mark.parametrize("what", ["attention", "train"])
def test_bench_replaces_only_its_own_timelines(here, capsys, monkeypatch, what):
    import torch
    from torch.profiler import profile

    import benchmarks.engine.job
    from benchmarks.engine.timeline import record

    monkeypatch.setattr(benchmarks.engine.job, "run_job", lambda *_args, **_options: 9)
    group = SimpleNamespace(rank=0, device=torch.device("cpu"), barrier=lambda: None)
    bench = ["bench", what, "--ranks", "2", "--tokens", "1K", "--methods", "ours"]
    assert main([*bench, "--list"]) == 0
    cell = capsys.readouterr().out.split()[0]
    name = cell if what == "train" else f"{cell}/forward_backward"
    file = Path("trace", f"{name.replace('/', '.')}.json")
    trace = [*bench, "--trace", "trace"]
    record(lambda: None, file.parent, name, group)
    assert main(trace) == 9, "its own timeline may be recorded again"
    with profile() as other:
        pass
    other.export_chrome_trace("elsewhere.json")
    for theirs in (b"mine", b'{"traceEvents": []}', Path("elsewhere.json").read_bytes()):
        file.write_bytes(theirs)
        message = refused(capsys, *trace)
        assert f"--trace {file}" in message and "timeline" in message and "fix: " in message
        assert file.read_bytes() == theirs
    file.unlink()
    file.with_suffix(".png").write_bytes(b"mine")
    message = refused(capsys, *trace)
    assert f"--trace {file.with_suffix('.png')}" in message and "picture" in message


PLAN = ("--model", "llama-tiny", "--seq", "1024")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (("plan", *PLAN, "--output", "folder"), "--output folder\nallowed: a .png file"),
        (("plan", *PLAN, "--output", "/proc/none.png"), "--output /proc/none.png: cannot be written"),
        (("plan", "--calibrate", "--output", "folder"), "--output folder: cannot be written: Is a directory"),
        (("plan", *PLAN, "--ranks", "3"), "--ranks 3 is an option of --calibrate\nfix: give --gpus"),
        (("plan", "--check", *PLAN), "--check predicts recorded runs and takes no --model"),
        (
            ("plan", "--check", "--json"),
            "--check predicts recorded runs\nfix: leave out one",
        ),
        (("plan", "--calibrate", *PLAN), "--calibrate measures this machine and takes no --model"),
        (("plan", "--check", "--calibrate"), "--check and --calibrate cannot be combined\nfix: "),
        (
            ("plan", *PLAN, "--batch", "2", "--micro-batch", "3"),
            "--micro-batch 3 does not divide --batch 2\nallowed: a",
        ),
        (
            ("plan", *PLAN, "--hardware", "latin.toml"),
            "is no TOML file: 'utf-8' codec can't decode byte 0xe9 in position 4",
        ),
        (("plan", "--model", "llama-tiny", "--seq", "1e6"), "--seq 1e6\nallowed: a whole number, also as 64K"),
        (
            ("plan", *PLAN, "--mlp-chunk", "2KB"),
            "--mlp-chunk 2KB\nallowed: a whole number, also as 64K for 65536\nfix:",
        ),
        (("plan", *PLAN, "--gpus", "1K"), "--gpus 1K\nallowed: a whole number\n"),
        (
            ("bench", "train", "--ranks", "2", "--tokens", "1K,2X"),
            "--tokens 1K,2X\nallowed: whole numbers separated by commas",
        ),
        (
            ("bench", "train", "--ranks", "2K"),
            "--ranks 2K\nallowed: whole numbers separated by commas, for example 2,4",
        ),
        (("bench", "attention", "--ranks", "2", "--tokens", "0K"), "--tokens 0K\nallowed: at least 1"),
        (("check", "--json", "/proc/none"), "--json /proc/none: cannot be written"),
        (("bench", "attention", "--ranks", "2", "--output", "folder"), "--output folder\nallowed: a .json file"),
        (
            ("bench", "attention", "--ranks", "2", "--output", "/proc/n.json"),
            "--output /proc/n.json: cannot be written",
        ),
        (
            ("bench", "attention", "--ranks", "2", "--trace", "file"),
            "--trace file: no file can be written there: Not a",
        ),
        (("bench", "train", "--ranks", "2", "--cell-seconds", "x"), "--cell-seconds x\nallowed: a number\n"),
        (("bench", "train", "--ranks", "2", "--text", "latin"), "'latin' is not a text file: byte 4 is not UTF-8"),
        (
            ("bench", "attention", "--table", "--output", "list.json"),
            "is no file of this benchmark: list.json does not hold a JSON object",
        ),
        (("bench", "train", "--table", "--output", "other.json"), "is no file of this benchmark: its format is other,"),
        (
            ("data", "--input", "file", "--output", "file"),
            "--output file: this file exists and is not a token file\nfix: ",
        ),
        (
            ("data", "--input", "latin", "--output", "file"),
            "--output file: this file exists and is not a token file\nfix: ",
        ),
        (("convert", "folder", "out", "--to", "bmburst", "--part-size", "inf"), "--part-size inf\nallowed: gigabytes"),
        (("convert", "folder", "out", "--to", "bmburst", "--part-size", "nan"), "--part-size nan\nallowed: a number\n"),
        (("convert", "folder", "out", "--to", "bmburst", "--part-size", "big"), "--part-size big\nallowed: a number\n"),
    ],
)
def test_refused_before_any_work(here, capsys, monkeypatch, argv, expected):
    def worked(*_args, **_options):
        pytest.fail("work was begun")

    for work in ("plan.search.search", "plan.calibrate.calibrate", "plan.accuracy.compare"):
        monkeypatch.setattr(f"bmburst.{work}", worked)
    monkeypatch.setattr("benchmarks.engine.job.run_job", worked)
    for name in ("latin", "latin.toml"):
        (here / name).write_bytes(b"text\xe9 text")
    (here / "list.json").write_text("[1]")
    (here / "other.json").write_text('{"format": "other"}')
    found = sorted(here.rglob("*"))
    assert expected in refused(capsys, *argv)
    assert sorted(here.rglob("*")) == found
    assert (here / "file").read_text() == "mine"


def test_a_token_file_may_be_made_again(here, capsys):
    for _ in range(2):
        assert main(["data", "--input", "file", "--output", "out.tokens"]) == 0
    assert "1 documents, 5 tokens" in capsys.readouterr().out


def test_cells_are_found_by_the_name_that_a_list_shows(here, capsys):
    for what, name in (("attention", "sequence/1024/mha/causal/ours"), ("train", "loss/tiny-8-heads/1024/ours")):
        words = ["bench", what, "--list", "--ranks", "2", "--tokens", "1K,3072", "--cells"]
        assert main([*words, f"{name}*"]) == 0
        listed = capsys.readouterr().out.split()
        for shown in (listed[0], listed[-1]):
            assert main([*words, shown]) == 0
            assert capsys.readouterr().out.split() == [shown]
