"""shard and unshard are exact inverses, and transposes of each other, for any length."""

import math
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

import bmburst
from bmburst.comm.groups import communicator
from bmburst.errors import UserError
from bmburst_ops import IGNORE_INDEX
from tests.distributed.processes import on_processes
from tests.distributed.threads import on_ranks, run_ranks
from tests.refusals import refused

LAYOUTS = ["contiguous", "zigzag", "striped"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1, -1])
@on_ranks()
def test_inverse_for_any_length(comm, layout, size, dim):
    for length in (size, size + 1, 11, 24):
        shape = [2, 3, 5]
        shape[dim] = max(length, size)
        whole = torch.arange(torch.tensor(shape).prod().item()).reshape(shape)
        part = bmburst.shard(whole, dim, layout, comm, pad_value=-7)
        cut = bmburst.SequenceShard.cut(whole.shape[dim], layout=layout, size=size, rank=comm.rank)
        assert part.shape[dim] == cut.local_tokens
        moved = part.movedim(dim, 0)
        assert torch.equal(moved[: cut.real_tokens], whole.movedim(dim, 0)[cut.positions()[: cut.real_tokens]])
        assert (moved[cut.real_tokens :] == -7).all()
        assert torch.equal(bmburst.unshard(part, dim, layout, comm, whole.shape[dim]), whole)


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(3)
def test_gradients_of_the_sum_of_the_ranks_losses(comm, layout):
    """d/dx of sum_r L_r, by the definition on one rank, for losses that differ between ranks."""
    length = 13
    x = torch.randn(2, length, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    weights = torch.randn(comm.size, 2, length, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    part = bmburst.shard(x, layout=layout, group=comm)
    (bmburst.shard(weights[0], layout=layout, group=comm) * part.square()).sum().backward()
    cut = bmburst.SequenceShard.cut(length, layout=layout, size=comm.size, rank=comm.rank)
    mine = torch.zeros(length, dtype=torch.bool).index_fill(0, cut.positions()[: cut.real_tokens], True)
    assert torch.equal(x.grad, torch.where(mine, 2 * x.detach() * weights[0], 0.0))

    part = part.detach().requires_grad_()
    whole = bmburst.unshard(part, layout=layout, group=comm, length=length)
    (whole * weights[comm.rank]).sum().backward()
    torch.testing.assert_close(part.grad, cut.take(weights.sum(0)))


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_autocast_changes_nothing(comm, layout, low):
    """Nor refuses a dtype: torch's own joining takes there, of 16-bit tensors, those of autocast's dtype alone."""
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        x = torch.arange(42.0).view(2, 7, 3).to(dtype).requires_grad_()
        with torch.autocast("cpu", low):
            whole = bmburst.unshard(bmburst.shard(x, layout=layout, group=comm), 1, layout, comm, 7)
            whole.sum().backward()
        assert torch.equal(whole, x) and whole.dtype == dtype
        (total,) = comm.all_reduce(x.grad).wait()
        assert (total == comm.size).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_batch_shifts_labels_before_the_cut(layout, size):
    tokens = torch.arange(100, 122).reshape(2, 11)
    given = tokens + 500  # labels of another kind, with some that count for nothing
    given[0, 3:7] = IGNORE_INDEX
    for labels, valid in ((None, 20), (given, 18), (torch.full_like(tokens, IGNORE_INDEX), 0)):
        cuts = [bmburst.SequenceShard.cut(11, layout=layout, size=size, rank=rank) for rank in range(size)]
        parts = [cut.batch(tokens, labels) for cut in cuts]
        assert all(t.shape == (2, cut.local_tokens) for cut, part in zip(cuts, parts, strict=True) for t in part)
        seen = {}
        for part in parts:
            for row in range(2):
                for token, label, position, weight in zip(*(t[row].tolist() for t in part), strict=True):
                    if position < 11:
                        assert token == tokens[row, position]
                        follower = token + 1 if position < 10 else IGNORE_INDEX
                        assert label == (follower if labels is None else labels[row, position])
                        seen[row, position] = seen.get((row, position), 0) + 1
                    else:
                        assert (token, label) == (0, IGNORE_INDEX)
                    assert weight == (0 if label == IGNORE_INDEX else pytest.approx(1 / valid))
        assert seen == {(row, position): 1 for row in range(2) for position in range(11)}
        whole = torch.stack([part.tokens for part in parts])
        assert torch.equal(cuts[0].join(whole), tokens)
        assert torch.equal(cuts[0].join(whole, dim=-1), tokens)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_take_counts_dimensions_from_the_end_too(layout):
    whole = torch.arange(2 * 7 * 7).reshape(2, 7, 7)
    cut = bmburst.SequenceShard.cut(7, layout=layout, size=2, rank=1)
    assert torch.equal(cut.take(whole, -1), cut.take(whole.mT, 1).mT)
    assert torch.equal(cut.take(whole, -2), cut.take(whole, 1))


def test_bad_input():
    """One rank is wrong, every rank gets the error."""

    def body(comm):
        def refuses(words, function, *wrong, **options):
            mine = partial(function, *wrong, **options) if comm.rank == 1 else partial(function, torch.zeros(1, 4))
            with refused(words):
                mine(group=comm)

        refuses("1 tokens | 2 ranks | one token a rank", bmburst.shard, torch.zeros(1, 1))
        refuses("layout | 'zig' | 'zigzag' | contiguous", bmburst.shard, torch.zeros(1, 4), layout="zig")
        refuses("dim 2 | [1, 4] | -2 to 1 | fix: ", bmburst.shard, torch.zeros(1, 4), dim=2)
        refuses("dim 0 | [] | at least one dimension | fix: ", bmburst.shard, torch.tensor(1.0), dim=0)
        refuses("torch tensor | list | torch.as_tensor", bmburst.shard, [[1.0, 2.0]])
        refuses("disagree | fix: | float32[1, 4] | float32[1, 5]", bmburst.shard, torch.zeros(1, 5))
        refuses("disagree | layout=zigzag | layout=striped", bmburst.shard, torch.zeros(1, 4), layout="striped")
        refuses("disagree | fix: | float32[1, 4] | float32[4, 4]", bmburst.shard, torch.zeros(4, 4), dim=0)
        refuses("layout | 'strip' | 'striped' | contiguous", bmburst.unshard, torch.zeros(1, 4), layout="strip")
        refuses("dim -3 | [1, 4] | -2 to 1", bmburst.unshard, torch.zeros(1, 4), dim=-3)
        refuses("'zigzag' | multiple of 2 | got 3 | multiple of 4", bmburst.unshard, torch.zeros(1, 3))
        for length in (9, 0):
            words = f"length | is {length} | 2 ranks | 4 local tokens | 1 to 8"
            refuses(words, bmburst.unshard, torch.zeros(1, 4), length=length)
        refuses("length | whole number | 7.5", bmburst.unshard, torch.zeros(1, 4), length=7.5)
        refuses("disagree | fix: | length=8 | length=7", bmburst.unshard, torch.zeros(1, 4), length=7)
        refuses(
            "disagree | fix: | layout=zigzag | layout=striped", bmburst.unshard, torch.zeros(1, 4), layout="striped"
        )

    run_ranks(2, body)
    cut = bmburst.SequenceShard.cut(5, layout="striped", size=2, rank=0)
    for tokens, labels in (
        (torch.zeros(5), None),
        ([[1] * 5], None),
        (torch.zeros(2, 5), torch.zeros(2, 6)),
        (torch.zeros(2, 6), None),
    ):
        with refused("tokens", "[batch, 5]"):
            cut.batch(tokens, labels)
    for labels, words in (
        ([[1] * 5], "labels | torch tensor | list"),
        (torch.zeros(1, 5).to_sparse(), "labels | dense"),
    ):
        with refused(words):
            cut.batch(torch.zeros(1, 5), labels)
    for dtype, fix in ((torch.uint8, "tokens.long()"), (torch.bool, "bmburst.shard"), (torch.float32, "bmburst.shard")):
        with refused(f"tokens | {dtype} | signed | -100 | fix: | {fix}"):  # a label of -100 has no place in bytes
            cut.batch(torch.zeros(1, 5, dtype=dtype))
    for parts, dim in ((None, 1), (torch.zeros(1, 2, 3), 1), (torch.zeros(2, 2, 2), 1)):
        with refused("parts must be a tensor [2, ...] with 3 tokens in dimension 1 | fix: torch.stack"):
            cut.join(parts, dim)
    with refused("mask | int | fix: "):
        cut.read(lambda places: (places, places), documents=5)
    for sequence, words in (
        (None, "sequence | function | NoneType | fix: lambda"),
        (lambda places: places, "sequence returned range for 3 positions"),
        (lambda places: ([1], places), "[1], int64 of shape [3] | 3 positions | allowed: "),
        (lambda places: (places, [0.5] * 3), "float64 | whole numbers [3]"),
    ):
        with refused(words):
            cut.read(sequence)
    for pad_value in ("x", 0.5):
        with refused(f"pad_value {pad_value!r} | torch.int64 | fix: "):
            cut.take(torch.zeros(1, 5, dtype=torch.int64), pad_value=pad_value)
    for mask in ("causal", None, [bmburst.Causal(), 5]):
        with refused("mask | one for each sample | fix: for example bmburst.Documents"):
            cut.under(mask)
    with refused("length | whole number | 'x'"):
        bmburst.Causal().key_length("x")
    for device in ("x", 3.5, "xpu", 10**30):
        with refused(f"device {device!r} | fix: "):
            cut.positions(device)
    for length, size, rank, words in (
        (5, 2, 2, "rank 2 | 2 ranks | 0 to 1"),
        (5, 2, "0", "rank '0' | 2 ranks | 0 to 1"),
        (5, 0, 0, "size | whole number | at least 1 | got 0"),
        ("5", 2, 0, "length | whole number | at least 0 | '5'"),
    ):
        with refused(words):
            bmburst.SequenceShard.cut(length, layout="striped", size=size, rank=rank)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pad_value": "x"}, "pad_value | 'x' | torch.int64 | fix: | number"),
        ({"pad_value": float("nan")}, "pad_value | nan | torch.int64 | fix: | number"),
        ({"pad_value": 0.5}, "pad_value | 0.5 | torch.int64 | fix: | number"),
        ({"dim": "1"}, "dim '1' | [1, 9] | -2 to 1"),
        ({"dim": 1.0}, "dim 1.0 | [1, 9] | -2 to 1"),
        ({"dim": True}, "dim True | [1, 9] | -2 to 1"),
    ],
)
@on_ranks(2)
def test_what_only_some_ranks_would_find_out_is_refused_on_all(comm, options, words):
    assert bmburst.SequenceShard.cut(9, layout="contiguous", size=2, rank=0).real_tokens == 5  # without padding
    with refused(words):
        bmburst.shard(torch.zeros(1, 9, dtype=torch.int64), layout="contiguous", group=comm, **options)


@pytest.mark.parametrize(("dtype", "value"), [(torch.bool, 7), (torch.uint8, 1.5), (torch.float16, 1e6)])
def test_a_pad_value_that_its_dtype_would_change_is_refused(dtype, value):
    with refused("pad_value", value, dtype, "fix: ", "number"):
        bmburst.shard(torch.zeros(1, 9, dtype=dtype), pad_value=value)
    for kept in (1, True, 0.0, *([0.1, math.inf, -math.inf, math.nan] if dtype.is_floating_point else [])):
        bmburst.shard(torch.zeros(1, 9, dtype=dtype), pad_value=kept)


@pytest.mark.parametrize("documents", ["causal", (4, 5), [[4, 5]], 5])
def test_documents_are_masks(documents):
    cut = bmburst.SequenceShard.cut(9, layout="zigzag", size=2, rank=0)
    with refused("documents", "masks", repr(documents), "fix: ", "bmburst.Documents"):
        cut.batch(torch.zeros(2, 9, dtype=torch.int64), documents=documents)


@on_ranks(1)
def test_second_derivatives(comm):
    """Through shard they are right; through unshard, which communicates, they are refused."""
    x = torch.randn(1, 5, dtype=torch.float64, requires_grad=True)
    part = partial(bmburst.shard, group=comm)
    assert torch.autograd.gradgradcheck(lambda t: part(t).sin(), (x,))
    whole = bmburst.unshard(part(x), group=comm)
    with pytest.raises(UserError, match="create_graph=True"):
        torch.autograd.grad(whole.square().sum(), x, create_graph=True)[0].sum().backward()


@on_processes(2)
def test_a_compiled_caller():
    """The graph ends before a sequence is cut or joined and goes on after it; results are those of an eager caller."""
    warnings.filterwarnings("error", message="(?s).*bmburst")  # the compiler looks into what it cannot keep
    x = torch.arange(36.0, dtype=torch.float64).view(2, 9, 2).requires_grad_()

    def caller(x):
        part = bmburst.shard(x * 2, layout="contiguous").sin()
        return (bmburst.unshard(part, 1, "contiguous", length=9) * 3).square()

    expected = caller(x)
    (wanted,) = torch.autograd.grad(expected.sum(), x)
    compiled = torch.compile(caller, backend="eager")
    for _ in range(2):
        got = compiled(x)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(*torch.autograd.grad(got.sum(), x), wanted)


WHOLE = {
    "ids": torch.arange(24).view(2, 12),
    "half": torch.linspace(-1, 1, 24, dtype=torch.float64).view(2, 12).bfloat16(),
    "complex": torch.linspace(-1, 1, 24).view(2, 12) * (1 + 1j),
    "flags": torch.arange(24).view(2, 12) % 2 == 0,
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("always", [True, False])
@on_ranks(2)
def test_shard_refuses_ranks_that_hold_different_tensors(comm, name, always):
    comm.always = comm.active = always  # not: as on GPUs
    whole = WHOLE[name]
    different = whole if comm.rank == 0 else whole.roll(1, dims=1)
    for _ in range(2):
        with refused("disagree", "mesh.data_rank", "rank 0: shard contents", "rank 1: shard contents"):
            bmburst.shard(different, group=comm)
    for _ in range(8):
        bmburst.shard(whole, group=comm)
    if not always:
        bmburst.shard(different, group=comm)


@on_ranks(2)
def test_shard_takes_what_differs_by_a_rounding(comm):
    whole = torch.linspace(-1, 1, 24).view(1, 12, 2)
    whole[0, 3, 1] = float("nan")
    noisy = whole * (1 + 0.01 * comm.rank)
    for x in (noisy, noisy.bfloat16(), noisy.mT.contiguous().mT, torch.zeros(1, 12), torch.zeros(0, 12)):
        bmburst.shard(x, group=comm)
    with refused("disagree", "fix: ", "mesh.data_rank"):
        bmburst.shard(torch.full((1, 12), float(comm.rank)), group=comm)


@on_processes(2)
def test_batches_of_ranks_that_share_a_sequence_are_compared():
    world = communicator(None)
    ids = torch.arange(24).view(2, 12)
    cuts = [
        bmburst.SequenceShard.cut(12, layout="zigzag", size=2, rank=world.rank),
        bmburst.SequenceShard.cut(12, layout="zigzag", group=world),
    ]
    assert cuts[0] == cuts[1]
    other = bmburst.SequenceShard.cut(12, layout="zigzag", size=3, rank=world.rank)
    for cut in cuts:
        for given in (
            (ids + world.rank,),
            (ids, ids + world.rank),
            (ids, None, bmburst.Documents((5 + world.rank, 7 - world.rank))),
            (ids[: 1 + world.rank],),
        ):
            with refused("disagree", "mesh.data_rank", "rank 0: ", "rank 1: "):
                cut.batch(*given)
        with refused("tokens", "torch.float32", "whole numbers", "bmburst.shard"):
            cut.batch(ids.float())
        with refused("labels", "torch.float32", "whole numbers"):
            cut.batch(ids, ids.float())
        with refused("[batch, 12]", "[2, 11]"):
            cut.batch(ids[:, : 12 - world.rank])  # which rank 1 refuses
        cut.batch(ids)
    other.batch(ids + world.rank)  # of nobody here
    with ThreadPoolExecutor(1) as pool:  # a loader's thread talks to nobody
        pool.submit(cuts[0].batch, ids + world.rank).result()


def test_a_shard_of_a_group_has_its_size_and_rank():
    with refused("size and rank", "group", "fix: ", "group=mesh.sequence"):
        bmburst.SequenceShard.cut(12, layout="zigzag", size=2)
    with refused("rank 1 of 2", "0 of 1", "fix: ", "leave size and rank out"):
        bmburst.SequenceShard.cut(12, layout="zigzag", size=2, rank=1, group=communicator(None))
