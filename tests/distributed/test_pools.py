"""What ranks that run one body after another keep, and what they do not."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
import types
import warnings

import pytest
import torch
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

import bmburst
from tests.distributed.processes import run_processes
from tests.distributed.programs import run_program
from tests.launch.launcher import assert_gone, wait_until

STARTERS = pytest.mark.parametrize("start", [run_processes, run_program])


def pids(start, body, folder, *args):
    """Return the process of each of two ranks that run a body."""
    start(2, _recorded, folder, body, args)
    return [int((folder / str(rank)).read_text()) for rank in range(2)]


def _recorded(folder, body, args):
    rank = _rank()
    (folder / str(rank)).write_text(str(os.getpid()))
    body(*args)


def _rank():
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])


@STARTERS
def test_the_next_body_has_the_same_processes_and_finds_nothing(start, tmp_path):
    first = pids(start, _changes_what_is_set_back, tmp_path)
    assert pids(start, _finds_a_new_process, tmp_path) == first


def _changes_what_is_set_back():
    os.environ["BMBURST_LEFT"] = "1"
    os.chdir("/")
    torch.manual_seed(_rank() + 7)
    random.seed(7)
    torch.set_num_threads(2)


def _finds_a_new_process():
    assert "BMBURST_LEFT" not in os.environ
    assert os.getcwd() != "/"
    assert torch.initial_seed() != _rank() + 7
    assert random.random() != random.Random(7).random()
    assert torch.get_num_threads() == 1


def test_both_ranks_of_bmtrain_are_seeded_again():
    for _ in range(2):
        run_program(2, _draws_what_seed_0_gives)


def _draws_what_seed_0_gives():
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0)))
    assert random.random() == random.Random(0).random()


def _dtype():
    torch.set_default_dtype(torch.float64)


def _name():
    bmburst.errors.UserError = ValueError


def _method():
    torch.Tensor.left_behind = 1


def _handler():
    signal.signal(signal.SIGUSR1, lambda *_: None)


def _warning():
    warnings.filterwarnings("ignore", message="left behind")


def _thread():
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


def _process():
    subprocess.Popen(["sleep", "60"])


def _module():
    sys.modules["left_behind"] = types.ModuleType("left_behind")


LEAVING = [_dtype, _name, _method, _handler, _warning, _thread, _process, _module]


def test_what_a_body_leaves_behind_ends_its_ranks(tmp_path):
    """Each body that follows has ranks of its own."""
    before = pids(run_processes, LEAVING[0], tmp_path)
    for body, left in zip([*LEAVING[1:], _finds_a_new_process], LEAVING, strict=True):
        found = pids(run_processes, body, tmp_path)
        assert not set(found) & set(before), left.__name__
        before = found


@STARTERS
def test_a_failure_ends_the_ranks(start, tmp_path):
    """Also that which waits for the other."""
    with pytest.raises(ProcessRaisedException, match="rank 1 has failed"):
        pids(start, _one_fails, tmp_path)
    failed = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert not set(failed) & set(pids(start, _finds_a_new_process, tmp_path))


def _one_fails():
    if _rank() == 1:
        raise ValueError("rank 1 has failed")
    time.sleep(60)


@STARTERS
def test_a_rank_that_is_lost_or_late_fails_the_job(start, tmp_path):
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        start(2, _one_is_killed)
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        start(2, _other_sees_it_first)
    with pytest.raises(TimeoutError, match="_one_is_late on 2 ranks"):
        start(2, _one_is_late, seconds=1)
    start(2, _finds_a_new_process)


def _one_is_killed():
    if _rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def _other_sees_it_first():
    if _rank() == 1:
        raise ConnectionError("Connection closed by peer")
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)


def _one_is_late():
    if _rank() == 1:
        time.sleep(60)


PROGRAM = """
import os, sys, time
from pathlib import Path
from tests.distributed.processes import run_processes
from tests.distributed.test_pools import record_and_sleep
if __name__ == "__main__":
    run_processes(2, record_and_sleep, Path(sys.argv[1]))
"""


def record_and_sleep(folder):
    new = folder / f"new-{_rank()}"
    new.write_text(str(os.getpid()))
    new.rename(folder / str(_rank()))
    time.sleep(600)


@pytest.mark.long  # imports what ranks need again
def test_ranks_end_with_the_tests_that_are_killed(tmp_path):
    (tmp_path / "tests.py").write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    tests = subprocess.Popen([sys.executable, "-P", tmp_path / "tests.py", tmp_path], env=environment)
    try:
        wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(2)), 300)
    finally:
        tests.kill()
        tests.wait()
    assert_gone([int((tmp_path / str(rank)).read_text()) for rank in range(2)])


@STARTERS
def test_another_environment_or_fresh_has_ranks_of_its_own(start, tmp_path, monkeypatch):
    first = pids(start, _finds_a_new_process, tmp_path)
    start(2, _recorded, tmp_path, _finds_a_new_process, (), fresh=True)
    assert not set(first) & {int((tmp_path / str(rank)).read_text()) for rank in range(2)}
    monkeypatch.setenv("BMBURST_TIMEOUT", "77")
    assert not set(first) & set(pids(start, _is_in, tmp_path, "77"))
    monkeypatch.undo()
    pids(start, _finds_a_new_process, tmp_path)


def _is_in(value):
    assert os.environ["BMBURST_TIMEOUT"] == value
