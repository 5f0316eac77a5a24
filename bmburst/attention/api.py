"""`burst_attention`, exact attention over a sequence split over ranks, and the same under Burst-Attention's names."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, overload

import torch
from torch import Tensor

from bmburst.attention.call import decide
from bmburst.attention.function import SequenceAttention
from bmburst.attention.heads import executor_of
from bmburst.attention.options import AttentionOptions, MaskOption, no_autocast, require_tensors
from bmburst.attention.sink import check_sink, with_sink
from bmburst.comm.checks import CheckedCommunicator
from bmburst.comm.groups import communicator
from bmburst.errors import UserError, unknown
from bmburst.mesh import current_mesh
from bmburst.schedule.mask import make_mask


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

    Every rank of the group calls it with its own tokens, in the layout's order (`bmburst.shard` cuts them), with equal
    shapes. A rank needs memory for its share of the sequence only: its local tokens of all heads, or all
    tokens of its own heads; "gather" also holds all tokens of a few KV heads. Gradients are those of a loss that is
    the sum of the ranks' losses, once: `create_graph=True` is refused.

    A NaN or an infinity in q, k or v stays in its sample and in its document (`bmburst.Documents`), in outputs and in
    gradients. Inside a document a NaN may reach queries that do not see it: kernels multiply whole tiles, and a weight
    of zero times NaN is NaN.

    Args:
        q: `[batch, local_tokens, heads, head_dim]`, any float dtype, any strides.
        k: `[batch, local_tokens, kv_heads, head_dim]`; heads is a multiple of kv_heads (GQA, MQA). Never expanded.
            In cross-attention `[batch, local_keys, kv_heads, head_dim]`.
        v: Shaped as k.
        mask: Which keys a query sees, in global positions: "causal", "full", or one of `bmburst.Causal`, `Full`,
            `SlidingWindow`, `Documents`, `PrefixLM`, `BlockSparse`, joined with `&`. A tuple of them has one for each
            sample of the batch.
        layout: "contiguous", "zigzag", "striped" or "balanced" (like work for every rank under this mask): which global
            positions the local tokens are. "balanced" depends on mask and length: they must be those of `shard`.
        length: Real tokens of the whole sequence; later ones are padding: never attended to, zero output, zero
            gradient. Default: what the mask is made for, or all of them.
        key_layout: Layout of the keys in cross-attention; default: `layout`. "balanced" is that of `shard` under the
            same mask made for the keys: for `Documents` that of their key lengths above 0.
        key_length: Real tokens of the keys' sequence, where it is another one than the queries'. Keys then have local
            tokens and padding of their own. "causal" and `SlidingWindow` are aligned at the bottom right: the last
            query sees the last key, query i is treated as key `i + key_length - length`. `Documents` take
            `key_lengths`. Other masks are refused. Default: with `key_layout`, what the mask is made for, or as many
            as queries; else queries and keys are one sequence.
        sink: `[heads]`, any float dtype: a logit for each query head that takes a share of every row's softmax and has
            no value, as in gpt-oss. Rows that see no key are not changed. Every rank gives all heads' sinks. Its
            gradient is this rank's queries' part, which the caller adds up over the group as that of other weights.
        group: A `torch.distributed` process group, a `bmt.nccl` communicator, or None for the current mesh's sequence
            group or else the world.
        scale: Factor on the scores, above 0; default `head_dim ** -0.5`.
        softcap: Bound of the scores, above 0: a scaled score becomes `softcap * tanh(score / softcap)`, before the mask
            and before a sink, as in Gemma 2. Kernels "fa4", "fa3", "fa2", "triton" and "reference" have it. None: no
            bound.
        kernel: "auto", the first of these that takes the inputs on this machine: "fa4" (FlashAttention-4, package
            flash-attn-4), "fa3" (FlashAttention-3), "cudnn" (cuDNN inside torch; expands shared KV heads for the
            length of a call), "fa2" (package flash-attn), "torch" (FlashAttention-2 inside torch), "cpu" (torch's
            flash kernel for CPUs), "triton" (ours) or "reference" (plain torch, any dtype).
        strategy: How the work is spread: "heads" (ranks exchange tokens for heads, needs heads that divide by the
            ranks), "gather" (each rank pulls the keys and values that its queries see), "ring" (blocks go round, as far
            as any rank needs them), "heads+ring" and "heads+gather" (heads among neighbours, the other between their
            groups), "double-ring" (blocks go round inside nodes, and from node to node behind that; BMBURST_NODE names
            a process's node where it is not its host), or "auto", the one that `bmburst.schedule.cost` finds
            cheapest. "kv" and "burst" are rings whose backward moves keys and values, or queries and their gradients;
            "ring" takes the one that costs less.
        transport: "peer" (copy engines between the GPUs of one host, beside the kernels), "nccl", "gloo", or "auto":
            "peer" where every rank can reach the others' memory, else what the group has.
        deterministic: Whether repeated calls must give the same bits in backward too. Costs speed on a GPU.
        return_lse: Whether to return also the log-sum-exp. A loss that depends on it runs backward with "reference"
            where the kernel cannot take its gradient.

    Returns:
        The output, shaped and typed as q; with `return_lse` also the log-sum-exp of the scores in nats,
        `[batch, heads, local_tokens]`, fp32 or wider. Both are differentiable. Rows that see no key give zero and -inf.

    Raises:
        UserError: A value is unknown, shapes, dtypes or devices cannot work, or the ranks of the group disagree: on
            every rank, where calls are compared (on CPUs always; see `bmburst.comm.checks.CheckedCommunicator`).

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
    out, lse = attend(q, k, v, length, group, options, key_length, sink)
    return (out, lse) if return_lse else out


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
    """Return output and log-sum-exp; see `burst_attention`.

    torch.compile breaks its graph here: decisions and transfers cannot be part of a compiled graph.
    """
    if torch.compiler.is_compiling():
        from bmburst.attention.uncompiled import uncompiled

        found: tuple[Tensor, Tensor] = uncompiled(attend, q, k, v, length, group, options, key_length, sink)
        return found
    comm = resolve_group(group)
    if isinstance(options.mask, tuple):
        return _sample_by_sample(q, k, v, length, comm, options, key_length, sink)
    if sink is not None:
        comm.decided(partial(check_sink, q, sink))
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
        require_tensors(
            q, k, v, is_cross=options.is_cross(key_length)
        )  # whole: of a sample's own slices nobody could tell that there were others
        if not masks or len(masks) != len(q):
            raise UserError(f"got {len(masks)} masks for a batch of {len(q)}\nfix: one mask, or one for each sample")
        if "balanced" in (options.layout, options.key_layout) and comm.size > 1 and len(set(map(make_mask, masks))) > 1:
            raise UserError("layout 'balanced' needs one mask, but each sample has its own\nfix: use layout 'zigzag'")
        return None, f"attention with {len(masks)} masks"

    comm.decided(check)
    parts = [
        attend(q[i : i + 1], k[i : i + 1], v[i : i + 1], length, comm, replace(options, mask=mask), key_length, sink)
        for i, mask in enumerate(masks)
    ]
    outs, lses = zip(*parts, strict=True)
    with no_autocast(q.device.type):  # in which torch joins no 16-bit tensors but those of its own dtype
        return torch.cat(outs), torch.cat(lses)


def resolve_group(group: object) -> CheckedCommunicator:
    """Return the communicator of `group`, or for None that of the current mesh's sequence group or else the world."""
    mesh = current_mesh()
    return mesh.sequence if group is None and mesh is not None else communicator(group)


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
    """Return attention as Burst-Attention's function of this name does; causal means zigzag order.

    Args:
        q: `[batch, local_tokens, heads, head_dim]`; with `flash=None` `[batch, heads, local_tokens, head_dim]`.
        k: In the same order of dimensions, with its own number of heads.
        v: Shaped as k.
        softmax_scale: Factor on the scores; default `head_dim ** -0.5`.
        flash: "cuda" or "triton": both take the best kernel of this device. None: plain torch.
        causal: Causal mask over a sequence in zigzag order, or no mask.
        optimize_bwd_comm: True makes the queries travel in backward (strategy "burst"); False takes the cheapest way.
        deterministic: Whether repeated calls must give the same bits.
        process_group: As `group` in `burst_attention`.
        double_group: Groups inside and between nodes. Not used: ranks find out which of them share a node.

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
    """Return attention as `burst_attn_func` does; causal means striped order."""
    del double_group
    return _attend(q, k, v, softmax_scale, flash, causal, optimize_bwd_comm, deterministic, process_group, "striped")


class OpBurstAttn:
    """Burst-Attention's autograd function: `OpBurstAttn.apply` takes what `burst_attn_func` takes, by position."""

    apply = staticmethod(burst_attn_func)


class OpBurstAttnStrip:
    """Burst-Attention's autograd function of striped order: `apply` takes what `burst_attn_func_striped` takes."""

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
    if flash is None:  # what has no heads to put first is refused behind this, on every rank
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
