"""`burst_attention`: exact attention over a sequence split over ranks."""

from dataclasses import replace
from typing import Literal, overload

import torch
from torch import Tensor

from bmburst.attention.call import decide
from bmburst.attention.differentiable import no_autocast
from bmburst.attention.function import SequenceAttention
from bmburst.attention.options import AttentionOptions, MaskOption, require_tensors
from bmburst.comm.checks import Checked
from bmburst.comm.groups import communicator
from bmburst.errors import UserError
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
    group: object = ...,
    scale: float | None = ...,
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
    group: object = ...,
    scale: float | None = ...,
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
    group: object = None,
    scale: float | None = None,
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
        v: Shaped as k.
        mask: Which keys a query sees, in global positions: "causal", "full", or one of `bmburst.Causal`, `Full`,
            `SlidingWindow`, `Documents`, `PrefixLM`, `BlockSparse`, joined with `&`. A tuple of them has one for each
            sample of the batch.
        layout: "contiguous", "zigzag", "striped" or "balanced" (like work for every rank under this mask): which global
            positions the local tokens are. "balanced" depends on mask and length: they must be those of `shard`.
        length: Real tokens of the whole sequence; later ones are padding: never attended to, zero output, zero
            gradient. Default: what the mask is made for, or all of them.
        group: A `torch.distributed` process group, a `bmt.nccl` communicator, or None for the current mesh's sequence
            group or else the world.
        scale: Factor on the scores, above 0; default `head_dim ** -0.5`.
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
            "ring" takes the one with fewer bytes.
        transport: "peer" (copy engines between the GPUs of one host, beside the kernels), "nccl", "gloo", or "auto":
            "peer" where every rank can reach the others' memory, else what the group has.
        deterministic: Whether repeated calls must give the same bits in backward too. Costs speed on a GPU.
        return_lse: Whether to return also the log-sum-exp. A loss that depends on it runs backward with "reference"
            where the kernel cannot take its gradient.

    Returns:
        The output, shaped and typed as q; with `return_lse` also the log-sum-exp of the scaled scores in nats,
        `[batch, heads, local_tokens]`, fp32 or wider. Both are differentiable. Rows that see no key give zero and -inf.

    Raises:
        UserError: A value is unknown, shapes, dtypes or devices cannot work, or the ranks of the group disagree: on
            every rank, where calls are compared (on CPUs always; see `bmburst.comm.checks.Checked`).

    Source: BurstAttention, arXiv:2403.09347.
    """
    options = AttentionOptions(
        mask=mask,
        layout=layout,
        scale=scale,
        kernel=kernel,
        strategy=strategy,
        transport=transport,
        deterministic=deterministic,
    )
    out, lse = attend(q, k, v, length, group, options)
    return (out, lse) if return_lse else out


def attend(
    q: Tensor, k: Tensor, v: Tensor, length: int | None, group: object, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp; see `burst_attention`.

    torch.compile breaks its graph here: decisions and transfers cannot be part of a compiled graph.
    """
    if torch.compiler.is_compiling():
        from bmburst.attention.uncompiled import attend as uncompiled

        return uncompiled(q, k, v, length, group, options)
    comm = resolve_group(group)
    if isinstance(options.mask, tuple):
        return _sample_by_sample(q, k, v, length, comm, options)
    call = decide(comm, q, k, v, length, options)
    out, lse = SequenceAttention.apply(q, k, v, call)  # type: ignore[no-untyped-call]
    return out, lse


def _sample_by_sample(
    q: Tensor, k: Tensor, v: Tensor, length: int | None, comm: Checked, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    masks = options.mask
    assert isinstance(masks, tuple)

    def check() -> tuple[None, str]:
        options.validate()
        require_tensors(q, k, v)  # whole: of a sample's own slices nobody could tell that there were others
        if not masks or len(masks) != len(q):
            raise UserError(f"got {len(masks)} masks for a batch of {len(q)}\ngive one mask, or one to each sample")
        if options.layout == "balanced" and comm.size > 1 and len(set(map(make_mask, masks))) > 1:
            raise UserError("layout 'balanced' is made for one mask, but each sample has its own\nuse layout 'zigzag'")
        return None, f"attention with {len(masks)} masks"

    comm.decided(check)
    parts = [
        attend(q[i : i + 1], k[i : i + 1], v[i : i + 1], length, comm, replace(options, mask=mask))
        for i, mask in enumerate(masks)
    ]
    outs, lses = zip(*parts, strict=True)
    with no_autocast(q.device.type):  # in which torch joins no 16-bit tensors but those of its own dtype
        return torch.cat(outs), torch.cat(lses)


def resolve_group(group: object) -> Checked:
    """Return the communicator of `group`, or for None that of the current mesh's sequence group or else the world."""
    mesh = current_mesh()
    return mesh.sequence if group is None and mesh is not None else communicator(group)
