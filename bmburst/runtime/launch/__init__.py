"""Starts the ranks of a program on this node with their environment, watches them, and reports an error once.

`spec` holds the options of a launch and reads a SLURM step. `launch` sets the environment of the ranks, waits for them,
ends them on a signal, and reports the result. `agent` starts and ends the ranks. `result` turns their ends into one
message and an exit status. `nodes` connects the launchers of several nodes. `bmburst.runtime.rank` runs in each rank,
and in a separate process that cleans up after a killed launcher.
"""

import contextlib
import importlib.util
import os
import secrets
import shlex
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType, MappingProxyType

from bmburst.errors import UserError
from bmburst.runtime.launch.agent import (
    GRACE,
    AgentThread,
    GracefulStop,
    Outcome,
    all_polite,
    rank_command,
    start_guard,
    torchrun_arguments,
)
from bmburst.runtime.launch.nodes import JOIN_TIMEOUT, SILENT, NodeWatch
from bmburst.runtime.launch.result import LaunchResult, launch_result, only_lost_a_peer
from bmburst.runtime.launch.spec import ALLOCATOR, EXPANDING, LaunchSpec, StoreAddress, require_command, require_devices
from bmburst.runtime.rank import FOLDER, HANG_TIMEOUT, HOST_RUNTIME, LAUNCHER, START_TIMEOUT, kill_groups, rank_pids
from bmburst.runtime.stores import LOOPBACK, LOOPBACK_ONLY, serve

__all__ = ["LaunchSpec", "launch"]

_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_KERNEL_CACHE = ("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")


def usable_cores(quota: Path = _QUOTA) -> int:
    """Return the number of cores that this process may use: those of its affinity, or a container's lower quota."""
    cores = len(os.sched_getaffinity(0))
    if not quota.is_file():
        return cores
    allowance, _, period = quota.read_text().strip().partition(" ")
    if not (allowance.isdigit() and period.isdigit()) or int(period) == 0:
        return cores
    return max(1, min(cores, int(allowance) // int(period)))


def defaults(environ: Mapping[str, str], nproc: int, cores: int, *, cuda: bool, nnodes: int = 1) -> dict[str, str]:
    """Return the default values of environment variables that the user has not set.

    * OMP_NUM_THREADS: cores per rank. Otherwise every rank would start a thread for every core.
    * NCCL_LAUNCH_ORDER_IMPLICIT=1 (NCCL 2.26 and later): ZeRO and the sequence ring use their communicators at the same
      time. With this variable NCCL keeps their kernels in the order of the host's calls, so that they cannot block each
      other.
    * PYTORCH_ALLOC_CONF=expandable_segments:True: activations of many sizes would otherwise leave fragments. llama-3-8b
      at 128K tokens on 2 H200s ran out of memory with 128 of 139 GiB allocated; with it the same step runs.
    * `stores.LOOPBACK_ONLY`, on one node.

    Raises:
        UserError: CUDA_DEVICE_MAX_CONNECTIONS is 1 and there are GPUs. It puts all streams of a GPU into one hardware
            queue: a parameter gather then waits behind a ring step that waits for a rank whose gather is still queued.
    """
    if cuda and environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip() == "1":
        raise UserError(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 puts every stream of a GPU in one queue: concurrent transfers can hang\n"
            "allowed: unset (8), or 2 to 32\n"
            "fix: unset CUDA_DEVICE_MAX_CONNECTIONS"
        )
    found = {"OMP_NUM_THREADS": str(max(1, cores // nproc))}
    if nnodes == 1:
        found |= LOOPBACK_ONLY
    if cuda:
        found |= {"NCCL_LAUNCH_ORDER_IMPLICIT": "1", ALLOCATOR[0]: EXPANDING}
    own = set(environ) | (set(ALLOCATOR) if any(name in environ for name in ALLOCATOR) else set())
    return {name: value for name, value in found.items() if name not in own}


def kernel_cache(folder: Path) -> dict[str, str]:
    """Return the variables with which FlashAttention-4 keeps compiled kernels for later runs of this user on this node.

    The package loads files there as code. So the cache is a folder that belongs to this user and that no other user can
    write or read. If that is not possible, kernels are not cached.

    Args:
        folder: A folder on a local disk: the package locks files, which network disks may not do.
    """
    own = folder / f"bmburst-{os.getuid()}"
    try:
        own.mkdir(mode=0o700, exist_ok=True)
        state = own.lstat()
    except OSError:
        return {}
    is_private = stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid() and not state.st_mode & 0o077
    return dict(zip(_KERNEL_CACHE, ("1", str(own / "flash-attn-4")), strict=True)) if is_private else {}


_IN_ORDER = (signal.SIGTERM, signal.SIGUSR1)  # what SLURM sends before it kills a job, by default or by --signal
_SIGNALS = (signal.SIGINT, signal.SIGHUP, *_IN_ORDER)
_AFTER_KILL = 5.0  # seconds for the agent to see that killed ranks are gone
_STORE_LOST = 3.0  # seconds to wait for this node's ranks when node 0 is gone: its part may have ended a moment earlier


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedLaunch:
    """A launch whose options, command and environment have been checked.

    Attributes:
        spec: How many ranks, where.
        command: What each rank runs.
        environment: Variables to add to the environment.
    """

    spec: LaunchSpec
    command: tuple[str, ...]
    environment: Mapping[str, str]

    def __str__(self) -> str:
        """Return the shell command that torchrun would need for the same ranks."""
        words = ["torchrun", *torchrun_arguments(self.spec), "--no-python", *rank_command(self.command)]
        return "\n".join([*(f"{name}={value}" for name, value in self.environment.items()), shlex.join(words)])


def check_launch(spec: LaunchSpec, command: Sequence[str]) -> CheckedLaunch:
    """Check a launch against this node.

    Args:
        spec: How many ranks, where.
        command: `[SCRIPT, ARGS...]` or `["-m", MODULE, ARGS...]`.

    Raises:
        UserError: There is no such script or module, there are fewer GPUs than ranks, or CUDA_DEVICE_MAX_CONNECTIONS
            is 1.
    """
    require_command(command)
    import torch

    cuda = torch.cuda.is_available()
    require_devices(spec.nproc, torch.cuda.device_count() if cuda else 0)
    cores = usable_cores()
    found = defaults(os.environ, spec.nproc, cores, cuda=cuda, nnodes=spec.nnodes)
    if cuda and not any(name in os.environ for name in _KERNEL_CACHE):
        found |= kernel_cache(Path(tempfile.gettempdir()))
    found[HANG_TIMEOUT] = f"{spec.hang_timeout:g}"
    found[START_TIMEOUT] = f"{spec.start_limit:g}"
    stand_in = spec.host_runtime and not cuda and importlib.util.find_spec("bmtrain") is not None
    found[HOST_RUNTIME] = str(int(stand_in))
    return CheckedLaunch(spec=spec, command=tuple(command), environment=MappingProxyType(found))


def launch(spec: LaunchSpec, command: Sequence[str]) -> int:
    """Run `command` on this node's ranks and return the exit status.

    Ranks share standard input, output and error. An error is written to standard error once. The status is 2 after a
    UserError in a rank, the program's own after sys.exit, 128 + N after signal N to this process, else 1. If the ranks
    handle SIGTERM or SIGUSR1 themselves (`bmburst.runtime.watchdog.polite`), the launcher waits for them. Then the
    status is 0.

    Args:
        spec: How many ranks, where, and how long one may go without progress.
        command: `[SCRIPT, ARGS...]` or `["-m", MODULE, ARGS...]`.

    Raises:
        UserError: See `check_launch`, or the port is taken. No rank has been started.
    """
    checked = check_launch(spec, command)
    address = None
    if spec.nnodes == 1:
        store = serve(*spec.endpoint, timedelta(seconds=JOIN_TIMEOUT))
        address = StoreAddress(host=LOOPBACK, port=store.port, run=secrets.token_hex(8))
    folder = Path(tempfile.mkdtemp(prefix="bmburst-launch-"))
    guard = start_guard(folder)
    try:
        result = _run(checked, folder, address)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        guard.communicate()
    if result.message:
        sys.stdout.flush()
        sys.stderr.write(f"{result.message}\n")
        sys.stderr.flush()
    return result.status


def _run(checked: CheckedLaunch, folder: Path, address: StoreAddress | None) -> LaunchResult:
    spec = checked.spec
    place: StoreAddress | NodeWatch = address or NodeWatch(spec, folder)
    nodes = place if isinstance(place, NodeWatch) else None
    own = {FOLDER: str(folder), LAUNCHER: str(os.getpid())}
    environment = {**os.environ, **checked.environment, **own}
    agent = AgentThread(spec, checked.command, environment, folder, place)
    with _caught_signals() as caught:
        if nodes is not None:
            nodes.start()
        agent.start()
        result = _wait(agent, nodes, caught, folder) or launch_result(
            spec, agent.outcome, folder, nodes.stopped_elsewhere if nodes is not None else {}
        )
    if nodes is not None:
        nodes.leave(result.status)
    if result.status:
        _end_leftovers(agent, folder)
    return result


def _wait(
    agent: AgentThread, nodes: NodeWatch | None, caught: list[signal.Signals], folder: Path
) -> LaunchResult | None:
    """Wait for the ranks; return a result only if the run was ended from outside."""

    def ended() -> str:
        return "" if nodes is None else nodes.ended

    while agent.is_alive() and not caught and not ended():
        agent.join(0.05)
    if not caught:
        if ended():
            agent.join(_STORE_LOST)
        if not agent.is_alive():
            is_ours = nodes is None or nodes.store_address is not None or nodes.error is not None
            if is_ours and nodes is not None and only_lost_a_peer(folder):
                _await_reason(nodes, caught)
                is_ours = not nodes.ended
            if not caught:
                return None if is_ours else _ended_elsewhere(ended())
    patient = bool(caught) and caught[0] in _IN_ORDER and all_polite(folder)
    stop = GracefulStop(folder, caught[0] if caught else signal.SIGTERM, patient)
    gone = others_gone = float("inf")
    if nodes is not None and not rank_pids(folder):
        gone = 0.0  # the agent waits for other nodes and has no ranks to end
    while agent.is_alive() and time.monotonic() < gone:
        if ended():
            others_gone = min(others_gone, time.monotonic())
        forced = len(caught) > 1 or stop.overdue or time.monotonic() > others_gone + GRACE
        stop.press(now=forced)
        if forced:
            gone = min(gone, time.monotonic() + _AFTER_KILL)
        agent.join(0.05)
    if patient and not agent.is_alive() and agent.outcome == Outcome():
        return LaunchResult(status=0)  # the ranks handled the signal and ended without an error
    if patient and len(caught) == 1 and agent.outcome != Outcome():
        return None  # a rank failed; `launch_result` reads the reason from the folder
    if caught:
        return LaunchResult(status=128 + caught[0], message=f"bmburst: ended by {caught[0].name}")
    return _ended_elsewhere(ended())


def _await_reason(nodes: NodeWatch, caught: list[signal.Signals]) -> None:
    """Wait until another node reports why it closed its connections, or is lost."""
    until = time.monotonic() + SILENT + GRACE
    while not (caught or nodes.ended) and time.monotonic() < until:
        time.sleep(0.05)


def _ended_elsewhere(reason: str) -> LaunchResult:
    return LaunchResult(status=1, message=f"bmburst: the run was ended: {reason}")


def _end_leftovers(agent: AgentThread, folder: Path) -> None:
    """End the processes that failed ranks left running, for example the data loaders of a killed rank."""
    if rank_pids(folder):
        kill_groups(folder)
        agent.join(_AFTER_KILL)


@contextlib.contextmanager
def _caught_signals() -> Iterator[list[signal.Signals]]:
    """Collect signals instead of ending by them. Outside the main thread Python allows no handlers: collect none."""
    caught: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def catch(signum: int, _frame: FrameType | None) -> None:
        caught.append(signal.Signals(signum))

    # An ignored signal stays ignored: nohup relies on that.
    before = {s: signal.signal(s, catch) for s in _SIGNALS if signal.getsignal(s) is not signal.SIG_IGN}
    try:
        yield caught
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
