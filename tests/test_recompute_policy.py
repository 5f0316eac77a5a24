"""Names of recompute policies, and their formulas."""

import pytest

from bmburst.errors import UserError
from bmburst.recompute.policy import AUTO, POLICIES, BlockBytes, Policy
from bmburst.train.config import ParallelConfig, TrainConfig

BLOCK = BlockBytes(input=100.0, attended=40.0, rest=1000.0)


MORE = ["block-keep-attention:0.25", "block-keep-attention:0.9+offload", "block+first-3", "block+offload+first-1"]
MORE += ["block-keep-attention:0.5+offload-all+first-2"]


@pytest.mark.parametrize("name", [*POLICIES, *MORE])
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
    "none+first-3": "keeps everything in all layers\nfix: block-keep-attention+first-3, or none",
    "block+first-0": "is to hold for the first '0' layers\nallowed: 1 and more",
    "block+first-": "allowed: 1 and more, below the model's layers",
    "block+first-2.5": "fix: block+first-1, or block for all",
    "block+first-1_0": "allowed: 1 and more",
    "block+first-3+offload": "at the very end",
    "block+first-3+first-3": "at the very end",
    "block+first": "unknown recompute policy",
    "blok+first-3": "did you mean 'block'?",
    "": "unknown recompute policy",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_names_are_refused_with_the_fix(name):
    with pytest.raises(UserError) as caught:
        Policy.parse(name)
    assert REFUSALS[name] in str(caught.value) and len(str(caught.value).splitlines()) <= 3
    with pytest.raises(UserError):
        TrainConfig(recompute=name)


@pytest.mark.parametrize("count", [4, 5])
def test_more_first_layers_than_the_model_has_are_refused(count):
    message = (
        f"recompute policy 'block\\+offload\\+first-{count}' names all of the model's 4 layers, or more\nfix: block"
    )
    with pytest.raises(UserError, match=message) as caught:
        TrainConfig(preset="llama-tiny", recompute=f"block+offload+first-{count}")
    assert str(caught.value).endswith("or fewer: block+offload+first-1 to +first-3")
    with pytest.raises(
        UserError, match=r"all of the model's 1 layers, or more\nfix: block, which holds for all of them$"
    ):
        Policy.parse("block+first-1").require_layers(1)
    Policy.parse("block").require_layers(1)


def test_each_layer_has_its_policy():
    policy = Policy.parse("block-keep-attention:0.5+offload+first-2")
    first, last = Policy.parse("block-keep-attention:0.5+offload"), Policy.parse("none")
    assert policy.of_layers(5) == (first, first, last, last, last)
    assert policy.kinds(5) == ((first, 2), (last, 3)) and first.kinds(5) == ((first, 5),)
    assert policy.kept(BLOCK) == first.kept(BLOCK) and policy.hosted(BLOCK) == first.hosted(BLOCK)
    with pytest.raises(UserError, match=r"fix: block-keep-attention:0\.5\+offload, which"):
        policy.of_layers(2)


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
