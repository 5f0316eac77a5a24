"""`burst_attention`: exact attention over a sequence that is split over ranks; also under Burst-Attention's names."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, overload

import torch
from torch import Tensor

from bmburst.amounts import require_flag
from bmburst.attention.call import decide
from bmburst.attention.function import SequenceAttention, check_sink, with_sink
from bmburst.attention.graphs import outside_of_graphs
from bmburst.attention.heads import executor_of
from bmburst.attention.options import AttentionOptions, MaskOption, require_tensors
from bmburst.comm.checks import CheckedCommunicator
from bmburst.comm.groups import bmtrain_pipe_degree, bmtrain_tensor_degree, communicator
from bmburst.comm.streams import BUFFERS, RECORDINGS
from bmburst.comm.transports import PEER_GROUPS
from bmburst.errors import UserError, unknown
from bmburst.mesh import current_mesh
from bmburst.schedule.documents import Documents
from bmburst.schedule.mask import sample_masks
from bmburst_ops.autocast import no_autocast


@overload
def burst_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: MaskOption = ...,
    layout: str = ...,
    length: int | None = ...,
    key_layout: str | None = ...,
    key_length: int | None = ...,
    sink: Tensor | None = ...,
    group: object = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    kernel: str = ...,
    strategy: str = ...,
    transport: str = ...,
    deterministic: bool = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def burst_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: MaskOption = ...,
    layout: str = ...,
    length: int | None = ...,
    key_layout: str | None = ...,
    key_length: int | None = ...,
    sink: Tensor | None = ...,
    group: object = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    kernel: str = ...,
    strategy: str = ...,
    transport: str = ...,
    deterministic: bool = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def burst_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: MaskOption = "causal",
    layout: str = "zigzag",
    length: int | None = None,
    key_layout: str | None = None,
    key_length: int | None = None,
    sink: Tensor | None = None,
    group: object = None,
    scale: float | None = None,
    softcap: float | None = None,
    kernel: str = "auto",
    strategy: str = "auto",
    transport: str = "auto",
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return exact softmax attention of this rank's queries over the whole sequence.

    Every rank of the group calls it with its own tokens in the order of the layout (`bmburst.shard` cuts them). Shapes
    are equal on all ranks. A rank holds only its share of the sequence: its local tokens of all heads, or all tokens of
    its own heads; "gather" also holds all tokens of a few KV heads. Gradients are those of the sum of the ranks'
    losses, and only of first order: `create_graph=True` is refused.

    A NaN or an infinity in q, k or v stays in its sample and in its document (`bmburst.Documents`), in outputs and in
    gradients. Inside a document a NaN may reach queries that do not see it: kernels multiply whole tiles, and zero
    times NaN is NaN.

    Args:
        q: `[batch, local_tokens, heads, head_dim]`, any float dtype, any strides.
        k: `[batch, local_tokens, kv_heads, head_dim]`; heads is a multiple of kv_heads (GQA, MQA). Never expanded.
            In cross-attention `[batch, local_keys, kv_heads, head_dim]`.
        v: `[batch, local_tokens, kv_heads, value_dim]`, shaped as k but for its own head dim, as in multi-head latent
            attention (DeepSeek: 192 and 128). Kernels "fa4", "cudnn", "triton" and "reference" take both; others pad
            the narrower one inside a call.
        mask: Which keys a query sees, in global positions: "causal", "full", or one of `bmburst.Causal`, `Full`,
            `SlidingWindow`, `Documents`, `PrefixLM`, `BlockSparse`, joined with `&`. A tuple has one mask for each
            sample of the batch.
        layout: Which global positions the local tokens have: "contiguous", "zigzag", "striped" or "balanced" (equal
            work for every rank under this mask). "balanced" depends on mask and length: pass those given to `shard`.
        length: Real tokens of the whole sequence. Later tokens are padding: never attended to, zero output, zero
            gradient. Default: the length that the mask is made for, else all tokens.
        key_layout: Layout of the keys in cross-attention; default: `layout`. "balanced" is the layout that `shard`
            gives under the same mask made for the keys: `Documents` of the key lengths above 0.
        key_length: Real tokens of the keys' sequence in cross-attention. Keys then have their own number of local
            tokens and their own padding. "causal" and `SlidingWindow` are aligned at the bottom right: the last query
            sees the last key, and query i has the position of key `i + key_length - length`. `Documents` take
            `key_lengths`. Other masks are refused. Default with `key_layout`: the length that the mask is made for,
            else that of the queries. Default without `key_layout`: queries and keys are one sequence.
        sink: `[heads]`, any float dtype: a logit for each query head that takes a share of every row's softmax and has
            no value, as in gpt-oss. Rows that see no key are not changed. Every rank passes the sinks of all heads. The
            gradient covers this rank's queries; the caller sums it over the group, as for other weights.
        group: A `torch.distributed` process group or a `bmt.nccl` communicator. None: the sequence group of the current
            mesh, else the world, which BMTrain must not divide into tensor groups or stages.
        scale: Factor on the scores, above 0; default `head_dim ** -0.5`.
        softcap: Bound of the scores, above 0: a scaled score becomes `softcap * tanh(score / softcap)`, before the mask
            and before a sink, as in Gemma 2. Kernels "fa4", "fa3", "fa2", "triton" and "reference" have it. None: no
            bound.
        kernel: "auto", the first of these that supports the inputs on this machine: "fa4" (FlashAttention-4, package
            flash-attn-4), "fa3" (FlashAttention-3), "cudnn" (cuDNN inside torch; expands shared KV heads for the
            duration of a call), "fa2" (package flash-attn), "torch" (FlashAttention-2 inside torch), "cpu" (torch's
            flash kernel for CPUs), "triton" (ours) or "reference" (plain torch, any dtype).
        strategy: What the ranks exchange: "heads" (Ulysses: tokens for heads; the number of ranks must divide the
            heads), "gather" (each rank pulls the keys and values that its queries see), "ring" (blocks go round, as far
            as any rank needs them), "heads+ring" and "heads+gather" ("heads" among neighbours, the other between such
            groups), "double-ring" (a ring inside each node, overlapped with a ring between nodes; BMBURST_NODE names
            the node of a process where it is not its host), or "auto", the one that `bmburst.schedule.cost` finds
            cheapest. "kv" and "burst" are rings whose backward moves keys and values, or queries and their gradients;
            "ring" takes the one that costs less.
        transport: "peer" (copy engines between the GPUs of one host, concurrent with the kernels), "nccl", "gloo", or
            "auto": "peer" where every rank can access the memory of the others, else the transport of the group.
        deterministic: Whether repeated calls must give the same bits in backward too. Costs speed on a GPU.
        return_lse: Whether to return the log-sum-exp too. If a loss depends on it and the kernel does not support its
            gradient, backward runs with "triton" or "reference".

    Returns:
        The output, `[batch, local_tokens, heads, value_dim]`, typed as q; with `return_lse` also the log-sum-exp of the
        scores in nats, `[batch, heads, local_tokens]`, fp32 or wider. Both are differentiable. Rows that see no key
        give zero and -inf.

    Raises:
        UserError: A value is unknown, shapes, dtypes or devices are not supported, or the ranks of the group disagree.
            Every rank raises it if calls are compared: on CPUs always, on GPUs the first ones (see
            `bmburst.comm.checks.CheckedCommunicator`).

    Source: BurstAttention, arXiv:2403.09347.
    """
    options = AttentionOptions(
        mask=mask,
        layout=layout,
        key_layout=key_layout,
        scale=scale,
        softcap=softcap,
        kernel=kernel,
        strategy=strategy,
        transport=transport,
        deterministic=deterministic,
    )
    _require_flags(group, return_lse=return_lse)
    if isinstance(mask, Documents) and layout != "balanced" and (length, key_length, key_layout) == (None, None, None):
        _require_whole(group, mask, q)
    out, lse = attend(q, k, v, length, group, options, key_length, sink)
    return (out, lse) if return_lse else out


def _require_whole(group: object, mask: Documents, q: object) -> None:
    """Refuse documents of one rank's tokens, on every rank: other packages take `cu_seqlens // ranks`."""
    tokens = q.shape[1] if isinstance(q, Tensor) and q.dim() == 4 else 0
    # A sequence of 1 or 2 tokens is padded to as many on each rank.
    if tokens > 2 and mask.length == tokens and (comm := resolve_group(group)).size > 1:
        comm.refuse(
            f"the documents of the mask have {tokens} tokens, as many as each of {comm.size} ranks holds\n"
            "allowed: documents of the whole sequence, the same on all ranks\n"
            f"fix: cu_seqlens that are not divided by the ranks; or length={tokens}, if all later tokens are padding"
        )


def _require_flags(group: object, **flags: object) -> None:
    """Refuse values that are no bools, on every rank."""
    for name, value in flags.items():
        try:
            require_flag(name, value)
        except UserError as error:
            resolve_group(group).refuse(str(error))


@outside_of_graphs
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    length: int | None,
    group: object,
    options: AttentionOptions,
    key_length: int | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp; see `burst_attention`."""
    comm = resolve_group(group)
    if isinstance(options.mask, tuple):
        return _sample_by_sample(q, k, v, length, comm, options, key_length, sink)
    with comm.first_calls("burst_attention"):
        if sink is not None:
            comm.decided(partial(check_sink, q, sink))
            comm.require_alike("sink of burst_attention", sink)
        call = decide(comm, q, k, v, length, options, key_length)
    executor, sinks = (executor_of(call), ()) if sink is None else (with_sink(executor_of(call)), (sink,))
    out, lse = SequenceAttention.apply(executor, call, q, k, v, *sinks)  # type: ignore[no-untyped-call]
    return out, lse


def _sample_by_sample(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    length: int | None,
    comm: CheckedCommunicator,
    options: AttentionOptions,
    key_length: int | None,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor]:
    masks = options.mask
    assert isinstance(masks, tuple)

    def check() -> tuple[None, str]:
        options.validate()
        # The whole batch is checked: an error about one sample's slice would show the wrong shape.
        require_tensors(q, k, v, is_cross=options.is_cross(key_length))
        sample_masks(masks, len(q), alike=comm.size > 1 and "balanced" in (options.layout, options.key_layout))
        return None, f"attention with {len(masks)} masks"

    with comm.first_calls("burst_attention of samples"):
        comm.decided(check)
    parts = [
        attend(q[i : i + 1], k[i : i + 1], v[i : i + 1], length, comm, replace(options, mask=mask), key_length, sink)
        for i, mask in enumerate(masks)
    ]
    outs, lses = zip(*parts, strict=True)
    with no_autocast(q.device.type):  # under autocast, torch.cat refuses 16-bit tensors of another dtype
        return torch.cat(outs), torch.cat(lses)


def resolve_group(group: object) -> CheckedCommunicator:
    """Return the communicator of `group`. None: that of the current mesh's sequence group, else that of the world.

    Raises:
        UserError: As `communicator`; or the world is meant and BMTrain divides it into tensor groups or stages, whose
            ranks hold no parts of one sequence.
    """
    mesh = current_mesh()
    if group is not None:
        return communicator(group)
    if mesh is not None:
        return mesh.sequence
    for option, degree in (("tp_size", bmtrain_tensor_degree()), ("pipe_size", bmtrain_pipe_degree())):
        if degree > 1:
            raise UserError(
                f"BMTrain was started with {option}={degree}, so not all ranks hold parts of one sequence\n"
                "fix: pass group=bmburst.Mesh.over_bmtrain().sequence"
            )
    return communicator(None)


def empty_cache() -> None:
    """Free the GPU memory that `burst_attention` keeps between calls, and torch's cache.

    Attention keeps the buffers of transport "peer", which are outside of torch's cache and as large as the largest call
    so far needed, and the memory of its CUDA graphs. Call this between phases of a program when the next phase has
    shorter sequences or fewer ranks per group. Call it before the old groups are destroyed: buffers of a destroyed
    group stay until the process ends. Later calls allocate new memory.

    Every rank must call it, at the same point of the program. It waits for the GPU.
    """
    PEER_GROUPS.release()
    RECORDINGS.clear()
    BUFFERS.clear()
    torch.cuda.empty_cache()


_FLASH = ("cuda", "triton")


def burst_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    flash: str | None = "cuda",
    causal: bool = False,
    optimize_bwd_comm: bool = False,
    deterministic: bool = False,
    process_group: object = None,
    double_group: Sequence[object] = (None, None),
) -> Tensor:
    """Return attention with the signature of Burst-Attention's function of this name; causal means zigzag order.

    Args:
        q: `[batch, local_tokens, heads, head_dim]`; with `flash=None` `[batch, heads, local_tokens, head_dim]`.
        k: Dimensions in the order of q, with its own number of heads.
        v: Shaped as k.
        softmax_scale: Factor on the scores; default `head_dim ** -0.5`.
        flash: "cuda" or "triton": both take the best kernel of this device. None: plain torch.
        causal: True: causal mask over a sequence in zigzag order. False: no mask.
        optimize_bwd_comm: True: backward moves the queries (strategy "burst"). False: strategy "auto".
        deterministic: Whether repeated calls must give the same bits.
        process_group: As `group` in `burst_attention`.
        double_group: Groups inside and between nodes. Ignored: ranks find out which of them share a node.

    Raises:
        UserError: As `burst_attention`.
    """
    del double_group
    return _attend(q, k, v, softmax_scale, flash, causal, optimize_bwd_comm, deterministic, process_group, "zigzag")


def burst_attn_func_striped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    flash: str | None = "cuda",
    causal: bool = False,
    optimize_bwd_comm: bool = False,
    deterministic: bool = False,
    process_group: object = None,
    double_group: Sequence[object] = (None, None),
) -> Tensor:
    """Return attention as `burst_attn_func` does, except that causal means striped order."""
    del double_group
    return _attend(q, k, v, softmax_scale, flash, causal, optimize_bwd_comm, deterministic, process_group, "striped")


class OpBurstAttn:
    """Burst-Attention's autograd function: `apply` takes the arguments of `burst_attn_func`, by position."""

    apply = staticmethod(burst_attn_func)


class OpBurstAttnStrip:
    """Burst-Attention's autograd function for striped order; arguments as in `burst_attn_func_striped`."""

    apply = staticmethod(burst_attn_func_striped)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    flash: str | None,
    causal: bool,
    optimize_bwd_comm: bool,
    deterministic: bool,
    process_group: object,
    order: str,
) -> Tensor:
    if flash is not None and flash not in _FLASH:
        resolve_group(process_group).refuse(str(unknown("flash", flash, _FLASH)))
    _require_flags(process_group, causal=causal, optimize_bwd_comm=optimize_bwd_comm)
    if flash is None:  # `burst_attention` refuses other inputs, on every rank
        q, k, v = (t.transpose(1, 2) if isinstance(t, Tensor) and t.dim() == 4 else t for t in (q, k, v))
    out = burst_attention(
        q,
        k,
        v,
        mask="causal" if causal else "full",
        layout=order if causal else "contiguous",
        group=process_group,
        scale=softmax_scale,
        kernel="reference" if flash is None else "auto",
        strategy="burst" if optimize_bwd_comm else "auto",
        deterministic=deterministic,
    )
    return out.transpose(1, 2) if flash is None else out
