"""What is no batch, number, dtype or tensor is refused with what is allowed, on every rank, and hangs none."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import bmburst
from bmburst.attention.biased import biased_attention
from tests import lazy
from tests.distributed.programs import on_program, run_program
from tests.integrations.cpm_live_program import DIM_HEAD, HEADS, WIDTH, ant_data, bee_data, make_layer
from tests.ops.biased_oracle import draw_ant, draw_bee
from tests.refusals import refusal_of, refused, says

BEE, ANT = bee_data(draw_bee(3, 2, 21)), ant_data(draw_ant(4, 2, 29))
NO_BATCH = "a batch | mapping | arrays | name | {} | fix: | CPM-Live's loader"
NO_NUMBERS = "'{}' | whole numbers | {} | fix: | CPM-Live's loader"
LENGTHS = BEE["length"].astype(float)

# Of CPM-Bee's batch: what is changed, and the message's key words.
BATCHES = [
    ({"inputs": None}, NO_NUMBERS.format("inputs", "NoneType")),
    ({"inputs": "text"}, NO_NUMBERS.format("inputs", "str")),
    ({"inputs": BEE["inputs"] + 0.5}, NO_NUMBERS.format("inputs", "float64 of shape [2, 21]")),
    ({"inputs": BEE["inputs"] + 1j}, NO_NUMBERS.format("inputs", "complex128 of shape [2, 21]")),
    ({"inputs": torch.zeros(2, 21, dtype=torch.bfloat16)}, "'inputs' | array of numbers | tens"),
    ({"inputs": [[1, 2], [3]]}, "'inputs' | array of numbers | [[1, 2], [3]] | fix: pass what"),
    ({"inputs": BEE["inputs"][0]}, "'inputs' | [batch, length] | [21] | allowed: one sequence"),
    ({"inputs": BEE["inputs"][:0]}, "'inputs' | [batch, length] | [0, 21] | allowed: one sequence"),
    ({"inputs": BEE["inputs"].astype(np.int64) + 2**33}, f"'inputs' | {2**33 + 41} | int32"),
    ({"spans": BEE["spans"][:, 1:]}, "'spans' | [batch, length] as 'inputs' [2, 21] | [2, 20] | fix: pass what"),
    ({"target": BEE["target"] > 0}, NO_NUMBERS.format("target", "bool of shape [2, 21]")),
    ({"length": [5.5, 3.0]}, NO_NUMBERS.format("length", "float64 of shape [2]")),
    ({"length": LENGTHS}, NO_NUMBERS.format("length", "float64 of shape [2]")),
    ({"length": np.array([2**32 + 3, 3])}, "'length' | holds 4294967299 | allowed: | int32"),
    ({"length": np.array([-1, 3])}, "'length' | 2 lengths from 0 to 21 | [-1, 3] | fix: one to each of the 2"),
    ({"length": np.array([21, 22])}, "'length' | 2 lengths from 0 to 21 | [21, 22]"),
    ({"length": 7}, "'length' | 2 lengths from 0 to 21 | 7 | fix: one to each of the 2 sequences"),
    ({"segment_rel": 3}, "'segment_rel' | [2, entries], none below 0 | [], the least 3 | allowed: for each"),
    ({"segment_rel": BEE["segment_rel"][:, :0]}, "'segment_rel' | [2, entries], none below 0 | [2, 0] | allow"),
    ({"segment_rel": BEE["segment_rel"] - 9}, "'segment_rel' | [2, entries], none below 0 | [2, 41], the lea"),
    ({"ext_ids": None}, NO_NUMBERS.format("ext_ids", "NoneType")),
    ({"ext_ids": [[1], [2]]}, "'ext_ids' and 'ext_sub' | vectors of one length | [2, 1] and [2] | fix: pass"),
    ({"ext_sub": np.arange(5)}, "'ext_ids' and 'ext_sub' | vectors of one length | [2] and [5] | fix: pass"),
]


def refuses(call, words):
    assert len(says(refusal_of(call), words).splitlines()) >= 2


def of_batches():
    for none, kind in ((None, "NoneType"), ("zigzag", "str")):
        refuses(lambda n=none: lazy.cpm_live.SplitSequences(n), f"mesh | bmburst.Mesh | {kind} | fix: bmburst.Mesh")
    split = lazy.cpm_live.SplitSequences(bmburst.Mesh.over_bmtrain())
    for none, kind in ((None, "NoneType"), ([], "list"), (torch.zeros(2, 3), "Tensor")):
        for call in (split.shared, split.bee, lambda batch: split.ant(batch, 3)):
            refuses(lambda call=call, none=none: call(none), NO_BATCH.format(kind))
    refuses(lambda: split.bee({}), "no 'inputs' | nothing")
    for change, words in BATCHES:
        refuses(lambda c=change: split.bee(BEE | c), words)
    whole = {name: torch.as_tensor(values).long() for name, values in BEE.items()}
    assert torch.equal(split.bee(whole).inputs, split.bee(BEE).inputs)
    assert split.bee(BEE | {"ext_ids": [], "ext_sub": np.array([])}).ext_ids.shape == (0,)

    for number in (None, "3", 2.5, 0, -1):
        text = f"num_segments | whole number | at least 1 | {number!r} | fix: the model's segment_types"
        refuses(lambda n=number: split.ant(ANT, n), text)
    refuses(lambda: split.ant(ANT, 1), "0 to 2 | num_segments=1 | allowed: 0 to 0 | num_segments that the data")
    refuses(lambda: split.ant(ANT | {"len_ctx": [5.5, 2.0]}, 3), NO_NUMBERS.format("len_ctx", "float64 of shape [2]"))

    part, one = split.bee(BEE), torch.ones(())
    for loss, target, words in (
        (one, "x", "target | tensor | str | fix: split.mean(loss, part.target)"),
        (None, part.target, "loss_sum | tensor | NoneType | fix: split.mean(loss, part.target)"),
        (1.5, part.target, "loss_sum | tensor | float | fix: split.mean(loss, part.target)"),
        (torch.ones(2), part.target, "loss_sum | number in floating | float32[2] | fix: Fused"),
        (one.long(), part.target, "loss_sum | number in floating | int64[] | fix: Fused"),
        (one, part.target.float(), "target | labels | float32[2, 21] | fix: target of the same part"),
    ):
        refuses(lambda loss=loss, target=target: split.mean(loss, target), words)


def of_modules():
    from bmburst.integrations.cpm_live import Attention, BucketPositionBias, SegmentPositionEmbedding, SplitSequences

    for dtype in ("float", None, torch.int32, torch.float8_e4m3fn):
        words = f"dtype | of floating | {dtype!r} | allowed: torch.float16, "
        refuses(lambda d=dtype: Attention(WIDTH, HEADS, DIM_HEAD, d), words)
        refuses(lambda d=dtype: BucketPositionBias(HEADS, dtype=d), words)
        refuses(lambda d=dtype: SegmentPositionEmbedding(HEADS, dtype=d), words)
    for size in (0, -1, 2.5, "3", None):
        ending = f" | whole number | at least 1 | {size!r} | fix: take it from the configuration"
        refuses(lambda s=size: Attention(s, HEADS, DIM_HEAD), f"dim_model{ending}")
        refuses(lambda s=size: Attention(WIDTH, s, DIM_HEAD), f"num_heads{ending}")
        refuses(lambda s=size: Attention(WIDTH, HEADS, s), f"dim_head{ending}")
        refuses(lambda s=size: BucketPositionBias(s), f"num_heads{ending}")
    for name in ("num_buckets", "max_distance"):
        for value in ("x", None, 32.5, True):
            words = f"{name} | whole number | {value!r} | allowed: what the model was made with"
            refuses(lambda n=name, v=value: BucketPositionBias(HEADS, **{n: v}), words)
    words = "num_segments | whole number | '2' | allowed: what the model was made with"
    refuses(lambda: SegmentPositionEmbedding(HEADS, "2"), words)
    words = "bidirectional | bool | 'no' | allowed: True or False"
    refuses(lambda: SegmentPositionEmbedding(HEADS, bidirectional="no"), words)
    refuses(lambda: BucketPositionBias(HEADS, max_distance=0), "max_distance 0 | above 8 | 32 buckets")
    refuses(lambda: SegmentPositionEmbedding(HEADS, max_distance=16), "max_distance 16 | above 16")
    refuses(lambda: BucketPositionBias(HEADS, init_std=-1), "init_std | number | at least 0 | -1 | allowed: as")
    refuses(lambda: BucketPositionBias(HEADS, init_mean="0"), "init_mean | finite number | '0' | allowed: as")

    split = SplitSequences(bmburst.Mesh.over_bmtrain())
    tokens = split.bee(BEE).tokens
    refuses(lambda: tokens.under(None), "a formula | RelativeBias | NoneType | fix: call a position bias module")
    mask, table = make_layer(draw_bee(3, 2, 21)).position_bias(tokens)
    attention, x = Attention(WIDTH, HEADS, DIM_HEAD, torch.float32), torch.zeros(2, 21, WIDTH)
    wanted = f"must be a tensor [batch, local_tokens, {WIDTH}] of torch.float32, got"
    for wrong, kind in (
        *((None, "NoneType | fix: docs/cpm_live.md"), ("x", "str | fix: docs/cpm_live.md")),
        *(
            (x[0], f"float32[21, {WIDTH}] | fix: dim_model"),
            (x[..., 1:], f"float32[2, 21, {WIDTH - 1}] | fix: dim_model"),
        ),
        *(
            (x.double(), f"float64[2, 21, {WIDTH}] | fix: dim_model"),
            (x.int(), f"int32[2, 21, {WIDTH}] | fix: dim_model"),
        ),
    ):
        refuses(lambda w=wrong: attention(w, x, mask, table), f"hidden_q {wanted} {kind}")
        refuses(lambda w=wrong: attention(x, w, mask, table), f"hidden_kv {wanted} {kind}")
    with torch.autocast("cpu", torch.bfloat16):  # which casts what it multiplies
        assert attention(x.bfloat16(), x.bfloat16(), mask, table).shape == x.shape
        words = f"hidden_q {wanted} float64[2, 21, {WIDTH}] | fix: dim_model"  # but not fp64
        refuses(lambda: attention(x.double(), x, mask, table), words)

    q, table = torch.zeros(2, 21, HEADS, DIM_HEAD), table.detach()
    for name, kind in (
        ("formula", "RelativeBias"),
        ("relations", "Tensor"),
        ("tokens", "Tokens"),
        ("group", "CheckedCommunicator"),
    ):
        words = f"{name} | {kind} | NoneType | fix: pass the result of a position bias of bmburst.integrations"
        refuses(lambda n=name: replace(mask, **{n: None}), words)
    refuses(lambda: biased_attention(q, q, q, table, None), "sequence | BiasedSequence | NoneType | fix: pass")
    for wrong, kind in ((None, "NoneType"), ([1.0], "list"), (q.to_sparse(), "one of layout torch.sparse_coo")):
        refuses(lambda w=wrong: biased_attention(w, q, q, table, mask), f"q | dense tensor | {kind} | allowed")
    refuses(lambda: biased_attention(q, q, q, None, mask), "the bias table | dense tensor | NoneType | allowed")
    tiny = [t.to(torch.float8_e4m3fn) for t in (q, q, q)]
    refuses(lambda: biased_attention(*tiny, table, mask), "q, k and v must share one floating-point dtype | torch.flo")
    words = "the bias table | float [22, 3], [rows, heads] | int32 [22, 3] | fix: the table of the module"
    refuses(lambda: biased_attention(q, q, q, table.int(), mask), words)


def on_every_rank():
    """What is wrong on one rank alone is an error on all."""
    mesh = bmburst.Mesh.over_bmtrain()
    split, first = lazy.cpm_live.SplitSequences(mesh), mesh.rank == 0
    refuses(lambda: split.shared(None), NO_BATCH.format("NoneType"))
    refuses(lambda: split.shared({"call": lambda: 0}), "rank 0 | dict | cannot be sent")
    assert split.shared({"a": 1} if first else "not looked at") == {"a": 1}
    part = split.bee(BEE)
    words = "target | tensor | str | fix: split.mean(loss, part.target)"
    refuses(lambda: split.mean(torch.ones(()), "x" if first else part.target), words)
    mask, table = make_layer(draw_bee(3, 2, 21)).position_bias(part.tokens)
    attention = lazy.cpm_live.Attention(WIDTH, HEADS, DIM_HEAD, torch.float32)
    x = torch.zeros(*part.inputs.shape, WIDTH)
    refuses(lambda: attention(x, x.double() if first else x, mask, table), "hidden_kv | tensor [batch, local_tok")


@pytest.mark.parametrize(("size", "body"), [(1, of_batches), (1, of_modules), (2, on_every_rank)])
def test_refuses_with_what_is_allowed(size, body):
    run_program(size, body)


@on_program(2)
def test_ranks_with_different_batches_are_told_on_every_rank():
    mesh = bmburst.Mesh.over_bmtrain()
    split, rank = lazy.cpm_live.SplitSequences(mesh), mesh.sequence_rank
    for compared in (True, False):  # on CPUs always, on GPUs the first times
        mesh.sequence.always = mesh.sequence.active = compared
        mesh.sequence._state.compared.clear()
        for name, values in BEE.items():
            change = {name: np.concatenate([values.reshape(-1)[:-1], values.reshape(-1)[-1:] ^ rank])}
            change = {name: change[name].reshape(values.shape)}
            if name == "length":
                change = {name: values - rank}
            with refused() as caught:
                split.bee(BEE | change)
            assert re.search(r"mesh\.data_rank|allowed: ", str(caught.value))
        for change in ({"ctx": ANT["ctx"] + rank}, {"len_ctx": ANT["len_ctx"] - rank}):
            with refused("disagree", "fix: ", "mesh.data_rank"):
                split.ant(ANT | change, 3)
        with refused("disagree", "fix: ", "same"):
            split.ant(ANT, 3 + rank)
        split.ant(ANT, 3)
        for _ in range(8):
            split.bee(BEE)
    split.bee(BEE | {"inputs": BEE["inputs"] + rank})  # compared no longer
    mesh.sequence.always = mesh.sequence.active = True
