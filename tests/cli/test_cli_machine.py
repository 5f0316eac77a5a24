"""A kernel or transport that this machine does not have is refused before any rank starts, with what it has."""

import pytest
import torch

from bmburst.cli import main
from bmburst.cli.check import runs_to_compare
from bmburst.errors import UserError
from bmburst.launch.devices import Gpu
from bmburst.train.machine import require_dtype, require_machine
from bmburst.train.resolve import resolve
from tests.cli.commands import refused, see_gpus
from tests.ops.another_machine import AnotherMachine
from tests.refusals import says

ON_CPU = "runs on NVIDIA GPUs only, and the tensors are on cpu"


@pytest.fixture
def gpus(monkeypatch):
    """The launcher sees two GPUs."""
    see_gpus(monkeypatch, *[Gpu("NVIDIA H100 80GB HBM3", (9, 0))] * 2)


def machine(**installed):
    """Return a machine with Hopper GPUs, and these packages of kernels beside Triton."""
    packages = {name.replace("_", "-"): version for name, version in installed.items()}
    return AnotherMachine((9, 0), {"triton": None, **packages})


@pytest.fixture
def no_gpu(launches, no_cuda):
    return launches


def message(here, **options):
    config = resolve((), {name.replace("__", "."): value for name, value in options.items()})
    with pytest.raises(UserError) as caught:
        require_machine(config, 2, machine=here)
    return str(caught.value)


@pytest.mark.parametrize(
    ("argv", "first", "allowed"),
    [
        (["--kernel", "fa4"], f"kernel 'fa4' {ON_CPU}", "allowed here: auto, cpu, reference"),
        (["--kernel", "cudnn", "--dtype", "bfloat16"], f"kernel 'cudnn' {ON_CPU}", "auto, cpu, reference"),
        (["--transport", "peer"], "transport peer does not work on a machine", "allowed: auto, gloo"),
        (["--transport", "nccl"], "transport nccl does not work on a machine", "allowed: auto, gloo"),
    ],
)
@pytest.mark.parametrize("command", ["train", "check"])
def test_what_needs_a_gpu_is_refused_without_one(no_gpu, tmp_path, capsys, command, argv, first, allowed):
    lines = refused(capsys, command, *argv).splitlines()
    assert lines[0].startswith(f"bmburst {command}: {first}")
    assert allowed in lines[1]
    assert lines[2] == f"fix: {argv[0]} auto"
    assert not no_gpu
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--strategy", "double-ring"], "2 ranks on 1 node do not form 2 or more nodes"),
        (["--strategy", "heads+ring"], "2 ranks cannot form smaller groups"),
        (
            ["--strategy", "heads+ring", "--tensor-parallel", "4", "--nproc", "16"],
            "1 query heads cannot be split over 2 ranks",
        ),
        (["--strategy", "gather", "--layout", "striped"], "layout 'striped' has no run of neighbouring tokens"),
    ],
)
def test_a_strategy_that_cannot_work_is_refused(no_gpu, tmp_path, capsys, argv, reason):
    first, fix = refused(capsys, "train", *argv).splitlines()
    assert first.startswith(f"bmburst train: strategy '{argv[1]}' cannot work: {reason}")
    assert fix == "fix: --strategy auto"
    assert not list(tmp_path.iterdir())


def test_a_double_ring_may_be_over_nodes_that_are_not_known_yet(no_gpu, as_rank, trained, monkeypatch):
    argv = ["train", "--strategy", "double-ring", "--output", "run", "--nproc", "4"]
    monkeypatch.setenv("BMBURST_NODE", "a")
    assert main(argv) == 0
    monkeypatch.delenv("BMBURST_NODE")
    as_rank(0, 4, launched=True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert main(argv) == 0
    assert len(trained) == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(UserError) as caught:
        main(argv)
    says(caught, "4 ranks", "1 node")


def test_a_rank_refuses_too(no_gpu, as_rank, trained, capsys):
    as_rank(0, 2)
    assert ON_CPU in refused(capsys, "train", "--kernel", "fa3", "--output", "run")
    assert not trained


@pytest.mark.parametrize(
    "argv",
    [
        ["--kernel", "cpu"],
        ["--kernel", "reference"],
        ["--transport", "gloo"],
        ["--transport", "peer", "--nproc", "1"],
        ["--strategy", "double-ring", "--nproc", "1"],
        ["--strategy", "heads+gather", "--nproc", "4", "--model.num_heads", "6", "--model.hidden_size", "192"],
        ["--strategy", "heads", "--nproc", "4", "--tensor-parallel", "4", "--model.num_kv_heads", "2"],
    ],
)
def test_what_is_there_may_be_asked_for(no_gpu, argv):
    assert main(["train", *argv]) == 0
    assert len(no_gpu) == 1


@pytest.mark.usefixtures("gpus")
def test_a_package_that_is_not_installed_is_refused_on_a_gpu():
    here = machine()
    half = {"dtype": "bfloat16", "preset": "llama-2-7b"}
    allowed = "auto, cudnn, torch, triton, reference"
    says(message(here, parallel__kernel="fa4", **half), "kernel", "'fa4'", "flash-attn-4", allowed, "--kernel auto")
    says(message(here, parallel__kernel="fa2", **half), "kernel", "'fa2'", "flash-attn\n", allowed, "--kernel auto")
    says(message(here, parallel__kernel="cpu", **half), "kernel", "'cpu'", "CPU", allowed, "--kernel auto")


@pytest.mark.usefixtures("gpus")
def test_dtype_head_dim_mask_and_repetition_count_on_a_gpu():
    here = machine(flash_attn_4=(4, 0, 0))
    half = {"dtype": "bfloat16", "preset": "llama-2-7b", "parallel__kernel": "cudnn"}
    require_machine(resolve((), {"parallel.kernel": "fa4", "dtype": "bfloat16", "preset": "llama-2-7b"}), 2, 1, here)
    assert set(here.asked) == {torch.device("cuda", 1)}
    says(message(here, parallel__kernel="fa4"), "'fa4'", "bfloat16", "torch.float32", "--kernel auto")
    says(message(here, **half, model__head_dim="12"), "'cudnn'", "head dim", "multiples of 8", "12", "--kernel auto")
    says(message(here, **half, pack="documents"), "'cudnn'", "packed segments", "auto, fa4", "--kernel auto")
    says(message(here, **half, model__sliding_window="64"), "'cudnn'", "sliding window", "--kernel auto")
    says(
        message(here, **half, parallel__deterministic="true"), "'cudnn'", "deterministic backward", "fix: --kernel auto"
    )


def test_a_gpu_without_bfloat16_trains_in_float16():
    device, turing = torch.device("cuda", 1), AnotherMachine((7, 5))
    for capability, dtypes in (((7, 0), ("float16", "float32")), ((8, 0), ("bfloat16", "float16"))):
        for dtype in dtypes:
            require_dtype(dtype, device, AnotherMachine(capability))
    require_dtype("bfloat16", torch.device("cpu"), turing)
    with pytest.raises(UserError) as caught:
        require_dtype("bfloat16", device, turing)
    says(caught, "bfloat16", "a GPU", "7.5", "float16, float32", "fix: --dtype float16")


@pytest.mark.usefixtures("gpus")
def test_transports_of_a_gpu():
    here = machine()
    for transport in ("auto", "peer", "nccl"):
        require_machine(resolve((), {"parallel.transport": transport}), 2, machine=here)
    says(message(here, parallel__transport="gloo"), "transport", "gloo", "GPUs", "fix: --transport auto")
    assert not here.asked, "a GPU was asked though the kernel is free"


def test_a_check_looks_at_the_ranks_own_kernel_alone(no_gpu):
    phases = runs_to_compare(
        resolve((), {"parallel.kernel": "cpu", "parallel.transport": "gloo", "dtype": "bfloat16"}), 2
    )
    assert [phase.config.parallel.kernel for phase in phases] == ["cpu", "cpu", "auto"]
