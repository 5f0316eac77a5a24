"""Stand-ins for packages of flash attention that are not installed here, with the signatures of the real ones.

They read the mask from their arguments as each package does, and leave what a package may leave where nothing is seen:
NaN, and a log-sum-exp of inf. They fail where a package would be wrong without a word.
"""

import sys
from types import ModuleType

import torch
import torch.distributed.tensor  # it reads operations that are replaced below; `torch.testing` imports it late

from bmburst_ops.flash import (
    CAUSAL,
    FULL,
    BackwardInputs,
    Band,
    Gradients,
    ReferenceKernel,
    Scoring,
    Segments,
    few_heads,
    few_segments,
)
from bmburst_ops.flash.fa2_fa3 import FlashAttention2Kernel, FlashAttention3Kernel
from bmburst_ops.flash.fa4 import FlashAttention4Kernel
from bmburst_ops.flash.inputs import is_aligned
from bmburst_ops.flash.torch_cuda import CudnnKernel, TorchKernel
from bmburst_ops.merge import row_dots
from tests.ops.masks import visible


def fa2_rule(causal, left, right, queries, keys):
    """`mha_fwd` and `set_params_fprop` of flash-attn 2, also in torch: a bound of at least the keys is no bound.

    Beside a bound that is left, the other one is the number of keys.
    """
    left, right = (None if bound is None or bound >= keys else bound for bound in (left, right))
    if causal:
        return FULL if queries == 1 else CAUSAL
    if (left is None) != (right is None):
        left, right = (keys if bound is None else bound for bound in (left, right))
    return Band(left, right)


def fa3_rule(causal, left, right, queries, keys):
    """`mha_fwd` and `set_params_fprop` of FlashAttention-3: a bound that hides nothing from the longest is no bound."""
    left = None if left is None or left >= keys - 1 else left
    right = None if right is None or right >= queries - 1 else right
    if causal:
        return FULL if queries == 1 else CAUSAL
    return Band(left, right)


def fa4_rule(causal, left, right, *_):
    """`_resolve_causal_local_window` of flash-attn-4."""
    return CAUSAL if causal else Band(left, right)


class StandIn:
    """A package that sees a mask in its arguments.

    Args:
        kernel: What calls it.
        rule: The band that the package computes for a causal flag, bounds or None, and the longest queries and keys.
        has_wide_offsets: Whether its offsets in backward have 64 bits, and its grids one dimension.
    """

    def __init__(self, kernel, rule, has_wide_offsets=False):
        self.kernel, self.rule, self.has_wide_offsets, self.calls = kernel, rule, has_wide_offsets, 0
        self.softcaps = set()  # that its functions were told; 0 and None are none
        self.asked = (None, None)  # memory that its last forward was to write to
        self.gradients = self.deterministic = None  # of its last backward

    def pattern(self, q, k, causal, left, right, cu_q=None, cu_k=None, max_q=None, max_k=None):
        """Return the pattern of the arguments."""
        left, right = (None if bound is None or bound < 0 else bound for bound in (left, right))
        assert not causal or left is right is None
        if cu_q is cu_k is None:
            return self.rule(causal, left, right, q.shape[1], k.shape[1])
        for side, most, count in ((cu_q, max_q, len(q)), (cu_k, max_k, len(k))):
            assert side.dtype is torch.int32 and side.is_contiguous() and side[0] == 0 and side[-1] == count
            assert side.diff().max() <= most
        assert self.has_wide_offsets or len(cu_q) - 1 <= few_segments.MOST
        # With one query at most, flash-attn 2 takes every segment to have one.
        assert self.rule is not fa2_rule or max_q > 1
        return Segments(self.rule(causal, left, right, max_q, max_k), *(tuple(side.tolist()) for side in (cu_q, cu_k)))

    def forward(self, q, k, v, scale, pattern, softcap=None, out=None, statistic=None):
        self.calls += 1
        self.softcaps.add(softcap or None)
        assert all(is_aligned(t) for t in (q, k, v)) and scale > 0
        assert q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and q.shape[-2] % k.shape[-2] == 0
        four = [t if t.ndim == 4 else t[None] for t in (q, k, v)]
        result, lse = ReferenceKernel().forward(*four, Scoring(pattern, scale, softcap or None))
        blind = ~visible(pattern, four[0].shape[1], four[1].shape[1]).any(1)
        result[:, blind], lse[:, :, blind] = torch.nan, torch.inf
        result, lse = (t if q.ndim == 4 else t[0] for t in (result.to(q.dtype), lse))
        self.asked = out, statistic
        if statistic is not None:
            check_statistic_memory(statistic, lse.shape)
        return result if out is None else out.copy_(result), lse if statistic is None else statistic.copy_(lse)

    def backward(self, dout, q, k, v, out, lse, scale, pattern, into, softcap=None, deterministic=False, dlse=None):
        """Write to aligned memory of the inputs' dtype. Without `dlse`, statistics must be contiguous."""
        self.calls += 1
        self.softcaps.add(softcap or None)
        self.gradients, self.deterministic = into, deterministic
        assert all(is_aligned(t) and t.dtype is q.dtype for t in (dout, q, k, v, *into))
        assert dlse is not None or lse.is_contiguous()
        assert self.has_wide_offsets or _padded(q, pattern) < few_heads.OFFSETS
        delta = (row_dots(dout, out) if q.ndim == 4 else row_dots(dout[None], out[None])[0]) - (
            0 if dlse is None else dlse
        )
        assert lse.shape == delta.shape == (*q.shape[:-3], q.shape[-2], q.shape[-3])
        assert lse.dtype is delta.dtype is torch.float32 and lse.isfinite().all() and delta.isfinite().all()
        four = [t if q.ndim == 4 else t[None] for t in (dout, q, k, v, lse, delta, *into)]
        given, scoring = BackwardInputs(*four[:6]), Scoring(pattern, scale, softcap or None)
        ReferenceKernel().backward(given, scoring, deterministic=True, into=Gradients(*four[6:]))
        mask = visible(pattern, four[1].shape[1], four[2].shape[1])
        for gradient, seen in zip(four[6:], (mask.any(1), mask.any(0), mask.any(0)), strict=True):
            gradient[:, ~seen] = torch.nan


def _padded(q, pattern):
    """Return the size of dQ in fp32 as flash-attn 2 and FlashAttention-3 allocate it."""
    heads, head_dim = q.shape[-2:]
    rows = len(q) + 128 * (len(pattern.queries) - 1) if q.ndim == 3 else len(q) * -(-q.shape[1] // 128) * 128
    width = 32 if head_dim <= 128 else 64
    return rows * heads * -(-head_dim // width) * width


def check_statistic_memory(lse, shape):
    """What flash-attn-4 asks of memory for a log-sum-exp: `validate_output_layout` in its cute_dsl_utils.py."""
    assert lse.shape == shape and lse.dtype is torch.float32 and 0 not in lse.stride()
    assert lse.data_ptr() % 4 == 0 and (lse.is_contiguous() or lse.stride(-1) == 1)


# fmt: off
def fa2(monkeypatch):
    made = StandIn(FlashAttention2Kernel(), fa2_rule)

    def _flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
                            alibi_slopes, return_softmax):
        assert dropout_p == 0.0 and alibi_slopes is None and not return_softmax
        pattern = made.pattern(q, k, causal, window_size_left, window_size_right)
        return *made.forward(q, k, v, softmax_scale, pattern, softcap), None, None

    def _flash_attn_varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
                                   softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0,
                                   alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None,
                                   seqused_k=None):
        assert dropout_p == 0.0 and alibi_slopes is None and not return_softmax
        pattern = made.pattern(q, k, causal, window_size_left, window_size_right, cu_seqlens_q, cu_seqlens_k,
                               max_seqlen_q, max_seqlen_k)
        return *made.forward(q, k, v, softmax_scale, pattern, softcap), None, None

    def _flash_attn_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal,
                             window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None):
        assert dropout_p == 0.0 and alibi_slopes is None
        pattern, into = made.pattern(q, k, causal, window_size_left, window_size_right), (dq, dk, dv)
        made.backward(dout, q, k, v, out, softmax_lse, softmax_scale, pattern, into, softcap, deterministic)

    def _flash_attn_varlen_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k,
                                    max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left,
                                    window_size_right, softcap, alibi_slopes, deterministic, rng_state=None):
        assert dropout_p == 0.0 and alibi_slopes is None
        pattern = made.pattern(q, k, causal, window_size_left, window_size_right, cu_seqlens_q, cu_seqlens_k,
                               max_seqlen_q, max_seqlen_k)
        made.backward(dout, q, k, v, out, softmax_lse, softmax_scale, pattern, (dq, dk, dv), softcap, deterministic)

    functions = _flash_attn_forward, _flash_attn_backward, _flash_attn_varlen_forward, _flash_attn_varlen_backward
    install(monkeypatch, made.kernel, "flash_attn.flash_attn_interface", *functions)
    return made


def fa3(monkeypatch):
    made = StandIn(FlashAttention3Kernel(), fa3_rule)

    def _flash_attn_forward(q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
                            cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
                            page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None,
                            seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
                            causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0,
                            rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0):
        assert k_new is v_new is qv is out_ is cu_seqlens_k_new is seqused_q is seqused_k is page_table is None
        assert kv_batch_idx is leftpad_k is rotary_cos is rotary_sin is seqlens_rotary is None
        assert q_descale is k_descale is v_descale is None
        pattern = made.pattern(q, k, causal, window_size_left, window_size_right, cu_seqlens_q, cu_seqlens_k,
                               max_seqlen_q, max_seqlen_k)
        return *made.forward(q, k, v, softmax_scale, pattern, softcap), torch.tensor([]), torch.tensor([])

    def _flash_attn_backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None,
                             sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None,
                             softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1,
                             softcap=0.0, deterministic=False, sm_margin=0):
        assert sequed_q is sequed_k is None
        pattern = made.pattern(q, k, is_causal, window_size_left, window_size_right, cu_seqlens_q, cu_seqlens_k,
                               max_seqlen_q, max_seqlen_k)
        made.backward(dout, q, k, v, out, softmax_lse, softmax_scale, pattern, (dq, dk, dv), softcap, deterministic)

    install(monkeypatch, made.kernel, "flash_attn_interface", _flash_attn_forward, _flash_attn_backward)
    return made


def older_fa3(monkeypatch):
    made = StandIn(FlashAttention3Kernel(), fa3_rule)

    def _flash_attn_forward(q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q,
                            seqused_k, max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos,
                            rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale, softmax_scale, causal,
                            window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
                            scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0):
        assert k_new is v_new is qv is out is q_descale is k_descale is v_descale is None
        pattern = made.pattern(q, k, causal, *window_size, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return made.forward(q, k, v, softmax_scale, pattern, softcap)

    def _flash_attn_backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k,
                             max_seqlen_q, max_seqlen_k, dq, dk, dv, softmax_scale, causal, window_size=(-1, -1),
                             softcap=0.0, deterministic=False, sm_margin=0):
        pattern = made.pattern(q, k, causal, *window_size, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        made.backward(dout, q, k, v, out, softmax_lse, softmax_scale, pattern, (dq, dk, dv), softcap, deterministic)
        return dq, dk, dv, None

    install(monkeypatch, made.kernel, "flash_attn_interface", _flash_attn_forward, _flash_attn_backward)
    return made


def fa4(monkeypatch):
    made = StandIn(FlashAttention4Kernel(), fa4_rule, has_wide_offsets=True)

    def read(q, k, causal, left, right, *segments):
        assert all(bound is None or bound >= 0 for bound in (left, right))
        return made.pattern(q, k, causal, left, right, *segments)

    def _flash_attn_fwd(q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
                        softmax_scale=None, causal=False, window_size_left=None, window_size_right=None, pack_gqa=None,
                        return_lse=False, out=None, lse=None, softcap=None):
        assert return_lse and pack_gqa is (None if q.shape[-2] // k.shape[-2] in (1, 2, 4, 8, 16, 32, 64) else False)
        assert out is None or (out.shape == (*q.shape[:-1], v.shape[-1]) and is_aligned(out) and out.dtype is q.dtype)
        pattern = read(q, k, causal, window_size_left, window_size_right, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                       max_seqlen_k)
        return *made.forward(q, k, v, softmax_scale, pattern, softcap, out, lse), None, None, None

    def _flash_attn_bwd(q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
                        window_size_right=None, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
                        max_seqlen_k=None, deterministic=False, dq, dk, dv, dlse):
        assert q.shape[-2] == k.shape[-2] or q.shape[-1] == v.shape[-1]  # "GQA backward requires head_dim == ..."
        assert out.shape == dout.shape and out.dtype is q.dtype and out.untyped_storage().nbytes() <= 2 * q.shape[-1]
        assert softcap is not None
        pattern, into = read(q, k, causal, window_size_left, window_size_right, cu_seqlens_q, cu_seqlens_k,
                             max_seqlen_q, max_seqlen_k), (dq, dk, dv)
        made.backward(dout, q, k, v, out, lse, softmax_scale, pattern, into, softcap, deterministic, dlse)
        return into

    install(monkeypatch, made.kernel, "flash_attn.cute.interface", _flash_attn_fwd, _flash_attn_bwd)
    return made


def torchs(monkeypatch):
    made = StandIn(TorchKernel(), fa2_rule)

    def forward(q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale,
                window_size_left=None, window_size_right=None):
        pattern = made.pattern(q, k, is_causal, window_size_left, window_size_right, cum_seq_q, cum_seq_k, max_q, max_k)
        return *made.forward(q, k, v, scale, pattern), None, None, None

    def backward(grad_out, q, k, v, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
                 unused, *, scale, window_size_left=None, window_size_right=None):
        pattern = made.pattern(q, k, is_causal, window_size_left, window_size_right, cum_seq_q, cum_seq_k, max_q, max_k)
        into, deterministic = [torch.empty_like(t) for t in (q, k, v)], torch.are_deterministic_algorithms_enabled()
        made.backward(grad_out, q, k, v, out, lse, scale, pattern, into, deterministic=deterministic)
        return into

    take_operations(monkeypatch, _flash_attention_forward=forward, _flash_attention_backward=backward)
    return made


def cudnn(monkeypatch):
    """Heads first and as many of K and V, no causal tile but squares, nothing of one token, nothing far away."""
    made = StandIn(CudnnKernel(), fa4_rule, has_wide_offsets=True)

    def expect(causal, q, k, *others):
        assert q.shape[1] == k.shape[1] and min(q.shape[2], k.shape[2]) > 1
        assert not causal or q.shape[2] == k.shape[2]
        for t in (q, k, *others):
            assert sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True)) < few_heads.OFFSETS

    def forward(q, k, v, bias, wants_lse, dropout, causal, debug, *, scale):
        assert (bias, wants_lse, dropout, debug) == (None, True, 0.0, False)
        expect(causal, q, k, v)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out, lse = made.forward(q, k, v, scale, CAUSAL if causal else FULL)
        return out.transpose(1, 2), lse[..., None], None, None, q.shape[1], k.shape[1], None, None, None

    def backward(grad, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout, causal, *, scale):
        assert lse.is_contiguous() and lse.shape == (*q.shape[:3], 1) and bias is cum_q is cum_k is None
        assert (max_q, max_k, dropout) == (q.shape[2], k.shape[2], 0.0)
        expect(causal, q, k, v, grad, out)
        grad, q, k, v, out = (t.transpose(1, 2) for t in (grad, q, k, v, out))
        into = [torch.empty_like(t) for t in (q, k, v)]
        made.backward(grad, q, k, v, out, lse[..., 0], scale, CAUSAL if causal else FULL, into)
        return tuple(t.transpose(1, 2) for t in into)

    take_operations(
        monkeypatch,
        _scaled_dot_product_cudnn_attention=forward,
        _scaled_dot_product_cudnn_attention_backward=backward,
    )
    return made
# fmt: on


def take_operations(monkeypatch, **functions):
    """Put functions in the place of the operations of `torch.ops.aten` with these names."""
    for name, function in functions.items():
        monkeypatch.setattr(torch.ops.aten, name, function)


def limit_kernels(monkeypatch, *, offsets=few_heads.OFFSETS, segments=few_segments.MOST):
    """Let offsets of kernels reach, and their grids hold, only so much, as real ones do with larger tensors."""
    monkeypatch.setattr(few_heads, "OFFSETS", offsets)
    monkeypatch.setattr(few_segments, "MOST", segments)


def install(monkeypatch, kernel, path, *functions):
    for parent in range(1, path.count(".") + 1):
        name = ".".join(path.split(".")[:parent])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = ModuleType(path)
    for function in functions:
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, path, module)
    return kernel
