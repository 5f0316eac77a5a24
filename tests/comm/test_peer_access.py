"""Whether peers' memory can be had, and what becomes of a rank whose peers die: without a GPU."""

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from bmburst.comm import waits
from bmburst.comm.checks import CheckedCommunicator
from bmburst.comm.shared_memory import SharedMemoryError
from bmburst.comm.transports import PeerGroups, over_transport
from tests.distributed.started import Python
from tests.distributed.threads import MessageQueue, ThreadCommunicator
from tests.refusals import refused, says

CPU = torch.device("cpu")


def group(rank, transport="nccl", size=2):
    inner = ThreadCommunicator(rank, [[MessageQueue() for _ in range(size)] for _ in range(size)])
    inner.transport = transport
    return CheckedCommunicator(inner, CPU, always=False)


@pytest.mark.parametrize("rank", [0, 1])
def test_without_access_to_a_peer(rank):
    def refuse(inner, device):
        made.append(inner)
        raise SharedMemoryError("rank 1 cannot read the memory of rank 0")

    made, comm, groups = [], group(rank), PeerGroups(refuse)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert over_transport(comm, "nccl", groups) is comm and not made
        assert over_transport(comm, "auto", groups) is comm
        assert over_transport(comm, "auto", groups) is comm
    assert made == [comm.inner]  # asked once: asking is collective
    assert len(caught) == (rank == 0)
    for each in caught:
        says(each.message, "bmburst: ", "NCCL", "rank 1 cannot read the memory of rank 0")
    with refused("transport", "'peer'", "rank 1 cannot read", "transport='auto'", "'nccl'"):
        over_transport(comm, "peer", groups)


def test_with_access_to_all_peers():
    groups = PeerGroups(lambda *_: group(0, "peer").inner)
    comm, other = group(0), group(0)
    moved = over_transport(comm, "auto", groups)
    assert moved.transport == "peer" and over_transport(comm, "peer", groups) is moved
    assert over_transport(other, "peer", groups) is not moved
    assert over_transport(moved, "auto", groups) is moved
    comm.active = True
    assert moved.active and not other.active
    for alone in (group(0, size=1), group(0, "gloo"), group(0, "threads")):
        assert over_transport(alone, "auto", groups) is alone


RENAMED = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'a) Z (1 2'); print(1, flush=True); time.sleep(60)"


def test_birth_of_real_processes():
    ours = waits.start_ticks(os.getpid())
    assert ours is not None and ours == waits.start_ticks(os.getpid())
    time.sleep(0.05)  # some clock ticks
    other = subprocess.Popen([sys.executable, "-c", RENAMED], stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline()  # its name is "a) Z (1 2" now
        born = waits.start_ticks(other.pid)
        assert born is not None and int(born) > int(ours)
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        assert 0 <= uptime - int(born) / os.sysconf("SC_CLK_TCK") < 60
        other.send_signal(signal.SIGKILL)
        end = time.monotonic() + 30
        while waits.start_ticks(other.pid) is not None:  # a zombie until somebody waits for it
            assert time.monotonic() < end
            time.sleep(0.01)
        assert Path(f"/proc/{other.pid}").exists()
    finally:
        other.kill()
        other.wait()
        other.stdout.close()
    assert waits.start_ticks(other.pid) is None


WATCHING = """
import sys, time, torch
from pathlib import Path
from types import SimpleNamespace
from bmburst.comm import waits
pid, is_done, killed = int(sys.argv[1]), sys.argv[2] == "done", Path(sys.argv[3])
waits._LOOK_EVERY, waits._PATIENCE = 0.02, 0.1
elsewhere = ["pid:[1]", 2**22 + 1, "1"]  # in a namespace of its own: not watched
waits.gather_objects = lambda inner, mine: [[mine[0], pid, waits.start_ticks(pid)], mine, elsewhere]
torch.cuda.set_device = lambda device: None
waits.look_during_captures = lambda: None
watch = waits.PeerWatch(SimpleNamespace(rank=1), None)
watch.expect(SimpleNamespace(query=lambda: is_done))
print(1, flush=True)
while not killed.exists(): time.sleep(0.02)
time.sleep(1.0 if is_done else 60)
watch.close()
assert not watch._thread.is_alive()
"""


@pytest.mark.parametrize("state", ["done", "waiting"])
def test_a_rank_that_waits_for_the_dead_ends(tmp_path, state):
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    killed = tmp_path / "killed"
    watching = Python(["-c", WATCHING, str(other.pid), state, str(killed)], cwd=tmp_path, env=os.environ)
    try:
        assert watching.stdout.readline()
        time.sleep(0.5)
        assert watching.poll() is None  # its peer lives
        other.kill()
        killed.touch()
        _, told = watching.communicate(timeout=60)
    finally:
        other.kill()
        other.wait()
        watching.close()
    assert watching.returncode == (0 if state == "done" else 1), told
    line = f"bmburst: rank 0 (process {other.pid}) of this host has ended"
    assert (line in told) == (state == "waiting")
