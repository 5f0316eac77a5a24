"""The communicator over bmt.nccl says what the others say; BurstAttention runs in a BMTrain program."""

import pytest
import torch

import bmburst
from bmburst.comm.groups import communicator
from bmburst.errors import UserError
from bmburst.mesh import Mesh
from tests.attention.oracle import draw, reference
from tests.distributed.programs import run_program
from tests.test_comm import verbs


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_verbs_and_attention(size):
    run_program(size, _verbs_and_attention)


def _verbs_and_attention():
    import bmtrain as bmt

    world = communicator(bmt.config["comm"])
    assert world is communicator(None)
    assert (world.rank, world.size, world.transport) == (bmt.rank(), bmt.world_size(), "gloo")
    verbs(world)
    with pytest.raises(UserError, match="disagree") if world.size > 1 else pytest.raises(UserError):
        world.ring(torch.zeros(2 + world.rank)) if world.size > 1 else world.all_to_all(torch.zeros(2))

    whole = draw(0, 2, 21, 4, 2, 8)
    out, _, *grads = reference(*whole[:4], "causal")
    attention = bmburst.BurstAttention(strategy="burst", transport="gloo")
    assert "strategy='burst'" in repr(attention)
    mine = [bmburst.shard(t).clone().requires_grad_() for t in whole[:3]]
    ours = attention(*mine, 21)
    torch.testing.assert_close(bmburst.unshard(ours, length=21), out)
    for got, wanted in zip(torch.autograd.grad(ours, mine, bmburst.shard(whole[3])), grads, strict=True):
        torch.testing.assert_close(bmburst.unshard(got, length=21), wanted)


@pytest.mark.parametrize(("data", "sequence"), [(2, 2), (1, 4)])
def test_mesh(data, sequence):
    run_program(data * sequence, _mesh, data, sequence)


def _mesh(data, sequence):
    mesh = Mesh.over_bmtrain(sequence=sequence)
    assert (mesh.shape.data, mesh.shape.sequence) == (data, sequence)
    (peers,) = mesh.sequence.all_gather(torch.tensor(mesh.rank)).wait()
    assert peers.tolist() == mesh.shape.sequence_groups()[mesh.data_rank]
    (peers,) = mesh.data.all_gather(torch.tensor(mesh.rank)).wait()
    assert peers.tolist() == mesh.shape.data_groups()[mesh.sequence_rank]
    verbs(mesh.sequence)
    assert mesh.sum(mesh.rank) == sum(range(mesh.shape.size))
    with mesh.current():
        assert bmburst.shard(torch.zeros(1, 8)).shape[1] == 8 // sequence
    with pytest.raises(UserError, match="4 ranks cannot form a mesh of data 3"):
        Mesh.over_bmtrain(data=3, sequence=2)
