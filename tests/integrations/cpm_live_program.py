"""CPM-Live's layers over split sequences on BMTrain, for ranks to run: what they give, and what they refuse."""

from dataclasses import replace

import numpy as np
import torch

import bmburst
from bmburst_ops.biased import PADDING
from tests import lazy
from tests.ops.biased_oracle import Bee, attention, draw_ant, draw_bee
from tests.refusals import refused

HEADS, DIM_HEAD, WIDTH = 3, 8, 20
NAMES = ("project_q", "project_k", "project_v", "attention_out")
ADAPTED, RANK = ("project_q", "project_v"), 3


def bee_data(batch):
    """An oracle's batch as `MixedDataset` has it, NumPy arrays."""
    tokens = torch.arange(batch.segment.numel(), dtype=torch.int32).view_as(batch.segment)
    return {
        "inputs": tokens.numpy(),
        "inputs_sub": (tokens % 3).numpy(),
        "target": tokens.masked_fill(tokens % 2 == 0, -100).numpy(),
        "task_ids": (tokens % 2).numpy(),
        "length": batch.length.numpy(),
        "context": (batch.context > 0).numpy(),
        "sample_ids": batch.sample_ids.numpy(),
        "num_segments": batch.num_segments.numpy(),
        "segment_ids": batch.segment.numpy(),
        "segment_rel_offset": batch.segment_rel_offset.numpy(),
        "segment_rel": batch.segment_rel.numpy(),
        "spans": batch.span.numpy(),
        "ext_ids": torch.arange(2).numpy(),
        "ext_sub": torch.arange(1, 3).numpy(),
    }


def ant_data(batch):
    """An oracle's batch as `BatchPacker` has it, tensors."""
    tokens = torch.arange(batch.segment.numel()).view_as(batch.segment)
    return {
        "ctx": tokens,
        "tgt": tokens.masked_fill(tokens % 2 == 0, -100),
        "task": tokens % 2,
        "context": batch.context > 0,
        "segment": batch.segment.long(),
        "span": batch.span.long(),
        "position": tokens.float(),
        "len_ctx": batch.length.long(),
    }


def make_layer(batch):
    """Return bias and attention, in a block, as CPM-Live calls them."""

    class Layer(lazy.bmt.DistributedModule):
        def __init__(self, position_bias):
            super().__init__()
            self.position_bias = position_bias
            self.attention = lazy.bmt.Block(lazy.cpm_live.Attention(WIDTH, HEADS, DIM_HEAD, torch.float32, 0.0))

        def forward(self, x, tokens):
            attention_mask, position_bias = self.position_bias(tokens)
            return self.attention(x, x, attention_mask, position_bias)

    if isinstance(batch, Bee):
        sizes = (batch.num_buckets, batch.num_segment_buckets, batch.max_distance)
        layer = Layer(lazy.cpm_live.BucketPositionBias(HEADS, *sizes, dtype=torch.float32))
    else:
        sizes = (batch.num_segments, batch.num_buckets, batch.max_distance, True)
        layer = Layer(lazy.cpm_live.SegmentPositionEmbedding(HEADS, *sizes, dtype=torch.float32))
    lazy.bmt.init_parameters(layer)
    return layer


def layers_equal_the_formulas():
    mesh = bmburst.Mesh.over_bmtrain()
    for layout in ("contiguous", "zigzag", "striped"):
        is_adapted = layout == "zigzag"
        split = lazy.cpm_live.SplitSequences(mesh, layout=layout)
        batch = draw_bee(3, 2, 45)
        part = split.bee(split.shared(bee_data(batch) if split.is_reader else None))
        assert part.ext_sub.tolist() == [1, 2]
        equals_the_formulas(split, batch, part.tokens, part.inputs, part.target, is_adapted=is_adapted)
        batch = draw_ant(4, 2, 29)
        part = split.ant(ant_data(batch), batch.num_segments)
        equals_the_formulas(split, batch, part.tokens, part.input, part.target)


def equals_the_formulas(split, batch, tokens, inputs, target, *, is_adapted=False):
    layer, length = make_layer(batch), batch.segment.shape[1]
    size, rank = split.mesh.sequence.size, split.mesh.sequence_rank
    cut = bmburst.SequenceShard.cut(length, layout=split.layout, size=size, rank=rank)
    order = torch.arange(batch.segment.numel()).view_as(batch.segment)
    assert torch.equal(inputs, cut.take(order).int())
    assert (tokens.tokens.span[:, cut.real_tokens :] == PADDING).all()
    assert torch.equal(target, cut.take(order.masked_fill(order % 2 == 0, -100), pad_value=-100).int())

    learned = {f"attention.{name}.weight" for name in NAMES} | {"position_bias.relative_attention_bias"}
    assert {shard.replace("_module.", "") for shard in layer.state_dict()} == learned  # as CPM-Live's checkpoints have
    if is_adapted:
        for name in ADAPTED:
            adapt(getattr(layer.attention, name))
    parameters = {name: value.double().requires_grad_() for name, value in whole_parameters(layer).items()}
    rng = torch.Generator().manual_seed(0)
    x, grad = torch.randn(2, 2, length, WIDTH, generator=rng)
    mine = cut.take(x).requires_grad_()
    out = layer(mine, tokens)
    (out * cut.take(grad)).sum().backward()

    whole = x.double().requires_grad_()
    expected = dense(whole, parameters, batch)
    (expected * grad.double()).sum().backward()
    near = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(out.double(), cut.take(expected.detach()), **near)
    torch.testing.assert_close(mine.grad.double(), cut.take(whole.grad), **near)
    for name, value in whole_parameters(layer, of_gradients=True).items():
        wanted = parameters[name].grad
        assert (value.double() - wanted).norm() < 1e-5 * wanted.norm(), name


def adapt(linear):
    """Add LoRA beside a linear layer as OpenDelta's `LoraModel(..., backend="bmt")` does in CPM-Live's fine-tuning."""
    lora = lazy.bmt.DistributedModule()
    rng = torch.Generator().manual_seed(1)
    sizes = {"A": (RANK, linear.in_features), "B": (linear.out_features, RANK)}
    for name, size in sizes.items():
        drawn = linear.weight.new_empty(size).normal_(std=0.2, generator=rng)
        setattr(lora, f"lora_{name}", lazy.bmt.DistributedParameter(drawn))
    linear.lora, alone = lora, linear.forward
    linear.forward = lambda x: alone(x) + x @ lora.lora_A.T @ lora.lora_B.T


def whole_parameters(layer, of_gradients=False):
    """Return all parameters whole, or their gradients, which ZeRO has added up over the ranks."""
    from bmburst.zero import ShardData

    shards = lazy.named_shards(layer)
    return {
        shard.name: lazy.gather(shard, shard.storage.grad if of_gradients else ShardData.WEIGHTS).clone()
        for shard in shards
    }


def dense(x, parameters, batch):
    """CPM-Live's attention layer on whole sequences, in fp64."""
    q, k, v = (torch.nn.functional.linear(x, parameters[f"attention.{name}.weight"]) / WIDTH**0.5 for name in NAMES[:3])
    if "attention.project_q.lora.lora_A" in parameters:
        lora = {name: [parameters[f"attention.{name}.lora.lora_{matrix}"] for matrix in "AB"] for name in ADAPTED}
        q, v = (y + x @ lora[name][0].T @ lora[name][1].T for y, name in zip((q, v), ADAPTED, strict=True))
    table = parameters["position_bias.relative_attention_bias"]
    mixed, _ = attention(*(t.unflatten(-1, (HEADS, DIM_HEAD)) for t in (q, k, v)), table, batch)
    return mixed.flatten(2) @ parameters["attention.attention_out.weight"].t() / (HEADS * DIM_HEAD) ** 0.5


def groups_share_batches_and_means():
    """Two groups of two ranks: each has its first rank's batch, and every label of all of them weighs the same."""
    mesh = bmburst.Mesh.over_bmtrain(sequence=2)
    split = lazy.cpm_live.SplitSequences(mesh, layout="striped")
    assert split.is_reader == (mesh.sequence_rank == 0)
    shared = split.shared({"rank": mesh.rank, "names": ["a", "b" * 3000]} if split.is_reader else None)
    assert shared == {"rank": mesh.rank - mesh.sequence_rank, "names": ["a", "b" * 3000]}
    batches = [bee_data(draw_bee(seed, 2, 21)) for seed in (1, 2)]
    for data, step in zip(batches, (3, 7), strict=True):
        data["target"] = np.where(np.arange(42).reshape(2, 21) % step == 0, np.arange(42).reshape(2, 21), -100)
    part = split.bee(batches[mesh.data_rank])
    labels = part.target[part.target != -100]
    mean = lazy.bmt.sum_loss(split.mean(labels.float().sum(), part.target)).item()
    every = np.concatenate([data["target"][data["target"] != -100] for data in batches])
    assert abs(mean - every.mean()) < 1e-4


def refuses_by_a_clear_line():
    mesh = bmburst.Mesh.over_bmtrain()
    batch = draw_bee(3, 2, 21)
    data, layer, split = bee_data(batch), make_layer(batch), lazy.cpm_live.SplitSequences(mesh)
    part, x = split.bee(data), torch.randn(2, 21, WIDTH)
    mask, table = layer.position_bias(part.tokens)
    # In no block, which errors would leave open.
    attention = lazy.cpm_live.Attention(WIDTH, HEADS, DIM_HEAD, torch.float32)
    dense_mask, dense_bias = torch.ones(2, 21, 21), torch.ones(2, HEADS, 21, 21)
    more = {**data, "segment_rel": data["segment_rel"] + 11}
    ant, ant_batch = ant_data(draw_ant(4, 2, 29)), torch.zeros(2, 29).long()
    formula = replace(mask.formula, num_relations=4)
    for call, words in (
        (lambda: attention(x, x, dense_mask, table), "attention_mask | tensor [2, 21, 21]"),
        (lambda: attention(x, x, mask, dense_bias), "position_bias | tensor [2, 3, 21, 21]"),
        (lambda: attention(x, x, mask, None), "position_bias | NoneType"),
        (lambda: attention(x, x, mask, table, True), "use_cache | past_kv | generation"),
        (lambda: attention(x, x, mask, table, False, (x, x)), "use_cache | past_kv | generation"),
        (lambda: attention(x, x[:, 1:], mask, table), "[2, 21] keys | [2, 20]"),
        (lambda: attention(x, x, mask, table[1:]), "bias table | float | [22, 3]"),
        (lambda: attention(x, x, replace(mask, kernel="fa4"), table), "kernel | 'fa4' | known: "),
        (lambda: layer.position_bias(x, x, x), "tokens | SplitSequences | 3 tensors"),
        (lambda: layer.position_bias(part), "tokens | SplitSequences | BeePart"),
        (lambda: split.bee(more).tokens.under(mask.formula), "relation 21 | bias table | 10"),
        (lambda: part.tokens.under(formula), "relation 10 | bias table | 4"),
        (lambda: lazy.cpm_live.Attention(WIDTH, HEADS, DIM_HEAD, dropout_p=0.1), "dropout_p 0.1"),
        (lambda: lazy.cpm_live.Attention(WIDTH, HEADS, DIM_HEAD, int4=True), "int4"),
        (lambda: lazy.cpm_live.BucketPositionBias(HEADS, num_buckets=3), "num_buckets 3 | 32 relations"),
        (lambda: lazy.cpm_live.SplitSequences(mesh, layout="balanced"), "layout | 'balanced' | zigzag"),
        (lambda: lazy.cpm_live.SplitSequences(mesh, kernel="fa4"), "kernel | 'fa4' | known: "),
        (lambda: lazy.cpm_live.SplitSequences(mesh, transport="mpi"), "transport | 'mpi' | known: "),
        (lambda: split.bee({"inputs": data["inputs"]}), "'inputs_sub' | inputs"),
        (lambda: split.bee({**data, "segment_rel": data["segment_rel"][:1]}), "'segment_rel' | [2, entries]"),
        (lambda: split.bee({**data, "segment_rel": data["segment_rel"][:, :1]}), "token | of sequence | segment"),
        (lambda: split.bee({**data, "num_segments": data["segment_ids"]}), "token | of sequence 0 | segment"),
        (lambda: split.ant({**ant, "len_ctx": ant_batch}, 3), "'len_ctx' | 2 lengths | 0 to 29"),
    ):
        with refused(words):
            call()
