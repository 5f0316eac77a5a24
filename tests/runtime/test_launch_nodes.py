"""Launchers of several nodes, here of one host: they end together, quietly, and a lost one is missed."""

import signal
import socket
from contextlib import contextmanager
from threading import Thread, Timer
from types import SimpleNamespace

import pytest

from bmburst.runtime.launch.nodes import LEFT, SILENT, Heartbeats, NodeWatch
from bmburst.runtime.launch.spec import LaunchSpec
from tests.distributed.ports import held_port
from tests.refusals import says
from tests.runtime.launcher import assert_gone, ended, lines_of, start

__all__ = ["start"]  # the fixture

HELLO = """
    import os
    e = os.environ
    print(e["RANK"], e["LOCAL_RANK"], e["WORLD_SIZE"], e["MASTER_ADDR"], flush=True)
    """
# All have said hello before the named rank does what ends the run.
FAILING = (
    HELLO
    + """
    import sys, time
    from pathlib import Path
    rank, fails = e["RANK"], sys.argv[1]
    Path("hello" + rank).touch()
    while rank == fails and len(list(Path().glob("hello*"))) < 4: time.sleep(0.01)
    if rank == fails: raise RuntimeError("gone")
    time.sleep(600)
    """
)
# A machine so busy that this node says that it leaves long after the others have.
SLOW_TO_LEAVE = """
import time
from bmburst.runtime.launch.nodes import NodeWatch
depart = NodeWatch._depart
def slow(*args):
    time.sleep(1.5)
    depart(*args)
NodeWatch._depart = slow
"""
SHORT_SILENCE = """
from bmburst.runtime.launch import nodes
nodes.SILENT = 5.0  # long enough for a machine that is busy with other tests
"""
SOON_LATE = """
from bmburst.runtime.launch import nodes
nodes._LATE = 0.5
"""
SLEEP = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


@contextmanager
def node_options():
    """Yield the options of each of two nodes that meet at a port of this host."""
    with held_port() as port:
        address = ("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}")
        yield [(f"--node-rank={node}", *address) for node in range(2)]


def assert_all_said_hello(results):
    seen = sorted(line for _, out, _ in results for line in out.splitlines())
    assert seen == [f"{rank} {rank % 2} 4 127.0.0.1" for rank in range(4)]


@pytest.mark.parametrize("slow", [0, 1])
def test_two_nodes_run_and_say_nothing(start, slow):
    with node_options() as nodes:
        both = [start(HELLO, *options, first=SLOW_TO_LEAVE * (n == slow)) for n, options in enumerate(nodes)]
        results = [ended(process) for process in both]
    assert [(status, err) for status, _, err in results] == [(0, ""), (0, "")]
    assert_all_said_hello(results)


@pytest.mark.parametrize("rank", [0, 2])
def test_two_nodes_fail_together(start, rank):
    fails, other = rank // 2, 1 - rank // 2
    with node_options() as nodes:
        both = [start(FAILING, *options, args=(str(rank),)) for options in nodes]
        results = [ended(process) for process in both]
    assert_all_said_hello(results)
    assert [status for status, _, _ in results] == [1, 1]
    assert results[other][2] == f"bmburst: the run was ended: node {fails} ended with status 1\n"
    assert results[fails][2].startswith(f"bmburst: rank {rank} failed\n")
    assert results[fails][2].endswith("RuntimeError: gone\n")


@pytest.mark.parametrize(
    ("lost", "signum", "reason"),
    [
        (0, signal.SIGKILL, "launcher of node 0 | gone"),
        # as when its host has no power
        pytest.param(0, signal.SIGSTOP, "node 0 | lost | 5 s", marks=pytest.mark.long),
        (1, signal.SIGKILL, "node 1 | lost | 5 s"),
    ],
)
def test_a_lost_node_ends_the_others(start, lost, signum, reason):
    with node_options() as nodes:
        both = [start(SLEEP, *options, nproc=1, first=SHORT_SILENCE) for options in nodes]
        pids = [int(line) for process in both for line in lines_of(process, 1)]
        both[lost].send_signal(signum)
        _, err = both[1 - lost].communicate(timeout=60)
    assert both[1 - lost].returncode == 1
    says(err, "bmburst: ", "ended", reason, lines=1)
    both[lost].kill()
    assert_gone(pids)


LOST_PEER = SLEEP.replace(
    "time.sleep(600)",
    """
class HostRuntimeError(RuntimeError): pass
if os.environ["RANK"] == "0":
    time.sleep(1)
    raise HostRuntimeError("rank 0 of 2: all_gather: Connection closed by peer [10.77.1.1]:38576")
time.sleep(600)
""",
)


def test_a_closed_connection_to_a_lost_node_is_not_shown_as_a_failure(start):
    with node_options() as nodes:
        both = [start(LOST_PEER, *options, nproc=1, first=SHORT_SILENCE) for options in nodes]
        pids = [int(line) for process in both for line in lines_of(process, 1)]
        both[1].kill()
        _, err = both[0].communicate(timeout=60)
    assert both[0].returncode == 1
    assert err.splitlines() == ["bmburst: the run was ended: node 1 is lost, nothing was heard of its launcher for 5 s"]
    assert_gone(pids)


@pytest.mark.parametrize(
    ("node", "host", "awaited"),
    [
        (0, "127.0.0.1", "node 1 of 2 to start"),
        (1, "127.0.0.1", "node 0 at 127.0.0.1:{port}"),
        (0, "no.such.host.invalid", "no.such.host.invalid to be known here as a host ("),
        (1, "no.such.host.invalid", "no.such.host.invalid to be known here as a host ("),
    ],
)
def test_a_node_that_waits_says_for_whom(start, node, host, awaited):
    with held_port() as port:
        options = ("--nnodes=2", f"--node-rank={node}", f"--master-addr={host}", f"--master-port={port}")
        process = start(SLEEP, *options, first=SOON_LATE)
        (end := Timer(30, process.kill)).start()  # a silent one leaves an empty line
        said = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=60)[1]
        end.cancel()
    assert said.startswith(f"bmburst: node {node} waits for {awaited.format(port=port)}")
    assert err.splitlines()[-1] == "bmburst: ended by SIGINT"


def test_a_quiet_connection_that_something_between_has_ended_is_made_again(tmp_path):
    store = SimpleNamespace(add=lambda *_: 1, check=lambda _: False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        spec = LaunchSpec(nnodes=2, node_rank=1, master_addr="127.0.0.1", master_port=server.getsockname()[1])
        watch = NodeWatch(spec, tmp_path)
        watch._line = lambda: socket.create_connection(spec.endpoint)
        listening = Thread(target=watch._listen, args=(store,), daemon=True)
        listening.start()
        server.accept()[0].close()
        again, _ = server.accept()
        watch._over.set()
        listening.join(60)
        again.close()
    assert not listening.is_alive() and not watch.ended


def test_heartbeats_tell_who_is_missing_there_or_lost():
    heartbeats = Heartbeats(range(1, 4))
    assert (heartbeats.missing, heartbeats.staying, heartbeats.lost(1e9)) == ([1, 2, 3], [], [])
    for node, count in ((1, 5), (2, 1), (3, 0)):
        heartbeats.hear(node, count, now=100.0)
    assert (heartbeats.missing, heartbeats.staying) == ([3], [1, 2])
    heartbeats.hear(1, 6, now=100.0 + SILENT)
    heartbeats.hear(2, 1, now=100.0 + SILENT)  # the same heartbeat again
    assert heartbeats.lost(100.0 + SILENT) == []
    assert heartbeats.lost(100.1 + SILENT) == [2]
    heartbeats.hear(2, LEFT, now=100.1 + SILENT)
    assert (heartbeats.staying, heartbeats.lost(1e9)) == ([1], [1])


def test_one_that_listens_again_after_minutes_finds_the_others_alive():
    heartbeats = Heartbeats([1])
    heartbeats.hear(1, 1, now=0.0)
    heartbeats.hear(1, 900, now=10 * SILENT)
    assert heartbeats.lost(10 * SILENT) == []
