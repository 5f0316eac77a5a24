"""What a run left behind, as one message and one exit status: the cause, not its consequences in other ranks."""

import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bmburst.runtime.launch.agent import Outcome, RankEnd
from bmburst.runtime.launch.spec import LaunchSpec

_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\S+) in (?P<name>.*)$')
_OWN_FILES = ("/bmburst/runtime/rank.py", "<frozen runpy>")
_MOST_FRAMES = 30
_NOT_FOUND, _BAD_INPUT, _FAILED = "", 2, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the launcher shows and returns.

    Attributes:
        status: Exit status of the launcher.
        message: For standard error; empty when the program itself has said all there is to say.
    """

    status: int
    message: str = ""


def judge(spec: LaunchSpec, outcome: Outcome, folder: Path) -> Verdict:
    """Return what to show, from the ranks' ends and from what they wrote into the run's folder.

    A hang comes first, since the ranks that waited for the stuck one fail after it. A rank killed by a signal comes
    before an error in another rank: its peers fail because their connections break.
    """
    hung = _dumps(folder, "hang")
    if hung:
        return Verdict(status=_FAILED, message=_hang_message(spec, hung, _dumps(folder, "stood")))
    error = _first_error(folder)
    failed = [end for end in outcome.failed if error is None or end.local_rank != error["local_rank"]]
    killed = [_killed_message(end, folder) for end in failed if _was_killed(end, folder)]
    if error is not None:
        if killed:
            return Verdict(status=_FAILED, message="\n".join(filter(None, [*killed, _consequence(error)])))
        return Verdict(status=error["status"], message=_error_message(error))
    if killed:
        return Verdict(status=_FAILED, message="\n".join(killed))
    if outcome.error is not None:
        return Verdict(status=_FAILED, message=_start_message(spec, outcome.error))
    exits = [end for end in failed if end.status > 0]
    if exits:
        return Verdict(status=exits[0].status, message=f"bmburst: {_ranks(exits)} ended with status {exits[0].status}")
    if failed:
        return Verdict(status=_FAILED, message=f"bmburst: {_ranks(failed)} was ended by SIGTERM from outside")
    return Verdict(status=0)


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
    """Return another rank's error in one line: most often its connection to the killed rank broke."""
    if error["kind"] != "error":
        return _error_message(error)
    return f"beside it rank {error['rank']} failed: {str(error['text']).splitlines()[-1]}"


def _was_killed(end: RankEnd, folder: Path) -> bool:
    """Whether a signal that the launcher did not send ended the rank.

    torchrun ends the ranks beside a failed one by SIGTERM, and by SIGKILL those that ignore it; either way they wrote
    down where they stood.
    """
    if end.status >= 0 or end.status == -signal.SIGTERM:
        return False
    stood = _read(folder / f"stood.{end.local_rank}")
    return not stood or _crashed(stood)


def _crashed(stood: str) -> bool:
    return stood.startswith("Fatal Python error")


def _killed_message(end: RankEnd, folder: Path) -> str:
    try:
        name = signal.Signals(-end.status).name
    except ValueError:
        name = f"signal {-end.status}"
    hint = " (out of memory? the kernel's log, dmesg, says)" if end.status == -signal.SIGKILL else ""
    stood = _read(folder / f"stood.{end.local_rank}")
    place = f"; it stood at {_place(stood)}" if _crashed(stood) and _place(stood) else ""
    return f"bmburst: rank {end.rank} was killed by {name}{hint}{place}"


def _hang_message(spec: LaunchSpec, hung: dict[int, str], stood: dict[int, str]) -> str:
    first = spec.node_rank * spec.nproc
    names = ", ".join(str(first + local_rank) for local_rank in hung)
    one = next(iter(hung))
    lines = [f"bmburst: rank {names} made no progress for {spec.hang_timeout:g} s, so the run was ended"]
    lines += [f"rank {first + one} stood at (most recent call first):", *_frames(hung[one])[:_MOST_FRAMES]]
    places = {rank: _place(text) for rank, text in sorted((stood | hung).items()) if rank != one}
    lines += [f"rank {first + rank} stood at {place}" for rank, place in places.items() if place]
    lines.append("a step that takes longer is no hang: --hang-timeout SECONDS changes the limit, 0 lifts it")
    return "\n".join(lines)


def _start_message(spec: LaunchSpec, error: Exception) -> str:
    text = " ".join(str(error).split())
    host, port = spec.endpoint
    if "EADDRINUSE" in text or "in use" in text:
        return f"bmburst: port {port} of {host} is in use\ngive every node another --master-port"
    if spec.nnodes > 1:
        return (
            f"bmburst: the {spec.nnodes} nodes did not come together at {host}:{port}: {text[:200]}\n"
            "start one launcher on each node, with the same --nnodes, --master-addr and --master-port"
        )
    return f"bmburst: the ranks could not be started: {type(error).__name__}: {text[:400]}"


def _dumps(folder: Path, kind: str) -> dict[int, str]:
    """Return the stacks that ranks wrote down, by local rank, the one written first in front."""
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
    frames = _frames(dump)
    found = _FRAME.match(frames[0]) if frames else None
    return f"{found['file']}:{found['line']} in {found['name']}" if found else _NOT_FOUND


def _ranks(ends: list[RankEnd]) -> str:
    return "rank " + ", ".join(str(end.rank) for end in ends)


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
