"""Every block meets every rank that has work with it exactly once, over as few slow links as the formula says."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmburst.schedule.layout import LAYOUTS, padded_layout
from bmburst.schedule.mask import make_mask
from bmburst.schedule.ring_schedule import make_ring_order, make_schedule

MESHES = [(1, 1), (1, 3), (3, 1), (2, 2), (2, 4), (3, 2), (3, 3), (4, 2)]


def everything(owner, rank):
    return True


def walk(ring_order):
    """Move every block as the ring_order says, hop by hop; return the ranks of each, and hops inside and between nodes.

    Written with a block's own coordinates, where the executor has only what arrives at a rank.
    """
    visited, inner, outer = Counter(), 0, 0
    for node in range(ring_order.nodes):
        for place in range(ring_order.places):
            entered, inner, outer = node, 0, 0
            for window in ring_order.windows:
                if window.nodes:
                    outer += 1
                    entered = node + window.nodes
                else:
                    entered = node
                at = place
                for stop in window.stops:
                    inner += at != place + stop
                    at = place + stop
                    rank = entered % ring_order.nodes * ring_order.places + at % ring_order.places
                    visited[node * ring_order.places + place, rank] += 1
    return visited, inner, outer


@pytest.mark.parametrize(("nodes", "places"), MESHES)
@pytest.mark.parametrize("returning", [False, True])
def test_every_block_visits_every_rank_once(nodes, places, returning):
    ring_order = make_ring_order(nodes, places, everything, returning=returning)
    visited, inner, outer = walk(ring_order)
    size = nodes * places
    assert visited == {(owner, rank): 1 for owner in range(size) for rank in range(size)}
    assert outer == ring_order.outer_hops == nodes - 1
    assert inner == ring_order.inner_hops == nodes * (places - 1)
    for rank in range(size):
        owners = ring_order.owners(rank)
        assert owners[0] == rank
        assert Counter(owner for owner, host in visited if host == rank) == Counter(owners)


@given(st.sampled_from(MESHES), st.integers(0, 10**6), st.sampled_from([0.02, 0.1, 0.5]), st.booleans())
@settings(max_examples=200, deadline=None)
def test_stops_where_nobody_has_work_are_left_out(mesh, seed, share, returning):
    nodes, places = mesh
    size, rng = nodes * places, random.Random(seed)
    pairs = {(a, b) for a in range(size) for b in range(size) if rng.random() < share}
    ring_order = make_ring_order(nodes, places, lambda owner, rank: (owner, rank) in pairs, returning=returning)
    visited, inner, outer = walk(ring_order)
    assert set(visited.values()) == {1}
    assert pairs <= set(visited)
    assert (inner, outer) == (ring_order.inner_hops, ring_order.outer_hops)
    stops = {}  # by how many nodes and places up a rank is from the owner
    for owner, rank in visited:
        key = (rank // places - owner // places) % nodes, (rank - owner) % places
        stops.setdefault(key, set()).add((owner, rank))
    assert all(key == (0, 0) or at & pairs for key, at in stops.items())
    assert outer == len({up for up, _ in stops if up})


def test_how_it_is_cut():
    """As the module's docstring draws it: the own node first, the nodes below in order, and its rest at the end."""
    forward = make_ring_order(3, 4, everything, returning=False)
    assert [(w.nodes, w.stops) for w in forward.windows] == [(n, (0, 1, 2, 3)) for n in range(3)]
    backward = make_ring_order(3, 4, everything, returning=True)
    assert [(w.nodes, w.stops) for w in backward.windows] == [
        *((0, (0, 1)), (1, (0, 1, 2, 3)), (2, (0, 1, 2, 3)), (0, (2, 3)))
    ]
    assert str(backward) == (
        "3 nodes x 4 ranks; gradients leave a node 3 places up\n"
        "own node: same place, 1 down\n"
        "1 node down: same place, 1 down, 2 down, 3 down\n"
        "2 nodes down: same place, 1 down, 2 down, 3 down\n"
        "own node: 2 down, 3 down"
    )


def test_a_mask_that_looks_back_a_little_ends_it_early():
    """A window of one rank's tokens over neighbouring tokens: own keys, and those of the rank before."""

    def works(owner, rank):
        return rank - owner in (0, 1)

    ring_order = make_ring_order(4, 4, works, returning=False)
    assert [(w.nodes, w.stops) for w in ring_order.windows] == [(0, (0, 1)), (1, (1,))]
    assert (ring_order.outer_hops, ring_order.inner_hops) == (1, 2)


def test_gradients_leave_a_node_where_most_windows_end():
    """Elsewhere they must hop there first, and nothing hides that."""
    stops = {0: (0, 2), 1: (0, 2), 2: (1, 2), 3: (0, 1)}

    def works(owner, rank):
        return (rank - owner) % 4 in stops[(rank // 4 - owner // 4) % 4]

    ring_order = make_ring_order(4, 4, works, returning=True)
    assert [w.stops for w in ring_order.windows] == [(0,), (0, 2), (1, 2), (0, 1), (2,)]
    assert ring_order.exit == 2


@given(
    st.sampled_from([(2, 2), (2, 3), (3, 2), (1, 2), (2, 1)]),
    st.sampled_from(sorted(set(LAYOUTS) - {"balanced"})),
    st.integers(0, 30),
    st.sampled_from(["causal", "full"]),
    st.sampled_from(["kv", "q"]),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_work_is_that_of_the_flat_ring(mesh, name, extra, mask, ring_tensors, returning):
    """Which `test_schedule` counts, pair by pair."""
    nodes, places = mesh
    length = nodes * places + extra
    options = padded_layout(name, nodes * places, length), length, make_mask(mask)
    for rank in range(nodes * places):
        flat = make_schedule(*options, rank, ring_tensors)
        double = make_schedule(*options, rank, ring_tensors, nodes, returning=returning)
        assert {s.owner: s.tiles for s in double.steps if s.tiles} == {s.owner: s.tiles for s in flat.steps if s.tiles}
        assert len({s.owner for s in double.steps}) == len(double.steps)
        assert all(s.distance == (rank - s.owner) % (nodes * places) for s in double.steps)
