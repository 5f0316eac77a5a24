"""Names of recompute policies, and their formulas."""

import pytest

from bmburst.errors import UserError
from bmburst.recompute_policy import AUTO, POLICIES, BlockBytes, Policy
from bmburst.train.config import ParallelConfig, TrainConfig

BLOCK = BlockBytes(input=100.0, attended=40.0, rest=1000.0)


@pytest.mark.parametrize("name", [*POLICIES, "block-keep-attention:0.25", "block-keep-attention:0.9+offload"])
def test_names_are_read_and_written(name):
    policy = Policy.parse(name)
    assert policy.name == name and Policy.parse(policy.name) == policy
    config = TrainConfig(recompute=name)
    assert config.recompute == name


REFUSALS = {
    "blok": "did you mean 'block'?",
    "block+offlod": "did you mean 'block+offload'",
    "block-keep-attention:": "allowed: above 0 and below 1",
    "block-keep-attention:1": "fix: block-keep-attention:0.5, or block-keep-attention for all",
    "block-keep-attention:0": "allowed: above 0 and below 1",
    "block-keep-attention:nan": "allowed: above 0 and below 1",
    "block-keep-attention:half": "allowed: above 0 and below 1",
    "block:0.5": "'block' keeps no attention",
    "none:0.5": "'none' keeps no attention",
    "none+offload": "keeps everything",
    "block+offload-all": "fix: block+offload",
    "block+": "unknown recompute policy",
    "": "unknown recompute policy",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_names_are_refused_with_the_fix(name):
    with pytest.raises(UserError) as caught:
        Policy.parse(name)
    assert REFUSALS[name] in str(caught.value) and len(str(caught.value).splitlines()) <= 3
    with pytest.raises(UserError):
        TrainConfig(recompute=name)


def test_auto_is_for_those_who_know_the_step():
    assert TrainConfig(recompute=AUTO).recompute == AUTO
    TrainConfig(recompute=AUTO).validate(2)
    with pytest.raises(UserError, match="fix: block-keep-attention"):
        Policy.parse(AUTO)
    with pytest.raises(UserError):
        Policy.parse(3)


def test_a_part_of_attention_needs_a_layout_that_shares_it():
    def check(fraction, layout, ranks):
        config = TrainConfig(recompute=f"block-keep-attention:{fraction}", parallel=ParallelConfig(layout=layout))
        config.validate(ranks)

    check(0.5, "zigzag", 4)
    check(0.3, "striped", 4)
    check(0.3, "zigzag", 1)
    for fraction, layout in ((0.3, "zigzag"), (0.5, "contiguous"), (0.5, "balanced")):
        with pytest.raises(UserError, match=f"layout '{layout}'"):
            check(fraction, layout, 4)


KEPT = {  # on the GPU, in host memory, seconds again
    "none": (1140, 0, 0),
    "block": (100, 0, 15),
    "block-keep-attention": (140, 0, 5),
    "block-keep-attention:0.5": (120, 0, 7),
    "block+offload": (0, 100, 15),
    "block-keep-attention+offload": (40, 100, 5),
    "block-keep-attention:0.5+offload": (20, 100, 7),
    "block-keep-attention+offload-all": (0, 140, 5),
    "block-keep-attention:0.5+offload-all": (0, 120, 7),
}


def test_each_policy_costs_what_its_table_says():
    assert set(KEPT) == set(POLICIES)
    for name, (kept, hosted, again) in KEPT.items():
        policy = Policy.parse(name)
        assert policy.kept(BLOCK) == kept and policy.hosted(BLOCK) == hosted, name
        assert policy.again(5.0, 10.0, 2.0) == again, name
        assert policy.visiting(BLOCK, 9, backward=False) == hosted == policy.visiting(BLOCK, 1, backward=True)
        assert policy.visiting(BLOCK, 9, backward=True) == 2 * hosted
        assert policy.waiting(BLOCK, 10.0, 100.0, 100.0) == 0
        assert policy.waiting(BLOCK, 10.0, 3.0, 8.0) == max(0, hosted / 10 - 3) + max(0, hosted / 10 - 8)
