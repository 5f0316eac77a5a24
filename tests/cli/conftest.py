"""Stand-ins for the launcher, the trainer and the place of a rank."""

import importlib
import json
import sys
import types
from pathlib import Path

import pytest
from torch.distributed import HashStore

from bmburst.checkpoint.files import VERIFIED
from bmburst.train.config import TrainConfig
from tests.cli.commands import see_gpus


class Launches(list):
    """The calls of the launcher's stand-in."""

    @property
    def spec(self):
        return self[-1][0]

    @property
    def request(self):
        """What the ranks get."""
        return self[-1][2]

    def config(self):
        """Return what the ranks train, as JSON."""
        assert self[-1][1] == "bmburst.cli.train"
        return self.request["config"]

    def output(self):
        return Path(self.config()["output"])

    def run_rank(self):
        """Run the newest launch in this process, as a rank does."""
        return importlib.import_module(self[-1][1]).run_rank(self.request)


@pytest.fixture
def launches(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "BMBURST_LAUNCH_FOLDER", VERIFIED):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    see_gpus(monkeypatch)
    calls = Launches()

    def launch(spec, command, request=""):
        assert command[:2] == ["-m", "bmburst.launch.handover"]
        calls.append((spec, command[2], json.loads(request)))
        return 0

    monkeypatch.setattr("bmburst.launch.launcher.launch", launch)
    return calls


class Trained(list):
    """The configurations that the trainer's stand-in was given. `work` is what it does with one.

    `valid_for` are the numbers of ranks for which they were said to be valid.
    """

    work = staticmethod(lambda _: "")

    def __init__(self):
        super().__init__()
        self.valid_for = []

    def run(self, config, _beginning, *, valid_for):
        self.append(config)
        self.valid_for.append(valid_for)
        return self.work(config)


@pytest.fixture
def trained(monkeypatch):
    """Stand in for the trainer and return the configurations it is given."""
    seen = Trained()
    module = types.ModuleType("bmburst.train.trainer")
    module.run = seen.run
    monkeypatch.setitem(sys.modules, "bmburst.train.trainer", module)
    return seen


@pytest.fixture
def validations(monkeypatch):
    """Record the configurations that are validated, and for how many ranks."""
    seen, real = [], TrainConfig.validate
    monkeypatch.setattr(
        TrainConfig, "validate", lambda config, ranks: seen.append((config, ranks)) or real(config, ranks)
    )
    return seen


@pytest.fixture
def as_rank(monkeypatch, launches):
    """Become a rank of our launcher, or of another one, where ranks share a store and nobody watches this process."""
    store = HashStore()
    monkeypatch.setattr("bmburst.launch.start.join", lambda: store)
    monkeypatch.setattr("bmburst.launch.joined.watch", lambda *_: None)
    monkeypatch.setattr("bmburst.launch.handover._FAREWELL", 0.0)
    monkeypatch.setattr("bmburst.launch.handover._ARRIVAL", 0.0)  # nobody else is there

    def enter(rank, size, launched=False):
        for name, value in (("RANK", rank), ("WORLD_SIZE", size), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", size)):
            monkeypatch.setenv(name, str(value))
        if launched:
            monkeypatch.setenv("BMBURST_LAUNCH_FOLDER", "x")

    return enter
