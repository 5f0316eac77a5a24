"""What is no batch, number, dtype or tensor is refused with what is allowed, on every rank, and hangs none."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import bmburst
from bmburst.errors import UserError
from tests.distributed.programs import run_program
from tests.integrations.cpm_live_program import DIM_HEAD, HEADS, WIDTH, ant_data, bee_data, make_layer
from tests.ops.biased_oracle import draw_ant, draw_bee

BEE, ANT = bee_data(draw_bee(3, 2, 21)), ant_data(draw_ant(4, 2, 29))
NO_BATCH = "a batch must be a mapping of arrays by name, got {}\nfix: pass what CPM-Live's loader yields; "
NO_NUMBERS = "'{}' of the batch must be whole numbers, got {}\nfix: pass what CPM-Live's loader yields"
LENGTHS = BEE["length"].astype(float)

# Of CPM-Bee's batch: what is changed, and the message's beginning.
BATCHES = [
    ({"inputs": None}, NO_NUMBERS.format("inputs", "NoneType")),
    ({"inputs": "text"}, NO_NUMBERS.format("inputs", "str")),
    ({"inputs": BEE["inputs"] + 0.5}, NO_NUMBERS.format("inputs", "float64 of shape [2, 21]")),
    ({"inputs": BEE["inputs"] + 1j}, NO_NUMBERS.format("inputs", "complex128 of shape [2, 21]")),
    (
        {"inputs": torch.zeros(2, 21, dtype=torch.bfloat16)},
        "'inputs' of the batch must be an array of numbers, got tens",
    ),
    ({"inputs": [[1, 2], [3]]}, "'inputs' of the batch must be an array of numbers, got [[1, 2], [3]]\nfix: pass what"),
    ({"inputs": BEE["inputs"][0]}, "'inputs' of the batch must be [batch, length], got [21]\nallowed: one sequence"),
    (
        {"inputs": BEE["inputs"][:0]},
        "'inputs' of the batch must be [batch, length], got [0, 21]\nallowed: one sequence",
    ),
    ({"inputs": BEE["inputs"].astype(np.int64) + 2**33}, "'inputs' of the batch holds 85899346"),
    (
        {"spans": BEE["spans"][:, 1:]},
        "'spans' must be [batch, length] as 'inputs' [2, 21], got [2, 20]\nfix: pass what",
    ),
    ({"target": BEE["target"] > 0}, NO_NUMBERS.format("target", "bool of shape [2, 21]")),
    ({"length": [5.5, 3.0]}, NO_NUMBERS.format("length", "float64 of shape [2]")),
    ({"length": LENGTHS}, NO_NUMBERS.format("length", "float64 of shape [2]")),
    ({"length": np.array([2**32 + 3, 3])}, "'length' of the batch holds 4294967299\nallowed: what int32 holds, below"),
    ({"length": np.array([-1, 3])}, "'length' must be 2 lengths from 0 to 21, got [-1, 3]\nfix: one to each of the 2"),
    ({"length": 7}, "'length' must be 2 lengths from 0 to 21, got 7\nfix: one to each of the 2 sequences"),
    ({"segment_rel": 3}, "'segment_rel' must be [2, entries], none below 0, got [], the least 3\nallowed: for each"),
    ({"segment_rel": BEE["segment_rel"][:, :0]}, "'segment_rel' must be [2, entries], none below 0, got [2, 0]\nallow"),
    ({"segment_rel": BEE["segment_rel"] - 9}, "'segment_rel' must be [2, entries], none below 0, got [2, 41], the lea"),
    ({"ext_ids": None}, NO_NUMBERS.format("ext_ids", "NoneType")),
    ({"ext_ids": [[1], [2]]}, "'ext_ids' and 'ext_sub' must be vectors of one length, got [2, 1] and [2]\nfix: pass"),
    ({"ext_sub": np.arange(5)}, "'ext_ids' and 'ext_sub' must be vectors of one length, got [2] and [5]\nfix: pass"),
]


def refused(call, beginning):
    with pytest.raises(UserError) as caught:
        call()
    assert str(caught.value).startswith(beginning), (str(caught.value), beginning)
    assert 2 <= len(str(caught.value).splitlines()) <= 3


def of_batches():
    from bmburst.integrations import cpm_live

    for none, kind in ((None, "NoneType"), ("zigzag", "str")):
        refused(
            lambda n=none: cpm_live.SplitSequences(n), f"mesh must be a bmburst.Mesh, got {kind}\nfix: bmburst.Mesh"
        )
    split = cpm_live.SplitSequences(bmburst.Mesh.over_bmtrain())
    for none, kind in ((None, "NoneType"), ([], "list"), (torch.zeros(2, 3), "Tensor")):
        for call in (split.shared, split.bee, lambda batch: split.ant(batch, 3)):
            refused(lambda call=call, none=none: call(none), NO_BATCH.format(kind))
    refused(lambda: split.bee({}), "the batch has no 'inputs'\nknown: nothing")
    for change, beginning in BATCHES:
        refused(lambda c=change: split.bee(BEE | c), beginning)
    whole = {name: torch.as_tensor(values).long() for name, values in BEE.items()}
    assert torch.equal(split.bee(whole).inputs, split.bee(BEE).inputs)
    assert split.bee(BEE | {"ext_ids": [], "ext_sub": np.array([])}).ext_ids.shape == (0,)

    for number in (None, "3", 2.5, 0, -1):
        text = f"num_segments must be a whole number of at least 1, got {number!r}\nfix: the model's segment_types"
        refused(lambda n=number: split.ant(ANT, n), text)
    refused(lambda: split.ant(ANT, 1), "segments go from 0 to 2, num_segments=1\nallowed: 0 to 0\nfix: ")
    refused(lambda: split.ant(ANT | {"len_ctx": [5.5, 2.0]}, 3), NO_NUMBERS.format("len_ctx", "float64 of shape [2]"))

    part, one = split.bee(BEE), torch.ones(())
    for loss, target, beginning in (
        (one, "x", "target must be a tensor, got str\nfix: split.mean(loss, part.target)"),
        (None, part.target, "loss_sum must be a tensor, got NoneType\nfix: split.mean(loss, part.target)"),
        (1.5, part.target, "loss_sum must be a tensor, got float\nfix: split.mean(loss, part.target)"),
        (torch.ones(2), part.target, "loss_sum must be one number in floating point, got float32[2]\nfix: Fused"),
        (one.long(), part.target, "loss_sum must be one number in floating point, got int64[]\nfix: Fused"),
        (one, part.target.float(), "target must be labels, got float32[2, 21]\nfix: target of the same part"),
    ):
        refused(lambda loss=loss, target=target: split.mean(loss, target), beginning)


def of_modules():
    from bmburst.attention.biased import biased_attention
    from bmburst.integrations.cpm_live import Attention, BucketPositionBias, SegmentPositionEmbedding, SplitSequences

    for dtype in ("float", None, torch.int32, torch.float8_e4m3fn):
        beginning = f"dtype must be one of floating point, got {dtype!r}\nallowed: torch.float16, "
        refused(lambda d=dtype: Attention(WIDTH, HEADS, DIM_HEAD, d), beginning)
        refused(lambda d=dtype: BucketPositionBias(HEADS, dtype=d), beginning)
        refused(lambda d=dtype: SegmentPositionEmbedding(HEADS, dtype=d), beginning)
    for size in (0, -1, 2.5, "3", None):
        ending = f" must be a whole number of at least 1, got {size!r}\nfix: take it from the configuration"
        refused(lambda s=size: Attention(s, HEADS, DIM_HEAD), f"dim_model{ending}")
        refused(lambda s=size: Attention(WIDTH, s, DIM_HEAD), f"num_heads{ending}")
        refused(lambda s=size: Attention(WIDTH, HEADS, s), f"dim_head{ending}")
        refused(lambda s=size: BucketPositionBias(s), f"num_heads{ending}")
    for name in ("num_buckets", "max_distance"):
        for value in ("x", None, 32.5, True):
            beginning = f"{name} must be a whole number, got {value!r}\nallowed: what the model was made with"
            refused(lambda n=name, v=value: BucketPositionBias(HEADS, **{n: v}), beginning)
    beginning = "num_segments must be a whole number, got '2'\nallowed: what the model was made with"
    refused(lambda: SegmentPositionEmbedding(HEADS, "2"), beginning)
    beginning = "bidirectional must be a bool, got 'no'\nallowed: True or False"
    refused(lambda: SegmentPositionEmbedding(HEADS, bidirectional="no"), beginning)
    refused(
        lambda: BucketPositionBias(HEADS, max_distance=0), "max_distance 0 must be above 8, of 32 buckets those that"
    )
    refused(
        lambda: BucketPositionBias(HEADS, init_std=-1), "init_std must be a number of at least 0, got -1\nallowed: as"
    )
    refused(lambda: BucketPositionBias(HEADS, init_mean="0"), "init_mean must be a finite number, got '0'\nallowed: as")

    split = SplitSequences(bmburst.Mesh.over_bmtrain())
    tokens = split.bee(BEE).tokens
    refused(
        lambda: tokens.under(None), "a formula must be a RelativeBias, got NoneType\nfix: call a position bias module"
    )
    mask, table = make_layer(draw_bee(3, 2, 21)).position_bias(tokens)
    attention, x = Attention(WIDTH, HEADS, DIM_HEAD, torch.float32), torch.zeros(2, 21, WIDTH)
    wanted = f"must be a tensor [batch, local_tokens, {WIDTH}] of torch.float32, got"
    for wrong, kind in (
        *((None, "NoneType\nfix: docs/cpm_live.md"), ("x", "str\nfix: docs/cpm_live.md")),
        *(
            (x[0], f"float32[21, {WIDTH}]\nfix: dim_model"),
            (x[..., 1:], f"float32[2, 21, {WIDTH - 1}]\nfix: dim_model"),
        ),
        *(
            (x.double(), f"float64[2, 21, {WIDTH}]\nfix: dim_model"),
            (x.int(), f"int32[2, 21, {WIDTH}]\nfix: dim_model"),
        ),
    ):
        refused(lambda w=wrong: attention(w, x, mask, table), f"hidden_q {wanted} {kind}")
        refused(lambda w=wrong: attention(x, w, mask, table), f"hidden_kv {wanted} {kind}")
    with torch.autocast("cpu", torch.bfloat16):  # which casts what it multiplies
        assert attention(x.bfloat16(), x.bfloat16(), mask, table).shape == x.shape

    q, table = torch.zeros(2, 21, HEADS, DIM_HEAD), table.detach()
    for name, kind in (
        ("formula", "RelativeBias"),
        ("relations", "Tensor"),
        ("tokens", "Tokens"),
        ("group", "Checked"),
    ):
        beginning = f"{name} must be a {kind}, got NoneType\nfix: take what a position bias of bmburst.integrations"
        refused(lambda n=name: replace(mask, **{n: None}), beginning)
    refused(
        lambda: biased_attention(q, q, q, table, None), "sequence must be a BiasedSequence, got NoneType\nfix: take"
    )
    for wrong, kind in ((None, "NoneType"), ([1.0], "list"), (q.to_sparse(), "one of layout torch.sparse_coo")):
        refused(
            lambda w=wrong: biased_attention(w, q, q, table, mask), f"q must be a dense tensor, got {kind}\nallowed"
        )
    refused(
        lambda: biased_attention(q, q, q, None, mask), "the bias table must be a dense tensor, got NoneType\nallowed"
    )
    tiny = [t.to(torch.float8_e4m3fn) for t in (q, q, q)]
    refused(
        lambda: biased_attention(*tiny, table, mask), "q, k and v must share one floating-point dtype, got torch.flo"
    )
    beginning = "the bias table must be float [22, 3], [rows, heads], got int32 [22, 3]\nfix: the table of the module"
    refused(lambda: biased_attention(q, q, q, table.int(), mask), beginning)


def on_every_rank():
    """What is wrong on one rank alone is an error on all."""
    from bmburst.integrations import cpm_live

    mesh = bmburst.Mesh.over_bmtrain()
    split, first = cpm_live.SplitSequences(mesh), mesh.rank == 0
    refused(lambda: split.shared(None), NO_BATCH.format("NoneType"))
    refused(lambda: split.shared({"call": lambda: 0}), "rank 0's dict cannot be sent: ")
    assert split.shared({"a": 1} if first else "not looked at") == {"a": 1}
    part = split.bee(BEE)
    beginning = "target must be a tensor, got str\nfix: split.mean(loss, part.target)"
    refused(lambda: split.mean(torch.ones(()), "x" if first else part.target), beginning)
    mask, table = make_layer(draw_bee(3, 2, 21)).position_bias(part.tokens)
    attention = cpm_live.Attention(WIDTH, HEADS, DIM_HEAD, torch.float32)
    x = torch.zeros(*part.inputs.shape, WIDTH)
    refused(
        lambda: attention(x, x.double() if first else x, mask, table), "hidden_kv must be a tensor [batch, local_tok"
    )


@pytest.mark.parametrize(("size", "body"), [(1, of_batches), (1, of_modules), (2, on_every_rank)])
def test_refuses_with_what_is_allowed(size, body):
    run_program(size, body)


def of_different_batches():
    from bmburst.integrations import cpm_live

    mesh = bmburst.Mesh.over_bmtrain()
    split, rank = cpm_live.SplitSequences(mesh), mesh.sequence_rank
    for compared in (True, False):  # on CPUs always, on GPUs the first times
        mesh.sequence.always = mesh.sequence.active = compared
        mesh.sequence._switch.compared.clear()
        for name, values in BEE.items():
            change = {name: np.concatenate([values.reshape(-1)[:-1], values.reshape(-1)[-1:] ^ rank])}
            change = {name: change[name].reshape(values.shape)}
            if name == "length":
                change = {name: values - rank}
            with pytest.raises(UserError, match=r"mesh\.data_rank|allowed: ") as caught:
                split.bee(BEE | change)
            assert len(str(caught.value).splitlines()) <= 3
        for change in ({"ctx": ANT["ctx"] + rank}, {"len_ctx": ANT["len_ctx"] - rank}):
            with pytest.raises(UserError, match=r"mesh\.data_rank"):
                split.ant(ANT | change, 3)
        with pytest.raises(UserError, match="same"):
            split.ant(ANT, 3 + rank)
        split.ant(ANT, 3)
        for _ in range(8):
            split.bee(BEE)
    split.bee(BEE | {"inputs": BEE["inputs"] + rank})  # compared no longer
    mesh.sequence.always = mesh.sequence.active = True


def test_ranks_with_different_batches_are_told_on_every_rank():
    run_program(2, of_different_batches)
