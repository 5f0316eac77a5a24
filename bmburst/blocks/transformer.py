"""One LLaMA block: attention and gated MLP, each with a pre-norm and a residual connection.

With tensor parallelism, the residual stream holds this rank's tokens; attention and MLP process all tokens of the
tensor group.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import Thread

import torch
from torch import Tensor

from bmburst.attention.module import BurstAttention
from bmburst.attention.options import MaskOption
from bmburst.blocks.config import LlamaConfig, LoRAConfig
from bmburst.blocks.config import mlp_chunk as choose_chunk
from bmburst.blocks.graphed import BlockGraphs, Part, has_hooks
from bmburst.blocks.layers import Composite, Linear, RMSNorm, TensorGroup, add_adapters, keep_apart, project
from bmburst.blocks.recomputed import BlockSegments, recomputed_block
from bmburst.recompute.checkpointing import checkpoint, is_recomputing
from bmburst.recompute.host_store import MLP_OUTPUTS, HostStore
from bmburst.recompute.policy import Policy
from bmburst_ops.gated_mlp import gated_mlp
from bmburst_ops.rms_norm import stream_norm
from bmburst_ops.rotary import apply_rotary, apply_rotary_to
from bmburst_ops.swiglu import swiglu

_FEW = 128  # tokens of the inputs that `compile_ahead` runs kernels on

AttentionFactory = Callable[[], torch.nn.Module]
"""Returns the attention of one block: forward(q, k, v, length, mask) on `[batch, local_tokens, heads, head_dim]`."""
NormFactory = Callable[..., RMSNorm]
"""Returns an `RMSNorm` for a number of features and a factor."""


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """What all blocks get besides the stream.

    Attributes:
        cos: `[batch, tokens, head_dim / 2]` of all tokens of the tensor group, fp32 or wider.
        sin: As `cos`.
        length: Tokens of the whole sequence over all ranks, without padding; None: there is no padding.
        mask: Mask of the batch; replaces that of the attention module.
        keys: See `Llama.loss`.
        graphs: Graphs of the blocks; None: the pass runs without them.
    """

    cos: Tensor
    sin: Tensor
    length: int | None
    mask: MaskOption | None
    keys: Tensor | None
    graphs: BlockGraphs | None = None


class SelfAttention(Composite):
    """Projections and rotary embedding around BurstAttention. KV heads are not expanded to the query heads.

    With tensor parallelism, each rank has a shard of the query heads and the matching KV heads. If the tensor degree
    does not divide the KV heads, several ranks compute the same KV head, and ZeRO shards the projection over all ranks.
    """

    def __init__(
        self,
        config: LlamaConfig,
        attention: AttentionFactory,
        dtype: torch.dtype,
        tensor: TensorGroup,
        norm: NormFactory,
    ) -> None:
        super().__init__()
        self.head_dim, self.tensor = config.head_dim, tensor
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        is_shared = config.num_kv_heads % tensor.size != 0
        first = tensor.rank * config.num_kv_heads // tensor.size * config.head_dim
        rows = slice(first, first + config.head_dim) if is_shared else slice(None)
        cut = None if is_shared else 0
        bias = config.qkv_bias
        self.q_proj = Linear(config.hidden_size, query, dtype=dtype, split=0, bias=bias)
        self.k_proj = Linear(config.hidden_size, kv, dtype=dtype, split=cut, rows=rows, bias=bias)
        self.v_proj = Linear(config.hidden_size, kv, dtype=dtype, split=cut, rows=rows, bias=bias)
        self.o_proj = Linear(query, config.hidden_size, dtype=dtype, split=1)
        self.has_norms = config.qk_norm
        if config.qk_norm:
            self.q_norm = norm(config.head_dim)
            self.k_norm = norm(config.head_dim)
        self.attention = attention()
        if isinstance(self.attention, BurstAttention):
            self.attention.masks_are_own = True  # every stage has the whole batch

    def forward(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Return `[batch, own tokens, hidden_size]`; see `TransformerBlock.forward`."""
        mixed: Tensor = self.attention(*self.inputs(hidden, batch.cos, batch.sin, batch.keys), batch.length, batch.mask)
        return self.output(mixed, batch.keys)

    def inputs(self, hidden: Tensor, cos: Tensor, sin: Tensor, keys: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return attention's queries, keys and values, `[batch, tokens, heads, head_dim]`."""
        gathered = self.tensor.gather(hidden, cos.shape[1])
        projected = project(gathered, self.q_proj, self.k_proj, self.v_proj, keys=keys)
        query, key, value = (each.view(*gathered.shape[:2], -1, self.head_dim) for each in projected)
        del projected  # rotary embedding returns new query and key tensors; the old ones can be freed
        if self.has_norms:
            query, key = self.q_norm(query), self.k_norm(key)
        return *apply_rotary_to((query, key), cos, sin), value

    def output(self, mixed: Tensor, keys: Tensor | None = None) -> Tensor:
        """Return the projection of attention's output, `[batch, own tokens, hidden_size]`."""
        return self.tensor.add_up(self.o_proj(mixed.flatten(-2), keys=keys))


class MLP(Composite):
    """The gated MLP, down(silu(gate(x)) * up(x)); tensor parallelism splits its intermediate dimension.

    Args:
        config: The model's configuration.
        dtype: dtype of the weights.
        tensor: The tensor group.
        chunk: Maps a number of rows (tokens) to the chunk size. Default: no chunks.
    """

    def __init__(
        self, config: LlamaConfig, dtype: torch.dtype, tensor: TensorGroup, chunk: Callable[[int], int] | None = None
    ) -> None:
        super().__init__()
        self.tensor = tensor
        self.chunk = chunk
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, dtype=dtype, split=0)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, dtype=dtype, split=0)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, dtype=dtype, split=1)

    def rows_at_once(self, rows: int) -> int:
        """Return the chunk size for a number of rows."""
        return rows if self.chunk is None else self.chunk(rows)

    def forward(self, hidden: Tensor, tokens: int, keys: Tensor | None = None, *, is_needed: bool = True) -> Tensor:
        """Return `[batch, own tokens, hidden_size]`.

        Args:
            hidden: `[batch, own tokens, hidden_size]`.
            tokens: Tokens of all ranks of the tensor group.
            keys: See `Llama.loss`.
            is_needed: Whether the result is needed. Recompute needs only the tensors that backward reads.
        """
        gathered = self.tensor.gather(hidden, tokens)
        rows = gathered.shape[0] * gathered.shape[1]
        chunk = self.rows_at_once(rows)
        if chunk < rows:
            matrices = self.gate_proj, self.up_proj, self.down_proj
            weights, adapters = [each.weight for each in matrices], [each.adapter(keys) for each in matrices]
            result = gated_mlp(gathered, *weights, chunk=chunk, is_needed=is_needed, adapters=adapters)
            return self.tensor.add_up(result)
        # Safe: only down_proj reads the activation, and its backward allocates a new gradient for it.
        inner = swiglu(*project(gathered, self.gate_proj, self.up_proj, keys=keys), overwrite_grad=True)
        return self.tensor.add_up(self.down_proj(inner, keys=keys, is_needed=is_needed))


class TransformerBlock(Composite):
    """A transformer block for `bmt.Block`, which drops keyword arguments: forward takes positional arguments only.

    Args:
        config: The model's configuration.
        attention: Returns the attention module.
        dtype: dtype of the weights.
        policy: Recompute policy of this layer.
        tensor: The tensor group.
        store: Host memory that `policy` offloads to, shared by all blocks.
        segments: Recompute segments of the model, for blocks whose input is not stored.
        mlp_chunk: See `Llama`.
        norm: Factory of the norms.
        lora: Adapters to train; None: the weights are trained.
        layer: Number of the block in the model.
        kept_apart: See `Llama`.
        prefetches: See `Policy.prefetches`.
    """

    def __init__(
        self,
        config: LlamaConfig,
        attention: AttentionFactory,
        dtype: torch.dtype,
        policy: Policy,
        tensor: TensorGroup,
        store: HostStore,
        segments: BlockSegments,
        mlp_chunk: int | None,
        norm: NormFactory,
        lora: LoRAConfig | None = None,
        *,
        layer: int = 0,
        kept_apart: frozenset[str] = frozenset(),
        prefetches: bool = False,
    ) -> None:
        super().__init__()
        self.input_layernorm = norm(config.hidden_size)
        self.self_attn = SelfAttention(config, attention, dtype, tensor, norm)
        self.post_attention_layernorm = norm(config.hidden_size)
        self.mlp = MLP(config, dtype, tensor, partial(choose_chunk, wanted=mlp_chunk, recomputes=policy.recomputes))
        if lora is not None:
            add_adapters(self, lora, layer)
        keep_apart(self, kept_apart)
        self.recompute, self.store, self.segments, self.factor = policy, store, segments, config.residual_scale
        self._prefetches = prefetches
        self._parts: list[Part] = []
        self._all_modules = list(self.modules())

    def forward(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Return the residual stream after this block.

        Args:
            hidden: `[batch, own tokens, hidden_size]`: this rank's share of the tokens of its tensor group.
            batch: Rotary tables, length and mask.
        """
        prefetch = None
        if not self.recompute.offloads and torch.is_grad_enabled():
            self.store.settle()
            prefetch = self.store.prefetcher() if self._prefetches else None
        if self.recompute.recomputes and self.mlp.tensor.size == 1:
            return recomputed_block(self, hidden, batch)
        if batch.graphs is not None and not has_hooks(self._all_modules):
            return self._in_parts(batch.graphs, hidden, batch)
        result: Tensor = checkpoint(self.recompute, self._forward, hidden, batch, store=self.store)
        if prefetch is not None:
            result.register_hook(prefetch)
        return result

    def _in_parts(self, graphs: BlockGraphs, hidden: Tensor, batch: Batch) -> Tensor:
        """Return the residual stream after this block, whose kernels around attention run as CUDA graphs."""
        if not self._parts:
            attention = self.self_attn
            norms = (attention.q_norm, attention.k_norm) if attention.has_norms else ()
            first = self.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj, *norms
            last = attention.o_proj, self.post_attention_layernorm, self.mlp
            self._parts = [graphs.part(self._before, first), graphs.part(self._after, last)]
        before_attention, after_attention = self._parts
        hidden, *heads = before_attention(hidden, batch.cos, batch.sin)
        (result,) = after_attention(hidden, self.self_attn.attention(*heads, batch.length, batch.mask))
        return result

    def _before(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Return the residual stream, and attention's queries, keys and values."""
        hidden, normed = self.input_layernorm.of_stream(hidden)
        return hidden, *self.self_attn.inputs(normed, cos, sin)

    def _after(self, hidden: Tensor, mixed: Tensor) -> tuple[Tensor, ...]:
        """Return the residual stream after the block, given that before it and attention's output."""
        hidden, normed = self.post_attention_layernorm.of_stream(hidden, self.self_attn.output(mixed), self.factor)
        return (torch.add(hidden, self.mlp(normed, hidden.shape[1]), alpha=self.factor),)

    def _forward(self, hidden: Tensor, batch: Batch) -> Tensor:
        hidden, normed = self.input_layernorm.of_stream(hidden)
        # The attention output gets no name: a local variable would keep it alive until the MLP is done.
        hidden, normed = self.post_attention_layernorm.of_stream(hidden, self.self_attn(normed, batch), self.factor)
        self.store.settle(MLP_OUTPUTS)  # the block before has copied them while attention ran
        # Backward does not read the MLP's result, so that recompute can skip it.
        is_needed = not is_recomputing(self._forward)
        mlp: Tensor = self.mlp(normed, batch.cos.shape[1], batch.keys, is_needed=is_needed)
        return torch.add(hidden, mlp, alpha=self.factor)


def compile_ahead(model: LlamaConfig, dtype: torch.dtype, attention: BurstAttention, *, packed: bool) -> Thread:
    """Start a thread that compiles the kernels of a block for this GPU in the background, and return the thread.

    Errors in the thread are ignored: the first block raises them again.

    Args:
        model: Gives the shapes.
        dtype: dtype of weights and activations.
        attention: Attention of the blocks; the kernels for a rank's local keys are compiled.
        packed: Whether batches have document masks.
    """
    device = torch.cuda.current_device()

    def compile_all() -> None:
        with contextlib.suppress(Exception), torch.cuda.device(device):
            heads, kv_heads, head_dim = model.num_heads, model.num_kv_heads, model.head_dim
            attention.compile_kernels(heads, kv_heads, head_dim, dtype, window=model.sliding_window, packed=packed)
            _run_elementwise(model, dtype)

    thread = Thread(target=compile_all, name="compile-kernels", daemon=True)
    thread.start()
    return thread


def _run_elementwise(model: LlamaConfig, dtype: torch.dtype) -> None:
    """Run norm, rotary embedding and SwiGLU on a few tokens, forward and backward."""
    new = partial(torch.zeros, device="cuda", dtype=dtype, requires_grad=True)
    stream, weight = new(_FEW, model.hidden_size), new(model.hidden_size)
    for added in (None, torch.zeros_like(stream)):
        torch.autograd.backward(stream_norm(stream, added, weight, model.norm_eps), (stream.detach(), stream.detach()))
    angles = torch.zeros(1, _FEW, model.head_dim // 2, device="cuda")
    for heads in {model.num_heads, model.num_kv_heads}:
        x = new(1, _FEW, heads, model.head_dim)
        apply_rotary(x, angles, angles).backward(x.detach())
    gate = new(_FEW, model.intermediate_size)
    swiglu(gate, new(_FEW, model.intermediate_size)).backward(gate.detach())
