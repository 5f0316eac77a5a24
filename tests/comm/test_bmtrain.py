"""The communicator over bmt.nccl says what the others say; BurstAttention runs in a BMTrain program."""

import copy

import pytest
import torch

import bmburst
from bmburst.comm.collectives import launched_together
from bmburst.comm.groups import communicator
from bmburst.mesh import Mesh
from tests import lazy
from tests.attention.oracle import draw, reference
from tests.comm.test_communicators import check_mesh, starts_before_its_peer, verbs
from tests.distributed.programs import run_program
from tests.refusals import refused


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_verbs_meshes_and_attention(size, tmp_path):
    run_program(size, _program, str(tmp_path))


def _program(folder):
    world = communicator(lazy.bmt.config["comm"])
    assert world is communicator(None)
    assert (world.rank, world.size, world.transport) == (lazy.bmt.rank(), lazy.bmt.world_size(), "gloo")
    verbs(world)
    starts_before_its_peer(world, folder)
    if world.size > 1:
        with refused("disagree", "fix: "):
            world.ring(torch.zeros(2 + world.rank))
    check_groups_close(world)
    check_unwaited(world)

    whole = draw(0, 2, 21, 4, 2, 8)
    out, _, *grads = reference(*whole[:4], "causal")
    attention = bmburst.BurstAttention(strategy="burst", transport="gloo")
    assert "strategy='burst'" in repr(attention)
    check_attention(attention, whole, out, grads)
    named = bmburst.BurstAttention(group=lazy.bmt.config["comm"])
    assert copy.deepcopy(named).group is named.group is world
    check_attention(copy.deepcopy(named), whole, out, grads)
    q, k, v = (bmburst.shard(t) for t in whole[:3])
    capped, wanted = bmburst.BurstAttention(softcap=0.7)(q, k, v, 21), attention(q, k, v, 21)
    torch.testing.assert_close(capped, bmburst.burst_attention(q, k, v, length=21, softcap=0.7))
    assert (capped - wanted).norm() > 0.01 * wanted.norm()
    with refused("softcap | positive | 0.0"):
        bmburst.BurstAttention(softcap=0.0)
    for late in ("length", "key_length", "sink", "return_lse"):
        with refused(late, "BurstAttention", "fix: ", "burst_attention" if late == "return_lse" else "each call"):
            bmburst.BurstAttention(**{late: None})
    with refused("option", "'softcapp'", "'softcap'", "key_layout"):
        bmburst.BurstAttention(softcapp=1.0)
    with refused("layout", "'stripped'", "'striped'", "zigzag"):
        bmburst.BurstAttention(layout="stripped")

    if world.size == 4:
        for data, sequence in ((2, 2), (1, 4)):
            mesh = Mesh.over_bmtrain(sequence=sequence)
            check_mesh(mesh, data, sequence)
            with mesh.current():
                assert bmburst.shard(torch.zeros(1, 8)).shape[1] == 8 // sequence
                attention = bmburst.BurstAttention()
            # The module keeps its mesh: blocks run again where none is current.
            check_attention(attention, whole, out, grads, group=mesh.sequence)
        with refused("4 ranks", "data 3", "1, 2, 4"):
            Mesh.over_bmtrain(data=3, sequence=2)


def check_attention(attention, whole, out, grads, group=None):
    mine = [bmburst.shard(t, group=group).clone().requires_grad_() for t in whole[:3]]
    ours = attention(*mine, 21)
    torch.testing.assert_close(bmburst.unshard(ours, group=group, length=21), out)
    got = torch.autograd.grad(ours, mine, bmburst.shard(whole[3], group=group))
    for gradient, wanted in zip(got, grads, strict=True):
        torch.testing.assert_close(bmburst.unshard(gradient, group=group, length=21), wanted)


def check_groups_close(world):
    """An exception inside a group leaves none open, which would hold back whatever is called later."""
    with pytest.raises(KeyError), launched_together():
        raise KeyError
    (total,) = world.all_reduce(torch.ones(1)).wait()
    assert total.item() == world.size


def check_unwaited(world):
    """A transfer that nobody waits for writes into memory that nobody else has got meanwhile."""
    for _ in range(20):
        world.ring(torch.full((4096,), 7.0))
        bystander = torch.zeros(4096)
        torch.cuda.synchronize()  # the host runtime's
        assert not bystander.any()


@pytest.mark.parametrize("axis", ["tensor", "pipe"])
def test_a_world_of_tensor_groups_or_stages_is_no_group_of_attention(axis):
    run_program(2, _divided, axis, **{axis: 2})


def _divided(axis):
    q, option = torch.randn(1, 8, 4, 16), {"tensor": "tp_size=2", "pipe": "pipe_size=2"}[axis]
    alone = torch.nn.functional.scaled_dot_product_attention(*3 * [q.transpose(1, 2)], is_causal=True).transpose(1, 2)
    for call in (
        lambda: lazy.BurstAttention()(q, q, q),
        lambda: bmburst.burst_attention(q, q, q),
        lambda: bmburst.burst_attn_func(q, q, q, causal=True),
        lambda: bmburst.shard(q),
    ):
        with refused(option, "fix: pass group=bmburst.Mesh.over_bmtrain().sequence"):
            call()
    group = Mesh.over_bmtrain().sequence
    torch.testing.assert_close(lazy.BurstAttention(group=group)(q, q, q), alone)
    with Mesh.over_bmtrain().current():
        torch.testing.assert_close(bmburst.burst_attention(q, q, q), alone)
