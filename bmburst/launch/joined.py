"""Watches ranks that another launcher started: torchrun, or one that only sets torch's variables.

Each rank has the watchdog that ranks of `bmburst launch` have. The first rank of a host also starts a reporter, a
process that waits for the end of the host's ranks. If one hung or crashed, the reporter prints one message with the
place of each rank, which the ranks cannot do: a blocked collective holds the GIL.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from bmburst.launch import watchdog
from bmburst.launch.rank import die_with, is_stopped, kill_groups, rank_pids, sign_in, start_time
from bmburst.launch.result import report_of
from bmburst.launch.spec import LaunchSpec

_POLL = 0.1  # seconds
_STACKS = 1.0  # seconds from the first stack of a hang until those of the other ranks are there
_START = 60.0  # seconds that ranks of a host may start after each other


def watch(spec: LaunchSpec, folder: Path) -> None:
    """Arm the watchdog of this rank, and let the rank end with torchrun.

    Args:
        spec: The limits of time.
        folder: A folder of this run on this host, which does not exist before its ranks call this.
    """
    local_rank, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun is the parent, and one that is killed leaves its ranks running
        die_with(os.getppid())
    folder.mkdir(mode=0o700, exist_ok=True)
    sign_in(folder, local_rank)
    watchdog.arm(spec.hang_timeout, folder, local_rank, spec.start_limit)
    watchdog.beat_with_optimizers()
    try:
        (folder / "reporter").touch(exist_ok=False)
    except FileExistsError:
        return
    first, world = int(os.environ["RANK"]) - local_rank, os.environ["WORLD_SIZE"]
    words = [str(folder), str(here), str(spec.hang_timeout), str(spec.start_limit), str(first), world]
    subprocess.Popen(
        [sys.executable, "-m", "bmburst.launch.joined", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # torchrun ends the process groups of its ranks
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])},
    )


def report(folder: Path, spec: LaunchSpec, first: int, world: int) -> None:
    """Wait until the ranks of this host have ended, and print why if one hung or crashed. Removes the folder.

    Args:
        folder: The folder of `watch`.
        spec: The ranks of this host.
        first: Rank of local rank 0.
        world: Ranks of the run.
    """
    import shutil

    since, hung_since, message = time.monotonic(), float("inf"), ""
    stopped: list[int] = []
    while not message:
        pids = rank_pids(folder)
        living = {rank: pid for rank, pid in pids.items() if start_time(pid)}
        stopped = [rank for rank, pid in living.items() if is_stopped(pid)] or stopped
        if any(path.stat().st_size for path in folder.glob("hang.*")):
            hung_since = min(hung_since, time.monotonic())
        is_over = not living and (len(pids) == spec.nproc or time.monotonic() > since + _START)
        # torchrun may end the container with itself, so the message does not wait for the last rank.
        if is_over or time.monotonic() > hung_since + _STACKS:
            message = report_of(spec, folder, stopped, first, world)
            if is_over:
                break
        time.sleep(_POLL)
    if message:
        sys.stderr.write(f"{message}\n")
        sys.stderr.flush()
    while any(map(start_time, rank_pids(folder).values())):
        time.sleep(_POLL)
    kill_groups(folder)  # children that ranks left
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    where, ranks, hang_timeout, start_timeout, first_rank, world_size = sys.argv[1:]
    report(
        Path(where),
        LaunchSpec(nproc=int(ranks), hang_timeout=float(hang_timeout), start_timeout=float(start_timeout) or None),
        int(first_rank),
        int(world_size),
    )
