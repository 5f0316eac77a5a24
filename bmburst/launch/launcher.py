"""Starts the ranks of a program on this machine with their environment, watches them, and reports an error once.

`spec` holds the options of a launch. `launch` sets the environment of the ranks, waits for them, ends them on a signal,
and reports the result. `agent` starts and ends the ranks. `result` turns their ends into one message and an exit
status. `bmburst.launch.rank` runs in each rank, and in a separate process that cleans up after a killed launcher.
`joined` watches ranks that another launcher started, as torchrun does on several nodes.
"""

import contextlib
import importlib.util
import os
import secrets
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType

from bmburst.errors import UserError
from bmburst.host.stores import LOOPBACK, LOOPBACK_ONLY, listen, serve_at
from bmburst.launch import devices
from bmburst.launch.agent import AgentThread, GracefulStop, all_handle_signals, rank_command, start_guard
from bmburst.launch.rank import (
    FOLDER,
    HANG_TIMEOUT,
    HOST_RUNTIME,
    LAUNCHER,
    REQUEST,
    START_TIMEOUT,
    kill_groups,
    rank_pids,
)
from bmburst.launch.result import LaunchResult, launch_result
from bmburst.launch.spec import ALLOCATOR, EXPANDING, LaunchSpec, require_command, require_devices
from bmburst.setup.kernel_caches import flash_attention_4

__all__ = ["LaunchSpec", "launch"]

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(quota: Path = _QUOTA, cores: int | None = None) -> int:
    """Return the number of cores that this process may use: those of its affinity, or a container's lower quota.

    Args:
        quota: File with the quota of a container.
        cores: Number of cores of the affinity; default: this process's.
    """
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    if not quota.is_file():
        return cores
    allowance, _, period = quota.read_text().strip().partition(" ")
    if not (allowance.isdigit() and period.isdigit()) or int(period) == 0:
        return cores
    return max(1, min(cores, int(allowance) // int(period)))


def defaults(environ: Mapping[str, str], nproc: int, cores: int, *, cuda: bool) -> dict[str, str]:
    """Return the default values of environment variables that the user has not set.

    * OMP_NUM_THREADS: cores per rank. Otherwise every rank would start a thread for every core.
    * NCCL_LAUNCH_ORDER_IMPLICIT=1 (NCCL 2.26 and later): ZeRO and the sequence ring use their communicators at the same
      time. With this variable NCCL keeps their kernels in the order of the host's calls, so that they cannot block each
      other.
    * PYTORCH_ALLOC_CONF=expandable_segments:True: activations of many sizes would otherwise leave fragments. llama-3-8b
      at 128K tokens on 2 H200s ran out of memory with 128 of 139 GiB allocated; with it the same step runs.
    * `stores.LOOPBACK_ONLY`.

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
    found = {"OMP_NUM_THREADS": str(max(1, cores // nproc)), **LOOPBACK_ONLY}
    if cuda:
        found |= {"NCCL_LAUNCH_ORDER_IMPLICIT": "1", ALLOCATOR[0]: EXPANDING}
    own = set(environ) | (set(ALLOCATOR) if any(name in environ for name in ALLOCATOR) else set())
    return {name: value for name, value in found.items() if name not in own}


def start_note(nproc: int, cores: int) -> str:
    """Return a line about ranks whose imports take long because they share cores; empty if they share few.

    Measured: 2 seconds of a core a rank, so 64 ranks on 2 cores print nothing for more than a minute.
    """
    if nproc <= _FEW * cores:
        return ""
    shared = "a core" if cores == 1 else f"{cores} cores"
    return f"bmburst: starting {nproc} ranks on {shared}; the imports of each take a core about 2 s"


_FEW = 4  # ranks a core that are ready within 10 seconds
_IN_ORDER = (signal.SIGTERM, signal.SIGUSR1)  # what SLURM sends before it kills a job, by default or by --signal
_SIGNALS = (signal.SIGINT, signal.SIGHUP, *_IN_ORDER)
_TWIN = 0.1  # seconds for a signal that comes twice: `timeout` sends SIGTERM to its child, and once more to its group
_AFTER_KILL = 5.0  # seconds for the agent to see that killed ranks are gone
_STORE_TIMEOUT = timedelta(seconds=900)


def check_launch(spec: LaunchSpec, command: Sequence[str]) -> dict[str, str]:
    """Check a launch against this node, and return the variables to add to the environment of its ranks.

    Args:
        spec: How many ranks, where.
        command: `[SCRIPT, ARGS...]` or `["-m", MODULE, ARGS...]`.

    Raises:
        UserError: There is no such script or module, there are fewer GPUs than ranks, or CUDA_DEVICE_MAX_CONNECTIONS
            is 1.
    """
    require_command(command)
    here = len(devices.gpus())
    cuda = here > 0
    require_devices(spec.nproc, here)
    cores = usable_cores()
    found = defaults(os.environ, spec.nproc, cores, cuda=cuda)
    if cuda:
        found |= flash_attention_4(os.environ)
    found[HANG_TIMEOUT] = f"{spec.hang_timeout:g}"
    found[START_TIMEOUT] = f"{spec.start_limit:g}"
    stand_in = spec.host_runtime and not cuda and importlib.util.find_spec("bmtrain") is not None
    found[HOST_RUNTIME] = str(int(stand_in))
    return found


def described(spec: LaunchSpec, command: Sequence[str]) -> str:
    """Return a launch's variables, and torchrun's shell command for the same ranks; errors as `check_launch`."""
    words = ["torchrun", "--standalone", f"--nproc-per-node={spec.nproc}", "--no-python", *rank_command(command)]
    return "\n".join([*(f"{name}={value}" for name, value in check_launch(spec, command).items()), shlex.join(words)])


def launch(spec: LaunchSpec, command: Sequence[str], request: str = "") -> int:
    """Run `command` on this machine's ranks and return the exit status.

    Ranks share standard input, output and error. An error is written to standard error once. The status is 2 after a
    UserError in a rank, the program's own after sys.exit, 128 + N after signal N to this process, else 1. If the ranks
    handle SIGTERM or SIGUSR1 themselves (`bmburst.launch.watchdog.handle_signals`), the launcher waits for them. Then
    the status is theirs: `STOPPED` if the run has saved its state and is to continue, else 0.

    Args:
        spec: How many ranks, where, and how long one may go without progress.
        command: `[SCRIPT, ARGS...]` or `["-m", MODULE, ARGS...]`.
        request: JSON for `bmburst.launch.handover`; it is in a file, as Linux limits the environment.

    Raises:
        UserError: See `check_launch`. No rank has been started.
    """
    environment = check_launch(spec, command)
    if note := start_note(spec.nproc, usable_cores()):
        sys.stderr.write(f"{note}\n")
        sys.stderr.flush()
    listener = listen(LOOPBACK, 0)
    folder = Path(tempfile.mkdtemp(prefix="bmburst-launch-"))
    (folder / REQUEST).write_text(request, encoding="utf-8")
    guard = start_guard(folder)
    try:
        result = _run(spec, command, environment, folder, listener)
    finally:
        listener.close()
        shutil.rmtree(folder, ignore_errors=True)
        guard.communicate()
    if result.message:
        sys.stdout.flush()
        sys.stderr.write(f"{result.message}\n")
        sys.stderr.flush()
    return result.status


def _run(
    spec: LaunchSpec, command: Sequence[str], checked: Mapping[str, str], folder: Path, listener: socket.socket
) -> LaunchResult:
    store_at = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(listener.getsockname()[1])}
    own = {FOLDER: str(folder), LAUNCHER: str(os.getpid()), "TORCHELASTIC_RUN_ID": secrets.token_hex(8)}
    agent = AgentThread(spec, command, {**os.environ, **checked, **store_at, **own}, folder)
    with _caught_signals() as caught:
        # Importing torch takes seconds: the ranks do it at the same time. Where it is imported, the store comes first.
        store = serve_at(listener, _STORE_TIMEOUT) if "torch" in sys.modules else None
        agent.start()
        store = store or serve_at(listener, _STORE_TIMEOUT)
        result = _wait(agent, caught, folder) or launch_result(spec, agent.outcome, folder)
    del store  # held until here, for the ranks
    if result.status:
        _end_leftovers(agent, folder)
    return result


def _wait(agent: AgentThread, caught: list[signal.Signals], folder: Path) -> LaunchResult | None:
    """Wait for the ranks; return a result only if a signal ended the run."""
    while agent.is_alive() and not caught:
        agent.join(0.05)
    if not caught:
        return None
    agent.join(_TWIN)
    known = len(caught)
    patient = caught[0] in _IN_ORDER and all_handle_signals(folder)
    stop = GracefulStop(folder, caught[0], patient)
    gone = float("inf")
    while agent.is_alive() and time.monotonic() < gone:
        forced = len(caught) > known or stop.overdue
        stop.press(now=forced)
        if forced:
            gone = min(gone, time.monotonic() + _AFTER_KILL)
        agent.join(0.05)
    if patient and len(caught) == known:
        return None  # the ranks handled the signal, or one failed; `launch_result` reads the reason from the folder
    return LaunchResult(status=128 + caught[0], message=f"bmburst: ended by {caught[0].name}")


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
