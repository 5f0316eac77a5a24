"""What all tests of a process share.

Where there is no GPU, Triton's kernels run in its interpreter. It decides when Triton is first imported. With NumPy 2.4
or newer the interpreter needs Triton 3.7 (triton-lang/triton#9171).

What has been imported and collected stays: Python's collector need not look at it again and again.

Torch computes in one thread, as in ranks that are processes: ranks that are threads would get as many more each, which
wait for each other on processors that are taken. Where a program that a test starts has more, as BMTrain makes it, its
idle ones sleep: by default they spin on processors that other ranks need, which doubles what a small model takes.
"""

import gc
import os
import tempfile
import zlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from tests.distributed.launched import START, from_server
from tests.interpreter import names_replaced_once
from tests.pairs import part

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # TRL's, from a thread that stays and would end a pool's rank
os.environ["XDG_STATE_HOME"] = os.path.join(
    tempfile.gettempdir(), f"bmburst-tests-{os.getuid()}"
)  # of refused commands
torch.set_num_threads(1)
gc.set_threshold(50_000, 20, 50)  # a tenth of the time of collection of the tests, and a twentieth of theirs


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", metavar="K/N", help="of the long tests, run part K of N only")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a part that cannot be, before anything is collected; ignore warnings of Triton's interpreter."""
    part(config.getoption("part"))
    if os.environ.get("TRITON_INTERPRET") == "1":  # of numbers beyond a tile's edge, which are not stored
        for warning in ("overflow encountered", "invalid value encountered", "divide by zero encountered in log"):
            config.addinivalue_line("filterwarnings", f"ignore:{warning}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the long tests of one part. All cases of a test are in one part: they share what they need."""
    mine, parts = part(config.getoption("part"))
    elsewhere = [item for item in items if item.get_closest_marker("long") and _part(item, parts) != mine]
    config.hook.pytest_deselected(items=elsewhere)
    left_out = set(elsewhere)
    items[:] = [item for item in items if item not in left_out]


def _part(item: pytest.Item, parts: int) -> int:
    test = item.nodeid.partition("[")[0]
    return zlib.crc32(test.encode()) % parts + 1


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _interpreter() -> Iterator[None]:
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    with names_replaced_once():
        yield


@pytest.fixture(scope="session", autouse=True)
def _ranks_with_torch() -> Iterator[None]:
    """Let commands that tests call in their own process start ranks that have imported torch already."""
    if torch.cuda.is_available():  # ranks that were forked have no CUDA
        yield
        return
    with mock.patch(START, from_server):
        yield


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch see no GPU, also on a machine that has some."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the test fail where weights for inference are read."""
    read = "bmburst.inference.weights.ResidentWeights.read"
    monkeypatch.setattr(read, lambda *_: pytest.fail("weights were read"))


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the test fail where a command starts ranks."""
    monkeypatch.setattr("bmburst.launch.launcher.launch", lambda *_: pytest.fail("ranks were started"))
