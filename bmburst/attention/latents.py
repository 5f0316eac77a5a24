"""Multi-head latent attention (MLA) whose ranks exchange latents instead of keys and values.

Keys and values of all heads are computed from a latent and a rotary key of each token (arXiv:2405.04434, section 2.1).
After an exchange of heads, a rank needs keys and values of all tokens, but only for its own heads. Here it gets the
latents of all tokens, and expands them for its own heads: as many FLOPs as to expand its own tokens for all heads.

Backward exchanges and expands the latents again: between the passes, a rank keeps only those of its tokens. The
gradients of latents, from each rank's heads, return to the owners of the tokens, who sum them. The gradient of the
weight on a rank is that of its own heads, for all tokens, and zero for other heads. The sum over the ranks, which data
parallelism takes of every gradient, is thus the gradient.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from bmburst.attention.api import attend
from bmburst.attention.at_once import (
    attend_own,
    by_rank,
    by_token,
    differentiate_own,
    is_recordable,
    joined,
    packed,
    split,
    statistics,
    to_heads,
    to_tokens,
)
from bmburst.attention.call import AttentionCall, Executor, decide, head_shapes_of
from bmburst.attention.function import SequenceAttention
from bmburst.attention.options import AttentionOptions
from bmburst.comm.checks import CheckedCommunicator
from bmburst.schedule.units import HeadShapes
from bmburst_ops.autocast import no_autocast
from bmburst_ops.flash import BackwardInputs, Partial


def attend_latents(
    q: Tensor,
    latent: Tensor,
    rotary: Tensor,
    weight: Tensor,
    length: int | None,
    comm: CheckedCommunicator,
    options: AttentionOptions,
) -> Tensor:
    """Return the output of latent attention; ranks exchange latents or keys and values, whichever costs less.

    Args:
        q: `[batch, local_tokens, heads, head_dim]`.
        latent: `[batch, local_tokens, 1, rank]`, in q's dtype.
        rotary: The last numbers of each token's key in all heads, `[batch, local_tokens, 1, rotary_dim]`, in q's dtype.
        weight: Maps a latent to the other numbers of the key and to the value of each head,
            `[heads * (head_dim - rotary_dim + value_dim), rank]`.
        length: See `burst_attention`.
        comm: The group.
        options: Options of attention.

    Returns:
        `[batch, local_tokens, heads, value_dim]`.

    Raises:
        UserError: As `burst_attention`.
    """
    if isinstance(options.mask, tuple):
        samples = zip(q.split(1), latent.split(1), rotary.split(1), options.mask, strict=True)
        outs = [
            attend_latents(own_q, own_latent, own_rotary, weight, length, comm, replace(options, mask=mask))
            for own_q, own_latent, own_rotary, mask in samples
        ]
        with no_autocast(q.device.type):
            return torch.cat(outs)
    if comm.size > 1:
        k, v = (latent[..., :1].expand(size) for size in _sizes(q, rotary, weight))  # their shapes are what counts
        with comm.first_calls("attention of latents"):
            call = decide(comm, q, k, v, length, options, latent_dim=latent.shape[3] + rotary.shape[3])
        if call.strategy.latents:
            found: Tensor = SequenceAttention.apply(_LATENTS, call, q, latent, rotary, weight)[0]  # type: ignore[no-untyped-call]
            return found
    keys, values = _expanded(latent, rotary, weight, q.shape[2], q.shape[3])
    return attend(q, keys, values, length, comm, options)[0]


def _forward(call: AttentionCall, q: Tensor, latent: Tensor, rotary: Tensor, weight: Tensor) -> Partial:
    """Return attention of this rank's queries over the whole sequence."""
    shapes = _shapes(call, q, rotary, weight)
    is_recorded = is_recordable(call, shapes, q)
    rows, _ = _arrived(call, shapes, [q], latent, rotary, weight, is_recorded=is_recorded)
    return attend_own(call, shapes, q, rows, is_recorded=is_recorded)


def _backward(call: AttentionCall, given: BackwardInputs, weight: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of this rank's queries, latents and rotary keys, and of the weight."""
    grad_out, q, latent, rotary, lse, delta = given
    shapes, rank = _shapes(call, q, rotary, weight), latent.shape[3]
    is_recorded = is_recordable(call, shapes, q)
    brought = [statistics(q.dtype, lse, delta), q, grad_out]
    rows, latents = _arrived(call, shapes, brought, latent, rotary, weight, is_recorded=is_recorded)
    grad_q, grad_k, grad_v = differentiate_own(call, shapes, q, rows, is_recorded=is_recorded)
    of_latent, of_rotary = grad_k.split((shapes.head_dim - rotary.shape[3], rotary.shape[3]), 3)
    grad_expanded = torch.cat((of_latent, grad_v), 3).flatten(2)  # [batch, tokens, rows of the weight]
    own = _own_rows(call, shapes, weight)
    shares = to_tokens(call, shapes, [grad_q.flatten(2), grad_expanded @ own, of_rotary.sum(2)])
    grads = [joined(part, *t.shape[2:]) for part, t in zip(shares, (q, latent, rotary), strict=True)]
    if not weight.requires_grad:
        return *grads, None
    grad_weight = torch.zeros_like(weight)
    torch.mm(
        grad_expanded.flatten(0, 1).mT, latents[..., :rank].flatten(0, 1), out=_own_rows(call, shapes, grad_weight)
    )
    return *grads, grad_weight


_LATENTS = Executor(_forward, _backward)


def _arrived(
    call: AttentionCall,
    shapes: HeadShapes,
    brought: Sequence[Tensor],
    latent: Tensor,
    rotary: Tensor,
    weight: Tensor,
    *,
    is_recorded: bool,
) -> tuple[Tensor, Tensor]:
    """Exchange latents and some tensors of all heads, and expand the latents.

    Returns:
        The tensors, keys and values of this rank's heads for all tokens, as `to_heads` returns them; and the latents of
        all tokens with their rotary keys, `[batch, tokens, rank + rotary_dim]`.
    """
    parts = [by_rank(t, shapes.degree) for t in (*brought, torch.cat((latent, rotary), 3))]
    tokens = by_token(to_heads(call, shapes, parts, is_recorded=False), shapes, latent)
    *own, latents = split(tokens, [part.shape[3] for part in parts])
    latent, rotary = latents[:, :, None].split((latent.shape[3], rotary.shape[3]), 3)
    expanded = _expanded(latent, rotary, _own_rows(call, shapes, weight), shapes.own_heads, shapes.head_dim)
    return packed([*own, *(t.flatten(2) for t in expanded)], is_recorded=is_recorded), latents


def _expanded(latent: Tensor, rotary: Tensor, weight: Tensor, heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return keys and values `[batch, tokens, heads, ...]` of the heads whose rows `weight` has."""
    both = functional.linear(latent[:, :, 0], weight).unflatten(2, (heads, -1))
    rest = head_dim - rotary.shape[3]
    return torch.cat((both[..., :rest], rotary.expand(-1, -1, heads, -1)), 3), both[..., rest:]


def _own_rows(call: AttentionCall, shapes: HeadShapes, weight: Tensor) -> Tensor:
    """Return a view of the rows of the heads that this rank has after the exchange."""
    return weight.chunk(shapes.degree)[call.comm.rank]


def _sizes(q: Tensor, rotary: Tensor, weight: Tensor) -> tuple[torch.Size, torch.Size]:
    """Return the shapes of a rank's keys and values before an exchange of heads."""
    *tokens, heads, head_dim = q.shape
    value_dim = weight.shape[0] // heads - (head_dim - rotary.shape[3])
    return q.shape, torch.Size((*tokens, heads, value_dim))


def _shapes(call: AttentionCall, q: Tensor, rotary: Tensor, weight: Tensor) -> HeadShapes:
    return head_shapes_of(call, q.shape, *_sizes(q, rotary, weight), q.dtype)
