"""Two runs in one folder: one of them trains, with its own configuration; the other says who does, and ends."""

import contextlib
import errno
import fcntl
import io
import json
import multiprocessing
import os
import signal
import time

import pytest

from bmburst.cli import main, run_folder
from bmburst.cli.run_folder import check_fresh
from bmburst.outputs import LOCK_FILE, TRAINING_LOCK, lock_folder
from bmburst.train.resolve import resolve
from tests import refusals
from tests.cli.commands import checkpoint, refused, started

CONTEXT = multiprocessing.get_context("fork")


def names(folder):
    """Return the names of a run folder's files without those of locks."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith((LOCK_FILE, TRAINING_LOCK)))


def launcher(argv, offset, queue, one_is_over):
    """Run the command with a stand-in for the launcher, whose run lasts until another command has ended.

    Report what its ranks would train, and what it printed.
    """

    def launch(spec, command, request):
        assert one_is_over.wait(60)
        launched.append(json.loads(request)["config"]["seed"])
        return 0

    launched, said = [], io.StringIO()
    import bmburst.launch.launcher

    bmburst.launch.launcher.launch = launch
    time.sleep(offset)
    with contextlib.redirect_stderr(said):
        status = main(argv)
    one_is_over.set()
    queue.put((status, launched, said.getvalue(), os.getpid()))


def two_at_once(argvs, offset):
    queue, one_is_over = CONTEXT.Queue(), CONTEXT.Event()
    jobs = [
        CONTEXT.Process(target=launcher, args=(argv, at, queue, one_is_over))
        for argv, at in zip(argvs, (0.0, offset), strict=True)
    ]
    for job in jobs:
        job.start()
    found = sorted((queue.get(timeout=120) for _ in jobs), key=lambda each: each[0])
    for job in jobs:
        job.join(60)
    return found


@pytest.mark.parametrize(
    "offset", [0.0, 0.05, *(pytest.param(each, marks=pytest.mark.long) for each in (0.01, 0.2, 0.6))]
)
@pytest.mark.parametrize("resume", [False, True])
def test_one_of_two_runs_trains_with_its_own_configuration(launches, tmp_path, offset, resume):
    argvs = [["train", "--output", "run", "--seed", str(seed)] for seed in (5, 6)]
    if resume:
        checkpoint(started(tmp_path, steps="9", seed="5"), 4)
        argvs = [["train", "--output", "run", "--resume", "--steps", str(steps)] for steps in (10, 11)]
    (status, launched, _, winner), (other, none, said, loser) = two_at_once(argvs, offset)
    assert (status, other, none) == (0, 2, [])
    assert f"run: another run is using this folder: process {winner} on host {os.uname().nodename}, since 2" in said
    assert len(said.splitlines()) == 2 and winner != loser
    assert resolve((tmp_path / "run" / "config.json",)).seed == launched[0]
    with lock_folder(tmp_path / "run"):  # the winner's end freed it
        pass


def test_ranks_train_what_their_launcher_settled_whatever_the_folder_says(launches, trained, as_rank, tmp_path):
    assert main(["train", "--output", "run", "--seed", "5"]) == 0
    (tmp_path / "run" / "config.json").write_text(json.dumps({"seed": 6}))
    as_rank(0, 2, launched=True)
    assert launches.run_rank() == 0
    (tmp_path / "run" / "config.json").unlink()
    as_rank(1, 2, launched=True)
    assert launches.run_rank() == 0
    assert [config.seed for config in trained] == [5, 5]


def test_a_rank_without_our_launcher_keeps_others_away(trained, as_rank, capsys, tmp_path):
    seen = []
    trained.work = lambda _: seen.append((tmp_path / "out" / f"{LOCK_FILE}.holder").exists()) or ""
    as_rank(0, 2)
    assert main(["train", "--output", "out"]) == 0
    assert seen == [True]
    with lock_folder(tmp_path / "out"):
        assert "another run is using this folder" in refused(capsys, "train", "--output", "out")
    assert seen == [True]


def test_what_another_run_wrote_before_the_lock_counts(launches, capsys, tmp_path, monkeypatch):
    hold, run = run_folder.lock_folder, tmp_path / "run"
    checkpoint(started(tmp_path, steps="9"), 4)

    def later(change):
        pending = [change]

        def held_late(*args, **options):
            while pending:
                pending.pop()()
            return hold(*args, **options)

        monkeypatch.setattr(run_folder, "lock_folder", held_late)

    later(lambda: started(tmp_path, steps="20"))
    assert main(["train", "--output", "run", "--resume"]) == 0
    assert launches.config()["steps"] == 20
    later(lambda: (tmp_path / "new" / "metrics.jsonl").write_text("{}\n"))
    assert "not empty, it holds metrics.jsonl" in refused(capsys, "train", "--output", "new")
    assert len(launches) == 1 and names(tmp_path / "new") == ["metrics.jsonl"]
    assert names(run) == ["checkpoints", "config.json"]


def test_a_rank_without_our_launcher_looks_for_room(trained, as_rank, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("bmburst.outputs.free_bytes", lambda _: 1000)
    as_rank(0, 2)
    assert "the run writes" in refused(capsys, "train", "--output", "out")
    assert trained == [] and not (tmp_path / "out").exists()


@pytest.mark.parametrize("lock", [LOCK_FILE, TRAINING_LOCK])
def test_the_lock_of_a_killed_run_does_not_block(launches, tmp_path, lock):
    (tmp_path / "run").mkdir()
    taken = CONTEXT.Event()

    def hold():
        with lock_folder(tmp_path / "run", lock):
            taken.set()
            time.sleep(600)

    job = CONTEXT.Process(target=hold)
    job.start()
    assert taken.wait(60)
    with refusals.refused("run", f"process {job.pid}", "on host", "fix: "), lock_folder(tmp_path / "run", lock):
        pass
    os.kill(job.pid, signal.SIGKILL)
    job.join(60)
    assert f"process {job.pid}" in (tmp_path / "run" / f"{lock}.holder").read_text()
    assert main(["train", "--output", "run"]) == 0
    assert names(tmp_path / "run") == ["config.json"]


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with refusals.refused(str(tmp_path), "no locks", "fix: give an --output"), lock_folder(tmp_path):
        pass


def test_a_configuration_that_another_run_is_writing_is_left_to_the_lock(tmp_path):
    (tmp_path / ".config.json.12.0a.partial").touch()
    check_fresh(tmp_path)
