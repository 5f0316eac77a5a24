"""The host runtime loads only where it may, when it is asked to, and changes nothing for others."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.distributed.ports import held_port
from tests.distributed.started import Python, run_python
from tests.refusals import says

ROOT = Path(__file__).parents[2]
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


# What glibc does with two of its settings as a process begins, which is one that was forked here.
SET = """
import ctypes
ctypes.CDLL(None).mallopt(-3, 4096)  # M_MMAP_THRESHOLD
ctypes.CDLL(None).mallopt(-1, 0)  # M_TRIM_THRESHOLD
"""


def python(*words: str, first: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process that no launcher has started."""
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    return run_python(*words, cwd=ROOT, env=clean | {"CUDA_VISIBLE_DEVICES": ""} | environment, first=first)


def test_others_see_the_truth_and_bmtrain_what_it_needs() -> None:
    done = python(str(Path(__file__).parent / "programs" / "manners.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "well behaved\n", "BMTrain's table must not be on stdout"
    said = [line for line in done.stderr.splitlines() if line]
    assert said == ["bmburst: no CUDA here, running BMTrain on CPUs (host runtime)"]


def test_only_rank_0_says_so() -> None:
    done = python("-c", "from bmburst import host; host.install(); host.install()", RANK="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


PAGES = """
import resource, torch
from bmburst import host
host.install()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def layers():  # two tensors of 4 MiB and one of 16 MiB: memory that a layer takes and frees
    for _ in range(5):
        kept = [torch.ones(1 << 20), torch.ones(1 << 20), torch.ones(1 << 22)]
rounds = []
for _ in range(4):  # memory that is in use elsewhere may cost one of them new pages, once
    before = faults()
    layers()
    rounds.append(faults() - before)
print(min(rounds[1:]))
"""


def test_freed_memory_is_kept_for_the_next_tensors() -> None:
    pages = 5 * (24 << 20) // 4096  # that the kernel would clear, or a share of it where it has huge ones
    assert int(python("-c", PAGES).stdout) < pages // 100
    assert int(python("-c", PAGES, first=SET).stdout) < pages // 100
    tunables = "glibc.malloc.mmap_threshold=4096:glibc.malloc.trim_threshold=0"
    for given in ({"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "4096"}, {"GLIBC_TUNABLES": tunables}):
        assert int(python("-c", PAGES, first=SET, **given).stdout) > pages // 100


REFUSED = """
from bmburst.errors import UserError
from bmburst import host
import sys, torch
{prepare}
before = torch.empty, torch.Tensor.is_cuda
try:
    host.install()
except UserError as error:
    assert (torch.empty, torch.Tensor.is_cuda) == before and not host.is_installed()
    print(error)
"""


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        ("torch.cuda.is_available = lambda: True", "CUDA | CUDA_VISIBLE_DEVICES="),
        ("sys.modules['bmtrain'] = sys", "imported already | CUDA | bmburst.launch.start.start()"),
        (
            "import os; sys.path[:] = [p for p in sys.path if not os.path.isdir(os.path.join(p, 'bmtrain'))]",
            "not installed for",
        ),
    ],
    ids=["CUDA", "imported", "missing"],
)
def test_refusals(prepare: str, said: str) -> None:
    done = python("-c", REFUSED.format(prepare=prepare))
    assert done.returncode == 0, done.stderr
    says(done.stdout, said)
    if "not installed" in said:
        assert "-m pip install --no-deps " in done.stdout
        assert done.stdout.rstrip().endswith("bmtrain==1.0.1")


START = "from bmburst.launch.start import start; start()"


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2 | RANK, MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE | 'two' | whole number"),
        ({"WORLD_SIZE": "1", "RANK": "1"}, "RANK is 1 | WORLD_SIZE 1"),
        ({"RANK": "0"}, "RANK is 0 | WORLD_SIZE is not set"),
        ({"LOCAL_RANK": "3"}, "LOCAL_RANK is 3 | LOCAL_WORLD_SIZE 1"),
    ],
)
def test_an_environment_that_names_no_rank_is_an_error(environment: dict[str, str], said: str) -> None:
    done = python("-c", START, **environment)
    last = [line for line in done.stderr.splitlines() if line.startswith("bmburst.errors.UserError")]
    assert len(last) == 1, done.stderr
    says(last[0], said)
    assert "bmburst launch" in done.stderr or "let a launcher set it" in done.stderr


def test_cuda_without_bmtrain_names_the_build() -> None:
    program = (
        "import sys, torch; torch.cuda.is_available = lambda: True\n"
        "import os; sys.path[:] = [p for p in sys.path if not os.path.isdir(os.path.join(p, 'bmtrain'))]\n" + START
    )
    done = python("-c", program)
    assert "BMTrain" in done.stderr and "bmburst build-bmtrain" in done.stderr


LEAVE = """
import atexit, sys, time, torch
if {last_words}:
    atexit.register(lambda: print(time.time(), file=sys.stderr))  # after the host runtime has closed
from bmburst.launch.start import start
me = start()
import bmtrain as bmt
data = torch.ones(2 << 20)
if me.rank == 0:
    bmt.nccl.send(data.storage(), 1, bmt.config["comm"])
    {sender}
else:
    {receiver}
"""


def leave(sender: str, receiver: str, last_words: bool = False) -> list[tuple[int, str]]:
    """Run two ranks of which the first sends 8 MB; return exit status and standard error of each."""
    program = LEAVE.format(sender=sender, receiver=receiver, last_words=last_words)
    ranks = []
    with held_port() as port:
        for rank in ("0", "1"):
            environment = os.environ | dict(zip(LAUNCHED, (rank, "2", rank, "2", "localhost", str(port)), strict=True))
            ranks.append(Python(["-c", program], cwd=ROOT, env=environment | {"CUDA_VISIBLE_DEVICES": ""}))
        try:
            said = [process.communicate(timeout=60)[1] for process in ranks]
        finally:
            for process in ranks:
                process.close()
    return [(process.returncode, text) for process, text in zip(ranks, said, strict=True)]


def test_a_rank_that_ends_delivers_what_it_has_sent() -> None:
    receive = (
        "time.sleep(1); data.zero_(); bmt.nccl.recv(data.storage(), 0, bmt.config['comm']); assert data.eq(1).all()"
    )
    (sender, receiver) = leave("", receive)
    assert sender == (0, "bmburst: no CUDA here, running BMTrain on CPUs (host runtime)\n")
    assert receiver == (0, "")


def test_a_rank_ends_quietly_though_nobody_receives() -> None:
    (sender, receiver) = leave("raise SystemExit(7)", "time.sleep(1)")
    assert sender == (7, "bmburst: no CUDA here, running BMTrain on CPUs (host runtime)\n")
    assert receiver == (0, "")


def test_a_rank_that_fails_waits_for_nobody() -> None:
    (sender, _) = leave("raise ValueError(time.time())", "time.sleep(3)", last_words=True)
    assert sender[0] == 1
    *_, error, ended = sender[1].splitlines()
    assert error.startswith("ValueError: "), sender[1]
    assert float(ended) - float(error.removeprefix("ValueError: ")) < 1.5


def test_what_scripts_ask_of_torch_cuda_is_there() -> None:
    warned = "import warnings; warnings.simplefilter('error')"
    done = python(str(Path(__file__).parent / "programs" / "torch_cuda.py"), first=warned)
    assert (done.returncode, done.stdout) == (0, "as on a GPU\n"), done.stderr
