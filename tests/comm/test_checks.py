"""What one rank would do differently, or cannot do, is an error on every rank, where calls are compared."""

import pytest
import torch

from bmburst.comm.checks import CheckedCommunicator, Mismatch, contents
from bmburst.comm.groups import SingleRank
from bmburst.errors import UserError
from bmburst.mesh import Mesh, MeshShape
from tests.distributed.threads import on_ranks, run_ranks
from tests.refusals import refused

DIFFER = "disagree | fix: | rank 0: | rank 1: "
FLOATS = f"{DIFFER} | float32[2] | float64[2]"
REDUCE = f"{DIFFER} | all_gather | rank 1: all_reduce"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: c.ring(torch.zeros(2 + c.rank)), f"{DIFFER} | shift=1 float32[2] | shift=1 float32[3]"),
        (lambda c: c.ring(torch.zeros(2), shift=1 + 2 * c.rank), f"{DIFFER} | ring shift=1 | ring shift=3"),
        (lambda c: c.ring(torch.zeros(2, dtype=[torch.float32, torch.float64][c.rank])), FLOATS),
        (lambda c: c.ring(*[torch.zeros(9, 9, 9)] * 40, torch.zeros(2 + c.rank)), f"{DIFFER} | #"),  # far behind
        (lambda c: c.all_reduce(torch.zeros(2)) if c.rank else c.all_gather(torch.zeros(2)), REDUCE),
        (lambda c: c.all_reduce(torch.zeros(2 + c.rank)), f"{DIFFER} | rank 1: all_reduce float32[3]"),
        (lambda c: c.all_gather(torch.zeros(2 + c.rank)), f"{DIFFER} | rank 1: all_gather float32[3]"),
        (lambda c: c.all_to_all(torch.zeros(2, 1 + c.rank)), f"{DIFFER} | rank 1: all_to_all float32[2, 2]"),
        (lambda c: c.reduce_scatter(torch.zeros(2, 1 + c.rank)), f"{DIFFER} | rank 1: reduce_scatter float32[2, 2]"),
        (lambda c: c.all_to_all(torch.zeros(3)), "all_to_all | dimension 0 | 2 ranks | [3]"),
        (lambda c: c.all_to_all(torch.tensor(1.0)), "all_to_all | dimension 0 | 2 ranks | []"),
        (lambda c: c.reduce_scatter(torch.zeros(3 - c.rank)), "reduce_scatter | dimension 0 | 2 ranks | [3]"),
        (lambda c: c.ring(torch.zeros(2, device=["cpu", "meta"][c.rank])), "cpu | threads | meta"),
    ],
)
@on_ranks(2)
def test_a_mismatch_is_an_error_on_every_rank(comm, call, words):
    with refused(words):
        call(comm)
    assert torch.equal(comm.ring(torch.tensor(comm.rank)).wait()[0], torch.tensor((comm.rank - 1) % 2))


@on_ranks(3)
def test_a_problem_of_one_rank_is_raised_on_all(comm):
    def decide(rank, problem):
        if problem:
            raise UserError(problem)
        return rank, "same"

    assert comm.decided(lambda: decide(comm.rank, None)) == comm.rank
    for problem in ("head counts do not divide", "x" * 3000):
        with refused(problem[:200]):
            comm.decided(lambda p=problem: decide(comm.rank, p if comm.rank == 2 else None))
    with refused("disagree", "fix: ", "rank 0: a\nrank 2: b", error=Mismatch):
        comm.agree("b" if comm.rank == 2 else "a")


@on_ranks(2)
def test_a_rank_that_left_the_calls_is_not_shown_as_text(comm):
    """It has caught an error, and is in a collective of its own, whose bytes are no text."""
    if comm.rank:
        comm.inner.all_gather(torch.randn(128, generator=torch.Generator().manual_seed(0)).view(torch.uint8)).wait()
    else:
        with refused("disagree", "fix: ", "rank 0: a", "rank 1: a collective that is not bmburst's", error=Mismatch):
            comm.agree("a")


def test_checks_on_demand(monkeypatch):
    """As on GPUs: off, on where asked for, and on everywhere by the debug switch."""

    def body(comm):
        off = CheckedCommunicator(comm, comm.device, always=False)
        world = Mesh(MeshShape(1, 2), comm.rank, off, comm, off)
        assert not off.active
        off.agree(f"rank {comm.rank}")
        with off.checking():
            with pytest.raises(Mismatch):
                off.agree(f"rank {comm.rank}")
            off.agree("same")
        off.agree(f"rank {comm.rank}")
        for active in (True, False):
            world.set_checks(active)
            assert (off.active, comm.active) == (active, True)
        with refused("disagree", "data 1", "data 2"):  # a mesh is made once, and compared always
            Mesh._over(off, lambda _: off, lambda: MeshShape(1 + comm.rank, 2))
        assert not off.active
        if comm.rank:
            with refused("mine alone"):
                off.refuse("mine alone")

    run_ranks(2, body)
    monkeypatch.setenv("BMBURST_CHECK", "1")
    switched = CheckedCommunicator(SingleRank(torch.device("cpu")), torch.device("cpu"), always=False)
    Mesh(MeshShape(1, 1), 0, switched, switched, switched).set_checks(False)
    assert switched.active


def test_a_digest_is_of_the_numbers_alone():
    whole = torch.arange(6, dtype=torch.int32)
    ways = [whole.view(2, 3), whole.view(2, 3).mT.contiguous().mT, torch.stack([whole, whole + 1], 1)[:, 0].view(2, 3)]
    assert len({contents(way) for way in ways}) == 1
    assert contents(torch.as_strided(whole, (1, 1), (0, 0))) == contents(whole[:1])
    assert len({contents(whole), contents(whole + 1), contents(whole[:5]), contents(whole.bfloat16())}) == 4
