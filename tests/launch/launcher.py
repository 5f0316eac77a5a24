"""A launcher that a test starts on a script's text, and what the test sees of it and of its ranks."""

import os
import re
import signal
import textwrap
import time
from functools import partial
from pathlib import Path

import pytest

from tests.distributed.started import Program, fresh_program

ROOT = Path(__file__).parents[2]
# `bmburst` with another patience with ranks that do not end.
PATIENT_FOR = """
from bmburst.launch import launcher as launch
from bmburst.launch import agent
agent.GRACE = launch.GRACE = {seconds}
"""
# Names of what works underneath, and what lines that torch logs begin with: [rank0]:[W1122 06:10:16.460 store.cpp:125].
NOISE = re.compile(r"ChildFailedError|torch\.distributed|elastic|Root Cause|runpy|rank\.py|\b[IWE]\d{4} \d\d:")


@pytest.fixture
def start(tmp_path):
    """Start `bmburst launch` on a script's text; whatever is left of it at the end of the test is killed.

    `first` is Python that the launcher's process runs before it launches. The launcher has imported torch already, but
    for a `fresh` one, which is `python -m bmburst`; ranks begin with nothing, but for `forked` ones: for scripts that
    need torch.
    """
    started = []

    def start(text, *options, nproc=2, args=(), target=None, first="", fresh=False, forked=False):
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(text))
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "BMBURST"))}
        scratch = tmp_path / "scratch"
        scratch.mkdir(exist_ok=True)
        environ |= {"CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"}
        environ["PYTHONPATH"] = f"{ROOT}:{environ.get('PYTHONPATH', '')}"
        words = ["launch", f"--nproc={nproc}", "--no-host-runtime", *options, "--", *(target or (str(script),)), *args]
        begin = fresh_program if fresh else partial(Program, first=first, forked=forked)
        assert not (fresh and (first or forked))
        process = begin(words, cwd=tmp_path, env=environ)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def ended(process, timeout=60):
    out, err = process.communicate(timeout=timeout)
    assert not NOISE.search(err), err
    return process.returncode, out, err


def lines_of(process, count):
    return [process.stdout.readline().strip() for _ in range(count)]


def wait_until(condition, seconds=60):
    """Wait for what will be so, on a machine that others load too; at most this long."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not so after {seconds} s"
        time.sleep(0.02)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_gone(pids):
    """Processes that were killed are gone, or soon will be."""
    try:
        wait_until(lambda: not any(map(alive, pids)), seconds=15)
    finally:
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)


def children(pid):
    """Return the processes that a process has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parts[2]))
        except OSError:
            continue
    return found
