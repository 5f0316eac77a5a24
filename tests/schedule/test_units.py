"""Which heads are attended with at once."""

from itertools import pairwise

import pytest

from bmburst.schedule.tiles import Span
from bmburst.schedule.units import even_units, make_units, most_exchanged, most_gathered, records_kernels, unit_plans

SHARES = [(1, 1), (2, 1), (2, 2), (3, 1), (4, 4), (6, 2), (8, 8), (9, 3), (16, 1), (32, 8)]


def plans(heads, kv_heads, most=100, pace=0.0, backward=True, overlaps=True):
    return unit_plans(heads, kv_heads, most=min(most, kv_heads), pace=pace, backward=backward, overlaps=overlaps)


@pytest.mark.parametrize(("heads", "kv_heads"), SHARES)
@pytest.mark.parametrize("most", [1, 2, 100])
@pytest.mark.parametrize("backward", [True, False])
def test_units_cover_the_share_once(heads, kv_heads, most, backward):
    group = heads // kv_heads
    assert make_units(heads, kv_heads) == ((Span(0, heads), Span(0, kv_heads), Span(0, kv_heads)),)
    for counts in plans(heads, kv_heads, most, 0.05, backward):
        units = make_units(heads, kv_heads, counts)
        assert [len(unit.heads) for unit in units] == list(counts)
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
            if backward:
                assert unit.heads == Span(unit.kv_heads.start * group, unit.kv_heads.stop * group)
            assert len(unit.kv_heads) <= most


def test_all_heads_at_once_and_small_first_and_last_units_are_among_the_plans():
    """Nothing hides the way in of the first and the way home of the last; the rest is one call."""
    assert plans(8, 8) == ((8,), (1, 6, 1), (4, 4), (1, 7), (7, 1))
    assert plans(8, 2, backward=False) == ((8,), (4, 4), (2, 4, 2))
    assert plans(6, 2, backward=False)[-1] == (1, 4, 1)
    assert plans(7, 1, backward=False) == ((7,), (1, 5, 1))
    assert plans(8, 2) == ((8,), (4, 4))
    assert (1, 2, 2, 2, 1) in plans(8, 8, most=2)
    assert all(max(plan) <= 2 for plan in plans(8, 8, most=2))
    assert plans(8, 8, most=3, overlaps=False) == ((2, 3, 3),)
    assert plans(8, 8, overlaps=False) == ((8,),)


def test_units_come_in_while_those_before_them_are_attended_with():
    """A head's three tensors take 0.3 of the time that it is attended with: three come in meanwhile, and so on."""
    assert (1, 3, 10, 1, 1) in plans(16, 16, pace=0.1, backward=False)
    for pace in (0.0, 0.05, 0.1, 0.3, 2.0):
        for backward, ratio in ((False, 3 * pace), (True, 4 * pace / 2.5)):
            counts = plans(32, 32, pace=pace, backward=backward)[1]
            assert len(counts) <= 7
            done = 1
            for before, count in pairwise(counts):
                done += count
                assert ratio * (done - 1) <= done - count or count <= 2 * before


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
    assert plans(32, 8, pace=0.1)[1] == (4, 24, 4)
    assert plans(32, 8, pace=0.3)[1] == (4, 12, 12, 4)


def test_what_moves_in_one_step_is_bounded_by_memory():
    mib = 1 << 20
    assert [most_exchanged(32, 8, n * mib) for n in (20, 24, 100, 4096)] == [8, 7, 1, 1]  # of 6 n MiB each
    assert [most_gathered(8, n * mib) for n in (42, 43, 170, 4096)] == [8, 7, 2, 1]  # of 12 n MiB each


def test_kernels_are_recorded_where_boxes_stay_and_sums_are_small():
    assert records_kernels(True, 512 << 20)
    assert not records_kernels(True, (512 << 20) + 1)
    assert not records_kernels(False, 1)
