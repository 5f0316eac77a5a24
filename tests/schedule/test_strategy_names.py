"""A strategy's name means the same to attention, to the trainer's configuration and to the planner."""

from itertools import product

import pytest

from bmburst.schedule.parallelism import STRATEGIES, name_of

EVERYTHING = {"ring", "gather", "double-ring"}
# By hand: for 4 ranks, which numbers may exchange heads, what may go on between groups, what travels in backward.
ON_4_RANKS = {
    "auto": ({1, 2, 3, 4}, EVERYTHING, None),
    "heads": ({4}, {"ring"}, None),
    "gather": ({1}, {"gather"}, None),
    "ring": ({1}, {"ring"}, None),
    "kv": ({1}, {"ring"}, "kv"),
    "burst": ({1}, {"ring"}, "q"),
    "heads+ring": ({2, 3}, {"ring"}, None),
    "heads+gather": ({2, 3}, {"gather"}, None),
    "double-ring": ({1}, {"double-ring"}, None),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_name_asks_for_what_it_says(name):
    heads, outer, ring_tensors = ON_4_RANKS[name]
    asked = STRATEGIES[name]
    assert {degree for degree in range(1, 5) if asked.allows(degree, 4)} == heads
    for degree, between in product(range(1, 5), EVERYTHING):
        assert asked.fits(degree, 4, between) == (degree in heads and (degree == 4 or between in outer))
    assert {each for each in EVERYTHING if asked.needs(each)} == (outer if len(outer) == 1 else set())
    assert asked.ring_tensors == ring_tensors


@pytest.mark.parametrize("name", STRATEGIES)
def test_one_rank_is_alone_whatever_the_name(name):
    assert STRATEGIES[name].allows(1, 1) == (not name.startswith("heads+"))
    assert name_of(1, 1, "none") == "auto"


def test_a_way_has_the_name_that_asks_for_it():
    found = {(heads, outer): name_of(heads, 4, outer) for heads, outer in product((1, 2), sorted(EVERYTHING))}
    assert found == {
        (1, "ring"): "ring",
        (1, "gather"): "gather",
        (1, "double-ring"): "double-ring",
        (2, "ring"): "heads+ring",
        (2, "gather"): "heads+gather",
        (2, "double-ring"): "auto",  # has no name of its own
    }
    assert name_of(4, 4, "none") == name_of(2, 2, "none") == "heads"
