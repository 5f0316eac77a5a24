"""A few faults of each kind, with real runs: what `python -m benchmarks.faults` does to hundreds."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.faults.inject import Workspace
from benchmarks.faults.kinds import CHAINS, CHECKPOINT_FILES, SINGLE, TOKEN_CACHE, TOKEN_FILE
from benchmarks.faults.programs import Fault, processes

ROOT = Path(__file__).parents[2]
CASES = {
    "kill": [("rename", "rank 0"), ("start", "rank 1"), ("checkpoint", "launcher"), ("evaluation", "all")],
    "term": [("step", "launcher")],
    "stop": [("step", "rank 1")],
    "disk": [("step", "disk")],
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    with Workspace(tmp_path_factory.mktemp("faults"), print) as bench:
        yield bench
    assert not processes(f"{bench.mark}/")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["term", "kill", "stop", "disk"])
def test_a_disturbed_run_goes_on_as_if_it_had_not_been(bench, kind):
    outcomes = []
    chain = CHAINS[kind](bench, bench.folder / kind, outcomes.append)
    for number, (moment, target) in enumerate(CASES[kind]):
        chain.point(Fault(kind, moment, target, number))
    chain.finish()
    assert len(outcomes) == len(CASES[kind])
    assert [outcome for outcome in outcomes if not outcome.is_good] == []


@pytest.mark.long
@pytest.mark.parametrize("target", ["state.json", "model.safetensors", TOKEN_FILE])
def test_a_flipped_bit_is_seen(bench, target):
    assert target in (*CHECKPOINT_FILES, TOKEN_CACHE, TOKEN_FILE)
    outcome = SINGLE["flip"](bench, Fault("flip", "anywhere", target, 1), bench.folder / f"flip-{target}")
    assert outcome.is_good, outcome


@pytest.mark.long
@pytest.mark.parametrize("target", ["fresh", "resumed"])
def test_one_of_two_runs_in_a_folder_trains_as_it_was_told(bench, target):
    outcome = SINGLE["pair"](bench, Fault("pair", "offset", target, 3), bench.folder / f"pair-{target}")
    assert outcome.is_good, outcome


def test_an_ended_harness_leaves_no_process_and_no_folder(tmp_path):
    command = [sys.executable, "-m", "benchmarks.faults", "--kinds", "disk,kill", "--points", "1"]
    command += ["--output", str(tmp_path / "record.md"), "--scratch", str(tmp_path / "scratch")]
    (tmp_path / "scratch").mkdir()
    harness = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        until = time.monotonic() + 120
        while not processes(f"{harness.pid}-") and time.monotonic() < until:
            time.sleep(0.05)
        assert processes(f"{harness.pid}-")
        os.kill(harness.pid, signal.SIGTERM)
        harness.communicate(timeout=120)
    finally:
        harness.kill()
    assert harness.returncode not in (0, None)
    assert not processes(f"{harness.pid}-")
    assert not list((tmp_path / "scratch").iterdir())
