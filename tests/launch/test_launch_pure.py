"""What a launch decides before ranks start and after they have ended, without starting any."""

import json
import signal
import socket
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from bmburst.cli import main
from bmburst.errors import UserError
from bmburst.launch import devices, handover
from bmburst.launch import launcher as launch
from bmburst.launch.agent import Outcome, RankEnd
from bmburst.launch.launcher import LaunchSpec
from bmburst.launch.rank import STOPPED, rank_pids
from bmburst.launch.result import launch_result, report_of
from bmburst.launch.spec import require_command, require_devices
from bmburst.setup.kernel_caches import flash_attention_4
from tests.refusals import refused, says


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"nproc": 0}, "--nproc 0"),
        ({"hang_timeout": -0.5}, "--hang-timeout -0.5"),
        ({"hang_timeout": float("nan")}, "--hang-timeout nan"),
        ({"hang_timeout": float("inf")}, "--hang-timeout inf"),
    ],
)
def test_a_spec_outside_its_range_is_refused(options, word):
    with refused(word):
        LaunchSpec(**options)


def test_more_ranks_than_gpus_is_refused_and_any_number_without_gpus_is_not(monkeypatch):
    require_devices(9, 0)
    require_devices(4, 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    with refused("--nproc 3", "2 GPU", "CUDA_VISIBLE_DEVICES=2,5"):
        require_devices(3, 2)


@pytest.mark.parametrize("command", [[], ["-m"], ["-m", "no_such_module.part"], ["none.py"], ["--lr"], ["folder"]])
def test_a_command_that_cannot_run_is_refused(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError):
        require_command(command)


def test_commands_that_can_run_are_not_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").touch()
    (tmp_path / "no_suffix").touch()
    for command in (["folder"], ["no_suffix", "--x"], ["-m", "folder"], ["-m", "json.tool"]):
        require_command(command)


def test_a_module_that_only_an_editable_install_knows_is_found_from_any_folder(tmp_path, monkeypatch):
    class Finder:  # what such an install adds: the package is in no folder of sys.path
        @staticmethod
        def find_spec(name, _path=None, _target=None):
            return ModuleSpec(name, None) if name == "of_editable_install" else None

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    require_command(["-m", "of_editable_install"])


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--nproc", "2", "script.py", "--lr", "3"], "-- | script.py"),
        (["--nproc", "2"], "no script"),
        (["--nproc", "2", "--"], "no script"),
        (["--nproc", "0", "--", sys.executable], "--nproc 0"),
        (["--nproc", "x", "--", sys.executable], "--nproc"),
        (["--nprok", "2", "--", sys.executable], "'--nprok' | '--nproc'"),
        (["--", "none.py"], "none.py"),
    ],
)
def test_the_command_line_refuses_with_status_2(argv, word, capsys, monkeypatch):
    monkeypatch.delenv("BMBURST_LAUNCH_FOLDER", raising=False)
    assert main(["launch", *argv]) == 2
    says(capsys.readouterr().err, word)


def test_a_dry_run_shows_settings_and_command(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(launch, "usable_cores", lambda: 7)
    monkeypatch.setattr(devices, "gpus", lambda: ())
    script = tmp_path / "a b.py"
    script.touch()
    assert (
        main(["launch", "--nproc", "3", "--hang-timeout", "60", "--dry-run", "--", str(script), "--dry-run", "-x"]) == 0
    )
    out = capsys.readouterr().out
    assert "OMP_NUM_THREADS=2\n" in out and "BMBURST_HANG_TIMEOUT=60\n" in out
    assert "torchrun --standalone --nproc-per-node=3" in out
    assert out.rstrip().endswith(f"'{script}' --dry-run -x")


def test_settings_leave_the_users_alone():
    own = {"OMP_NUM_THREADS": "1", "NCCL_LAUNCH_ORDER_IMPLICIT": "0", "PYTORCH_CUDA_ALLOC_CONF": "backend:native"}
    own |= {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}
    loopback = {"NCCL_SOCKET_IFNAME": "=lo", "GLOO_SOCKET_IFNAME": "lo"}
    assert launch.defaults(own, 2, 8, cuda=True) == {}
    on_gpus = {"OMP_NUM_THREADS": "2", "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
    on_gpus |= {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert launch.defaults({}, 3, 8, cuda=True) == on_gpus | loopback
    assert launch.defaults({}, 9, 8, cuda=False) == {"OMP_NUM_THREADS": "1"} | loopback
    assert not [name for name in launch.defaults({}, 1, 1, cuda=True) if "NVLS" in name or "MULTICAST" in name]


def test_compiled_kernels_are_kept_where_no_one_else_can_put_any(tmp_path):
    found = flash_attention_4({}, tmp_path)
    place = Path(found["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"])
    assert found["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1" and place.parent.parent == tmp_path
    assert place.parent.stat().st_mode & 0o777 == 0o700
    assert flash_attention_4({}, tmp_path) == found
    assert flash_attention_4({"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0"}, tmp_path) == {}
    place.parent.chmod(0o777)
    assert flash_attention_4({}, tmp_path) == {}
    place.parent.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    place.parent.symlink_to(tmp_path / "elsewhere")
    assert flash_attention_4({}, tmp_path) == {}
    assert flash_attention_4({}, tmp_path / "none") == {}


def test_one_queue_for_all_streams_is_refused_on_gpus_only():
    one = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    with refused("CUDA_DEVICE_MAX_CONNECTIONS", "unset"):
        launch.defaults(one, 1, 1, cuda=True)
    launch.defaults(one, 1, 1, cuda=False)
    launch.defaults({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, 1, 1, cuda=True)


@pytest.mark.parametrize(("text", "cores"), [("max 100000", 64), ("250000 100000", 2), ("50000 100000", 1), ("", 64)])
def test_a_containers_quota_counts(text, cores, tmp_path):
    (tmp_path / "cpu.max").write_text(text)
    for quota, wanted in (("cpu.max", cores), ("none", 64)):
        assert launch.usable_cores(tmp_path / quota, 64) == wanted


def test_many_ranks_on_few_cores_are_announced_before_their_imports(tmp_path, monkeypatch, capfd):
    (tmp_path / "script.py").write_text("import sys; sys.stderr.write('here\\n')")
    for cores in (1, 2):
        monkeypatch.setattr(launch, "usable_cores", lambda cores=cores: cores)
        assert launch.launch(LaunchSpec(nproc=5, host_runtime=False), [str(tmp_path / "script.py")]) == 0
        first, *others = capfd.readouterr().err.splitlines()
        assert len(others) == (5 if cores == 1 else 4)
        if cores == 1:
            says(first, "bmburst: | 5 ranks on a core | imports")
    says(launch.start_note(64, 2), "64 ranks on 2 cores")


def test_only_processes_that_still_are_the_ranks_count(tmp_path):
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
    (tmp_path / "pid.0").write_text(f"{process.pid} {stat}")
    (tmp_path / "pid.1").write_text(f"{process.pid} {int(stat) - 1}")  # its number was another's before
    (tmp_path / "pid.12").write_text(f"{2**22 + 1} 5")  # ended; its children may live
    assert rank_pids(tmp_path) == {0: process.pid, 12: 2**22 + 1}
    process.communicate(b"\n")


SPEC = LaunchSpec(nproc=4, hang_timeout=20.0)
STOOD = 'Current thread 0x1 (most recent call first):\n  File "/a/wait.py", line 3 in wait\n'
CRASHED = 'Fatal Python error: Aborted\n\nThread 0x2 (most recent call first):\n  File "/a/b.py", line 9 in f\n'


def end(rank, status, *, told=False):
    return RankEnd(rank=rank, status=status, told=told)


def leave_error(folder, **content):
    content = {"rank": 1, "local_rank": 1, "kind": "error", "status": 1, "text": "Traceback: it"} | content
    (folder / "error").write_text(json.dumps(content))


def test_all_well(tmp_path):
    for rank in range(4):
        (tmp_path / f"hang.{rank}").touch()
        (tmp_path / f"stood.{rank}").touch()
    result = launch_result(SPEC, Outcome(), tmp_path)
    assert (result.status, result.message) == (0, "")


def test_ranks_that_torchrun_ended_beside_a_failed_one_are_not_mentioned(tmp_path):
    leave_error(tmp_path)
    (tmp_path / "stood.3").write_text(STOOD)  # ignored SIGTERM until SIGKILL
    outcome = Outcome(failed=[end(0, -signal.SIGTERM), end(1, 1), end(2, 1), end(3, -signal.SIGKILL, told=True)])
    result = launch_result(SPEC, outcome, tmp_path)
    assert (result.status, result.message) == (1, "bmburst: rank 1 failed\nTraceback: it")


def test_a_killed_rank_comes_before_the_error_it_caused(tmp_path):
    leave_error(tmp_path, kind="user", status=2, text="peer gone")
    (tmp_path / "stood.2").write_text(CRASHED)
    outcome = Outcome(failed=[end(0, -signal.SIGKILL), end(1, 2), end(2, -signal.SIGABRT)])
    result = launch_result(SPEC, outcome, tmp_path)
    assert result.status == 1
    killed, aborted, told = result.message.splitlines()
    says(killed, "bmburst: rank 0", "SIGKILL", "memory")
    says(aborted, "bmburst: rank 2", "SIGABRT", "/a/b.py:9 in f")
    assert told == "bmburst: peer gone"


def test_the_crash_of_a_failed_ranks_teardown_is_not_its_error(tmp_path):
    leave_error(tmp_path, kind="user", status=2, text="too long")
    result = launch_result(SPEC, Outcome(failed=[end(1, -signal.SIGABRT)]), tmp_path)
    assert (result.status, result.message) == (2, "bmburst: too long")


def test_a_hang_comes_before_what_it_caused(tmp_path):
    leave_error(tmp_path)
    other = 'Thread 0x9 (most recent call first):\n  File "/x/threading.py", line 1 in run\n\n'
    own = "".join(f'  File "{f}", line 1 in {f}\n' for f in ("/u/s.py", "<frozen runpy>", "/p/bmburst/launch/rank.py"))
    (tmp_path / "hang.2").write_text(f"Timeout (0:00:20)!\n{other}Thread 0x1 (most recent call first):\n{own}")
    (tmp_path / "stood.0").write_text(STOOD)
    result = launch_result(SPEC, Outcome(failed=[end(2, 1), end(0, -15)]), tmp_path)
    assert result.status == 1
    first, whose, stack, other_rank, fix = result.message.splitlines()
    says(first, "bmburst: rank 2", socket.gethostname(), "no progress", "20 s")
    says(whose, "rank 2 stood at")
    assert stack == '  File "/u/s.py", line 1 in /u/s.py'
    says(other_rank, "rank 0", "/a/wait.py:3 in wait")
    says(fix, "--hang-timeout", "0")


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (
            UserError("port 29500 is taken by process 7 (other)\ngive another"),
            "port 29500 is taken by process 7 (other)",
        ),
        (OSError("no room\nfor a process"), "OSError: no room for a process"),
    ],
)
def test_ranks_that_never_started(error, word, tmp_path):
    result = launch_result(SPEC, Outcome(error=error), tmp_path)
    assert result.status == (2 if isinstance(error, UserError) else 1)
    assert word in result.message


def test_ranks_that_saved_and_stopped_are_no_failure(tmp_path):
    assert launch_result(SPEC, Outcome(is_to_continue=True), tmp_path).status == STOPPED == 75


def test_a_report_of_some_ranks_of_a_run_names_them_as_the_run_does(tmp_path):
    waiting = 'Thread 0x1 (most recent call first):\n  File "/p/bmtrain/nccl/__init__.py", line 1 in allReduce\n'
    waiting += '  File "/u/train.py", line 7 in step\n'
    (tmp_path / "hang.1").write_text(f"Timeout (0:00:20)!\n{waiting}")
    told = report_of(SPEC, tmp_path, [], 8, 16)
    says(told, "rank 9 waited 20 s in allReduce", "another node", "/u/train.py", "log", lines=5)
    (tmp_path / "stood.3").write_text(STOOD)
    says(report_of(SPEC, tmp_path, [], 8, 16), "rank 11 on", "no progress", "rank 9 waited in allReduce", lines=5)
    says(report_of(SPEC, tmp_path, [2], 8, 16), "rank 10 on", "is stopped", lines=4)


def test_a_report_tells_a_crash_and_is_silent_about_ranks_that_ended(tmp_path):
    (tmp_path / "stood.0").write_text(STOOD)
    assert report_of(SPEC, tmp_path, [], 8, 16) == ""
    (tmp_path / "stood.2").write_text(CRASHED)
    says(report_of(SPEC, tmp_path, [], 8, 16), "bmburst: rank 10 on", "Aborted", "/a/b.py:9 in f", lines=1)


def test_ranks_ended_from_outside(tmp_path):
    (tmp_path / "stood.0").write_text(STOOD)
    result = launch_result(SPEC, Outcome(failed=[end(0, -15), end(1, -15)]), tmp_path)
    assert result.status == 1
    says(result.message, "bmburst: rank 0, 1", "SIGTERM", "outside", lines=1)


def test_nodes_that_run_another_version_are_named():
    handover.require_code("a", handover._code())
    with refused("has bmburst", "rank 0 on host a has bmburst 0.0.9 (code 00000000)", "fix: install the same versions"):
        handover.require_code("a", "bmburst 0.0.9 (code 00000000)")
