"""What packages that are not installed here are told of windows and segments, by stand-ins with their signatures.

The stand-ins read the mask from their arguments, as the packages do, and leave what a package may leave where nothing
is seen: NaN, and a log-sum-exp of inf.
"""

import random

import pytest
import torch

from bmburst_ops.flash import CAUSAL, FULL, BackwardInputs, Band, Gradients, ReferenceKernel, Scoring, Segments
from bmburst_ops.flash.fa2_fa3 import FlashAttention2Kernel, FlashAttention3Kernel
from bmburst_ops.flash.fa4 import FlashAttention4Kernel
from bmburst_ops.flash.inputs import is_aligned
from bmburst_ops.flash.torch_cuda import TorchKernel
from bmburst_ops.merge import row_dots
from tests.ops.masked import Masked, gradient_bound
from tests.ops.masks import some, visible
from tests.ops.package_stand_ins import check_statistic_memory, install
from tests.ops.tiles import EPSILON, assert_same, error, one_number_off, room, some_heads, wider_room
from tests.pairs import pairwise

QUERIES, KEYS = 37, 53
CUT = (0, 10, 10, 11, 25, QUERIES), (0, 20, 31, 32, 32, KEYS)
CASES = [
    (Band(5, 0), QUERIES, KEYS),
    (Band(60, 0), KEYS, QUERIES),  # a bound that binds nothing, and queries that see nothing
    (Band(0, 200), 220, 120),  # to the right further than there are keys, and yet a bound
    (Band(None, 3), QUERIES, KEYS),
    (CAUSAL, KEYS, QUERIES),
    (Segments(CAUSAL, *CUT), QUERIES, KEYS),
    (Segments(FULL, *CUT), QUERIES, KEYS),
    (Segments(Band(4, 2), *CUT[::-1]), KEYS, QUERIES),
    (Segments(Band(None, 13), (0, 17, 40), (0, 12, 20)), 40, 20),
    (Segments(CAUSAL, (0, 1, 1, 2), (0, 3, 4, 9)), 2, 9),  # one query at most, and a segment without
    (Segments(CAUSAL, (0, 5, 5), (0, 0, 9)), 5, 9),  # nobody sees anything
    *((pattern, 29, 31) for seed in range(4) for pattern in some(seed, 29, 31, ("window", "segments"))),
]


class StandIn:
    """A package that sees a mask in its arguments."""

    def __init__(self, kernel):
        self.kernel, self.calls, self.deterministic = kernel, 0, None
        self.softcaps = set()  # that its functions were told; 0 and None are none
        self.writes_statistics = False  # itself, in its last forward

    def pattern(self, causal, window, offsets, longest, shape, clamped=False):
        """Return the pattern of the arguments. If clamped, a bound of at least the longest keys is no bound."""
        left, right = (None if bound is None or bound < 0 else bound for bound in window)
        assert not causal or left is right is None
        if clamped:
            left, right = (None if bound is None or bound >= longest[1] else bound for bound in (left, right))
        band = CAUSAL if causal else Band(left, right)
        if offsets == (None, None):
            return band
        for side, most, count in zip(offsets, longest, shape, strict=True):
            assert side.dtype is torch.int32 and side.is_contiguous() and side[0] == 0 and side[-1] == count
            assert side.diff().max() <= most
        assert not clamped or longest[0] > 1  # with one, the package takes every segment to have one
        return Segments(band, *(tuple(side.tolist()) for side in offsets))

    def forward(self, q, k, v, scale, pattern, softcap=None, out=None, statistic=None):
        self.calls += 1
        self.softcaps.add(softcap or None)
        assert all(is_aligned(t) for t in (q, k, v))
        four = [t if t.ndim == 4 else t[None] for t in (q, k, v)]
        result, lse = ReferenceKernel().forward(*four, Scoring(pattern, scale, softcap or None))
        blind = ~visible(pattern, four[0].shape[1], four[1].shape[1]).any(1)
        result[:, blind], lse[:, :, blind] = torch.nan, torch.inf
        result, lse = (t if q.ndim == 4 else t[0] for t in (result.to(q.dtype), lse))
        self.writes_statistics = statistic is not None
        if statistic is not None:
            check_statistic_memory(statistic, lse.shape)
        return result if out is None else out.copy_(result), lse if statistic is None else statistic.copy_(lse)

    def backward(self, dout, q, k, v, lse, delta, scale, pattern, into, softcap=None):
        self.calls += 1
        self.softcaps.add(softcap or None)
        assert all(is_aligned(t) and t.dtype is q.dtype for t in (dout, q, k, v, *into))
        four = [t if q.ndim == 4 else t[None] for t in (dout, q, k, v, lse, delta, *into)]
        if q.ndim == 3:
            assert lse.shape == delta.shape == (q.shape[1], q.shape[0])
        assert lse.isfinite().all() and delta.isfinite().all()
        given, scoring = BackwardInputs(*four[:6]), Scoring(pattern, scale, softcap or None)
        ReferenceKernel().backward(given, scoring, deterministic=True, into=Gradients(*four[6:]))
        mask = visible(pattern, four[1].shape[1], four[2].shape[1])
        for gradient, seen in zip(four[6:], (mask.any(1), mask.any(0), mask.any(0)), strict=True):
            gradient[:, ~seen] = torch.nan


def fa2(monkeypatch):
    made = StandIn(FlashAttention2Kernel())

    def dense(q, k, causal, left, right):
        return made.pattern(causal, (left, right), (None, None), (q.shape[1], k.shape[1]), None, True)

    def packed(q, k, causal, left, right, cu_q, cu_k, max_q, max_k):
        return made.pattern(causal, (left, right), (cu_q, cu_k), (max_q, max_k), (len(q), len(k)), True)

    # fmt: off
    def _flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
                            alibi_slopes, return_softmax):
        pattern = dense(q, k, causal, window_size_left, window_size_right)
        return *made.forward(q, k, v, softmax_scale, pattern, softcap), None, None

    def _flash_attn_varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
                                   softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0,
                                   alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None,
                                   seqused_k=None):
        assert dropout_p == 0.0 and not return_softmax
        pattern = packed(q, k, causal, window_size_left, window_size_right, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                         max_seqlen_k)
        return *made.forward(q, k, v, softmax_scale, pattern, softcap), None, None

    def _flash_attn_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal,
                             window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None):
        made.deterministic, pattern = deterministic, dense(q, k, causal, window_size_left, window_size_right)
        assert softmax_lse.is_contiguous()
        made.backward(dout, q, k, v, softmax_lse, row_dots(dout, out), softmax_scale, pattern, (dq, dk, dv), softcap)

    def _flash_attn_varlen_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k,
                                    max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left,
                                    window_size_right, softcap, alibi_slopes, deterministic, rng_state=None):
        pattern = packed(q, k, causal, window_size_left, window_size_right, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                         max_seqlen_k)
        assert softmax_lse.is_contiguous()
        made.deterministic, delta = deterministic, row_dots(dout[None], out[None])[0]
        made.backward(dout, q, k, v, softmax_lse, delta, softmax_scale, pattern, (dq, dk, dv), softcap)
    # fmt: on
    functions = (
        _flash_attn_forward,
        _flash_attn_backward,
        _flash_attn_varlen_forward,
        _flash_attn_varlen_backward,
    )
    install(monkeypatch, made.kernel, "flash_attn.flash_attn_interface", *functions)
    return made


def torchs(monkeypatch):
    made = StandIn(TorchKernel())

    def read(q, k, cu_q, cu_k, max_q, max_k, causal, left, right):
        shape = (len(q), len(k))
        return made.pattern(causal, (left, right), (cu_q, cu_k), (max_q, max_k), shape, True)

    # fmt: off
    def forward(q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale,
                window_size_left=None, window_size_right=None):
        pattern = read(q, k, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, window_size_left, window_size_right)
        return *made.forward(q, k, v, scale, pattern), None, None, None

    def backward(grad_out, q, k, v, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
                 unused, *, scale, window_size_left=None, window_size_right=None):
        made.deterministic = torch.are_deterministic_algorithms_enabled()
        pattern = read(q, k, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, window_size_left, window_size_right)
        into = [torch.empty_like(t) for t in (q, k, v)]
        delta = row_dots(grad_out, out) if q.ndim == 4 else row_dots(grad_out[None], out[None])[0]
        assert lse.is_contiguous()
        made.backward(grad_out, q, k, v, lse, delta, scale, pattern, into)
        return into
    # fmt: on
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    return made


def fa3_functions(made, window_of):
    """Return forward and backward; `window_of` takes the window from the names that a release gives it."""

    def _flash_attn_forward(q, k, v, *options, softmax_scale, causal, softcap=0.0, **window):
        assert len(options) == 20
        cu_q, cu_k, max_q, max_k = *options[4:6], *options[9:11]
        assert all(option is None for i, option in enumerate(options) if i not in (4, 5, 9, 10))
        pattern = made.pattern(causal, window_of(**window), (cu_q, cu_k), (max_q, max_k), (len(q), len(k)))
        return *made.forward(q, k, v, softmax_scale, pattern, softcap), None, None

    # fmt: off
    def _flash_attn_backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k,
                             max_seqlen_q, max_seqlen_k, dq, dk, dv, softmax_scale, causal, softcap=0.0,
                             **window):
        offsets, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        pattern = made.pattern(causal, window_of(**window), offsets, longest, (len(q), len(k)))
        delta = row_dots(dout, out) if q.ndim == 4 else row_dots(dout[None], out[None])[0]
        assert softmax_lse.is_contiguous() and sequed_q is sequed_k is None
        made.backward(dout, q, k, v, softmax_lse, delta, softmax_scale, pattern, (dq, dk, dv), softcap)
    # fmt: on
    return _flash_attn_forward, _flash_attn_backward


def fa3(monkeypatch):
    """An operation: its signature names nothing."""
    made = StandIn(FlashAttention3Kernel())

    def window_of(window_size_left=-1, window_size_right=-1):
        return window_size_left, window_size_right

    install(monkeypatch, made.kernel, "flash_attn_interface", *fa3_functions(made, window_of))
    return made


def older_fa3(monkeypatch):
    made = StandIn(FlashAttention3Kernel())
    forward, backward = fa3_functions(made, lambda window_size=(-1, -1): window_size)

    def _flash_attn_forward(*args, softmax_scale, causal, window_size=(-1, -1), softcap=0.0):
        return forward(*args, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap)

    def _flash_attn_backward(*args, window_size=(-1, -1), softcap=0.0):
        return backward(*args, window_size=window_size, softcap=softcap)

    install(monkeypatch, made.kernel, "flash_attn_interface", _flash_attn_forward, _flash_attn_backward)
    return made


def fa4(monkeypatch):
    made = StandIn(FlashAttention4Kernel())

    def read(q, k, causal, left, right, cu_q, cu_k, max_q, max_k):
        assert all(bound is None or bound >= 0 for bound in (left, right))
        return made.pattern(causal, (left, right), (cu_q, cu_k), (max_q, max_k), (len(q), len(k)))

    # fmt: off
    def _flash_attn_fwd(q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
                        softmax_scale=None, causal=False, window_size_left=None, window_size_right=None, pack_gqa=None,
                        return_lse=False, out=None, lse=None, softcap=None):
        pattern = read(q, k, causal, window_size_left, window_size_right, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                       max_seqlen_k)
        assert out is None or (out.shape == q.shape and is_aligned(out))
        return *made.forward(q, k, v, softmax_scale, pattern, softcap, out, lse), None, None, None

    def _flash_attn_bwd(q, k, v, out, dout, lse, *, softmax_scale=None, causal=False, window_size_left=None,
                        window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
                        max_seqlen_k=None, deterministic=False, dq, dk, dv, dlse, softcap=0.0):
        assert out.shape == dout.shape and not out.any() and dlse.shape == lse.shape
        made.deterministic = deterministic
        pattern = read(q, k, causal, window_size_left, window_size_right, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                       max_seqlen_k)
        made.backward(dout, q, k, v, lse, -dlse, softmax_scale, pattern, (dq, dk, dv), softcap)
    # fmt: on
    install(monkeypatch, made.kernel, "flash_attn.cute.interface", _flash_attn_fwd, _flash_attn_bwd)
    return made


def as_it_is(tensor):
    return tensor


def later_rows(tensor):
    """Samples that do not follow each other."""
    wide = torch.full((tensor.shape[0], tensor.shape[1] + 3, *tensor.shape[2:]), torch.nan).to(tensor)
    return wide[:, 3:].copy_(tensor)


@pytest.mark.parametrize(
    ("stand_in", "case", "batch"),
    pairwise([fa2, fa3, older_fa3, fa4, torchs], [(case,) for case in CASES], [1, 2]),
    ids=lambda value: getattr(value, "__name__", str(value)[:60]),
)
def test_packages_are_told_the_mask(monkeypatch, stand_in, case, batch):
    made = stand_in(monkeypatch)
    rng = random.Random(str(case))
    view = rng.choice((as_it_is, some_heads, one_number_off, later_rows))
    softcap = None if stand_in is torchs else rng.choice((None, 0.7))
    tile = Masked(*case, 4, 2, 16, torch.bfloat16, batch, softcap, device="cpu")
    tile.q, tile.k, tile.v, tile.grad = (view(t) for t in (tile.q, tile.k, tile.v, tile.grad))
    narrow = room(tile.q, view)
    for into in (None, narrow, wider_room(tile.q)):
        part = tile.forward(made.kernel, into=into)
        if into is not None:
            assert_same(part, into)
        # With offsets, samples of a batch lie in one row, as they do not where they are asked for.
        is_one_row = batch == 1 or not isinstance(tile.pattern, Segments)
        can_write = stand_in is fa4 and into is narrow and is_one_row and tile.mask.any()
        assert made.writes_statistics == can_write
        assert not tile.mask.any() or error(part.out, tile.out) < EPSILON[torch.bfloat16]
        torch.testing.assert_close(part.lse.double(), tile.lse, rtol=1e-5, atol=1e-5)
    for deterministic in (False, not isinstance(made.kernel, FlashAttention3Kernel)):
        into = (
            Gradients(*(view(torch.full_like(t, torch.nan)) for t in (tile.q, tile.k, tile.v)))
            if deterministic
            else None
        )
        gradients = tile.backward(made.kernel, deterministic, into=into)
        assert into is None or all(a is b for a, b in zip(gradients, into, strict=True))
        tile.hold_blind_rows(*part, gradients)
        for ours, wanted in zip(gradients, tile.gradients, strict=True):
            assert not wanted.any() or error(ours, wanted) < gradient_bound(made.kernel)
        assert made.deterministic in (None, deterministic)
    assert made.calls == (5 if tile.mask.any() else 0)
    assert made.softcaps <= {softcap}
