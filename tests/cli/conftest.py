"""Stand-ins for the launcher, the trainer and the place of a rank."""

import json
import os
import sys
import types
from pathlib import Path

import pytest

from bmburst.checkpoint.files import VERIFIED
from bmburst.cli import train

VARIABLES = (train.RUN_CONFIG, VERIFIED)


class Launches(list):
    """The calls of the launcher's stand-in."""

    @property
    def command(self):
        return self[-1][1]

    @property
    def variables(self):
        """What the ranks inherit."""
        return self[-1][2]

    @property
    def spec(self):
        return self[-1][0]

    def config(self):
        """Return what the ranks settle on."""
        assert self.command[:3] == ["-m", "bmburst", "train"]
        return json.loads(self.variables[train.RUN_CONFIG])

    def output(self):
        return Path(self.command[self.command.index("--output") + 1])


@pytest.fixture
def launches(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "BMBURST_LAUNCH_FOLDER", train.RUN_CONFIG, VERIFIED):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    calls = Launches()

    def launch(spec, command):
        calls.append((spec, command, {name: os.environ[name] for name in VARIABLES if name in os.environ}))
        return 0

    monkeypatch.setattr("bmburst.runtime.launch.launch", launch)
    return calls


@pytest.fixture
def trained(monkeypatch):
    """Stand in for the trainer and return the configurations it is given."""
    seen = []
    module = types.ModuleType("bmburst.train.trainer")
    module.run = seen.append
    monkeypatch.setitem(sys.modules, "bmburst.train.trainer", module)
    return seen


@pytest.fixture
def as_rank(monkeypatch, launches):
    def enter(rank, size, launched=False):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(size))
        if launched:
            monkeypatch.setenv("BMBURST_LAUNCH_FOLDER", "x")
            for name, value in launches.variables.items() if launches else ():
                monkeypatch.setenv(name, value)

    return enter
