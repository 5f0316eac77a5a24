"""Which cases are left to `make test-long`, and that the others hold every pair."""

from itertools import combinations, product

import pytest

from tests.pairs import in_turn, long, pairwise, part
from tests.refusals import refused

AXES = ([1, 2, 3, 4], ["a", "b", "c"], [True, False], ["x", "y", "z"], [None, 5])


def short(cases):
    return [case.values for case in cases if not case.marks]


def test_all_combinations_are_there_once_and_pairs_are_not_long():
    cases = pairwise(*AXES)
    assert [case.values for case in cases] == list(product(*AXES))
    few = short(cases)
    for i, j in combinations(range(len(AXES)), 2):
        assert {(case[i], case[j]) for case in few} == set(product(AXES[i], AXES[j]))
    assert len(few) <= 16  # of 144; 12 pairs of the first two


def test_a_tuple_is_the_values_of_several_parameters():
    assert [case.values for case in pairwise([(1, 2), (3, 4)], "ab")] == [
        (1, 2, "a"), (1, 2, "b"), (3, 4, "a"), (3, 4, "b"),
    ]  # fmt: skip


@pytest.mark.parametrize("axes", [AXES, AXES[:2], AXES[1:3], AXES[:1]])
def test_every_value_has_its_turn(axes):
    cases = in_turn(*axes)
    assert [case.values for case in cases] == list(product(*axes))
    for axis, seen in zip(axes, zip(*short(cases), strict=True), strict=True):
        assert set(seen) == set(axis)


def test_what_is_long_is_marked():
    assert [case.values for case in long(4, (1, 2))] == [(4,), (1, 2)]
    assert not short(long(4, (1, 2)))


@pytest.mark.parametrize("text", ["", "2", "4/3", "0/3", "1/0", "-1/3", "1/3/3", "a/b", "1.5/3"])
def test_a_part_that_is_none_is_refused(text):
    with refused(repr(text), "K/N", "1 to N", error=pytest.UsageError):
        part(text)
    assert part("2/3") == (2, 3)
