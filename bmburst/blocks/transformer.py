"""One LLaMA block: attention and gated MLP, each behind a norm and added to the stream."""

from collections.abc import Callable

import bmtrain as bmt
import torch
from torch import Tensor

from bmburst import recompute
from bmburst.blocks.config import LlamaConfig
from bmburst.blocks.layers import Linear, RMSNorm
from bmburst_ops.rotary import apply_rotary
from bmburst_ops.swiglu import swiglu

AttentionFactory = Callable[[], torch.nn.Module]
"""Makes the attention of one block: forward(q, k, v, length) on `[batch, local_tokens, heads, head_dim]`."""


class Attention(bmt.DistributedModule):  # type: ignore[misc]  # BMTrain has no types
    """Projections and rotary embedding around BurstAttention; key and value heads stay unexpanded."""

    def __init__(self, config: LlamaConfig, attention: AttentionFactory, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, query, dtype=dtype)
        self.k_proj = Linear(config.hidden_size, kv, dtype=dtype)
        self.v_proj = Linear(config.hidden_size, kv, dtype=dtype)
        self.o_proj = Linear(query, config.hidden_size, dtype=dtype)
        self.attention = attention()

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, length: int | None) -> Tensor:
        """Return `[batch, tokens, hidden_size]`; see `Block.forward`."""

        def heads(projection: Linear) -> Tensor:
            projected: Tensor = projection(hidden)
            return projected.view(*hidden.shape[:2], -1, self.head_dim)

        query, key = apply_rotary(heads(self.q_proj), cos, sin), apply_rotary(heads(self.k_proj), cos, sin)
        mixed: Tensor = self.attention(query, key, heads(self.v_proj), length)
        result: Tensor = self.o_proj(mixed.flatten(-2))
        return result


class MLP(bmt.DistributedModule):  # type: ignore[misc]  # BMTrain has no types
    """The gated MLP, down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, dtype=dtype)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, dtype=dtype)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return `[batch, tokens, hidden_size]`."""
        result: Tensor = self.down_proj(swiglu(self.gate_proj(hidden), self.up_proj(hidden)))
        return result


class TransformerBlock(bmt.DistributedModule):  # type: ignore[misc]  # BMTrain has no types
    """What a `bmt.Block` wraps. Its forward takes positional arguments only: a Block drops keyword ones in silence."""

    def __init__(self, config: LlamaConfig, attention: AttentionFactory, dtype: torch.dtype, policy: str) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.self_attn = Attention(config, attention, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.mlp = MLP(config, dtype)
        self.recompute = policy

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, length: int | None) -> Tensor:
        """Return the stream after this block.

        Args:
            hidden: `[batch, tokens, hidden_size]`.
            cos: `[batch, tokens, head_dim / 2]`, fp32 or wider; the tables are shared by all blocks.
            sin: As `cos`.
            length: Real tokens of the whole sequence over all ranks; None if all are.
        """
        result: Tensor = recompute.checkpoint(self.recompute, self._forward, hidden, cos, sin, length)
        return result

    def _forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, length: int | None) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, length)
        mlp: Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + mlp
