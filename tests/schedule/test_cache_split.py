"""How a KV cache is split: every head of a token once, as many tokens on every rank, and what cannot be."""

import pytest

from bmburst.schedule.cache_split import CacheSplit
from tests.refusals import refused


@pytest.mark.parametrize("cache", ["auto", "tokens"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (12, 3), (7, 1), (40, 40)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_every_head_of_a_token_is_kept_once(ranks: int, heads: int, kv_heads: int, cache: str) -> None:
    splits = [CacheSplit.choose(cache, ranks, rank, heads, kv_heads) for rank in range(ranks)]
    for length in (0, 1, 5, 24, 25):
        kept = [
            (position, head)
            for split in splits
            for position in range(length)
            if position % split.token_groups == split.token_group
            for head in range(split.head_group * split.own_kv_heads, (split.head_group + 1) * split.own_kv_heads)
        ]
        assert sorted(kept) == [(position, head) for position in range(length) for head in range(kv_heads)]
        for split in splits:
            own = sum(position % split.token_groups == split.token_group for position in range(length))
            assert split.tokens(length) == own <= split.capacity(length)
    assert {split.own_heads * split.head_groups for split in splits} == {heads}
    shares = [split.share(50) for split in splits]
    assert [index for share in shares for index in range(share.start, share.stop)] == list(range(50))


@pytest.mark.parametrize(
    ("cache", "ranks", "kv_heads", "name", "groups"),
    [
        ("auto", 1, 8, "heads", (1, 1)),
        ("auto", 8, 8, "heads", (8, 1)),
        ("heads", 4, 8, "heads", (4, 1)),
        ("auto", 16, 8, "heads x tokens", (8, 2)),
        ("heads", 6, 8, "heads x tokens", (2, 3)),
        ("auto", 3, 8, "tokens", (1, 3)),
        ("tokens", 8, 8, "tokens", (1, 8)),
    ],
)
def test_the_split_that_a_name_asks_for(
    cache: str, ranks: int, kv_heads: int, name: str, groups: tuple[int, int]
) -> None:
    split = CacheSplit.choose(cache, ranks, ranks - 1, kv_heads * 4, kv_heads)
    assert (split.name, (split.head_groups, split.token_groups)) == (name, groups)


def test_the_bytes_are_those_of_the_formula() -> None:
    one = CacheSplit.choose("auto", 1, 0, 32, 8).nbytes(32, 1, 131_072, 128, 2)
    assert one == 2 * 32 * 131_072 * 8 * 128 * 2
    assert CacheSplit.choose("auto", 8, 3, 32, 8).nbytes(32, 1, 131_072, 128, 2) == one // 8
    row = 2 * 32 * 8 * 128 * 2  # one more, which a rank writes before it knows whose the token is
    assert CacheSplit.choose("tokens", 8, 3, 32, 8).nbytes(32, 1, 131_072, 128, 2) == one // 8 + row


def test_what_cannot_be_is_refused() -> None:
    with refused("cache", "'rows'", "auto | heads | tokens"):
        CacheSplit.choose("rows", 2, 0, 8, 8)
    with refused("cache 'heads'", "8 KV heads", "3 ranks", "--cache tokens"):
        CacheSplit.choose("heads", 3, 0, 8, 8)
