"""What a command would write at its end is tried before its work begins, and nothing of the user's is written over."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from bmburst.cli import main
from bmburst.outputs import require_file, require_folder, require_own
from tests import refusals
from tests.cli.commands import refused
from tests.refusals import says


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
    with refusals.refused("--output", path, "cannot be written", "fix: "):
        require_file("--output", Path(path), *OURS)


@pytest.mark.parametrize("path", ["gone/file", "file/file"])
def test_a_file_in_no_folder(here, path):
    with refusals.refused("--output", path, "no such folder", "fix: "):
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
        with refusals.refused("--trace", path, "written", "fix: give a folder"):
            require_folder("--trace", Path(path))
    with refusals.refused("nowhere is a link to gone, which does not exist"):
        require_folder("--trace", Path("nowhere/folder"))


def test_only_files_of_the_same_kind_are_replaced(here):
    (here / "empty").touch()
    (here / "theirs").write_bytes(b"\xff")
    for name in ("file", "empty", "new", "folder"):
        require_own("--output", Path(name), *OURS)
    for is_own in (OURS[1], lambda _: False):
        with refusals.refused("--output theirs", "not text", "fix: ", "new file"):
            require_own("--output", Path("theirs"), "text", is_own)


def test_outputs_are_made_again_and_others_kept(here, capsys, monkeypatch):
    """Each command replaces what it wrote itself, and nothing else, not even of its own format."""
    from matplotlib.figure import Figure

    from bmburst.plan.rates import complete, render
    from bmburst.schedule.hardware import load_hardware

    facts = render("here", complete({}, load_hardware("h200"), "h200"), "Measured by bmburst plan --calibrate")
    monkeypatch.setattr("bmburst.plan.rates.calibrate", lambda *_: facts)
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
    from benchmarks.engine.timing import record_timeline

    monkeypatch.setattr(benchmarks.engine.job, "run_job", lambda *_args, **_options: 9)
    group = SimpleNamespace(rank=0, device=torch.device("cpu"), barrier=lambda: None)
    bench = ["bench", what, "--ranks", "2", "--tokens", "1K", "--methods", "ours"]
    assert main([*bench, "--list"]) == 0
    cell = capsys.readouterr().out.split()[0]
    name = cell if what == "train" else f"{cell}/forward_backward"
    file = Path("trace", f"{name.replace('/', '.')}.json")
    trace = [*bench, "--trace", "trace"]
    record_timeline(lambda: None, file.parent, name, ("Timeline", "of nothing"), group)
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


PLAN = ("--preset", "llama-tiny", "--sequence-length", "1024")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("plan", *PLAN, "--output", "folder"), "--output folder | .png"),
        (("plan", *PLAN, "--output", "/proc/none.png"), "--output /proc/none.png | cannot be written | fix: "),
        (("plan", "--calibrate", "--output", "folder"), "--output folder | cannot be written | Is a directory | fix: "),
        (("plan", "--calibrate", *PLAN), "--calibrate | --preset | fix: leave --preset out"),
        (("plan", "--calibrate", "--ways", "2"), "--calibrate | --ways | fix: leave --ways out"),
        (("plan", "--calibrate", "--json"), "--calibrate | --json | fix: leave --json out"),
        (("plan", *PLAN, "--init-from", "folder"), "--preset | --init-from | fix: "),
        (
            ("plan", *PLAN, "--batch-size", "2", "--micro-batch-size", "3"),
            "--micro-batch-size 3 | --batch-size 2 | fix: ",
        ),
        (("plan", *PLAN, "--hardware", "latin.toml"), "latin.toml | TOML | 'utf-8' | byte 0xe9 | position 4 | fix: "),
        (("plan", "--preset", "llama-tiny", "--sequence-length", "1e6"), "sequence_length | '1e6' | integer | 64K"),
        (("plan", *PLAN, "--mlp-chunk-tokens", "2KB"), "mlp_chunk_tokens | '2KB' | integer | 64K for 65536 | fix:"),
        (("plan", *PLAN, "--nproc", "1K"), "--nproc 1K | a whole number\n"),
        (("bench", "train", "--ranks", "2", "--tokens", "1K,2X"), "--tokens 1K,2X | whole numbers separated by commas"),
        (("bench", "train", "--ranks", "2K"), "--ranks 2K | whole numbers separated by commas | 2,4"),
        (("bench", "attention", "--ranks", "2", "--tokens", "0K"), "--tokens 0K | at least 1"),
        (("check", "--json", "/proc/none"), "--json /proc/none | cannot be written | fix: "),
        (("bench", "attention", "--ranks", "2", "--output", "folder"), "--output folder | .json"),
        (
            ("bench", "attention", "--ranks", "2", "--output", "/proc/n.json"),
            "--output /proc/n.json | cannot be written | fix: ",
        ),
        (
            ("bench", "attention", "--ranks", "2", "--trace", "file"),
            "--trace file | written | Not a directory | fix: give a folder",
        ),
        (("bench", "train", "--ranks", "2", "--cell-seconds", "x"), "--cell-seconds x | a number\n"),
        (("bench", "train", "--ranks", "2", "--text", "latin"), "'latin' | text file | byte 4 | UTF-8"),
        (("bench", "attention", "--table", "--output", "list.json"), "list.json | benchmark | JSON object"),
        (("bench", "train", "--table", "--output", "other.json"), "other.json | benchmark | format | other"),
        (("data", "--input", "file", "--output", "file"), "--output file | not a token file | fix: give the name"),
        (("data", "--input", "latin", "--output", "file"), "--output file | not a token file | fix: give the name"),
        (("convert", "folder", "out", "--to", "bmburst", "--part-size", "inf"), "--part-size inf | gigabytes"),
        (("convert", "folder", "out", "--to", "bmburst", "--part-size", "nan"), "--part-size nan | a number\n"),
        (("convert", "folder", "out", "--to", "bmburst", "--part-size", "big"), "--part-size big | a number\n"),
    ],
)
def test_refused_before_any_work(here, capsys, monkeypatch, argv, words):
    def worked(*_args, **_options):
        pytest.fail("work was begun")

    for work in ("plan.search.search", "plan.rates.calibrate"):
        monkeypatch.setattr(f"bmburst.{work}", worked)
    monkeypatch.setattr("benchmarks.engine.job.run_job", worked)
    for name in ("latin", "latin.toml"):
        (here / name).write_bytes(b"text\xe9 text")
    (here / "list.json").write_text("[1]")
    (here / "other.json").write_text('{"format": "other"}')
    found = sorted(here.rglob("*"))
    says(refused(capsys, *argv), words)
    assert sorted(here.rglob("*")) == found
    assert (here / "file").read_text() == "mine"


def test_a_token_file_may_be_made_again(here, capsys):
    for _ in range(2):
        assert main(["data", "--input", "file", "--output", "out.tokens"]) == 0
    assert "1 document, 5 tokens" in capsys.readouterr().out


def test_cells_are_found_by_the_name_that_a_list_shows(here, capsys):
    for what, name in (("attention", "sequence/1024/mha/causal/ours"), ("train", "loss/tiny-8-heads/1024/ours")):
        words = ["bench", what, "--list", "--ranks", "2", "--tokens", "1K,3072", "--cells"]
        assert main([*words, f"{name}*"]) == 0
        listed = capsys.readouterr().out.split()
        for shown in (listed[0], listed[-1]):
            assert main([*words, shown]) == 0
            assert capsys.readouterr().out.split() == [shown]
