"""Stand-ins for the launcher, the trainer and the place of a rank."""

import sys
import types
from pathlib import Path

import pytest

from bmburst.cli import CommandParser, train
from bmburst.config import to_dict


class Launches(list):
    """The calls of the launcher's stand-in."""

    @property
    def command(self):
        return self[-1][1]

    @property
    def spec(self):
        return self[-1][0]

    def config(self):
        """Return what the ranks settle on."""
        words = self.command
        assert words[:3] == ["-m", "bmburst", "train"]
        parser = CommandParser(prog="bmburst train", description="")
        train.configure(parser)
        return to_dict(train.settle(parser.read(words[3:]), as_rank=True))

    def output(self):
        return Path(self.command[self.command.index("--output") + 1])


@pytest.fixture
def launches(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "BMBURST_LAUNCH_FOLDER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    calls = Launches()
    monkeypatch.setattr("bmburst.runtime.launch.launch", lambda spec, command: calls.append((spec, command)) or 0)
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

    return enter
