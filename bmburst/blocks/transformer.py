"""One LLaMA block: attention and gated MLP, each behind a norm and added to the stream.

With tensor parallelism the stream holds this rank's tokens of its tensor group, attention and MLP all of the group's.
"""

from collections.abc import Callable

import bmtrain as bmt
import torch
from torch import Tensor

from bmburst import recompute
from bmburst.attention.call import MaskOption
from bmburst.blocks.config import LlamaConfig
from bmburst.blocks.layers import Linear, RMSNorm
from bmburst.blocks.tensor_parallel import TensorGroup
from bmburst_ops.rotary import apply_rotary
from bmburst_ops.swiglu import swiglu

AttentionFactory = Callable[[], torch.nn.Module]
"""Makes the attention of one block: forward(q, k, v, length, mask) on `[batch, local_tokens, heads, head_dim]`."""


class Attention(bmt.DistributedModule):  # type: ignore[misc]  # BMTrain has no types
    """Projections and rotary embedding around BurstAttention; key and value heads stay unexpanded.

    A rank of a tensor group has its part of the query heads with their KV heads. Where there are fewer KV heads than
    ranks, the ranks that share one compute it each; then all ranks of the world hold their projections in parts.
    """

    def __init__(
        self, config: LlamaConfig, attention: AttentionFactory, dtype: torch.dtype, tensor: TensorGroup
    ) -> None:
        super().__init__()
        self.head_dim, self.tensor = config.head_dim, tensor
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        is_shared = config.num_kv_heads % tensor.size != 0
        first = tensor.rank * config.num_kv_heads // tensor.size * config.head_dim
        rows = slice(first, first + config.head_dim) if is_shared else slice(None)
        cut = None if is_shared else 0
        self.q_proj = Linear(config.hidden_size, query, dtype=dtype, split=0)
        self.k_proj = Linear(config.hidden_size, kv, dtype=dtype, split=cut, rows=rows)
        self.v_proj = Linear(config.hidden_size, kv, dtype=dtype, split=cut, rows=rows)
        self.o_proj = Linear(query, config.hidden_size, dtype=dtype, split=1)
        self.attention = attention()

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, length: int | None, mask: MaskOption | None = None
    ) -> Tensor:
        """Return `[batch, own tokens, hidden_size]`; see `TransformerBlock.forward`."""
        gathered = self.tensor.gather(hidden, cos.shape[1])

        def heads(projection: Linear) -> Tensor:
            projected: Tensor = projection(gathered)
            return projected.view(*gathered.shape[:2], -1, self.head_dim)

        query, key = apply_rotary(heads(self.q_proj), cos, sin), apply_rotary(heads(self.k_proj), cos, sin)
        mixed: Tensor = self.attention(query, key, heads(self.v_proj), length, mask)
        return self.tensor.add_up(self.o_proj(mixed.flatten(-2)))


class MLP(bmt.DistributedModule):  # type: ignore[misc]  # BMTrain has no types
    """The gated MLP, down(silu(gate(x)) * up(x)), of which a rank of a tensor group has its part of the width."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, tensor: TensorGroup) -> None:
        super().__init__()
        self.tensor = tensor
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, dtype=dtype, split=0)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, dtype=dtype, split=0)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, dtype=dtype, split=1)

    def forward(self, hidden: Tensor, tokens: int) -> Tensor:
        """Return `[batch, own tokens, hidden_size]`.

        Args:
            hidden: As the result.
            tokens: Of all ranks of the tensor group.
        """
        gathered = self.tensor.gather(hidden, tokens)
        # Only down_proj reads the activation, and its backward makes a new gradient for it.
        inner = swiglu(self.gate_proj(gathered), self.up_proj(gathered), overwrite_grad=True)
        return self.tensor.add_up(self.down_proj(inner))


class TransformerBlock(bmt.DistributedModule):  # type: ignore[misc]  # BMTrain has no types
    """What a `bmt.Block` wraps. Its forward takes positional arguments only: a Block drops keyword ones in silence."""

    def __init__(
        self,
        config: LlamaConfig,
        attention: AttentionFactory,
        dtype: torch.dtype,
        policy: str,
        tensor: TensorGroup,
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.self_attn = Attention(config, attention, dtype, tensor)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.mlp = MLP(config, dtype, tensor)
        self.recompute = policy

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, length: int | None, mask: MaskOption | None = None
    ) -> Tensor:
        """Return the stream after this block.

        Args:
            hidden: `[batch, own tokens, hidden_size]`: this rank's tokens of its tensor group.
            cos: `[batch, tokens, head_dim / 2]` of all its tokens, fp32 or wider; all blocks share the tables.
            sin: As `cos`.
            length: Real tokens of the whole sequence over all ranks; None if all are.
            mask: Instead of the one that attention was made with.
        """
        result: Tensor = recompute.checkpoint(self.recompute, self._forward, hidden, cos, sin, length, mask)
        return result

    def _forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, length: int | None, mask: MaskOption | None) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, length, mask)
        mlp: Tensor = self.mlp(self.post_attention_layernorm(hidden), cos.shape[1])
        return hidden + mlp
