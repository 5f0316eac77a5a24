"""Nodes are found, and both groups of a double ring move what the group would; over threads, processes and BMTrain."""

import os

import pytest
import torch
import torch.distributed as dist

import bmburst
from bmburst.comm.checks import CheckedCommunicator
from bmburst.comm.groups import communicator
from bmburst.comm.transports import NODE_SWITCH, NodeGrouping, Subgroup, double_ring_groups, find_nodes
from tests.attention.test_burst_attention import compare
from tests.distributed.processes import on_processes
from tests.distributed.programs import on_program
from tests.distributed.threads import on_ranks, run_ranks
from tests.refusals import refused


def check_groups(comm, nodes, every=1):
    """Each group's ring passes on what its rank holds, both at once, in any order of waiting."""
    groups = double_ring_groups(comm, nodes, "auto", every)
    intra, inter, places = groups.intra, groups.inter, comm.size // nodes
    assert groups is double_ring_groups(comm, nodes, "auto", every)
    assert (intra.size, inter.size) == (places // every, nodes)
    assert inter.rank * intra.size + intra.rank == comm.rank // every
    node, place = divmod(comm.rank, places)
    mine = torch.tensor([comm.rank]), torch.full((3, 2), comm.rank / 2).t()
    for shift in (1, -1, intra.size + 1):
        hops = [group.ring(*mine, shift=shift) for group in (inter, intra) if shift % group.size]
        arrived = [[int(t.flatten()[0] * (1 + i)) for i, t in enumerate(hop.wait())] for hop in reversed(hops)]
        wanted = []
        if shift % intra.size:
            wanted.append(node * places + (place - shift * every) % places)
        if shift % inter.size:
            wanted.append((node - shift) % nodes * places + place)
        assert arrived == [[rank, rank] for rank in wanted]


@pytest.mark.parametrize(("size", "nodes", "every"), [(4, 2, 1), (6, 3, 1), (6, 2, 1), (2, 2, 1), (2, 1, 1), (8, 2, 2)])
def test_over_threads(size, nodes, every):
    run_ranks(size, check_groups, nodes, every)


@on_processes(4)
def test_over_processes():
    comm = communicator(None)
    check_groups(comm, 2)
    check_groups(comm, 1)
    for names in ("abab", "aaab", "abca"):
        comm = named(comm, names[comm.rank])
        with refused("equal numbers", "neighbouring ranks", " on a, 1 on b", "strategy='auto'"):
            bmburst.burst_attention(*[torch.zeros(1, 4, 2, 8)] * 3, group=comm, strategy="double-ring")
        bmburst.burst_attention(*[torch.zeros(1, 4, 2, 8)] * 3, group=comm, strategy="auto")
    comm = named(comm, "ab"[comm.rank // 2])
    assert find_nodes(comm) == NodeGrouping(2)
    for heads, kv_heads in ((2, 2), (4, 1)):
        compare(comm, "zigzag", "causal", 31, heads, kv_heads, {"strategy": "double-ring"})


@on_processes(4, seconds=100)
def test_over_processes_that_are_in_other_numbers_of_groups():
    dist.new_group([1, 3])
    check_groups(communicator(None), 2)


def named(comm, name):
    """Return the group anew, on nodes of these names: where ranks run is asked once for a communicator."""
    os.environ[NODE_SWITCH] = name
    return CheckedCommunicator(comm.inner, comm.device)


@on_program(4)
def test_over_bmtrain():
    comm = communicator(None)
    check_groups(comm, 2)
    os.environ[NODE_SWITCH] = "ab"[comm.rank // 2]
    for heads, kv_heads in ((2, 2), (4, 1)):
        compare(comm, "zigzag", "causal", 31, heads, kv_heads, {"strategy": "double-ring"})


def test_ranks_of_one_host_are_one_node():
    assert set(run_ranks(3, find_nodes)) == {NodeGrouping(1)}


@on_ranks(4)
def test_members_move_messages_as_the_group_does(comm):
    """Exchanges by place in the part; what the other parts do is another message."""
    part = Subgroup(comm, [comm.rank % 2, comm.rank % 2 + 2])
    (got,) = part.ring(torch.tensor([comm.rank])).wait()
    assert int(got) == (comm.rank + 2) % 4
    assert (part.rank, part.size, part.transport) == (comm.rank // 2, 2, "threads")
