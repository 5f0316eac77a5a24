"""Which heads are attended with at once."""

from itertools import pairwise

import pytest

from bmburst.schedule.tiles import Span
from bmburst.schedule.units import even_units, make_units, most_exchanged, most_gathered, records_kernels

SHARES = [(1, 1), (2, 1), (2, 2), (3, 1), (4, 4), (6, 2), (8, 8), (9, 3), (16, 1), (32, 8)]


@pytest.mark.parametrize(("heads", "kv_heads"), SHARES)
@pytest.mark.parametrize("most", [0, 1, 2, 100])
@pytest.mark.parametrize("whole_groups", [True, False])
def test_units_cover_the_share_once(heads, kv_heads, most, whole_groups):
    units = make_units(heads, kv_heads, most=most, backward=whole_groups)
    group = heads // kv_heads
    assert [h for unit in units for h in range(*unit.heads)] == list(range(heads))
    assert [h for unit in units for h in range(*unit.new_kv_heads)] == list(range(kv_heads))
    arrived = 0
    for unit in units:
        arrived = max(arrived, unit.new_kv_heads.stop)
        assert unit.kv_heads.stop <= arrived
        # as one kernel call sees it: head h of the unit attends to KV head h // ratio of the unit
        ratio = len(unit.heads) / len(unit.kv_heads)
        wanted = [unit.kv_heads.start + int(i // ratio) for i in range(len(unit.heads))]
        assert [h // group for h in range(*unit.heads)] == wanted
        if whole_groups:
            assert unit.heads == Span(unit.kv_heads.start * group, unit.kv_heads.stop * group)
        assert most == 0 or heads == 1 or len(unit.kv_heads) <= max(most, 1)
    if most == 0:
        assert len(units) == 1


def test_first_and_last_unit_are_small():
    """Nothing hides the way in of the first and the way home of the last; the rest is one call."""
    assert [len(u.heads) for u in make_units(8, 8, most=8, backward=True)] == [1, 6, 1]
    assert [len(u.heads) for u in make_units(8, 2, most=8, backward=False)] == [2, 4, 2]
    assert [len(u.heads) for u in make_units(6, 2, most=8, backward=False)] == [1, 4, 1]
    assert [len(u.heads) for u in make_units(7, 1, most=8, backward=False)] == [1, 5, 1]
    assert [len(u.heads) for u in make_units(8, 2, most=8, backward=True)] == [4, 4]
    assert [len(u.heads) for u in make_units(8, 8, most=2, backward=True)] == [1, 2, 2, 2, 1]


def test_units_come_in_while_those_before_them_are_attended_with():
    """A head's three tensors take 0.3 of the time that it is attended with: three come in meanwhile, and so on."""
    units = make_units(16, 16, most=16, pace=0.1, backward=False)
    assert [len(unit.heads) for unit in units] == [1, 3, 10, 1, 1]
    for pace in (0.0, 0.05, 0.1, 0.3, 2.0):
        for backward, ratio in ((False, 3 * pace), (True, 4 * pace / 2.5)):
            units = make_units(32, 32, most=32, pace=pace, backward=backward)
            assert len(units) <= 7
            done = 1
            for before, unit in pairwise(units):
                done += len(unit.heads)
                is_in_time = ratio * (done - 1) <= done - len(unit.heads)
                assert is_in_time or len(unit.heads) <= 2 * len(before.heads)


@pytest.mark.parametrize("kv_heads", range(1, 9))
@pytest.mark.parametrize("most", range(10))
def test_units_of_a_gather_are_few_and_even(kv_heads, most):
    units = even_units(3 * kv_heads, kv_heads, most)
    assert [h for unit in units for h in range(*unit.kv_heads)] == list(range(kv_heads))
    assert [h for unit in units for h in range(*unit.heads)] == list(range(3 * kv_heads))
    assert all(len(unit.heads) == 3 * len(unit.kv_heads) for unit in units)
    sizes = [len(unit.kv_heads) for unit in units]
    assert max(sizes) <= (most or kv_heads)
    assert max(sizes) - min(sizes) <= 1
    assert len(units) == (-(-kv_heads // most) if most else 1)


def test_units_of_backward_are_as_large_as_come_in():
    """A KV head of 4 query heads brings 10 tensors of a head, and is attended with for 10 heads' forward."""
    assert [len(u.kv_heads) for u in make_units(32, 8, most=8, pace=0.1, backward=True)] == [1, 6, 1]
    assert [len(u.kv_heads) for u in make_units(32, 8, most=8, pace=0.3, backward=True)] == [1, 3, 3, 1]


def test_what_moves_in_one_step_is_bounded_by_memory():
    mib = 1 << 20
    assert [most_exchanged(32, 8, n * mib, hides=True) for n in (20, 24, 100, 4096)] == [8, 7, 1, 1]  # of 6 n MiB each
    assert [most_exchanged(32, 8, n * mib, hides=False) for n in (20, 24, 100, 4096)] == [0, 7, 1, 1]
    assert [most_gathered(8, n * mib, hides=True) for n in (1, 100, 170, 4096)] == [4, 3, 2, 1]  # of 12 n MiB each
    assert [most_gathered(8, n * mib, hides=False) for n in (42, 43, 170, 4096)] == [0, 7, 2, 1]


def test_kernels_are_recorded_where_boxes_stay_and_sums_are_small():
    assert records_kernels("peer", 512 << 20)
    assert not records_kernels("peer", (512 << 20) + 1)
    assert not any(records_kernels(transport, 1) for transport in ("nccl", "gloo", "threads"))
