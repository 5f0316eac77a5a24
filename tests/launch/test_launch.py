"""Real ranks of tiny scripts: what the user sees, which exit status comes back, and that nothing is left running."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from tests.launch.launcher import PATIENT_FOR, ROOT, alive, assert_gone, ended, lines_of, start, wait_until

__all__ = ["start"]  # the fixture


@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.long)])
def test_ranks_get_the_environment_and_arguments_of_a_script(start, tmp_path, fresh):
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    text = """
        import os, sys, beside
        from __main__ import __name__ as name
        e = os.environ
        assert name == "__main__" and beside.VALUE == 7 and sys.path[0] == os.path.dirname(__file__), sys.path
        print(e["RANK"], e["LOCAL_RANK"], e["WORLD_SIZE"], e["LOCAL_WORLD_SIZE"], e["MASTER_PORT"].isdigit(),
              sys.argv[1:], e["OMP_NUM_THREADS"])
        """
    status, out, err = ended(start(text, nproc=3, args=("--nproc", "9", "--", "x y"), fresh=fresh))
    argv = ["--nproc", "9", "--", "x y"]
    assert (status, err) == (0, "")
    assert sorted(out.splitlines()) == [f"{r} {r} 3 3 True {argv} 1" for r in range(3)]
    assert not list((tmp_path / "scratch").iterdir()), "the run's folder stays behind"


def test_a_module_runs_as_python_m_would(start, tmp_path):
    package = tmp_path / "pack" / "age"
    package.mkdir(parents=True)
    (package / "tool.py").write_text("import sys; print(__name__, __package__, sys.argv[1:])\n")
    status, out, err = ended(start("", nproc=1, target=("-m", "pack.age.tool"), args=("-v",)))
    assert (status, out, err) == (0, "__main__ pack.age ['-v']\n", "")


def test_an_error_is_shown_once_and_ends_the_other_ranks(start):
    text = """
        import os, time
        print(os.getpid())
        open("here" + os.environ["RANK"], "w").close()
        def inner(): raise KeyError("lost")
        while not all(os.path.exists(f"here{rank}") for rank in range(3)): time.sleep(0.01)
        if os.environ["RANK"] == "1": inner()
        time.sleep(600)
        """
    process = start(text, nproc=3)
    pids = [int(line) for line in lines_of(process, 3)]
    status, _, err = ended(process)
    assert status == 1
    assert err.startswith("bmburst: rank 1 failed\nTraceback (most recent call last):\n"), err
    assert err.count("Traceback") == 1 and err.endswith("KeyError: 'lost'\n")
    assert err.count("  File ") == 2, "frames that are not the script's"
    assert_gone(pids)


def test_a_user_error_in_every_rank_is_one_message(start):
    text = """
        from bmburst.errors import UserError
        class Wrong(UserError): pass
        raise Wrong("heads 7 do not divide\\nallowed: 8")
        """
    assert ended(start(text)) == (2, "", "bmburst: heads 7 do not divide\nallowed: 8\n")


@pytest.mark.parametrize(
    ("leave", "status", "message"),
    [
        ("sys.exit(41)", 41, ""),
        ("sys.exit('no data')", 1, "no data\n"),
        ("os._exit(3)", 3, "bmburst: rank 0, 1 ended with status 3\n"),
        ("sys.exit(0)", 0, ""),
    ],
)
def test_a_scripts_own_exit_status_is_kept(start, leave, status, message):
    text = f"""
        import os, sys, time
        open(f"here{{os.environ['RANK']}}", "w").close()
        while not (os.path.exists("here0") and os.path.exists("here1")): time.sleep(0.01)
        {leave}
        """
    found, _, err = ended(start(text))
    assert found == status
    assert err == message or (leave.startswith("os._exit") and err.startswith("bmburst: rank ")), err


def test_a_syntax_error_is_shown_once_without_our_frames(start):
    status, _, err = ended(start("x = (1,\n"))
    assert status == 1
    assert err.count("SyntaxError") == 1 and err.count("  File ") == 1, err


@pytest.mark.parametrize(("signum", "name"), [(9, "SIGKILL"), (11, "SIGSEGV")])
def test_a_killed_rank_is_named(start, signum, name):
    text = f"""
        import os, time
        def fall(): os.kill(os.getpid(), {signum})
        if os.environ["RANK"] == "1": fall()
        time.sleep(600)
        """
    status, _, err = ended(start(text))
    assert status == 1
    assert err.startswith(f"bmburst: rank 1 was killed by {name}"), err
    assert len(err.splitlines()) == 1
    assert ("script.py:3 in fall" in err) == (name == "SIGSEGV")


def test_ctrl_c_ends_all_ranks_quietly_and_lets_them_clean_up(start, tmp_path):
    text = """
        import os, time
        try:
            print(os.getpid())
            time.sleep(600)
        finally:
            open(f"cleaned{os.environ['RANK']}", "w").close()
        """
    process = start(text)
    pids = [int(line) for line in lines_of(process, 2)]
    process.send_signal(signal.SIGINT)
    status, _, err = ended(process)
    assert (status, err) == (130, "bmburst: ended by SIGINT\n")
    assert all((tmp_path / f"cleaned{rank}").exists() for rank in range(2))
    assert_gone(pids)


def test_a_second_ctrl_c_kills_ranks_that_do_not_listen(start, tmp_path):
    # What a rank that is blocked in a collective does with SIGINT: nothing, for Python never gets to its handler.
    text = """
        import os, signal, time
        for s in (signal.SIGINT, signal.SIGTERM): signal.signal(s, signal.SIG_IGN)
        print(os.getpid())
        time.sleep(600)
        """
    process = start(text, first=PATIENT_FOR.format(seconds=600))
    pids = [int(line) for line in lines_of(process, 2)]
    process.send_signal(signal.SIGINT)
    wait_until(lambda: list((tmp_path / "scratch").glob("*/stop")))  # the launcher has taken it
    assert all(map(alive, pids)) and process.poll() is None
    process.send_signal(signal.SIGINT)
    assert ended(process)[0] == 130
    assert_gone(pids)


def test_sigterm_to_the_launcher_ends_the_ranks(start):
    process = start("import os, time; print(os.getpid()); time.sleep(600)")
    pids = [int(line) for line in lines_of(process, 2)]
    process.terminate()
    status, _, err = ended(process)
    assert (status, err) == (143, "bmburst: ended by SIGTERM\n")
    assert_gone(pids)


def test_ranks_and_their_children_end_when_their_launcher_is_killed(start, tmp_path):
    text = """
        import os, signal, subprocess, sys, time
        for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(s, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        print(os.getpid(), child.pid)
        time.sleep(600)
        """
    process = start(text)
    pids = [int(pid) for line in lines_of(process, 2) for pid in line.split()]
    assert len(pids) == 4 and all(map(alive, pids))
    process.kill()
    assert_gone(pids)
    wait_until(lambda: not list((tmp_path / "scratch").iterdir()))  # the run's folder does not stay behind


def test_a_rank_whose_launcher_died_before_it_started_ends(tmp_path):
    environ = os.environ | {"BMBURST_LAUNCH_FOLDER": str(tmp_path), "LOCAL_RANK": "0", "RANK": "0"}
    environ["BMBURST_LAUNCHER_PID"] = str(2**22 + 1)  # no process has this id
    script = tmp_path / "script.py"
    script.write_text("print('ran')\n")
    command = [sys.executable, str(ROOT / "bmburst/launch/rank.py"), str(script)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1 and done.stdout == ""


def test_a_hang_is_ended_and_located(start):
    # Rank 1 makes progress until rank 0 has hung: the rank named is the one that stood still.
    text = """
        import os, time
        from bmburst.launch.watchdog import beat
        def stuck(): time.sleep(600)
        def step():
            while True: beat(); time.sleep(0.05)
        beat()
        stuck() if os.environ["RANK"] == "0" else step()
        """
    status, _, err = ended(start(text, "--hang-timeout", "1"))
    lines = err.splitlines()
    assert status == 1
    assert lines[0] == f"bmburst: rank 0 on {socket.gethostname()} made no progress for 1 s, so the run was ended"
    assert 'script.py", line 4 in stuck' in lines[2], err
    assert any(line.startswith("rank 1 stood at ") and line.endswith(" in step") for line in lines), err
    assert "--hang-timeout" in lines[-1]
