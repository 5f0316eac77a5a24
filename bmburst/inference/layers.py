"""The forward pass of new tokens through all blocks of a model, in prefill."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from bmburst.checkpoint.derived import EMBEDDING
from bmburst.inference.replay import Phases
from bmburst.inference.weights import LayerWeights, ModelWeights
from bmburst.plan.inference import MLP_TOKENS
from bmburst_ops.rms_norm import rms_norm, stream_norm
from bmburst_ops.rotary import rotate
from bmburst_ops.swiglu import swiglu

Attend = Callable[[int, Tensor, Tensor, Tensor], Phases]
"""Computes attention of a layer: its index, and queries, keys and values `[1, tokens, heads, head_dim]`."""


def hidden_states(weights: ModelWeights, ids: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Phases:
    """Compute the hidden states after the last block, before the last norm.

    Args:
        weights: The model.
        ids: Token ids `[1, tokens]`.
        cos: Cosines of their rotary angles.
        sin: Sines of the same.
        attend: Attention, and its exchanges.

    Returns:
        `[1, tokens, hidden_size]`.
    """
    config = weights.config
    stream = embedding(ids, weights.table(EMBEDDING))
    if config.embedding_scale != 1:
        stream = stream * config.embedding_scale
    added: Tensor | None = None
    eps, factor = config.norm_eps, config.residual_scale
    for index in range(config.num_layers):
        layer = weights.layer(index)
        stream, normed = stream_norm(stream, added, layer.input_norm, eps, factor=factor)
        attended = yield from _attention(weights, index, layer, normed, cos, sin, attend)
        stream, normed = stream_norm(stream, attended, layer.mlp_norm, eps, factor=factor)
        del attended
        added = _mlp(layer, normed)
        del normed
    assert added is not None
    return torch.add(stream, added, alpha=factor)


def _attention(
    weights: ModelWeights, index: int, layer: LayerWeights, normed: Tensor, cos: Tensor, sin: Tensor, attend: Attend
) -> Phases:
    config = weights.config
    counts = config.num_heads, config.num_kv_heads, config.num_kv_heads
    joined = linear(normed, layer.qkv, layer.qkv_bias).unflatten(-1, (-1, config.head_dim))
    q, k, v = joined.split(counts, 2)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = rms_norm(q, layer.q_norm, config.norm_eps), rms_norm(k, layer.k_norm, config.norm_eps)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    else:
        turned = joined[:, :, : q.shape[2] + k.shape[2]]
        rotate(turned, cos, sin, out=turned)
    mixed = yield from attend(index, q, k, v)
    return linear(mixed.flatten(-2), layer.out)


def _mlp(layer: LayerWeights, normed: Tensor) -> Tensor:
    """Return the MLP's result for `[1, tokens, hidden_size]`, computed for `MLP_TOKENS` tokens at a time."""
    out = torch.empty_like(normed)
    for states, result in zip(normed[0].split(MLP_TOKENS), out[0].split(MLP_TOKENS), strict=True):
        inner = swiglu(*linear(states, layer.gate_up).chunk(2, -1))
        torch.mm(inner, layer.down.t(), out=result)
        del inner  # frees the activations of this chunk before the next one
    return out
