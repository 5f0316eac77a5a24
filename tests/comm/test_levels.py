"""Nodes are found, and both levels move what the group would; over threads, processes and BMTrain."""

import os

import pytest
import torch

import bmburst
from bmburst.comm.checks import Checked
from bmburst.comm.groups import communicator
from bmburst.comm.levels import NODE_SWITCH, Nodes, find_nodes, over_levels
from bmburst.comm.local import run_ranks
from bmburst.comm.subgroups import Members
from tests.attention.test_burst_attention import compare
from tests.distributed.processes import run_processes
from tests.distributed.programs import run_program
from tests.refusals import refused


def check_levels(comm, nodes, every=1):
    """Each level's ring passes on what its rank holds, both at once, in any order of waiting."""
    levels = over_levels(comm, nodes, "auto", every)
    inner, outer, places = levels.inner, levels.outer, comm.size // nodes
    assert levels is over_levels(comm, nodes, "auto", every)
    assert (inner.size, outer.size) == (places // every, nodes)
    assert outer.rank * inner.size + inner.rank == comm.rank // every
    node, place = divmod(comm.rank, places)
    mine = torch.tensor([comm.rank]), torch.full((3, 2), comm.rank / 2).t()
    for shift in (1, -1, inner.size + 1):
        hops = [level.ring(*mine, shift=shift) for level in (outer, inner) if shift % level.size]
        arrived = [[int(t.flatten()[0] * (1 + i)) for i, t in enumerate(hop.wait())] for hop in reversed(hops)]
        wanted = []
        if shift % inner.size:
            wanted.append(node * places + (place - shift * every) % places)
        if shift % outer.size:
            wanted.append((node - shift) % nodes * places + place)
        assert arrived == [[rank, rank] for rank in wanted]


@pytest.mark.parametrize(("size", "nodes", "every"), [(4, 2, 1), (6, 3, 1), (6, 2, 1), (2, 2, 1), (2, 1, 1), (8, 2, 2)])
def test_over_threads(size, nodes, every):
    run_ranks(size, check_levels, nodes, every)


def test_over_processes():
    run_processes(4, _over_processes)


def _over_processes():
    comm = communicator(None)
    check_levels(comm, 2)
    check_levels(comm, 1)
    for names in ("abab", "aaab", "abca"):
        comm = named(comm, names[comm.rank])
        with refused("equal numbers", "neighbouring ranks", " on a, 1 on b", "strategy='auto'"):
            bmburst.burst_attention(*[torch.zeros(1, 4, 2, 8)] * 3, group=comm, strategy="double-ring")
        bmburst.burst_attention(*[torch.zeros(1, 4, 2, 8)] * 3, group=comm, strategy="auto")
    comm = named(comm, "ab"[comm.rank // 2])
    assert find_nodes(comm) == Nodes(2)
    for heads, kv_heads in ((2, 2), (4, 1)):
        compare(comm, "zigzag", "causal", 31, heads, kv_heads, {"strategy": "double-ring"})


def named(comm, name):
    """Return the group anew, on nodes of these names: where ranks run is asked once for a communicator."""
    os.environ[NODE_SWITCH] = name
    return Checked(comm.inner, comm.device)


def test_over_bmtrain():
    run_program(4, _over_bmtrain)


def _over_bmtrain():
    comm = communicator(None)
    check_levels(comm, 2)
    os.environ[NODE_SWITCH] = "ab"[comm.rank // 2]
    for heads, kv_heads in ((2, 2), (4, 1)):
        compare(comm, "zigzag", "causal", 31, heads, kv_heads, {"strategy": "double-ring"})


def test_ranks_of_one_host_are_one_node():
    assert set(run_ranks(3, find_nodes)) == {Nodes(1)}


def test_members_move_messages_as_the_group_does():
    """Exchanges by place in the part; what the other parts do is another message."""

    def body(comm):
        part = Members(comm, [comm.rank % 2, comm.rank % 2 + 2])
        (got,) = part.ring(torch.tensor([comm.rank])).wait()
        assert int(got) == (comm.rank + 2) % 4
        assert (part.rank, part.size, part.transport) == (comm.rank // 2, 2, "threads")

    run_ranks(4, body)
