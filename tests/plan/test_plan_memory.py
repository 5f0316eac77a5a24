"""Predicted memory against the bytes that the real model holds, and against the plans that the executors obey."""

import json
from dataclasses import replace
from math import prod

import pytest

from bmburst.blocks import config as block_config
from bmburst.blocks.config import LoRAConfig
from bmburst.blocks.presets import preset
from bmburst.checkpoint.hugging_face import expected_shapes, is_matrix
from bmburst.plan.buffers import AttentionMemory, attention_buffers
from bmburst.plan.candidates import Candidate, Offload, Task
from bmburst.plan.counts import PLAIN, adapter_elements, block_matrices, four_bit_saving, held_block
from bmburst.plan.memory import _peak as remembered
from bmburst.plan.memory import memory_of
from bmburst.schedule.hardware import load_hardware
from bmburst.schedule.heads_plan import Strides, make_heads_plan
from bmburst.schedule.layout import make_layout
from bmburst.schedule.units import HeadShapes
from bmburst_ops import nf4
from tests import tiny
from tests.distributed.programs import run_program
from tests.pairs import selected
from tests.plan.program import after_frozen_forward, measure_all, measure_heads, measure_in_4bit

HARDWARE = load_hardware("h200")
# Changes of a tiny model, as data for the process that measures.
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 200,
    "num_layers": 3,
    "head_dim": 10,
    "max_position_embeddings": 1 << 20,
}
MINICPM = {"scale_emb": 3.0, "scale_depth": 2.0, "dim_model_base": 16}
POLICIES = [("none", "bfloat16"), ("block", "bfloat16"), ("block-keep-attention", "bfloat16"), ("none", "float32")]
MORE = [
    ("none", {"mlp_chunk": 84}),
    ("block", {"mlp_chunk": 84}),
    ("block-keep-attention", {"mlp_chunk": 84}),
    ("block-keep-attention:0.5", {}),
    ("block+offload", {}),
    ("block-keep-attention+offload", {"mlp_chunk": 84}),
    ("block-keep-attention:0.5+offload-all", {}),
    ("block-keep-attention+offload-all", {"mlp_chunk": 84}),
    ("block-keep-attention+first-1", {"mlp_chunk": 84, "within": 1e-3}),
    ("block-keep-attention:0.5+offload-all+first-1", {"within": 1e-3}),
    ("block+offload+first-2", {"mlp_chunk": 84, "within": 1e-3}),
    ("block+every-2", {"mlp_chunk": 84}),
    ("block+every-3", {"mlp_chunk": 84}),
    ("block+keep-attention-last-1+offload-first-1", {"mlp_chunk": 84}),
    ("block+every-2+offload-first-3", {"mlp_chunk": 84}),
    ("block+every-2+keep-attention-last-2", {"mlp_chunk": 84}),
    ("block+every-2+keep-attention-last-2+offload-first-3+offload-attention-first-2", {"mlp_chunk": 84}),
    ("block-keep-attention+every-3+offload-first-3+offload-attention-first-3", {"mlp_chunk": 84}),
    ("block+keep-attention-last-2+offload-first-3+offload-attention-first-2", {"mlp_chunk": 84}),
    ("block-keep-attention+offload-mlp-first-3", {"mlp_chunk": 84}),
    ("block-keep-attention+offload-mlp-first-3", {}),
    ("block-keep-attention+offload-mlp-first-2+first-2", {}),
    ("block+offload+offload-mlp-first-2", {"mlp_chunk": 84}),
    ("block-keep-attention+offload+offload-mlp-first-1", {"dtype": "float32"}),
]
PARTS = (
    *("block+every-3", "block+every-2+offload-first-3", "block+every-2+keep-attention-last-2"),
    *("block-keep-attention:0.5+offload-all", "block-keep-attention+offload-mlp-first-3"),
)
TARGETS = (("q_proj", "v_proj"), ("all-linear",))
CASES = [
    {"model": SHAPE, "recompute": recompute, "zero": 3, "dtype": dtype, "tokens": 334, "loss_chunk": 64}
    for recompute, dtype in POLICIES
] + [
    {"model": SHAPE | {"tie_embeddings": True}, "recompute": "block-keep-attention", "zero": 2, "dtype": "float32",
     "tokens": 334, "loss_chunk": 64},
    *({"model": SHAPE, "recompute": recompute, "zero": 3, "dtype": "bfloat16", "tokens": 334, "loss_chunk": 64} | more
      for recompute, more in MORE),
    *({"model": SHAPE | MINICPM, "recompute": "block", "zero": 3, "dtype": "bfloat16", "tokens": 334, "loss_chunk": 64}
      | more for more in ({}, {"mlp_chunk": 84})),
    {"model": SHAPE | {"qk_norm": True}, "recompute": "none", "zero": 3, "dtype": "bfloat16", "tokens": 334,
     "loss_chunk": 64},
    *({"model": SHAPE, "recompute": recompute, "zero": 3, "dtype": "bfloat16", "tokens": 334, "loss_chunk": 64,
       "lora": {"rank": 2, "targets": targets}} | more
      for recompute, more in (("block", {}), ("block", {"mlp_chunk": 84}), ("block-keep-attention", {"mlp_chunk": 84}),
                              ("block+every-2", {"mlp_chunk": 84}), ("block+offload", {"mlp_chunk": 84}),
                              ("none", {}), ("none", {"mlp_chunk": 84}), ("block-keep-attention+first-1", {}))
      for targets in TARGETS),
    *({"model": SHAPE, "recompute": "none", "zero": 3, "dtype": "bfloat16", "tokens": 334, "loss_chunk": 64,
       "lora": {"rank": 2, "targets": targets}} for targets in (("o_proj", "down_proj"), ("gate_proj",))),
]  # fmt: skip
BOTH_TARGETS = [i for i, case in enumerate(CASES) if case.get("lora", {}).get("targets") in TARGETS]
LONG = {i for place, i in enumerate(BOTH_TARGETS) if (place + place // 2) % 2} | {
    i for i, case in enumerate(CASES) if case["recompute"] in PARTS and "lora" not in case
}
"""Cases with adapters of which each policy and each choice of targets is in another, and parts of other policies."""
TENSOR_CASES = [
    {"model": SHAPE, "recompute": recompute, "zero": 3, "dtype": "bfloat16", "tokens": 334, "loss_chunk": 64,
     "mlp_chunk": chunk}
    for recompute, chunk in (("none", 84), ("none", 0), ("block", 84), ("block-keep-attention+first-1", 0))
]  # fmt: skip
FEW_TOKENS = [
    {"model": SHAPE | {"num_layers": layers}, "recompute": "block", "zero": zero, "dtype": "bfloat16", "tokens": tokens,
     "loss_chunk": 64, "gathered": True, "moment": moment}
    for zero, layers, tokens, moment in (
        (3, 3, 16, "MLP backward"),
        (2, 3, 8, "MLP backward"),
        (3, 1, 2, "gate and up backward"),
        (2, 1, 2, "gate and up backward"),
    )
]  # fmt: skip
ALWAYS_THERE = ("weights", "gradients", "optimizer", "workspace", "token ids, angles")
GATHERED, WHOLE = "gathered weights, gradients", "whole weights (ZeRO-2)"


def way(model, tokens, gpus=1, *, degree=1, outer="none", dtype="bfloat16", **more):
    asked = {name: more.pop(name) for name in ("loss_chunk", "mlp_chunk", "nodes", "lora") if name in more}
    task = Task(model=model, sequence=tokens, gpus=gpus, dtype=dtype, **asked)
    return Candidate(task=task, data=1, tensor=1, ulysses_degree=degree, outer=outer, **more)


@pytest.fixture(scope="module")
def measured(request, tmp_path_factory):
    """What is measured of the cases that are to run, by their places in `CASES`; `FEW_TOKENS` follow."""
    file = tmp_path_factory.mktemp("measured") / "bytes.json"
    places = [i for i in range(len(CASES)) if i not in LONG or i in selected(request, "index")]
    places += range(len(CASES), len(CASES + FEW_TOKENS))
    run_program(1, measure_all, [(CASES + FEW_TOKENS)[i] for i in places], file, seconds=300, fresh=True)
    return dict(zip(places, json.loads(file.read_text()), strict=True))


@pytest.mark.parametrize(
    "index",
    [
        pytest.param(i, marks=pytest.mark.long if i in LONG else (), id=f"{case['recompute']}-{case['dtype']}-{i}")
        for i, case in enumerate(CASES)
    ],
)
def test_activations_are_those_of_the_model(measured, index):
    case = CASES[index]
    memory = predicted(case)
    assert memory.moment.startswith(case.get("moment", "MLP backward"))
    assert activations(memory, case) == pytest.approx(measured[index]["peak"], rel=case.get("within", 0.02))


def activations(memory, case):
    """Return the predicted bytes of what `Activations` counts."""
    angles = case["tokens"] * case["model"]["head_dim"] * 4
    lines = {name: nbytes for name, nbytes in memory.lines.items() if name not in (*ALWAYS_THERE, GATHERED, WHOLE)}
    return sum(lines.values()) + angles


def test_activations_are_those_of_a_tensor_group(tmp_path):
    run_program(2, measure_all, TENSOR_CASES, tmp_path / "bytes", tensor=2, fresh=True)
    for case, found in zip(TENSOR_CASES, json.loads((tmp_path / "bytes").read_text()), strict=True):
        one = predicted_way(case)
        way = replace(one, task=replace(one.task, gpus=2), tensor=2)
        memory = memory_of(way, HARDWARE, operators=replace(PLAIN, lean=True))
        assert memory.moment == "MLP backward"
        assert activations(memory, case) == pytest.approx(found["peak"], rel=0.02)


@pytest.mark.parametrize("index", range(len(FEW_TOKENS)))
def test_few_tokens_take_what_zero_gathers(measured, index):
    case = FEW_TOKENS[index]
    memory = predicted(case)
    assert memory.moment == case["moment"]
    found = measured[len(CASES) + index]
    lines = {name: nbytes for name, nbytes in memory.lines.items() if name not in ALWAYS_THERE}
    aligned = found["block"] / held_block(tiny.config(**case["model"]))  # BMTrain aligns what it moves
    gathered = sum(lines.pop(name, 0.0) for name in (GATHERED, WHOLE))
    assert aligned * gathered + sum(lines.values()) == pytest.approx(found["peak"], rel=0.01)


FOUR_BIT = {
    "model": SHAPE, "recompute": "block", "zero": 3, "dtype": "bfloat16", "tokens": 16, "loss_chunk": 64,
    "gathered": True, "lora": {"rank": 2, "base": "4bit"},
}  # fmt: skip


def test_matrices_in_4_bits_are_dequantized_for_one_block(tmp_path):
    cases = [FOUR_BIT | each for each in ({}, {"zero": 2}, {"model": SHAPE | {"num_layers": 1}, "tokens": 2})]
    run_program(1, measure_in_4bit, cases, tmp_path / "bytes", fresh=True)
    for case, found in zip(cases, json.loads((tmp_path / "bytes").read_text()), strict=True):
        model, memory = tiny.config(**case["model"]), predicted(case)
        lora = LoRAConfig(**case["lora"])
        whole = 2 * block_matrices(model)
        stored = 2 * (held_block(model) + adapter_elements(model, lora)) - four_bit_saving(model, lora, 2)
        aligned = found["block_bytes"] / stored  # BMTrain aligns what it moves
        assert 1 <= aligned < 1.2
        lines = {name: nbytes for name, nbytes in memory.lines.items() if name not in ALWAYS_THERE}
        gathered = sum(lines.pop(name, 0.0) for name in (GATHERED, WHOLE))
        assert gathered > whole
        expected = aligned * (gathered - whole) + whole + sum(lines.values())
        assert expected == pytest.approx(found["peak"], rel=0.02)  # words of tiny matrices are not full


def test_weights_in_4_bits_are_those_of_the_files():
    """Of every matrix of a block the words, of the other weights two bytes a number."""
    model = preset("llama-3-70b")
    task = Task(model=model, sequence=1 << 15, gpus=1, lora=LoRAConfig(rank=16, base="4bit"))
    shapes = expected_shapes(model)
    assert sum(map(is_matrix, shapes)) == 7 * 80
    nbytes = sum(4 * nf4.Layout(prod(s)).words if is_matrix(name) else 2 * prod(s) for name, s in shapes.items())
    memory = memory_of(Candidate(task=task, recompute="block"), HARDWARE)
    assert memory.lines["weights"] == pytest.approx(nbytes + 2 * task.trained, rel=1e-5)
    assert nbytes < 0.29 * 2 * model.num_parameters


HEADS = SHAPE | {"hidden_size": 64, "num_heads": 16, "num_kv_heads": 8, "intermediate_size": 16, "head_dim": 16}
EVERY, FEW = 1 << 40, 1  # query rows of a call of attention: of all heads, of as few as may be
HEAD_CASES = [
    {"model": HEADS | {"num_layers": 2}, "recompute": recompute, "zero": 3, "dtype": "bfloat16", "tokens": 2048,
     "loss_chunk": 64, "mlp_chunk": 128, "group_rows": rows} | more
    for recompute, more in (("block", {}), ("block-keep-attention", {}), ("block+every-2+keep-attention-last-1", {}),
                            ("block-keep-attention:0.5+offload-all", {}), ("block-keep-attention+offload-all", {}),
                            ("block-keep-attention+every-2+offload-first-2+offload-attention-first-2", {}),
                            ("block", {"model": HEADS | MINICPM | {"num_layers": 2}}),
                            ("block+keep-attention-last-1+offload-first-2", {"lora": {"rank": 2}}))
    for rows in (EVERY, FEW)
]  # fmt: skip


@pytest.fixture
def group_rows(monkeypatch):
    """Return a function that sets `GROUP_ROWS`, which nothing else changes while a process lives."""

    def use(rows):
        monkeypatch.setattr(block_config, "GROUP_ROWS", rows)
        remembered.cache_clear()

    yield use
    remembered.cache_clear()


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2, 4])
def test_heads_in_work_are_those_of_the_model(tmp_path, group_rows, size):
    """Over ranks the boxes of the head exchange are among them: none lies outside of torch's allocator here."""
    run_program(size, measure_heads, HEAD_CASES, tmp_path / "bytes", fresh=True)
    measured = json.loads((tmp_path / "bytes").read_text())
    for case, found in zip(HEAD_CASES, measured, strict=True):
        group_rows(case["group_rows"])
        one = predicted_way(case)
        task = replace(one.task, sequence=case["tokens"] * size, gpus=size)
        way = replace(one, task=task, ulysses_degree=size, transport="gloo")
        memory = memory_of(way, HARDWARE, operators=replace(PLAIN, lean=True))
        assert memory.moment == "attention backward"
        assert activations(memory, case) == pytest.approx(found["peak"], rel=1e-3)
    peaks = [found["peak"] for found in measured]
    assert all(few < 0.8 * every for every, few in zip(peaks[::2], peaks[1::2], strict=True))


def test_norms_of_heads_are_those_of_the_model(tmp_path, group_rows):
    cases = [
        case | {"model": HEADS | {"num_layers": 2, "qk_norm": True}, "mlp_chunk": 0, "tokens": 512}
        for case in HEAD_CASES[:2]
    ]
    run_program(1, measure_heads, cases, tmp_path / "bytes", fresh=True)
    for case, found in zip(cases, json.loads((tmp_path / "bytes").read_text()), strict=True):
        group_rows(case["group_rows"])
        memory = predicted(case)
        assert memory.moment == "head norms backward"
        assert activations(memory, case) == pytest.approx(found["peak"], rel=0.02)


def predicted(case):
    return memory_of(predicted_way(case), HARDWARE, operators=replace(PLAIN, lean=True))  # what runs on a CPU


def predicted_way(case):
    return way(
        tiny.config(**case["model"]), case["tokens"], dtype=case["dtype"], recompute=case["recompute"],
        zero=case["zero"], loss_chunk=64, mlp_chunk=case.get("mlp_chunk"),
        lora=LoRAConfig(**case["lora"]) if "lora" in case else None,
    )  # fmt: skip


def test_parameters_are_those_of_the_model(measured):
    for place, found in measured.items():
        case = (CASES + FEW_TOKENS)[place]
        model, task = tiny.config(**case["model"]), predicted_way(case).task
        assert task.parameters == found["parameters"]
        held = held_block(model) + adapter_elements(model, task.lora)
        storages = 2 if task.lora else 1  # of frozen and of trained weights
        assert 0 <= found["block"] - held < 2048 * storages  # BMTrain aligns what it moves
        assert block_matrices(model) + 2 * model.hidden_size == held_block(model)


def shapes(size, tokens, degree, heads, kv_heads):
    return HeadShapes(
        layout=make_layout("zigzag", size, tokens // size), degree=degree, batch=1, heads=heads, kv_heads=kv_heads,
        head_dim=128, itemsize=2, statistics_itemsize=4,
    )  # fmt: skip


def attention_model(heads, kv_heads):
    return tiny.config(
        vocab_size=64, hidden_size=heads * 128, intermediate_size=64, num_layers=1, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=128,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(8, 8, 2), (8, 8, 4), (8, 2, 4), (16, 4, 2), (16, 4, 4), (12, 3, 3), (12, 12, 2)]
)
@pytest.mark.parametrize("backward", [False, True])
def test_heads_take_the_boxes_of_their_plan(heads, kv_heads, size, backward):
    tokens = 4096 * size
    candidate = way(attention_model(heads, kv_heads), tokens, size, degree=size)
    own = candidate.sizes
    found = shapes(size, tokens, size, heads, kv_heads)
    sources = tuple(Strides(1 << 30, heads * 256, 256) for _ in range(6 if backward else 3))
    plan = make_heads_plan(found, 0, sources, backward=backward, units=own.strategy.units(backward=backward))
    inward, outward = own.head_bytes(backward=backward)
    assert plan.nbytes == pytest.approx(inward, rel=1e-2)
    boxes = [at.exchange.nbytes for at in plan.outbound]
    assert sum(boxes) == pytest.approx(outward, rel=1e-2)
    shares = own.unit_shares(backward=backward)
    assert [len(unit.heads) / own.shapes.own_heads for unit in plan.units] == pytest.approx(shares)
    turns = min(2, len(boxes))
    assert attention_buffers(candidate, backward=backward).boxes == pytest.approx(
        plan.nbytes + turns * max(boxes), rel=1e-2
    )


def test_boxes_lie_outside_only_where_copy_engines_move_blocks():
    model = attention_model(32, 8)
    assert AttentionMemory(way(model, 65536, 8, degree=8)).outside > 0
    assert AttentionMemory(way(model, 65536, 8, degree=8, transport="nccl")).outside == 0
    assert AttentionMemory(way(model, 65536)).outside == 0
    inside, outside = (memory_of(way(model, 65536, 8, degree=8, transport=t), HARDWARE) for t in ("nccl", "peer"))
    assert "boxes that peers read" in outside.outside
    assert "boxes that peers read" not in inside.outside


def test_what_kernels_take_stays_with_their_graphs_where_they_are_recorded():
    model = attention_model(32, 8)
    recorded, long, called = (
        memory_of(way(model, tokens, 8, degree=8, transport=transport), HARDWARE)
        for tokens, transport in ((1 << 18, "peer"), (1 << 19, "peer"), (1 << 18, "nccl"))
    )
    sums = (1 << 18) * 4 * 128 * 4  # of four query heads; the KV head that they share has two as large as one of theirs
    assert recorded.outside["kept by CUDA graphs"] == pytest.approx(sums * (1 + 2 / 4), rel=2e-2)
    assert all("kept by CUDA graphs" not in memory.outside for memory in (long, called))
    moment = "attention backward"
    assert called.moments[moment] - recorded.moments[moment] > 0.9 * sums / 2


def test_memory_grows_with_what_is_kept_and_shrinks_with_ranks():
    model = tiny.config(**SHAPE)
    kept = [
        memory_of(way(model, 1 << 14, recompute=policy), HARDWARE).allocated
        for policy in ("block", "block-keep-attention", "none")
    ]
    assert kept == sorted(kept) and len(set(kept)) == 3
    spread = [
        memory_of(way(model, 1 << 14, gpus, degree=min(gpus, 2), outer="ring"), HARDWARE) for gpus in (1, 2, 4, 8)
    ]
    peaks = [memory.allocated for memory in spread]
    assert peaks == sorted(peaks, reverse=True)
    stages = [memory_of(way(model, 1 << 14, 2, degree=2, zero=zero), HARDWARE).allocated for zero in (2, 3)]
    assert stages[0] != stages[1]


def test_what_does_not_fit_is_said():
    model = tiny.config(**SHAPE | {"intermediate_size": 1 << 16})
    assert not memory_of(way(model, 1 << 20, mlp_chunk=0), HARDWARE).fits
    assert memory_of(way(model, 1 << 20), HARDWARE).fits  # in chunks of tokens
    assert memory_of(way(model, 1 << 10), HARDWARE).fits


@pytest.mark.parametrize("zero", [2, 3])
def test_a_reference_model_takes_its_shards(zero):
    model = preset("llama-3-8b")
    task = Task(model=model, sequence=1 << 16, gpus=8, pairs=True, second_model=True)
    way = Candidate(task=task, data=1, tensor=1, recompute="block", zero=zero)
    alone = replace(way, task=replace(task, second_model=False))
    ours, wanted = memory_of(way, HARDWARE), memory_of(alone, HARDWARE)
    assert ours.lines["reference's weights"] == 2 * model.num_parameters / 8
    assert ours.total - wanted.total == pytest.approx(2 * model.num_parameters / 8)
    if zero == 3:  # blocks stream from host memory
        streamed = [memory_of(replace(each, offload=Offload.WEIGHTS), HARDWARE) for each in (way, alone)]
        blocks = 2 * model.num_layers * held_block(model)
        assert streamed[0].in_host - streamed[1].in_host == pytest.approx(blocks)
        rest = 2 * model.num_parameters - blocks * (1 - 2 / model.num_layers)
        assert streamed[0].total - streamed[1].total == pytest.approx(rest / 8)


@pytest.mark.parametrize("zero", [2, 3])
def test_a_reference_model_keeps_no_block_whole(zero):
    run_program(2, after_frozen_forward, zero)
