"""Ranks that end in order after a signal: they are waited for, and a lost rank still ends them in bounded time."""

import os
import signal
import textwrap

import pytest

from bmburst.config import to_dict, write_json
from tests.distributed.started import Program, rank_of
from tests.launch.launcher import PATIENT_FOR, ROOT, alive, assert_gone, ended, lines_of, start, wait_until
from tests.train import run_program as program

__all__ = ["start"]  # the fixture

POLITE = """
    import os, signal, sys, time
    from bmburst.launch.watchdog import handle_signals
    asked = []
    rank = os.environ["RANK"]
    with handle_signals((signal.SIGTERM, signal.SIGUSR1), lambda signum, frame: asked.append(signum)):
        print(os.getpid())
        {body}
    """
PATIENCE = 0.4  # seconds
SAVING = f"""
        while not asked: time.sleep(0.01)
        time.sleep(2 * {PATIENCE})  # longer than the launcher's patience with others
        open("saved" + rank, "w").write(str(asked))
        if rank == "1" and len(sys.argv) > 1: raise KeyError("in the end")
    """
STAYING = """
        while not asked: time.sleep(0.01)
        print("asked")
        time.sleep(600)
    """


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_ranks_that_end_in_order_are_waited_for(start, tmp_path, signum):
    process = start(POLITE.format(body=SAVING.strip()), first=PATIENT_FOR.format(seconds=PATIENCE))
    lines_of(process, 2)
    process.send_signal(signum)
    assert ended(process) == (0, "", "")
    assert all((tmp_path / f"saved{rank}").read_text() == f"[{int(signum)}]" for rank in range(2))


def test_signals_at_once_are_one(start, tmp_path):
    """`timeout` sends SIGTERM to its child, and once more to its group."""
    process = start(POLITE.format(body=SAVING.strip()), first=PATIENT_FOR.format(seconds=PATIENCE))
    lines_of(process, 2)
    for signum in (signal.SIGTERM, signal.SIGUSR1):  # two of one number may be delivered as one
        process.send_signal(signum)
    assert ended(process) == (0, "", "")
    assert (tmp_path / "saved0").exists() and (tmp_path / "saved1").exists()


def test_an_error_in_the_end_is_shown(start):
    process = start(POLITE.format(body=SAVING.strip()), args=("fail",), first=PATIENT_FOR.format(seconds=PATIENCE))
    lines_of(process, 2)
    process.terminate()
    status, _, err = ended(process)
    assert status == 1 and err.startswith("bmburst: rank 1 failed\n") and err.endswith("KeyError: 'in the end'\n")


def test_a_second_signal_does_not_wait(start):
    process = start(POLITE.format(body=STAYING.strip()))
    pids = [int(line) for line in lines_of(process, 2)]
    process.terminate()
    assert lines_of(process, 2) == ["asked", "asked"]
    assert all(map(alive, pids))
    process.terminate()
    assert ended(process) == (143, "", "bmburst: ended by SIGTERM\n")
    assert_gone(pids)


@pytest.mark.parametrize("how", ["kill", "raise", "kill after SIGTERM"])
def test_a_lost_rank_ends_those_that_wait_for_it(start, how):
    """As in a collective: what is sent to them does not end them."""
    body = f"""
        if rank == "1":
            if {how.endswith("SIGTERM")}:
                while not asked: time.sleep(0.01)
            if {how == "raise"}: raise KeyError("lost")
            os.kill(os.getpid(), signal.SIGKILL)
        while True: time.sleep(1)
    """
    body = textwrap.indent(textwrap.dedent(body), " " * 8).strip()
    process = start(POLITE.format(body=body), nproc=3, first=PATIENT_FOR.format(seconds=PATIENCE))
    pids = [int(line) for line in lines_of(process, 3) if line.strip()]  # one may be ended before it says its own
    if how.endswith("SIGTERM"):
        process.terminate()
    status, _, err = ended(process, timeout=90)
    assert status == 1
    if how == "raise":
        assert err.startswith("bmburst: rank 1 failed\n") and err.endswith("KeyError: 'lost'\n"), err
    else:
        assert err.startswith("bmburst: rank 1 was killed by SIGKILL") and len(err.splitlines()) == 1, err
    assert_gone(pids)


@pytest.mark.parametrize("end", [pytest.param("kill -9 of a rank", marks=pytest.mark.long), "SIGTERM to the launcher"])
def test_a_training_run(end, tmp_path):
    config = program.config(tmp_path, "run", steps=10**6, checkpoint_every=0, eval_every=0, profile="2")
    write_json(tmp_path / "config.json", {**to_dict(config), "output": None})
    process = Program(
        ["train", "--config", "config.json", "--nproc", "3", "--output", "run"],
        cwd=tmp_path,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        forked=True,
    )
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"

        def trains_or_ended():
            return process.poll() is not None or (metrics.exists() and metrics.read_text().count("\n") > 2)

        wait_until(trains_or_ended, seconds=300)
        assert process.poll() is None, process.communicate(timeout=60)
        if end.startswith("kill"):
            os.kill(rank_of(process.pid, 1), signal.SIGKILL)
        else:
            process.terminate()
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    if end.startswith("kill"):
        said = err[err.index("bmburst: rank") :].splitlines()
        assert process.returncode == 1 and "Traceback" not in err, err
        assert said[0].startswith("bmburst: rank 1 was killed by SIGKILL") and len(said) <= 2, err
    else:
        assert process.returncode == 75, err
        steps = len(metrics.read_text().splitlines())
        assert len(list((tmp_path / "run" / "profile").glob("steps-2-2.rank-*.json"))) == 3
        assert f"stopped after step {steps} by SIGTERM on rank 0" in err
        assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step-{steps:06d}"]
