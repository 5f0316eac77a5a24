"""Turns the ends of the ranks of this host into one message and one exit status: the cause, without its consequences.

`launch_result` is for a launcher, which knows how its ranks ended. `report_of` has only the files that ranks left: it
is for ranks that torchrun started, perhaps on several hosts.
"""

import json
import re
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bmburst.errors import UserError
from bmburst.launch.agent import Outcome, RankEnd
from bmburst.launch.rank import STOPPED
from bmburst.launch.spec import LaunchSpec

_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\S+) in (?P<name>.*)$')
_TIMER = re.compile(r"Timeout \((?P<h>\d+):(?P<m>\d+):(?P<s>[\d.]+)\)")
# Files of communication code, in which a waiting rank is, and files between it and the calling line.
_COMMUNICATION = ("/bmtrain/nccl/", "/torch/distributed/", "/bmburst/host/", "/bmburst/comm/")
_BETWEEN = ("/bmtrain/", "/torch/")
_OWN_FILES = ("/bmburst/launch/rank.py", "<frozen runpy>")
_MOST_FRAMES = 30
_BAD_INPUT, _FAILED = 2, 1
_STEP_ADVICE = "a step that takes longer is no hang: --hang-timeout SECONDS changes the limit, 0 lifts it"


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchResult:
    """The launcher's message and exit status.

    Attributes:
        status: Exit status of the launcher.
        message: Text for standard error. Empty if the program has printed its own message.
    """

    status: int
    message: str = ""


def launch_result(spec: LaunchSpec, outcome: Outcome, folder: Path) -> LaunchResult:
    """Return the message and status, from the ends of the ranks and the files they wrote into the run's folder.

    A hang is reported before anything else: the ranks that waited for the stuck rank fail after it. A rank that a
    signal killed is reported before an error in another rank: its peers fail because their connections break.
    """
    if _dumps(folder, "hang"):
        return LaunchResult(status=_FAILED, message=_hang_message(spec, outcome.stopped, folder))
    if outcome.stood_still:
        line = _stopped_line(outcome.stopped, spec.hang_timeout)
        return LaunchResult(status=_FAILED, message=f"{line}\n{_STEP_ADVICE}")
    error = _first_error(folder)
    failed = [end for end in outcome.failed if error is None or end.rank != error["local_rank"]]
    killed = [_killed_message(end, folder) for end in failed if _was_killed(end, folder)]
    if error is not None:
        if killed:
            return LaunchResult(status=_FAILED, message="\n".join(filter(None, [*killed, _consequence(error)])))
        return LaunchResult(status=error["status"], message=_error_message(error))
    if killed:
        return LaunchResult(status=_FAILED, message="\n".join(killed))
    if isinstance(outcome.error, UserError):
        return LaunchResult(status=_BAD_INPUT, message=f"bmburst: {outcome.error}")
    if outcome.error is not None:
        return LaunchResult(status=_FAILED, message=_start_message(outcome.error))
    exits = [end for end in failed if end.status > 0]
    if exits:
        return LaunchResult(
            status=exits[0].status, message=f"bmburst: {_ranks(exits)} ended with status {exits[0].status}"
        )
    if failed:
        return LaunchResult(status=_FAILED, message=f"bmburst: {_ranks(failed)} was ended by SIGTERM from outside")
    return LaunchResult(status=STOPPED if outcome.is_to_continue else 0)


def report_of(spec: LaunchSpec, folder: Path, stopped: Sequence[int], first: int, world: int) -> str:
    """Return a message about a hang or a crash of the ranks of this host; empty if there was none.

    Args:
        spec: The ranks of this host.
        folder: The folder that they share.
        stopped: Those that are stopped, by local rank.
        first: Rank of local rank 0 in the run.
        world: Ranks of the run.
    """
    if _dumps(folder, "hang"):
        return _hang_message(spec, stopped, folder, first, is_whole=world == spec.nproc)
    crashed = {rank: text for rank, text in _dumps(folder, "stood").items() if _crashed(text)}
    return "\n".join(
        f"bmburst: rank {first + rank} on {socket.gethostname()}: {text.splitlines()[0]}; it stood at {_place(text)}"
        for rank, text in crashed.items()
    )


def _first_error(folder: Path) -> dict[str, Any] | None:
    path = folder / "error"
    return json.loads(path.read_text()) if path.exists() else None


def _error_message(error: dict[str, Any]) -> str:
    if error["kind"] == "user":
        return f"bmburst: {error['text']}"
    if error["kind"] == "exit":
        return str(error["text"])
    return f"bmburst: rank {error['rank']} failed\n{error['text']}"


def _consequence(error: dict[str, Any]) -> str:
    """Return the error of another rank in one line. Usually its connection to the killed rank broke."""
    if error["kind"] != "error":
        return _error_message(error)
    return f"beside it rank {error['rank']} failed: {str(error['text']).splitlines()[-1]}"


def _was_killed(end: RankEnd, folder: Path) -> bool:
    """Return whether a signal that the launcher did not send ended the rank.

    The launcher ends the other ranks of a failed one by SIGTERM, and by SIGKILL if they ignore it. In both cases they
    wrote their stacks into the run's folder, unless they were stopped. A rank that handles SIGTERM may have written its
    stack before, and then been killed while it saved its state.
    """
    if end.status >= 0 or end.status == -signal.SIGTERM or end.enforced:
        return False
    if not end.told:
        return True
    stood = _read(folder / f"stood.{end.rank}")
    return not stood or _crashed(stood)


def _crashed(stood: str) -> bool:
    return stood.startswith("Fatal Python error")


def _killed_message(end: RankEnd, folder: Path) -> str:
    try:
        name = signal.Signals(-end.status).name
    except ValueError:
        name = f"signal {-end.status}"
    hint = " (out of memory? the kernel's log, dmesg, says)" if end.status == -signal.SIGKILL else ""
    stood = _read(folder / f"stood.{end.rank}")
    place = f"; it stood at {_place(stood)}" if _crashed(stood) and _place(stood) else ""
    return f"bmburst: rank {end.rank} was killed by {name}{hint}{place}"


def _hang_message(
    spec: LaunchSpec, stopped: Sequence[int], folder: Path, first: int = 0, *, is_whole: bool = True
) -> str:
    """Return the message about a hang. It names the rank that others waited for, and where they waited.

    A stopped rank is named first: its own timer does not run, so the timer of a rank that waits for it fires. Otherwise
    it is a rank outside of a collective while others were in one, or the rank whose timer fired first.

    Args:
        spec: The ranks of this host.
        stopped: Those that are stopped, by local rank.
        folder: The folder that they share.
        first: Rank of local rank 0 in the run.
        is_whole: Whether the run has no other ranks.
    """
    hung = _dumps(folder, "hang")
    dumps = _dumps(folder, "stood") | hung
    earliest = next(iter(hung))
    limit, starting = spec.hang_timeout, _fired_in_start(hung[earliest], spec)
    if starting:
        limit = spec.start_limit
    advice = (
        "a start that takes longer is no hang: --start-timeout SECONDS changes the limit" if starting else _STEP_ADVICE
    )
    what = "did not take its first step within" if starting else "made no progress for"
    shown: int | None = None
    if stopped:
        lines = [_stopped_line([first + rank for rank in stopped], limit)]
    else:
        waiting = {rank for rank, text in dumps.items() if _collective(text)}
        away = sorted(set(dumps) - waiting) if waiting else []
        shown = away[0] if away else earliest
        if not away and waiting and not is_whole:
            lines = [
                f"bmburst: rank {first + earliest} waited {limit:g} s in {_collective(dumps[earliest])} for a rank of "
                "another node, so the run was ended; the log of that node says more"
            ]
        else:
            names = ", ".join(str(first + rank) for rank in away or hung)
            lines = [f"bmburst: rank {names} on {socket.gethostname()} {what} {limit:g} s, so the run was ended"]
        lines += [f"rank {first + shown} stood at (most recent call first):", *_frames(dumps[shown])[:_MOST_FRAMES]]
    for rank, text in sorted(dumps.items()):
        if rank != shown and rank not in stopped and _place(text):
            lines.append(f"rank {first + rank} {_position(text)}{_steps(folder, rank)}")
    return "\n".join([*lines, advice])


def _stopped_line(ranks: Sequence[int], limit: float) -> str:
    names = ", ".join(f"{rank} on {socket.gethostname()}" for rank in sorted(ranks))
    return f"bmburst: rank {names} is stopped (SIGSTOP, or a debugger), so the run was ended after {limit:g} s"


def _fired_in_start(dump: str, spec: LaunchSpec) -> bool:
    """Return whether the timer that wrote the stack was the one for the time before the first step."""
    found = _TIMER.match(dump)
    if found is None or spec.start_limit == spec.hang_timeout:
        return False
    seconds = int(found["h"]) * 3600 + int(found["m"]) * 60 + float(found["s"])
    return abs(seconds - spec.start_limit) < abs(seconds - spec.hang_timeout)


def _collective(dump: str) -> str:
    """Return the name of the collective that a stack is in; empty if it is in none."""
    name = ""
    for line in _frames(dump):
        found = _FRAME.match(line)
        if found is None or not any(part in found["file"] for part in _COMMUNICATION):
            break
        name = name if found["name"].startswith(("_", "wrapper")) and name else found["name"]
    return name


def _position(dump: str) -> str:
    """Return where a rank was, in words: the line that called a collective, if it was in one."""
    collective = _collective(dump)
    if not collective:
        return f"stood at {_place(dump)}"
    frames = [found for line in _frames(dump) if (found := _FRAME.match(line))]
    callers = [f for f in frames if not any(part in f["file"] for part in (*_COMMUNICATION, *_BETWEEN))]
    caller = (callers or frames)[0]
    return f"waited in {collective} at {caller['file']}:{caller['line']} in {caller['name']}"


def _steps(folder: Path, local_rank: int) -> str:
    path = folder / f"steps.{local_rank}"
    count = path.stat().st_size if path.exists() else 0
    return f", after {count} optimizer steps" if count else ""


def _start_message(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"bmburst: the ranks could not be started: {type(error).__name__}: {text[:400]}"


def _dumps(folder: Path, kind: str) -> dict[int, str]:
    """Return the stacks that ranks wrote, by local rank, in the order in which they were written."""
    paths = [path for path in folder.glob(f"{kind}.*") if path.stat().st_size]
    return {int(p.suffix[1:]): p.read_text(errors="replace") for p in sorted(paths, key=lambda p: p.stat().st_mtime_ns)}


def _frames(dump: str) -> list[str]:
    """Return the lines of the main thread's stack, innermost first, without the launcher's own frames.

    faulthandler writes the threads newest first, so the main thread's is the last section.
    """
    section = re.split(r"^(?:Current t|T)hread 0x.*$", dump, flags=re.MULTILINE)[-1]
    lines = [line for line in section.splitlines() if _FRAME.match(line)]
    return [line for line in lines if not any(own in line for own in _OWN_FILES)]


def _place(dump: str) -> str:
    """Return the innermost frame of a stack; empty if it has none."""
    frames = _frames(dump)
    found = _FRAME.match(frames[0]) if frames else None
    return f"{found['file']}:{found['line']} in {found['name']}" if found else ""


def _ranks(ends: list[RankEnd]) -> str:
    return "rank " + ", ".join(str(end.rank) for end in ends)


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
