"""CPM-Live's layers over split sequences on BMTrain, for ranks to run: what they give, and what they refuse."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import bmburst
from bmburst.errors import UserError
from bmburst_ops.biased import PADDING
from tests.ops.biased_oracle import Bee, attention, draw_ant, draw_bee

HEADS, DIM_HEAD, WIDTH = 3, 8, 20
NAMES = ("project_q", "project_k", "project_v", "attention_out")


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
    import bmtrain as bmt

    from bmburst.integrations import cpm_live

    class Layer(bmt.DistributedModule):
        def __init__(self, position_bias):
            super().__init__()
            self.position_bias = position_bias
            self.attention = bmt.Block(cpm_live.Attention(WIDTH, HEADS, DIM_HEAD, torch.float32, 0.0))

        def forward(self, x, tokens):
            attention_mask, position_bias = self.position_bias(tokens)
            return self.attention(x, x, attention_mask, position_bias)

    if isinstance(batch, Bee):
        sizes = (batch.num_buckets, batch.num_segment_buckets, batch.max_distance)
        layer = Layer(cpm_live.BucketPositionBias(HEADS, *sizes, dtype=torch.float32))
    else:
        sizes = (batch.num_segments, batch.num_buckets, batch.max_distance, True)
        layer = Layer(cpm_live.SegmentPositionEmbedding(HEADS, *sizes, dtype=torch.float32))
    bmt.init_parameters(layer)
    return layer


def layers_equal_the_formulas():
    from bmburst.integrations import cpm_live

    mesh = bmburst.Mesh.over_bmtrain()
    for layout in ("contiguous", "zigzag", "striped"):
        split = cpm_live.SplitSequences(mesh, layout=layout)
        batch = draw_bee(3, 2, 45)
        part = split.bee(split.shared(bee_data(batch) if split.is_reader else None))
        assert part.ext_sub.tolist() == [1, 2]
        equals_the_formulas(split, batch, part.tokens, part.inputs, part.target)
        batch = draw_ant(4, 2, 29)
        part = split.ant(ant_data(batch), batch.num_segments)
        equals_the_formulas(split, batch, part.tokens, part.input, part.target)


def equals_the_formulas(split, batch, tokens, inputs, target):
    layer, length = make_layer(batch), batch.segment.shape[1]
    size, rank = split.mesh.sequence.size, split.mesh.sequence_rank
    cut = bmburst.SequenceShard.cut(length, layout=split.layout, size=size, rank=rank)
    order = torch.arange(batch.segment.numel()).view_as(batch.segment)
    assert torch.equal(inputs, cut.take(order).int())
    assert (tokens.tokens.span[:, cut.real_tokens :] == PADDING).all()
    assert torch.equal(target, cut.take(order.masked_fill(order % 2 == 0, -100), pad_value=-100).int())

    learned = {f"attention.{name}.weight" for name in NAMES} | {"position_bias.relative_attention_bias"}
    assert {shard.replace("_module.", "") for shard in layer.state_dict()} == learned  # as CPM-Live's checkpoints have
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


def whole_parameters(layer, of_gradients=False):
    """Return all parameters whole, or their gradients, which ZeRO has added up over the ranks."""
    from bmburst.zero import Weights, gather, named_shards

    shards = named_shards(layer)
    return {
        shard.name: gather(shard, shard.storage.grad if of_gradients else Weights.THEMSELVES).clone()
        for shard in shards
    }


def dense(x, parameters, batch):
    """CPM-Live's attention layer on whole sequences, in fp64."""
    q, k, v = (torch.nn.functional.linear(x, parameters[f"attention.{name}.weight"]) / WIDTH**0.5 for name in NAMES[:3])
    table = parameters["position_bias.relative_attention_bias"]
    mixed, _ = attention(*(t.unflatten(-1, (HEADS, DIM_HEAD)) for t in (q, k, v)), table, batch)
    return mixed.flatten(2) @ parameters["attention.attention_out.weight"].t() / (HEADS * DIM_HEAD) ** 0.5


def groups_share_batches_and_means():
    """Two groups of two ranks: each has its first rank's batch, and every label of all of them weighs the same."""
    import bmtrain as bmt

    from bmburst.integrations import cpm_live

    mesh = bmburst.Mesh.over_bmtrain(sequence=2)
    split = cpm_live.SplitSequences(mesh, layout="striped")
    assert split.is_reader == (mesh.sequence_rank == 0)
    shared = split.shared({"rank": mesh.rank, "names": ["a", "b" * 3000]} if split.is_reader else None)
    assert shared == {"rank": mesh.rank - mesh.sequence_rank, "names": ["a", "b" * 3000]}
    batches = [bee_data(draw_bee(seed, 2, 21)) for seed in (1, 2)]
    for data, step in zip(batches, (3, 7), strict=True):
        data["target"] = np.where(np.arange(42).reshape(2, 21) % step == 0, np.arange(42).reshape(2, 21), -100)
    part = split.bee(batches[mesh.data_rank])
    labels = part.target[part.target != -100]
    mean = bmt.sum_loss(split.mean(labels.float().sum(), part.target)).item()
    every = np.concatenate([data["target"][data["target"] != -100] for data in batches])
    assert abs(mean - every.mean()) < 1e-4


def refuses_by_a_clear_line():
    from bmburst.integrations import cpm_live

    mesh = bmburst.Mesh.over_bmtrain()
    batch = draw_bee(3, 2, 21)
    data, layer, split = bee_data(batch), make_layer(batch), cpm_live.SplitSequences(mesh)
    part, x = split.bee(data), torch.randn(2, 21, WIDTH)
    mask, table = layer.position_bias(part.tokens)
    attention = cpm_live.Attention(WIDTH, HEADS, DIM_HEAD, torch.float32)  # in no block, which errors would leave open
    dense_mask, dense_bias = torch.ones(2, 21, 21), torch.ones(2, HEADS, 21, 21)
    more = {**data, "segment_rel": data["segment_rel"] + 11}
    ant, ant_batch = ant_data(draw_ant(4, 2, 29)), torch.zeros(2, 29).long()
    formula = replace(mask.formula, num_relations=4)
    for refused, message in (
        (
            lambda: attention(x, x, dense_mask, table),
            r"attention_mask must be what .* returned, got a tensor \[2, 21, 21\]",
        ),
        (lambda: attention(x, x, mask, dense_bias), r"position_bias must be what .* got a tensor \[2, 3, 21, 21\]"),
        (lambda: attention(x, x, mask, None), "position_bias must be what .* got NoneType"),
        (lambda: attention(x, x, mask, table, True), "use_cache and past_kv are for generation"),
        (lambda: attention(x, x, mask, table, False, (x, x)), "use_cache and past_kv are for generation"),
        (lambda: attention(x, x[:, 1:], mask, table), r"vectors of \[2, 21\] keys for \[2, 20\]"),
        (lambda: attention(x, x, mask, table[1:]), r"the bias table must be float \[22, 3\]"),
        (lambda: attention(x, x, replace(mask, kernel="fa4"), table), "unknown kernel 'fa4' of biased attention"),
        (lambda: layer.position_bias(x, x, x), "called with the tokens of a part of SplitSequences, got 3 tensors"),
        (lambda: layer.position_bias(part), "of a part of SplitSequences, got BeePart"),
        (lambda: split.bee(more).tokens.under(mask.formula), "the batch has relation 2. between segments, but .* 10\n"),
        (
            lambda: part.tokens.under(formula),
            "the batch has relation 10 between segments, but the bias table holds 4\n",
        ),
        (lambda: cpm_live.Attention(WIDTH, HEADS, DIM_HEAD, dropout_p=0.1), "dropout_p 0.1 on attention weights"),
        (lambda: cpm_live.Attention(WIDTH, HEADS, DIM_HEAD, int4=True), "int4 weights are not supported"),
        (lambda: cpm_live.BucketPositionBias(HEADS, num_buckets=3), "num_buckets 3 and 32 relations are too few"),
        (lambda: cpm_live.SegmentPositionEmbedding(HEADS, max_distance=16), "max_distance 16 must be above 16"),
        (lambda: cpm_live.SplitSequences(mesh, layout="balanced"), "unknown layout 'balanced'"),
        (lambda: cpm_live.SplitSequences(mesh, kernel="fa4"), "unknown kernel 'fa4'"),
        (lambda: cpm_live.SplitSequences(mesh, transport="mpi"), "unknown transport 'mpi'"),
        (lambda: split.bee({"inputs": data["inputs"]}), "the batch has no 'inputs_sub'\nknown: inputs"),
        (lambda: split.bee({**data, "spans": data["spans"][:, 1:]}), r"'spans' must be \[batch, length\] as 'inputs'"),
        (lambda: split.bee({**data, "length": np.array([21, 22])}), "'length' must be 2 lengths from 0 to 21, got"),
        (lambda: split.bee({**data, "segment_rel": data["segment_rel"][:1]}), r"'segment_rel' must be \[2, entries\]"),
        (lambda: split.bee({**data, "segment_rel": data["segment_rel"][:, :1]}), "token . of sequence . has segment"),
        (lambda: split.bee({**data, "num_segments": data["segment_ids"]}), "token . of sequence 0 has segment"),
        (lambda: split.ant(ant, 2), "segments go from 0 to 2, num_segments=2"),
        (lambda: split.ant({**ant, "len_ctx": ant_batch}, 3), "'len_ctx' must be 2 lengths from 0 to 29"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            refused()
        assert len(str(caught.value).splitlines()) <= 3
