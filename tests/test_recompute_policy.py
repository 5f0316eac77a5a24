"""Names of recompute policies, and their formulas."""

from dataclasses import replace

import pytest
import torch

from bmburst.recompute import checkpoint
from bmburst.recompute.policy import AUTO, POLICIES, BlockBytes, Policy
from bmburst.train.config import ParallelConfig, TrainConfig
from tests.refusals import refused

BLOCK = BlockBytes(input=100.0, attended=40.0, rest=1000.0)


MORE = ["block-keep-attention:0.25", "block-keep-attention:0.9+offload", "block+first-3", "block+offload+first-1"]
MORE += ["block-keep-attention:0.5+offload-all+first-2"]


@pytest.mark.parametrize("name", [*POLICIES, *MORE])
def test_names_are_read_and_written(name):
    policy = Policy.parse(name)
    assert policy.name == name and Policy.parse(policy.name) == policy
    config = TrainConfig(recompute=name)
    assert config.recompute == name


@pytest.mark.parametrize("given", [torch.nn.Linear(2, 2), torch.relu], ids=["module", "function"])
def test_a_function_in_place_of_the_policy_is_named_by_its_type(given):
    """As in torch's order of arguments: a module's text has a line for each of its layers."""
    with refused(f"got {type(given).__name__}", "policy first", "fix: ", lines=2) as caught:
        checkpoint(given, torch.ones(2))
    assert "in_features" not in str(caught.value)


def test_fields_are_the_same_as_names():
    fields = Policy(attention=0.5, offload="inputs", layers=3)
    for name in ("block-keep-attention:0.5+offload+first-3", "block-keep-attention:0.5+first-3+offload"):
        assert Policy.parse(name) == fields
    assert fields.name == "block-keep-attention:0.5+offload+first-3" and Policy.parse(fields) is fields


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"attention": 1.5}, "keeps attention of 1.5 | fraction"),
        ({"every": 0}, "number of layers | 1"),
        ({"every": 2.5}, "every 2.5 | whole number"),
        ({"every": "4"}, "every '4' | whole number | fix: Policy(every=1)"),
        ({"layers": True}, "layers True | whole number"),
        ({"attention": "0.5"}, "attention '0.5' | a number"),
        ({"layers": 0}, "number of layers | 1"),
        ({"offloads_mlp": -1}, "'block+offload-mlp-first--1' | number of layers"),
        ({"recomputes": False, "attention": 1.0}, "'none' | keeps everything | fix: block"),
        ({"layers": 2, "keeps_last": 1}, "'block+keep-attention-last-1+first-2' | alone"),
        ({"offload": "all"}, "'block+offload-all' | only inputs | fix: block+offload"),
    ],
)
def test_fields_that_cannot_be(fields, words):
    with refused("recompute policy", words):
        Policy(**fields)
    with refused("offload", "'input'", "inputs"):
        Policy(offload="input")


PART = "allowed: | above 0 and below 1 | fix: block-keep-attention:0.5, or block-keep-attention for all"
FIRST = "layers behind +first- | allowed: 1 | of the model | fix: +first-4"
REFUSALS = {
    "blok": "recompute | 'blok' | 'block' | known: ",
    "block+offlod": "recompute | 'block+offlod' | 'block+offload' | known: ",
    "block-keep-attention:": f"{PART} | ''",
    "block-keep-attention:1": f"{PART} | '1'",
    "block-keep-attention:0": f"{PART} | '0'",
    "block-keep-attention:nan": f"{PART} | 'nan'",
    "block-keep-attention:half": f"{PART} | 'half'",
    "block:0.5": "'block' | no attention | fix: block-keep-attention:0.5",
    "none:0.5": "'none' | no attention | fix: block-keep-attention:0.5",
    "none+offload": "'none+offload' | everything | fix: block+offload, or none",
    "block+offload-all": "'block+offload-all' | inputs | fix: block+offload",
    "block+": "recompute policy | 'block+' | 'block' | known: ",
    "none+first-3": "everything | fix: block+first-3, or none",
    "block+first-0": f"'0' | {FIRST}",
    "block+first-": f"'' | {FIRST}",
    "block+first-2.5": f"'2.5' | {FIRST}",
    "block+first-1_0": f"'1_0' | {FIRST}",
    "block+first-3+first-3": "'block+first-3+first-3' | 'first-3' twice",
    "block+offload+offload-all": "'block+offload+offload-all' | 'offload-all' twice",
    "block+first": "recompute policy | 'block+first' | 'block' | known: ",
    "blok+first-3": "recompute | 'block' | known: ",
    "": "recompute policy | '' | known: ",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_names_are_refused_with_the_fix(name):
    with refused(REFUSALS[name]):
        Policy.parse(name)
    with refused("recompute", f"'{name.partition('+first')[0]}"):
        TrainConfig(recompute=name)


@pytest.mark.parametrize("count", [4, 5])
def test_more_first_layers_than_the_model_has_are_refused(count):
    name = f"block+offload+first-{count}"
    with refused(f"'{name}'", "4 layers", "fix: block+offload", "block+offload+first-1 to +first-3"):
        TrainConfig(preset="llama-tiny", recompute=name)
    with refused("1 layers", "fix: block") as caught:
        Policy.parse("block+first-1").require_layers(1)
    assert "fewer" not in str(caught.value)
    Policy.parse("block").require_layers(1)


def test_policies_by_segments():
    policy = Policy.parse("block+every-4+keep-attention-last-3+offload-first-5")
    assert policy.name == "block+every-4+keep-attention-last-3+offload-first-5" and policy.is_of_model
    layers = policy.of_layers(10)
    assert [i for i, each in enumerate(layers) if each.is_stored] == [0, 4, 8]
    assert [i for i, each in enumerate(layers) if not each.feeds_next] == [3, 7, 9]
    assert [each.attention for each in layers] == [0.0] * 7 + [1.0] * 3
    assert [each.offload for each in layers] == ["inputs", *["nothing"] * 3, "inputs", *["nothing"] * 5]
    per_layer = [(each.kept(BLOCK), each.hosted(BLOCK)) for each in layers]
    inputs, attended = BLOCK.input, BLOCK.attended
    assert per_layer == [
        *[(0, inputs), (0, 0), (0, 0), (0, 0)] * 1,
        *[(0, inputs), (0, 0), (0, 0), (attended, 0)],
        *[(inputs + attended, 0), (attended, 0)],
    ]
    assert sum(count for _, count in policy.kinds(10)) == 10
    assert all(each.is_stored and not each.feeds_next for each in Policy.parse("block+every-1").of_layers(3))
    assert layers[0].waiting(BLOCK, 10.0, 100.0, 100.0) == (0, inputs / 10)  # nothing fetched it ahead
    offloading = Policy.parse("block+offload+every-2").of_layers(3)
    assert [each.hosted(BLOCK) for each in offloading] == [inputs, 0, inputs]


def test_attention_in_host_memory():
    name = "block+every-2+keep-attention-last-4+offload-first-6+offload-attention-first-4"
    policy, inputs, attended = Policy.parse(name), BLOCK.input, BLOCK.attended
    assert policy.name == name and policy.offloads
    layers = policy.of_layers(6)
    hosted = [inputs, 0, inputs + attended, attended, inputs, 0]
    assert [each.hosted(BLOCK) for each in layers] == hosted
    assert [each.kept(BLOCK) for each in layers] == [0, 0, 0, 0, attended, attended]
    assert [each.attention for each in layers] == [0, 0, 1, 1, 1, 1]
    # Backward waits for the input of a segment; attention's results arrive while inputs are computed again.
    assert layers[2].waiting(BLOCK, 10.0, 100.0, 100.0) == (0, inputs / 10)
    assert layers[3].waiting(BLOCK, 10.0, 100.0, 100.0) == (0, 0)
    assert layers[3].waiting(BLOCK, 1.0, 1.0, 1.0) == (attended - 1, attended - 1)
    whole = Policy.parse("block-keep-attention+offload-first-2+offload-attention-first-1").of_layers(3)
    assert [each.hosted(BLOCK) for each in whole] == [inputs + attended, inputs, 0]


def test_outputs_of_an_mlp_in_host_memory():
    name = "block-keep-attention+offload-first-1+offload-mlp-first-2"
    policy, block = Policy.parse(name), replace(BLOCK, mlp=70.0)
    assert policy.name == name and policy.offloads and policy.is_of_model and not policy.is_uniform
    layers = policy.of_layers(3)
    assert [each.hosted(block) for each in layers] == [block.input + block.mlp, block.mlp, 0]
    assert [each.kept(block) for each in layers] == [block.attended, *[block.input + block.attended] * 2]
    with refused("tensor parallelism 2", "fix: block-keep-attention+offload-first-1,"):
        policy.require_tensor(2)
    mostly = Policy.parse("block-keep-attention+offload-mlp-first-2+first-2")
    assert [i for i in range(5) if mostly.prefetches(i, 5)] == [2]
    assert not any(mostly.prefetches(i, 4) for i in range(4))  # too little memory is free by then
    assert not any(Policy.parse("block+first-2").prefetches(i, 5) for i in range(5))
    assert not any(Policy.parse("block+offload").prefetches(i, 5) for i in range(5))
    first = Policy.parse("block-keep-attention+first-2+offload-mlp-first-1")  # the third layer keeps all on the GPU
    assert first.name == "block-keep-attention+offload-mlp-first-1+first-2" and Policy.parse(first.name) == first
    assert [each.hosted(block) for each in first.of_layers(3)] == [block.mlp, 0, 0]
    assert [each.recomputes for each in first.of_layers(3)] == [True, True, False]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("block+every-2+offload-mlp-first-2", ("+every-", "+offload-mlp-first-")),
        ("block-keep-attention+offload-mlp-first-3+first-2", ("+first-", "+offload-mlp-first-2")),
        ("block-keep-attention+offload-first-1+offload-mlp-first-1+first-2", ("+first- beside", "alone")),
        ("block+every-0", ("'0' layers", "every")),
        ("block+every-x", ("'x' layers",)),
        ("none+every-3", ("keeps everything", "block+every-3")),
        ("block+every-2+first-3", ("+first- beside", "alone")),
        ("block-keep-attention+keep-attention-last-2", ("keeps attention in all",)),
        ("block+offload+offload-first-2", ("offloads all",)),
        ("block-keep-attention:0.5+every-2", ("recompute inputs", "block+every-2")),
        ("block-keep-attention+offload-all+every-2", ("recompute inputs",)),
        ("block+every-2+every-3", ("twice",)),
        ("block+keep-attention-last-2+offload-attention-first-2", ("inputs", "+offload-first-2")),
        ("block+offload-first-2+offload-attention-first-1", ("keeps no attention",)),
        ("block+evry-3", ("unknown", "known: block")),
    ],
)
def test_options_that_cannot_be(name, words):
    with refused(name, *words, "fix: "):
        Policy.parse(name)


def test_tensor_ranks_compute_no_inputs_again():
    Policy.parse("block+every-2").require_tensor(1)
    Policy.parse("block+keep-attention-last-2").require_tensor(2)
    with refused("block+every-2", "tensor parallelism 2", "fix: block,"):
        Policy.parse("block+every-2").require_tensor(2)
    config = TrainConfig(recompute="block+every-2", parallel=ParallelConfig(tensor_parallel=2))
    with refused("tensor parallelism 2", "fix: "):
        config.validate(2)


def test_a_call_alone_takes_no_policy_of_a_model():
    with refused("block+every-2", "fix: block"):
        checkpoint("block+every-2", lambda x: x, torch.ones(2, requires_grad=True))


def test_each_layer_has_its_policy():
    policy = Policy.parse("block-keep-attention:0.5+offload+first-2")
    first, last = Policy.parse("block-keep-attention:0.5+offload"), Policy.parse("none")
    assert policy.of_layers(5) == (first, first, last, last, last)
    assert policy.kinds(5) == ((first, 2), (last, 3)) and first.kinds(5) == ((first, 5),)
    assert policy.kept(BLOCK) == first.kept(BLOCK) and policy.hosted(BLOCK) == first.hosted(BLOCK)
    with refused("2 layers", "fix: block-keep-attention:0.5+offload"):
        policy.of_layers(2)


def test_auto_is_for_those_who_know_the_step():
    assert TrainConfig(recompute=AUTO).recompute == AUTO
    TrainConfig(recompute=AUTO).validate(2)
    with refused("'auto'", "fix: block-keep-attention"):
        Policy.parse(AUTO)
    with refused("'3'", "known: "):
        Policy.parse(3)


def test_a_part_of_attention_needs_a_layout_that_shares_it():
    def check(fraction, layout, ranks):
        config = TrainConfig(recompute=f"block-keep-attention:{fraction}", parallel=ParallelConfig(layout=layout))
        config.validate(ranks)

    check(0.5, "zigzag", 4)
    check(0.3, "striped", 4)
    check(0.3, "zigzag", 1)
    for fraction, layout in ((0.3, "zigzag"), (0.5, "contiguous"), (0.5, "balanced")):
        with refused(f"layout '{layout}'", "fix: recompute policy block-keep-attention", "striped"):
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
        assert policy.waiting(BLOCK, 10.0, 100.0, 100.0) == (0, 0)
        assert policy.waiting(BLOCK, 10.0, 3.0, 8.0) == (max(0, hosted / 10 - 3), max(0, hosted / 10 - 8))
