"""Ranks on GPUs, and attention over them, held to one GPU's kernel by their distances from the definition."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bmburst.errors import UserError
from bmburst_ops.machine import HERE
from tests.attention.test_burst_attention import split_attention
from tests.distributed.decorated import on_each_rank
from tests.distributed.ports import held_port
from tests.distributed.programs import run_program
from tests.refusals import says

GPUS = torch.cuda.device_count()
NEEDS_FA4 = pytest.mark.skipif(HERE.version("flash-attn-4") is None, reason="needs the package flash-attn-4")
LENGTH = 701
LENGTHS = (1, 300, 2, 1, 97, 128, 64, 3, 105)  # of documents
SOFTCAP = 5.0  # of scores with a standard deviation of 4
ADDED = 1.5  # errors over those of one GPU: parts are rounded to 16 bits, and the fp32 sums of ours once less there


def run_nccl(size, body, *args):
    with held_port() as port:
        mp.spawn(_enter, args=(size, port, body, args), nprocs=size)


def _enter(rank, size, port, body, args):
    torch.cuda.set_device(rank)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("nccl", rank=rank, world_size=size, timeout=timedelta(seconds=120))
    try:
        body(*args)
    finally:
        dist.destroy_process_group()


def run(program, size, body, *args):
    if size > GPUS:
        pytest.skip(f"needs {size} GPUs")
    if program == "bmtrain":
        run_program(size, body, *args, on_gpus=True, seconds=600)  # most of it compiles kernels
    else:
        run_nccl(size, body, *args)


def on_gpus(size=None):
    """Decorate a test that every rank runs, each on a GPU: as its argument `program` says, or by torch.distributed."""
    return on_each_rank(lambda ranks, body: run(body.arguments.get("program", "torch.distributed"), ranks, body), size)


def transports(comm):
    return ("auto", "nccl") if comm.size > 1 else ("auto",)


def attend(group, whole, mask, layout="zigzag", sink=None, **options):
    """Return the whole output and gradients in bf16, last that of a sink."""
    given, options = [t.cuda() for t in whole], options | {"sink": None if sink is None else sink.float().cuda()}
    out, _, *grads = split_attention(group, given, layout, mask, torch.bfloat16, with_lse=False, **options)
    return [out.detach(), *grads]


def errors(got, exact):
    """Return relative errors of output and gradients against fp64."""
    wanted = (exact[0], *exact[2:])
    return [((a.double().cpu() - b).norm() / b.norm()).item() for a, b in zip(got, wanted, strict=True)]


def errors_of(group, whole, mask, exact, *, strategy="auto", refusal="cannot work", **options):
    """Return the errors of a strategy; None if it is refused in these words, as "auto" never is."""
    try:
        return errors(attend(group, whole, mask, strategy=strategy, **options), exact)
    except UserError as error:
        says(error, refusal)
        assert strategy != "auto"
        return None


def excess(found, alone):
    """Return the largest ratio of errors to those of one GPU."""
    return max(ours / theirs for ours, theirs in zip(found, alone, strict=True))


def hold_graphs(call, given):
    """Call with each of some inputs by turns, until calls become CUDA graphs, and return the first results by name.

    Later calls give the same bits.
    """
    first = {name: call(value) for name, value in given.items()}
    for turn in range(8):
        for name, wanted in first.items():
            again = call(given[name])
            assert all(torch.equal(a, b) for a, b in zip(again, wanted, strict=True)), (name, turn)
    return first
