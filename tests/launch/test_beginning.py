"""The time up to the first step is the sum of its parts, from the start of the launcher on."""

import os
import subprocess
import sys
import time

import pytest

from bmburst.launch import beginning
from bmburst.launch.beginning import Beginning


def test_parts_add_up_and_short_ones_are_not_shown():
    made = Beginning(100.0)
    for part, now in (("checks", 101.25), ("data", 101.26), ("model", 103.0), ("data", 104.0), ("late", 103.5)):
        made.end(part, now)
    assert made.seconds == pytest.approx({"checks": 1.25, "data": 1.01, "model": 1.74, "late": 0.0})
    assert made.until("the model") == "4.0 s to the model: checks 1.2, data 1.0, model 1.7"
    for number in range(20):
        made.end(f"part {number}", 105.0 + number)
    lines = made.until("the end").splitlines()
    assert max(map(len, lines)) < 80 and len(lines) > 1 and lines[1].startswith("  ")
    parts = [line.strip().rstrip(",") for line in ",".join(lines).split(":")[1].split(",")]
    assert {*filter(None, parts)} >= {f"part {number} 1.0" for number in range(1, 20)}  # no line ends inside a part


def test_it_begins_with_the_launcher_or_this_process(monkeypatch):
    began = time.monotonic()
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        # A launcher, and a rank that is younger.
        monkeypatch.setenv("BMBURST_LAUNCHER_PID", str(os.getppid()))
        seconds = Beginning.of_process("imports", before="checks", rank=other.pid).seconds
        assert [*seconds] == ["checks", "imports"] and seconds["checks"] > 0
        assert 0 < seconds["imports"] <= time.monotonic() - began + 2 / beginning._TICKS
        monkeypatch.delenv("BMBURST_LAUNCHER_PID")
        assert [*Beginning.of_process("imports", before="checks", rank=other.pid).seconds] == ["imports"]
    finally:
        other.communicate(b"\n")
