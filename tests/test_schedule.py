"""Every schedule is the mask: each allowed (query, key) pair exactly once, no other pair, by brute force."""

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmburst.errors import UserError
from bmburst.layout import LAYOUTS, Layout, Run, make_layout, padded_layout, real_tokens
from bmburst.schedule import (
    AttentionShape,
    Tile,
    backward_bytes,
    choose_travellers,
    forward_bytes,
    make_schedule,
)


def positions(layout, rank):
    return [run.start + i * run.stride for run in layout.runs(rank) for i in range(run.tokens)]


def pairs(tile: Tile):
    hidden = len(tile.keys) - len(tile.queries)
    for row, query in enumerate(range(*tile.queries)):
        for column, key in enumerate(range(*tile.keys)):
            if not tile.causal or column <= row + hidden:
                yield query, key


@given(
    name=st.sampled_from(sorted(LAYOUTS)),
    size=st.integers(1, 8),
    extra=st.integers(0, 40),
    mask=st.sampled_from(["causal", "full"]),
    travellers=st.sampled_from(["kv", "q"]),
)
@settings(max_examples=300, deadline=None)
def test_schedule_is_exactly_the_mask(name, size, extra, mask, travellers):
    length = size + extra
    check_every_pair(padded_layout(name, size, length), length, mask, travellers)


@dataclass(frozen=True, slots=True)
class Lopsided(Layout):
    """Runs of unlike lengths that interleave: what the layouts of the package never need, and another may."""

    name: ClassVar[str] = "lopsided"

    def runs(self, rank):
        half = self.tokens // 2
        return [
            (Run(0, 0, 2, self.tokens),),
            (Run(0, 1, 2, half), Run(half, 1 + 2 * half, 2, self.tokens - half)),
        ][rank]


@pytest.mark.parametrize("length", range(2, 15))
@pytest.mark.parametrize("travellers", ["kv", "q"])
def test_another_layout_needs_no_change_here(length, travellers):
    check_every_pair(Lopsided(2, 7), length, "causal", travellers)


def check_every_pair(layout, length, mask, travellers):
    size, seen = layout.size, Counter()
    for rank in range(size):
        schedule = make_schedule(layout, length, mask, rank, travellers)
        assert [step.owner for step in schedule.steps] == [(rank - t) % size for t in range(size)]
        area = 0
        for owner, tiles in schedule.steps:
            query_rank, key_rank = (rank, owner) if travellers == "kv" else (owner, rank)
            queries, keys = positions(layout, query_rank), positions(layout, key_rank)
            for tile in tiles:
                assert len(tile.keys) >= len(tile.queries) or not tile.causal
                visible = list(pairs(tile))
                assert tile.area == len(visible) > 0
                area += len(visible)
                seen.update((queries[q], keys[k]) for q, k in visible)
        assert schedule.area == area
    wanted = {(q, k): 1 for q in range(length) for k in range(q + 1 if mask == "causal" else length)}
    assert seen == wanted


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_layout_is_a_permutation_in_ascending_local_order(name, size):
    layout = make_layout(name, size, tokens=6)
    local = [positions(layout, rank) for rank in range(size)]
    assert all(part == sorted(part) and len(part) == 6 for part in local)
    assert sorted(position for part in local for position in part) == list(range(6 * size))


def test_where_each_layout_puts_tokens():
    """The orders that other programs know by these names: their data must fit."""
    held = {name: [positions(make_layout(name, 3, 4), rank) for rank in range(3)] for name in LAYOUTS}
    assert held == {
        "contiguous": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]],
        "zigzag": [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]],
        "striped": [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]],
    }


@pytest.mark.parametrize("name", ["zigzag", "striped"])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_causal_work_is_balanced_to_a_diagonal(name, size):
    layout = make_layout(name, size, tokens=32)
    areas = [make_schedule(layout, 32 * size, "causal", rank, "kv").area for rank in range(size)]
    assert max(areas) - min(areas) <= size * 32


def test_zigzag_needs_one_call_a_step():
    layout = make_layout("zigzag", 4, tokens=8)
    for rank in range(4):
        assert all(len(step.tiles) == 1 for step in make_schedule(layout, 32, "causal", rank, "kv").steps)


@given(name=st.sampled_from(sorted(LAYOUTS)), size=st.integers(1, 6), extra=st.integers(0, 30))
def test_padding_is_a_suffix_and_as_short_as_it_can_be(name, size, extra):
    length = size + extra
    layout = padded_layout(name, size, length)
    assert 0 <= layout.size * layout.tokens - length < size * layout.chunks
    for rank in range(size):
        real = real_tokens(layout, rank, length)
        assert [p < length for p in positions(layout, rank)] == [i < real for i in range(layout.tokens)]


def test_unknown_and_impossible_layouts_are_refused():
    with pytest.raises(UserError, match="did you mean 'zigzag'"):
        make_layout("zigzga", 2, 4)
    with pytest.raises(UserError, match="multiple of 2 tokens a rank, got 5"):
        make_layout("zigzag", 2, 5)
    with pytest.raises(UserError, match="3 tokens cannot be split over 4 ranks"):
        padded_layout("striped", 4, 3)
    with pytest.raises(UserError, match="at least 1 rank and 1 token a rank, got 0 and 4"):
        make_layout("striped", 0, 4)
    with pytest.raises(UserError, match="unknown layout 'None'"):
        padded_layout(None, 2, 4)
    with pytest.raises(UserError, match="unknown mask 'causl'; did you mean 'causal'"):
        make_schedule(make_layout("zigzag", 2, 4), 8, "causl", 0, "kv")


def test_a_schedule_is_made_once_and_is_its_own():
    """Cached by value: layouts of one size do not share a schedule."""
    first = make_schedule(make_layout("zigzag", 2, 4), 8, "causal", 0, "kv")
    assert make_schedule(make_layout("zigzag", 2, 4), 8, "causal", 0, "kv") is first
    assert make_schedule(make_layout("striped", 2, 4), 8, "causal", 0, "kv") != first
    assert "causal=True" in repr(first)


def test_full_and_diagonal_work_is_one_call():
    for name in LAYOUTS:
        layout = make_layout(name, 4, tokens=8)
        for rank in range(4):
            assert all(len(step.tiles) == 1 for step in make_schedule(layout, 32, "full", rank, "kv").steps)
            assert len(make_schedule(layout, 32, "causal", rank, "q").steps[0].tiles) == 1


def test_bytes_follow_the_published_break_even():
    """prior work: queries travel for less than keys where heads / kv_heads is below about 1.49 (fp32 gradients)."""
    shape = AttentionShape(batch=1, tokens=1024, heads=32, kv_heads=32, head_dim=128)
    assert choose_travellers(shape, 64) == "q"
    assert forward_bytes(shape, 4) == 3 * 2 * 1024 * 32 * 128 * 2
    for heads, kv_heads, travellers in ((47, 32, "q"), (48, 32, "kv"), (32, 8, "kv")):
        grouped = AttentionShape(batch=1, tokens=1024, heads=heads, kv_heads=kv_heads, head_dim=128)
        assert choose_travellers(grouped, 1000) == travellers
        assert backward_bytes(grouped, 1, "kv") == backward_bytes(grouped, 1, "q") == 0
        assert choose_travellers(grouped, 1) == "q"  # a tie
