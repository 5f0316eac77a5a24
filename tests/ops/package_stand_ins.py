"""Stand-ins for packages of flash attention that are not installed here, with the signatures of the real ones."""

import sys
from types import ModuleType

import torch

from bmburst_ops.flash import CAUSAL, FULL, BackwardInputs, Gradients, ReferenceKernel, Scoring
from bmburst_ops.flash.fa2_fa3 import FlashAttention2Kernel, FlashAttention3Kernel
from bmburst_ops.flash.fa4 import FlashAttention4Kernel
from bmburst_ops.flash.inputs import is_aligned
from bmburst_ops.merge import row_dots


def pattern_of(causal):
    return CAUSAL if causal else FULL


def attend(q, k, v, scale, causal, softcap=0.0):
    """A package's forward: everything aligned, results in the dtype of q; a softcap of 0 is none."""
    assert all(is_aligned(t) for t in (q, k, v))
    out, lse = ReferenceKernel().forward(q, k, v, Scoring(pattern_of(causal), scale, softcap or None))
    return out.to(q.dtype), lse


def differentiate(dout, q, k, v, lse, delta, scale, causal, into, softcap=0.0):
    """A package's backward: aligned inputs, fp32 statistics, and aligned memory of its dtype to write to."""
    assert all(is_aligned(t) and t.dtype is q.dtype for t in (dout, q, k, v, *into))
    assert lse.shape == delta.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert lse.dtype is delta.dtype is torch.float32
    given, scoring = BackwardInputs(dout, q, k, v, lse, delta), Scoring(pattern_of(causal), scale, softcap or None)
    ReferenceKernel().backward(given, scoring, deterministic=True, into=Gradients(*into))


def check_statistic_memory(lse, shape):
    """What flash-attn-4 asks of memory for a log-sum-exp: `validate_output_layout` in its cute_dsl_utils.py."""
    assert lse.shape == shape and lse.dtype is torch.float32 and 0 not in lse.stride()
    assert lse.data_ptr() % 4 == 0 and (lse.is_contiguous() or lse.stride(-1) == 1)


def fa2(seen):
    # fmt: off
    def _flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
                            alibi_slopes, return_softmax):
        assert (dropout_p, window_size_left, window_size_right) == (0.0, -1, -1)
        assert alibi_slopes is None and not return_softmax
        return *attend(q, k, v, softmax_scale, causal, softcap), None, None

    def _flash_attn_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal,
                             window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None):
        assert (dropout_p, window_size_left, window_size_right, alibi_slopes) == (0.0, -1, -1, None)
        assert softmax_lse.is_contiguous()
        seen.append((deterministic, dq, dk, dv))
        differentiate(dout, q, k, v, softmax_lse, row_dots(dout, out), softmax_scale, causal, (dq, dk, dv), softcap)
    # fmt: on
    return FlashAttention2Kernel(), "flash_attn.flash_attn_interface", _flash_attn_forward, _flash_attn_backward


def fa3(seen):
    # fmt: off
    def _flash_attn_forward(q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
                            cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
                            page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None,
                            seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
                            causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0,
                            rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0):
        assert k_new is v_new is qv is out_ is q_descale is v_descale is None
        return *attend(q, k, v, softmax_scale, causal, softcap), torch.tensor([]), torch.tensor([])

    def _flash_attn_backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None,
                             sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None,
                             softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1,
                             softcap=0.0, deterministic=False, sm_margin=0):
        assert cu_seqlens_q is max_seqlen_k is None and softmax_lse.is_contiguous()
        seen.append((deterministic, dq, dk, dv))
        differentiate(dout, q, k, v, softmax_lse, row_dots(dout, out), softmax_scale, is_causal, (dq, dk, dv), softcap)
    # fmt: on
    return FlashAttention3Kernel(), "flash_attn_interface", _flash_attn_forward, _flash_attn_backward


def older_fa3(seen):
    # fmt: off
    def _flash_attn_forward(q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q,
                            seqused_k, max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos,
                            rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale, softmax_scale, causal,
                            window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
                            scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0):
        assert k_new is out is v_descale is None
        return attend(q, k, v, softmax_scale, causal, softcap)

    def _flash_attn_backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k,
                             max_seqlen_q, max_seqlen_k, dq, dk, dv, softmax_scale, causal, window_size=(-1, -1),
                             softcap=0.0, deterministic=False, sm_margin=0):
        seen.append((deterministic, dq, dk, dv))
        differentiate(dout, q, k, v, softmax_lse, row_dots(dout, out), softmax_scale, causal, (dq, dk, dv), softcap)
        return dq, dk, dv, None
    # fmt: on
    return FlashAttention3Kernel(), "flash_attn_interface", _flash_attn_forward, _flash_attn_backward


def fa4(seen, written=None):
    written = [] if written is None else written

    def _flash_attn_fwd(
        q, k, v, *, softmax_scale=None, causal=False, softcap=None, pack_gqa=None, return_lse=False, out=None, lse=None
    ):
        assert pack_gqa is (None if q.shape[2] // k.shape[2] in (1, 2, 4, 8, 16, 32, 64) else False)
        assert return_lse and (out is None or (is_aligned(out) and out.dtype is q.dtype))
        if lse is not None:
            check_statistic_memory(lse, (q.shape[0], q.shape[2], q.shape[1]))
        written.append((out, lse))
        results = zip(attend(q, k, v, softmax_scale, causal, softcap), (out, lse), strict=True)
        return *(ours if target is None else target.copy_(ours) for ours, target in results), None, None, None

    def _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, *, deterministic=False, dq, dk, dv, dlse
    ):
        assert softcap is not None
        assert q.shape[2] == k.shape[2] or q.shape[3] == v.shape[3]  # "GQA backward requires head_dim == head_dim_v"
        assert out.shape == dout.shape and out.dtype is q.dtype and out.untyped_storage().nbytes() <= 2 * q.shape[-1]
        assert dlse.dtype is torch.float32
        seen.append((deterministic, dq, dk, dv))
        differentiate(dout, q, k, v, lse, row_dots(dout, out) - dlse, softmax_scale, causal, (dq, dk, dv), softcap)
        return dq, dk, dv

    return FlashAttention4Kernel(), "flash_attn.cute.interface", _flash_attn_fwd, _flash_attn_bwd


def install(monkeypatch, kernel, path, *functions):
    for parent in range(1, path.count(".") + 1):
        name = ".".join(path.split(".")[:parent])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = ModuleType(path)
    for function in functions:
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, path, module)
    return kernel
