"""Every communicator says the same: threads, gloo processes; views, wrong shapes, groups."""

import pytest
import torch
import torch.distributed as dist

from bmburst.comm.checks import Mismatch
from bmburst.comm.groups import communicator
from bmburst.comm.local import run_ranks
from bmburst.errors import UserError
from bmburst.mesh import Mesh, MeshShape
from tests.distributed.processes import run_processes

SIZES = [1, 2, 3, 4]


def verbs(comm, device="cpu"):
    """Checks each verb against what it means; tensors are views with strides, offsets and odd shapes."""
    rank, size = comm.rank, comm.size

    def of(source):  # what rank `source` holds: a transposed slice, not contiguous
        values = torch.arange(60.0, device=device).reshape(3, 4, 5)
        return values.add(1000 * source)[:, 1:, ::2].transpose(0, 1)

    mine = of(rank)
    for shift in (1, -1, 2):
        passed = comm.ring(mine, mine[0].to(torch.bfloat16), torch.tensor(rank, device=device), shift=shift)
        later = comm.ring(mine + 0.5)  # two in flight
        a, b, c = passed.wait()
        source = (rank - shift) % size
        assert torch.equal(a, of(source))
        assert torch.equal(b, of(source)[0].to(torch.bfloat16))
        assert c.item() == source
        assert a.is_contiguous() or shift % size == 0
        assert torch.equal(later.wait()[0], of((rank - 1) % size) + 0.5)

    rows = torch.stack([of(rank) + 0.01 * to for to in range(size)]).transpose(1, 2)
    (got,) = comm.all_to_all(rows).wait()
    assert torch.equal(got, torch.stack([of(r) + 0.01 * rank for r in range(size)]).transpose(1, 2))

    (got,) = comm.all_gather(mine).wait()
    assert torch.equal(got, torch.stack([of(r) for r in range(size)]))
    (got,) = comm.all_gather(torch.tensor(7 + rank, device=device)).wait()
    assert got.tolist() == [7 + r for r in range(size)]

    (got,) = comm.reduce_scatter(rows).wait()
    expected = sum(of(r) + 0.01 * rank for r in range(size)).transpose(0, 1)
    torch.testing.assert_close(got, expected)

    before = mine.clone()
    (got,) = comm.all_reduce(mine).wait()
    torch.testing.assert_close(got, sum(of(r) for r in range(size)))
    assert torch.equal(mine, before)


@pytest.mark.parametrize("size", SIZES)
def test_threads(size):
    run_ranks(size, verbs)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gloo(size):
    run_processes(size, _verbs_over_gloo)


def _verbs_over_gloo():
    verbs(communicator(None))
    verbs(communicator(dist.group.WORLD))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.ring(torch.zeros(2 + c.rank)), r"rank 1: ring shift=1 float32\[3\]"),
        (lambda c: c.ring(torch.zeros(2, dtype=[torch.float32, torch.float64][c.rank])), r"rank 1: .* float64\[2\]"),
        (lambda c: c.all_reduce(torch.zeros(2)) if c.rank else c.all_gather(torch.zeros(2)), "rank 1: all_reduce"),
        (lambda c: c.all_to_all(torch.zeros(3)), r"dimension 0 must be the group's 2 ranks, got shape \[3\]"),
        (lambda c: c.reduce_scatter(torch.zeros(3 - c.rank)), "must be the group's 2 ranks"),
    ],
)
def test_a_mismatch_is_an_error_on_every_rank(call, message):
    def body(comm):
        with pytest.raises(UserError, match=message) as caught:
            call(comm)
        assert len(str(caught.value).splitlines()) <= 3
        assert torch.equal(comm.ring(torch.tensor(comm.rank)).wait()[0], torch.tensor((comm.rank - 1) % 2))

    run_ranks(2, body)


def test_a_problem_of_one_rank_is_raised_on_all():
    def body(comm):
        with pytest.raises(UserError, match="head counts do not divide"):
            comm.refuse("head counts do not divide") if comm.rank == 2 else comm.agree("same")
        with pytest.raises(Mismatch, match="rank 0: a"):
            comm.agree("b" if comm.rank == 2 else "a")

    run_ranks(3, body)


def test_mesh_shape_names_what_would_fit():
    assert MeshShape.fit(6, data=2) == MeshShape(2, 3)
    assert MeshShape.fit(6) == MeshShape(1, 6)
    assert MeshShape.fit(6, sequence=3) == MeshShape(2, 3)
    assert MeshShape(2, 3).sequence_groups() == [[0, 1, 2], [3, 4, 5]]
    assert MeshShape(2, 3).data_groups() == [[0, 3], [1, 4], [2, 5]]
    for data, sequence in ((4, None), (2, 2), (0, None), (None, 5)):
        with pytest.raises(UserError, match="each one of 1, 2, 3, 6"):
            MeshShape.fit(6, data, sequence)


@pytest.mark.parametrize(("data", "sequence"), [(4, 1), (2, 2), (1, 4)])
def test_mesh_over_gloo(data, sequence):
    run_processes(data * sequence, _mesh, data, sequence)


def _mesh(data, sequence):
    mesh = Mesh.over_process_group(data=data, sequence=sequence)
    assert (mesh.sequence.size, mesh.data.size) == (sequence, data)
    assert mesh.rank == mesh.data_rank * sequence + mesh.sequence_rank
    assert (mesh.sequence.rank, mesh.data.rank) == (mesh.sequence_rank, mesh.data_rank)
    (peers,) = mesh.sequence.all_gather(torch.tensor(mesh.rank)).wait()
    assert peers.tolist() == mesh.shape.sequence_groups()[mesh.data_rank]
    (peers,) = mesh.data.all_gather(torch.tensor(mesh.rank)).wait()
    assert peers.tolist() == mesh.shape.data_groups()[mesh.sequence_rank]
    assert mesh.sum(mesh.rank) == sum(range(mesh.shape.size))


def test_a_group_without_this_rank_is_refused():
    run_processes(2, _foreign_group)


def _foreign_group():
    group = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(UserError, match="not in the given process group"):
            communicator(group)
    with pytest.raises(UserError, match=r"group must be a .* got str"):
        communicator("world")
