"""A launcher asks kernels ahead of any tensor: they answer as to a rank, and no memory of a GPU is taken for it."""

import subprocess
import sys

import pytest
import torch

from bmburst_ops.errors import KernelError
from bmburst_ops.flash import NAMES, able_kernels, queries_ahead, select_kernel
from tests.refusals import says

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float32]

ASK = """
import torch
from bmburst.errors import UserError
from bmburst.train.machine import require_machine
from bmburst.train.resolve import resolve
for name in {names!r}:
    try:
        require_machine(resolve((), {{"parallel.kernel": name, "dtype": "bfloat16"}}), 1)
    except UserError as error:
        print(error)
assert not torch._C._cuda_hasPrimaryContext(0), "the launcher has taken memory of a GPU"
from bmburst.launch.devices import Gpu, gpus
seen = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
assert gpus() == tuple(Gpu(each.name, (each.major, each.minor)) for each in seen) != ()
"""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 100, 128, 256])
@pytest.mark.parametrize("deterministic", [False, True])
def test_kernels_answer_ahead_as_they_do_then(dtype, head_dim, deterministic):
    ahead = queries_ahead(torch.device("cuda", 0), dtype, head_dim)
    real = torch.empty(1, 1, 1, head_dim, dtype=dtype, device="cuda:0")
    for needs in (frozenset(), frozenset({"window"}), frozenset({"segments"})):
        assert able_kernels(ahead, ahead, deterministic, needs) == able_kernels(real, real, deterministic, needs)
        for name in NAMES:
            assert answer(name, ahead, deterministic, needs) == answer(name, real, deterministic, needs)


def answer(name, q, deterministic, needs):
    try:
        return select_kernel(name, q, q, deterministic, needs).name
    except KernelError as error:
        return str(error)


def test_asking_takes_no_memory():
    done = subprocess.run(
        [sys.executable, "-c", ASK.format(names=NAMES[1:])], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    says(done.stdout, "kernel 'cpu' | on the CPU | cuda:0 | allowed here: auto, ", lines=99)
