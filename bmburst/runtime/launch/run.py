"""Start ranks, wait for them, end them when asked to, and tell how it went."""

import contextlib
import importlib.util
import os
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType, MappingProxyType

from bmburst.runtime.launch import settings
from bmburst.runtime.launch.agent import AgentThread, Outcome, rank_command, torchrun_arguments
from bmburst.runtime.launch.guard import kill_groups, rank_pids
from bmburst.runtime.launch.nodes import JOIN_TIMEOUT, NodeWatch
from bmburst.runtime.launch.processes import GRACE, Stop, all_polite, start_guard
from bmburst.runtime.launch.spec import LaunchSpec, Meeting, require_command, require_devices
from bmburst.runtime.launch.verdict import Verdict, judge
from bmburst.runtime.stores import LOOPBACK, serve

_IN_ORDER = (signal.SIGTERM, signal.SIGUSR1)  # what SLURM sends before it kills, at its time or as --signal says
_SIGNALS = (signal.SIGINT, signal.SIGHUP, *_IN_ORDER)
_AFTER_KILL = 5.0  # seconds for the agent to see that killed ranks are gone
_STORE_LOST = 3.0  # seconds from node 0's end to ours: it may be over there only a moment earlier


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A checked launch: nothing that can be known to be wrong beforehand is.

    Attributes:
        spec: How many ranks, where.
        command: What each rank runs.
        environment: What is added to the environment, for what the user has not set.
    """

    spec: LaunchSpec
    command: tuple[str, ...]
    environment: Mapping[str, str]

    def __str__(self) -> str:
        """Return the shell command that torchrun would need for the same ranks."""
        words = ["torchrun", *torchrun_arguments(self.spec), "--no-python", *rank_command(self.command)]
        return "\n".join([*(f"{name}={value}" for name, value in self.environment.items()), shlex.join(words)])


def plan(spec: LaunchSpec, command: Sequence[str]) -> Plan:
    """Check a launch against this node.

    Args:
        spec: How many ranks, where.
        command: `[SCRIPT, ARGS...]` or `["-m", MODULE, ARGS...]`.

    Raises:
        UserError: There is no such script or module, there are fewer GPUs than ranks, or a variable forbids it.
    """
    require_command(command)
    import torch

    cuda = torch.cuda.is_available()
    require_devices(spec.nproc, torch.cuda.device_count() if cuda else 0)
    cores = settings.usable_cores()
    found = settings.open_defaults(os.environ, spec.nproc, cores, cuda=cuda, nnodes=spec.nnodes)
    found[settings.HANG_TIMEOUT] = f"{spec.hang_timeout:g}"
    found[settings.START_TIMEOUT] = f"{spec.start_limit:g}"
    stand_in = spec.host_runtime and not cuda and importlib.util.find_spec("bmtrain") is not None
    found[settings.HOST_RUNTIME] = str(int(stand_in))
    return Plan(spec=spec, command=tuple(command), environment=MappingProxyType(found))


def launch(spec: LaunchSpec, command: Sequence[str]) -> int:
    """Run `command` on this node's ranks and return the exit status.

    Ranks share standard input, output and error. What went wrong is written to standard error, once: 2 after a
    UserError in a rank, the program's own status after sys.exit, 128 + N after signal N to this process, else 1. Ranks
    that end in order after SIGTERM or SIGUSR1 (`bmburst.runtime.watchdog.polite`) are waited for; then it is 0.

    Args:
        spec: How many ranks, where, and how long one may stand still.
        command: `[SCRIPT, ARGS...]` or `["-m", MODULE, ARGS...]`.

    Raises:
        UserError: It cannot work, as `plan` finds before any rank starts, or the port is taken.
    """
    checked = plan(spec, command)
    meeting = None
    if spec.nnodes == 1:
        store = serve(*spec.endpoint, timedelta(seconds=JOIN_TIMEOUT))
        meeting = Meeting(host=LOOPBACK, port=store.port, run=secrets.token_hex(8))
    folder = Path(tempfile.mkdtemp(prefix="bmburst-launch-"))
    guard = start_guard(folder)
    try:
        verdict = _run(checked, folder, meeting)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        guard.communicate()
    if verdict.message:
        sys.stdout.flush()
        sys.stderr.write(f"{verdict.message}\n")
        sys.stderr.flush()
    return verdict.status


def _run(checked: Plan, folder: Path, meeting: Meeting | None) -> Verdict:
    spec = checked.spec
    place: Meeting | NodeWatch = meeting or NodeWatch(spec, folder)
    nodes = place if isinstance(place, NodeWatch) else None
    own = {settings.FOLDER: str(folder), settings.LAUNCHER: str(os.getpid())}
    environment = {**os.environ, **checked.environment, **own}
    agent = AgentThread(spec, checked.command, environment, folder, place)
    with _caught_signals() as caught:
        if nodes is not None:
            nodes.start()
        agent.start()
        verdict = _wait(agent, nodes, caught, folder) or judge(
            spec, agent.outcome, folder, nodes.stopped_elsewhere if nodes is not None else {}
        )
    if nodes is not None:
        nodes.leave(verdict.status)
    if verdict.status:
        _end_leftovers(agent, folder)
    return verdict


def _wait(agent: AgentThread, nodes: NodeWatch | None, caught: list[signal.Signals], folder: Path) -> Verdict | None:
    """Wait for the ranks; return a verdict only if the run was ended from outside."""
    while agent.is_alive() and not caught and not (nodes is not None and nodes.ended):
        agent.join(0.05)
    if not caught:
        if nodes is not None and nodes.ended:
            agent.join(_STORE_LOST)
        if not agent.is_alive():
            began = nodes is None or nodes.meeting is not None or nodes.error is not None
            return None if began else _ended_elsewhere(nodes)
    patient = bool(caught) and caught[0] in _IN_ORDER and all_polite(folder)
    stop = Stop(folder, caught[0] if caught else signal.SIGTERM, patient)
    gone = others_gone = float("inf")
    if nodes is not None and not rank_pids(folder):
        gone = 0.0  # the agent waits for other nodes, and there is nothing here to end
    while agent.is_alive() and time.monotonic() < gone:
        if nodes is not None and nodes.ended:
            others_gone = min(others_gone, time.monotonic())
        forced = len(caught) > 1 or stop.overdue or time.monotonic() > others_gone + GRACE
        stop.press(now=forced)
        if forced:
            gone = min(gone, time.monotonic() + _AFTER_KILL)
        agent.join(0.05)
    if patient and not agent.is_alive() and agent.outcome == Outcome():
        return Verdict(status=0)  # they have said that they stop
    if patient and len(caught) == 1 and agent.outcome != Outcome():
        return None  # a rank failed, and what there is to say is in the folder
    if caught:
        return Verdict(status=128 + caught[0], message=f"bmburst: ended by {caught[0].name}")
    return _ended_elsewhere(nodes)


def _ended_elsewhere(nodes: NodeWatch | None) -> Verdict:
    return Verdict(status=1, message=f"bmburst: the run was ended: {nodes.ended if nodes is not None else ''}")


def _end_leftovers(agent: AgentThread, folder: Path) -> None:
    """End what failed ranks started and left running, for example data loaders of a killed rank."""
    if rank_pids(folder):
        kill_groups(folder)
        agent.join(_AFTER_KILL)


@contextlib.contextmanager
def _caught_signals() -> Iterator[list[signal.Signals]]:
    """Collect signals instead of dying of them; outside the main thread, where Python allows none, collect nothing."""
    caught: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def catch(signum: int, _frame: FrameType | None) -> None:
        caught.append(signal.Signals(signum))

    # What is ignored stays ignored: nohup's way to survive the terminal.
    before = {s: signal.signal(s, catch) for s in _SIGNALS if signal.getsignal(s) is not signal.SIG_IGN}
    try:
        yield caught
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
