"""FlashAttention-4 under block-sparse masks: the lists it is given, how it is called, and on a GPU what it gives."""

import random
import sys
from functools import partial
from itertools import product
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch

from bmburst import BlockSparse, SlidingWindow
from bmburst_ops.errors import KernelError
from bmburst_ops.flash import CAUSAL, FULL, BackwardInputs, Band, Cells, Partial, Scoring, queries_ahead, select_kernel
from bmburst_ops.flash.fa4 import BLOCK_HEAD_DIMS, FlashAttention4Kernel, listed
from bmburst_ops.flash.inputs import is_aligned
from bmburst_ops.pattern import BLOCK, blocks_of
from tests.attention.oracle import attention, problem
from tests.attention.test_burst_attention import split_attention
from tests.distributed.threads import run_ranks
from tests.ops.another_machine import AnotherMachine
from tests.ops.masked import Masked, gradient_bound
from tests.ops.masks import blocks, visible
from tests.ops.package_stand_ins import check_statistic_memory, install
from tests.ops.tiles import DEVICE, EPSILON, error
from tests.refusals import refused

BF16 = torch.bfloat16


def banded(pattern, band):
    """The same cells, and of their keys those of a band that has no left bound."""
    queries, keys = len(pattern.start), int(pattern.key_edges[-1])
    stop = np.clip(np.arange(queries) + keys - queries + 1 + band.right, 0, keys)
    return Cells(pattern.start, stop, pattern.query_edges, pattern.key_edges, pattern.cells)


def sparse(seed, queries, keys, size, density, band=FULL):
    """Blocks of `size` tokens, some rows and columns of which are all off."""
    pattern = blocks(random.Random(seed), queries, keys, size, density)
    pattern.cells[seed % len(pattern.cells)] = False
    pattern.cells[:, (seed + 1) % pattern.cells.shape[1]] = False
    return pattern if band == FULL else banded(pattern, band)


DRAWN = [
    sparse(seed, queries, keys, size, density, band)
    for (queries, keys), size, (seed, density), band in product(
        ((640, 640), (569, 441), (300, 697), (127, 129)),
        (BLOCK, 3 * BLOCK),
        enumerate((0.3, 0.7, 1.0), 5),
        (FULL, CAUSAL, Band(None, 200)),
    )
]


def tokens_of(seen, queries, keys):
    """Blocks as pairs of tokens."""
    return torch.from_numpy(seen).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:queries, :keys]


def from_lists(counts, places, columns):
    """What lists say, `[rows, columns]`: ascending, in range, none twice."""
    seen = np.zeros((len(counts), columns), bool)
    assert places.shape[1] >= max(counts)
    for row, (count, own) in enumerate(zip(counts, places, strict=True)):
        first = [int(n) for n in own[:count]]
        assert first == sorted(set(first)) and all(0 <= n < columns for n in first)
        seen[row, first] = True
    return seen


@pytest.mark.parametrize("pattern", DRAWN, ids=lambda pattern: f"{len(pattern.start)}x{pattern.key_edges[-1]}")
def test_blocks_and_lists_are_the_definition(pattern):
    queries, keys = len(pattern.start), int(pattern.key_edges[-1])
    found = blocks_of(pattern)
    assert found is not None and pattern.needs == {"blocks"}
    for side in (np.array, np.transpose):  # as forward has them, and as backward
        part, whole = (from_lists(*listed(side(each)), side(each).shape[1]) for each in (found.part, found.whole))
        part, whole = (tokens_of(side(each), queries, keys) for each in (part, whole))
        assert not (part & whole).any()
        band, wanted = visible(found.band, queries, keys), visible(pattern, queries, keys)
        assert torch.equal((part | whole) & band, wanted)  # the band is applied to all blocks alike
        assert torch.equal(whole & wanted, whole)
    assert (found.band == FULL) == (not found.part.any())


def test_lists_of_nothing_have_a_column():
    for shape in ((3, 2), (1, 1)):
        counts, places = listed(np.zeros(shape, bool))
        assert counts.tolist() == [0] * shape[0] and places.tolist() == [[0]] * shape[0]


def changed(**fields):
    pattern = blocks(random.Random(0), 400, 500, BLOCK, 1.0)
    return Cells(**({name: getattr(pattern, name) for name in pattern.__dataclass_fields__} | fields))


ROWS = np.arange(400)
ODD = {
    "other cells of queries": changed(query_edges=np.array([0, 128, 256, 380, 400])),
    "other cells of keys": changed(key_edges=np.array([0, 64, 256, 384, 500])),
    "a window": changed(start=np.maximum(ROWS - 99, 0), stop=ROWS + 101),
    "starts that cut": changed(start=np.where(ROWS < 390, 0, 50)),
    "no band": changed(stop=np.where(ROWS < 200, 100, 450)),
    "a band that lies too low": changed(stop=np.maximum(ROWS - 40, 0)),
    "ends that jump inside a block": changed(stop=np.where(ROWS < 200, 0, 500)),
    "a band that ends early": changed(stop=np.minimum(ROWS + 101, 300)),
}


@pytest.mark.parametrize("pattern", ODD.values(), ids=ODD)
def test_what_is_no_pattern_of_blocks_is_refused(pattern):
    assert blocks_of(pattern) is None and pattern.needs == {"cells"}
    q, k = torch.zeros(1, 400, 2, 16, dtype=BF16), torch.zeros(1, 500, 2, 16, dtype=BF16)
    lse = torch.zeros(1, 2, 400)
    module = ModuleType("flash_attn.cute.interface")
    module._flash_attn_fwd = module._flash_attn_bwd = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        with refused("kernel 'fa4' | multiple of 128 | another kernel", error=KernelError):
            FlashAttention4Kernel().forward(q, k, k, Scoring(pattern, 1.0))
        given = BackwardInputs(q, q, k, k, lse, lse)
        with refused("kernel 'fa4' | multiple of 128 | another kernel", error=KernelError):
            FlashAttention4Kernel().backward(given, Scoring(pattern, 1.0), deterministic=False)


class BlockSparseTensorsTorch(NamedTuple):
    """That of flash-attn-4 4.0.0b36, `flash_attn/cute/block_sparsity.py`: names, order and defaults."""

    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor | None = None
    full_block_idx: torch.Tensor | None = None
    cu_total_m_blocks: torch.Tensor | None = None
    cu_block_idx_offsets: torch.Tensor | None = None
    block_size: tuple[int, int] | None = None
    dq_write_order: torch.Tensor | None = None
    dq_write_order_full: torch.Tensor | None = None
    spt: bool | None = None


def mask_of(given, rows, columns, device):
    """What a kernel reads of the tensors, in blocks; checked as `normalize_block_sparse_tensors` does, and stricter."""
    if given is None:  # between ranks there are tiles that are seen as a whole
        return [np.zeros((rows, columns), bool), np.ones((rows, columns), bool)]
    assert isinstance(given, BlockSparseTensorsTorch) and given.block_size == (128, 128)
    assert given[4:6] == (None, None) and given[7:] == (None, None, None)
    seen = []
    for counts, places in (given[:2], given[2:4]):
        assert counts.dtype is places.dtype is torch.int32 and counts.device == places.device == device
        assert counts.shape == (1, 1, rows) and places.shape[:3] == (1, 1, rows) and 1 <= places.shape[3] <= columns
        assert counts.is_contiguous() and places.is_contiguous() and places.data_ptr() % 4 == 0
        seen.append(from_lists(counts[0, 0].numpy(), places[0, 0].numpy(), columns))
    assert not (seen[0] & seen[1]).any()
    return seen


def pairs_of(seen, causal, left, right, queries, keys):
    """Which tokens see each other: blocks, and the flag or the window in all of them."""
    assert left is None and not (causal and right is not None)
    assert causal or right is not None or not seen[0].any(), "what is seen in part needs a mask"
    return tokens_of(seen[0] | seen[1], queries, keys) & visible(Band(None, 0 if causal else right), queries, keys)


def ceiling(tokens):
    return -(-tokens // 128)


def stand_in(monkeypatch):
    """FlashAttention-4's functions, with the names that its signatures have, over the definition."""
    calls = []

    # fmt: off
    def _flash_attn_fwd(q, k, v, *, softmax_scale=None, causal=False, softcap=None, window_size_left=None,
                        window_size_right=None, pack_gqa=None, block_sparse_tensors=None, return_lse=False, out=None,
                        lse=None):
        assert softcap is None and return_lse and pack_gqa is None and all(is_aligned(t) for t in (q, k, v))
        assert out is None or (is_aligned(out) and out.dtype is q.dtype)
        if lse is not None:
            check_statistic_memory(lse, (q.shape[0], q.shape[2], q.shape[1]))
        queries, keys = q.shape[1], k.shape[1]
        seen = mask_of(block_sparse_tensors, ceiling(queries), ceiling(keys), q.device)
        pairs = pairs_of(seen, causal, window_size_left, window_size_right, queries, keys)
        found = attention(q.float(), k.float(), v.float(), pairs, softmax_scale)
        calls.append(("forward", causal, window_size_right))
        results = zip((found[0].to(q.dtype), found[1].contiguous()), (out, lse), strict=True)
        return *(ours if target is None else target.copy_(ours) for ours, target in results), None, None, None

    def _flash_attn_bwd(q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
                        window_size_right=None, *, deterministic=False, dq=None, dk=None, dv=None,
                        block_sparse_tensors=None, dlse=None):
        assert softcap == 0.0 and not deterministic and not out.any() and out.shape == q.shape
        assert lse.dtype is dlse.dtype is torch.float32 and lse.shape == dlse.shape
        queries, keys = q.shape[1], k.shape[1]
        seen = mask_of(block_sparse_tensors, ceiling(keys), ceiling(queries), q.device)
        seen = [each.T for each in seen]
        pairs = pairs_of(seen, causal, window_size_left, window_size_right, queries, keys)
        group = q.shape[2] // k.shape[2]
        wide_q, grad, wide_k, wide_v = q.float(), dout.float(), *(t.float().repeat_interleave(group, 2) for t in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", wide_q, wide_k) * softmax_scale
        weights = torch.where(pairs, (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp(), 0.0)
        slopes = weights * (torch.einsum("bqhd,bkhd->bhqk", grad, wide_v) + dlse[..., None]) * softmax_scale
        dq.copy_(torch.einsum("bhqk,bkhd->bqhd", slopes, wide_k))
        for target, factors, rows in ((dk, slopes, wide_q), (dv, weights, grad)):
            each = torch.einsum("bhqk,bqhd->bkhd", factors, rows)
            target.copy_(each.unflatten(2, (-1, group)).sum(3))
        calls.append(("backward", causal, window_size_right))
        return dq, dk, dv
    # fmt: on
    kernel = install(
        monkeypatch, FlashAttention4Kernel(), "flash_attn.cute.interface", _flash_attn_fwd, _flash_attn_bwd
    )
    module = ModuleType("flash_attn.cute.block_sparsity")
    module.BlockSparseTensorsTorch = BlockSparseTensorsTorch
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return kernel, calls


_TIMES = 20
BANDS = {"full": FULL, "causal": CAUSAL, "a band to the right": Band(None, 200)}


def hold(kernel, tile):
    """Backward is called again and again on a GPU: older packages read what another kernel had yet to write."""
    out, lse = tile.forward(kernel)
    assert not tile.mask.any() or error(out, tile.out) < EPSILON[tile.dtype]
    torch.testing.assert_close(lse.double().cpu(), tile.lse, rtol=1e-4, atol=1e-4)
    for _ in range(_TIMES if tile.q.is_cuda else 1):
        gradients = tile.backward(kernel)
        for name, ours, wanted in zip("qkv", gradients, tile.gradients, strict=True):
            assert not wanted.any() or error(ours, wanted) < gradient_bound(kernel), name
        tile.hold_blind_rows(out, lse, gradients)


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize(("queries", "keys"), [(313, 313), (256, 441), (441, 130)])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_the_package_is_told_the_blocks(monkeypatch, band, queries, keys, kv_heads):
    kernel, calls = stand_in(monkeypatch)
    told = (band == "causal", 200 if band == "a band to the right" else None)
    for seed, density in enumerate((0.4, 0.8), 3):
        pattern = sparse(seed, queries, keys, BLOCK, density, BANDS[band])
        hold(kernel, Masked(pattern, queries, keys, 2, kv_heads, 16, BF16, device="cpu"))
        found = told if blocks_of(pattern).part.any() else (False, None)
        assert calls[-2:] == [("forward", *found), ("backward", *found)]


def test_results_are_put_where_they_are_asked_for(monkeypatch):
    kernel, _ = stand_in(monkeypatch)
    tile = Masked(sparse(3, 313, 313, BLOCK, 0.6, CAUSAL), 313, 313, 2, 1, 16, BF16, device="cpu")
    into = Partial(torch.empty_like(tile.q), torch.empty(2, 2, 313))
    found = tile.forward(kernel, into=into)
    assert found.out is into.out and found.lse is into.lse and error(into.out, tile.out) < EPSILON[BF16]


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_what_it_cannot_do_under_blocks_is_never_left_out(monkeypatch, softcap):
    kernel, _ = stand_in(monkeypatch)
    pattern = sparse(3, 313, 313, BLOCK, 0.6)
    tile = Masked(pattern, 313, 313, 2, 1, 16, BF16, device="cpu")
    given = BackwardInputs(tile.grad, tile.q, tile.k, tile.v, tile.lse.float(), tile.delta.float())
    words, scoring = "softcap" if softcap else "deterministic backward", Scoring(pattern, 1.0, softcap)
    with refused(f"kernel 'fa4' | {words} | block-sparse masks", error=KernelError):
        kernel.backward(given, scoring, deterministic=softcap is None)
    if softcap:
        with refused("kernel 'fa4' | softcap | block-sparse masks", error=KernelError):
            kernel.forward(tile.q, tile.k, tile.v, scoring)


def is_here():
    q = torch.empty(1, 1, 1, min(BLOCK_HEAD_DIMS), dtype=BF16, device=DEVICE)
    return FlashAttention4Kernel().refusal(q, q, frozenset({"blocks"})) is None


def on_gpu(monkeypatch):
    del monkeypatch
    return FlashAttention4Kernel(), None


# The stand-in shows on CPUs that these tests can hold; a Hopper GPU with the package adds the package itself.
MADE = [("stand-in", stand_in, 16, 2 * BLOCK + 57, "cpu")]
MADE += [("fa4", on_gpu, head_dim, 7 * BLOCK + 57, DEVICE) for head_dim in sorted(BLOCK_HEAD_DIMS) if is_here()]
named = {"ids": lambda made: f"{made[0]}-{made[2]}"}


@pytest.mark.parametrize("made", MADE, **named)
@pytest.mark.parametrize(("band", "kv_heads"), [("full", 4), ("causal", 4), ("causal", 1), ("a band to the right", 4)])
@pytest.mark.parametrize("density", [0.1, 0.25, 0.5, 1.0])
def test_equals_the_definition(monkeypatch, made, band, kv_heads, density):
    """Output, log-sum-exp and gradients, against fp64; rows and columns that are all off are among the blocks."""
    _, make, head_dim, tokens, device = made
    kernel, _ = make(monkeypatch)
    pattern = sparse(7, tokens, tokens, BLOCK, density, BANDS[band])
    hold(kernel, Masked(pattern, tokens, tokens, 4, kv_heads, head_dim, BF16, device=device))


@pytest.mark.parametrize("made", MADE, **named)
@pytest.mark.parametrize(("queries", "keys"), [(128, 128), (130, 513), (700, 129), (1, 300)])
def test_few_blocks_and_other_lengths(monkeypatch, made, queries, keys):
    """More keys than queries and fewer, blocks of 384 tokens, one block or one token alone."""
    _, make, head_dim, _, device = made
    kernel, _ = make(monkeypatch)
    for size, band in ((BLOCK, FULL), (3 * BLOCK, CAUSAL)):
        pattern = blocks(random.Random(2), queries, keys, size, 0.9)
        pattern = pattern if band == FULL else banded(pattern, band)
        hold(kernel, Masked(pattern, queries, keys, 4, 2, head_dim, torch.float16, device=device))


class OnCpu(FlashAttention4Kernel):
    """Takes tensors on CPUs as it would take those on a Hopper GPU."""

    def refusal(self, q, k, needs=frozenset()):
        del q, k
        on_gpu = queries_ahead(torch.device("cuda"), BF16, min(BLOCK_HEAD_DIMS))
        return super().refusal(on_gpu, on_gpu, needs)


def pretended(monkeypatch):
    """The stand-in, for tensors on CPUs."""
    stand_in(monkeypatch)
    able = [OnCpu(AnotherMachine((9, 0), {"flash-attn-4": (4, 0, 0)}))]
    monkeypatch.setattr("bmburst.attention.options.select_kernel", partial(select_kernel, kernels=able))


def split(comm, mask, length, strategy):
    whole, expected = problem(length, 4, 2, mask, False)
    options = {"with_lse": False, "kernel": "fa4", "strategy": strategy}
    torch.testing.assert_close(split_attention(comm, whole, "zigzag", mask, **options), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strategy", ["heads", "gather", "kv", "burst"])
def test_ranks_share_a_sequence(monkeypatch, strategy):
    pretended(monkeypatch)
    on = np.random.default_rng(0).random((4, 4)) < 0.6
    for causal in (True, False):
        run_ranks(2, split, BlockSparse(on, BLOCK, causal), 4 * BLOCK, strategy)


@pytest.mark.parametrize(
    ("mask", "length"),
    [
        (BlockSparse(np.ones((4, 4)), BLOCK), 4 * BLOCK - 4),  # 254 tokens a rank, in two runs
        (BlockSparse(np.ones((8, 8)), BLOCK // 2), 4 * BLOCK),
        (BlockSparse(np.ones((4, 4)), BLOCK) & SlidingWindow(9), 4 * BLOCK),
    ],
    ids=str,
)
def test_every_rank_says_what_it_cannot_split(monkeypatch, mask, length):
    pretended(monkeypatch)
    with refused("kernel 'fa4' | multiple of 128 | nothing but Causal | over ranks | fix: | 'auto'"):
        run_ranks(2, split, mask, length, "kv")
