"""On real GPUs, over NCCL: communicators, attention and training, over torch.distributed and in BMTrain programs."""

import math
from itertools import product

import pytest
import torch
import torch.distributed as dist

import bmburst
from bmburst.comm.checks import Mismatch
from bmburst.comm.groups import communicator
from bmburst.mesh import Mesh
from bmburst.recompute import POLICIES, checkpoint
from tests import tiny
from tests.attention.oracle import draw, reference
from tests.comm.test_communicators import starts_before_its_peer, verbs
from tests.distributed.programs import run_program
from tests.gpu.over_gpus import GPUS, errors, errors_of, excess, run
from tests.refusals import refused
from tests.train import equality_program as equality
from tests.train import stages_program as stages
from tests.train.test_equality import error
from tests.train.test_stages import require_equal

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("size", range(1, min(GPUS, 4) + 1))
@pytest.mark.parametrize("program", ["torch.distributed", "bmtrain"])
def test_communicator_and_attention(size, program, tmp_path):
    run(program, size, _communicator_and_attention, str(tmp_path))


def _communicator_and_attention(folder):
    comm = communicator(None)
    assert comm.transport == "nccl" and not comm.active
    verbs(comm, "cuda")
    starts_before_its_peer(comm, folder, "cuda")
    check_streams(comm)
    with comm.checking():
        verbs(comm, "cuda")
        if comm.size > 1:
            with refused("disagree", error=Mismatch, lines=99):
                comm.ring(torch.zeros(2 + comm.rank, device="cuda"))
            with refused("cuda | nccl | cpu", lines=99):
                comm.all_gather(torch.zeros(2, device="cpu" if comm.rank else "cuda"))
            q = torch.zeros(1, 4, 2, 8, device="cuda", dtype=torch.bfloat16)
            with refused("layout | 'zig'", lines=99):
                bmburst.burst_attention(q, q, q, group=comm, layout="zig" if comm.rank else "zigzag")
    check_determinism(comm)
    check_recompute()

    whole = draw(0, 2, 301, 8, 2, 64, torch.bfloat16)
    exact = reference(*whole[:4], "causal")
    q, k, v = (t.cuda().bfloat16().transpose(1, 2).requires_grad_() for t in whole[:3])
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    grads = torch.autograd.grad(out, (q, k, v), whole[3].cuda().bfloat16().transpose(1, 2))
    single = errors([t.transpose(1, 2) for t in (out, *grads)], exact)
    for layout, strategy, checked in product(("contiguous", "zigzag", "striped"), ("kv", "burst"), (False, True)):
        comm.active = checked
        found = errors_of(comm, whole, "causal", exact, layout=layout, strategy=strategy, kernel="torch")
        assert excess(found, single) <= 2, (layout, strategy, found, single)


def check_streams(comm):
    """What is sent is finished first; waiting on another stream orders it; a host far ahead of the GPU takes memory
    for few blocks, not for all."""
    x = torch.full((1 << 20,), float(comm.rank), device="cuda")
    other = torch.cuda.Stream()
    for i in range(20):
        torch.cuda._sleep(2_000_000)  # what comes is late
        transfer = comm.ring(x + i)
        with torch.cuda.stream(other):
            got = transfer.wait()[0] * 1.0
        del transfer
        bystander = torch.full_like(x, -1.0)
        torch.cuda.current_stream().wait_stream(other)
        assert (got == (comm.rank - 1) % comm.size + i).all()
        assert (bystander == -1).all()

    def reserved(hops):
        held = x
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(hops):
            transfer = comm.ring(held)
            torch.cuda._sleep(10_000_000)  # the kernel that works on what is here
            held = transfer.wait()[0] + 0
            del transfer
        return torch.cuda.max_memory_reserved()

    reserved(2)
    assert reserved(24) <= reserved(3)


def check_determinism(comm):
    whole = draw(4, 1, 2048 * comm.size, 8, 2, 64, torch.bfloat16)
    q, k, v, grad = (bmburst.shard(t.cuda().bfloat16(), group=comm).clone().requires_grad_() for t in whole[:4])
    out = bmburst.burst_attention(q, k, v, group=comm, kernel="torch", deterministic=True)
    first = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
    for _ in range(5):
        again = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.are_deterministic_algorithms_enabled()


def check_recompute():
    """Backward runs in autograd's own thread, where no mesh is current: it must find the forward's, not the world."""
    mesh = (Mesh.over_process_group if dist.is_initialized() else Mesh.over_bmtrain)(sequence=1)
    q = torch.randn(1, 4, 2, 8, device="cuda", requires_grad=True)
    gradients = []
    for policy in POLICIES:
        with mesh.current():
            loss = checkpoint(policy, lambda x: bmburst.burst_attention(x, x, x).sin(), q).sum()
        gradients.append(torch.autograd.grad(loss, q)[0])
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])


SPLITS = [(d, s) for d in (1, 2, 4) for s in (1, 2, 4)] + [(1, 1, 2), (1, 2, 2), (2, 1, 2), (1, 1, 4), (2, 2, 2)]


@pytest.mark.parametrize("split", [split for split in SPLITS if math.prod(split) <= min(GPUS, 8)], ids=str)
def test_training_equals_one_rank(split, tmp_path):
    (tmp_path / "text.txt").write_text("the text is not used: batches are given\n" * 50)
    tiny.save(tmp_path / "model", equality.SHAPE)
    case = equality.CASES[0]
    run_program(1, equality.train_all, tmp_path, [(1, 1)], [case], seconds=300)  # on the CPU
    expected = equality.result(tmp_path, (1, 1), case, "float32")
    (tmp_path / f"1x1-{case}-float32.pt").unlink()
    size, tensor = math.prod(split), (*split, 1)[2]
    run_program(size, equality.train_all, tmp_path, [split], [case], seconds=300, on_gpus=True, tensor=tensor)
    got = equality.result(tmp_path, split, case, "float32")
    for name, gradient in expected["gradients"].items():
        assert error(got["gradients"][name].cpu(), gradient) < 1e-5, name
    assert got["losses"] == pytest.approx(expected["losses"], rel=1e-3)


STAGES = [stages.Split(2), stages.Split(2, sequence=2), stages.Split(4)]


@pytest.mark.parametrize("split", [split for split in STAGES if split.ranks <= GPUS], ids=str)
def test_stages_equal_one_rank(split, tmp_path):
    """NCCL's messages between stages, beside its collectives on other streams.

    One rank trains on a GPU too: the initial weights come from the seed, of which a CPU draws others.
    """
    names = ["plain", "tied"]
    stages.write_text(tmp_path)
    for each in (stages.ALONE, split):
        run_program(each.ranks, stages.compare, tmp_path, each, names, seconds=300, on_gpus=True, pipe=each.pipe)
    for name in names:
        require_equal(tmp_path, split, name)
