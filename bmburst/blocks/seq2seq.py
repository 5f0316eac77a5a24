"""BART (arXiv:1910.13461) on BMTrain, an encoder-decoder: source and target are both sharded over the ranks.

The encoder attends over the whole source. The decoder attends causally over the target, then from the target to the
encoder's output (cross-attention). Source and target may differ in length, layout and padding. The model is post-norm,
with learned positions and a head tied to the embedding table. Parameters are named as in transformers'
`BartForConditionalGeneration`. There is no dropout.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import bmtrain as bmt
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear

from bmburst.attention.api import resolve_group
from bmburst.attention.module import BurstAttention
from bmburst.attention.options import MaskOption
from bmburst.blocks.layers import Linear, Table, parameter, project, rows_of
from bmburst.blocks.model import draw_normal
from bmburst.blocks.seq2seq_batch import Seq2SeqBatch, Seq2SeqCut
from bmburst.blocks.seq2seq_config import Seq2SeqConfig
from bmburst.errors import UserError
from bmburst.loss import DEFAULT_CHUNK, token_loss_sum
from bmburst.mesh import current_mesh
from bmburst.recompute.checkpointing import checkpoint
from bmburst.recompute.policy import Policy, require_end
from bmburst.sequence import ShardedBatch
from bmburst.zero import gather, named_shards, scatter

POSITION_OFFSET = 2
"""Row of position 0 in BART's position tables."""
_TIED = ("lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
_TABLE = "model.shared.weight"
_LOGITS_BIAS = "final_logits_bias"


class LayerNorm(bmt.DistributedModule):  # type: ignore[misc]  # BMTrain has no types
    """Layer norm with a learned scale and bias."""

    def __init__(self, features: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.bias = parameter(features, dtype=dtype), parameter(features, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized `[..., features]`."""
        return layer_norm(x, x.shape[-1:], self.weight, self.bias)


class Attention(bmt.DistributedModule):  # type: ignore[misc]  # BMTrain has no types
    """Projections around `BurstAttention`, for self-attention and cross-attention."""

    def __init__(self, width: int, heads: int, attention: BurstAttention, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.attention = heads, attention
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            Linear(width, width, dtype=dtype, bias=True) for _ in range(4)
        )

    def forward(
        self,
        hidden: Tensor,
        length: int | None,
        mask: MaskOption | None,
        keys: Tensor | None = None,
        key_length: int | None = None,
    ) -> Tensor:
        """Return `[batch, local_tokens, d_model]`.

        Args:
            hidden: `[batch, local_tokens, d_model]`, the input of the query projection.
            length: Tokens of the whole sequence of `hidden`, without padding; None: the length of the mask.
            mask: Replaces the mask of the attention module.
            keys: `[batch, local_keys, d_model]`, the input of the key and value projections; None: `hidden`.
            key_length: Tokens of the whole sequence of `keys`, without padding; None: the length of the mask.
        """
        if keys is None:
            projected = project(hidden, self.q_proj, self.k_proj, self.v_proj)
        else:
            projected = (self.q_proj(hidden), *project(keys, self.k_proj, self.v_proj))
        query, key, value = (each.unflatten(-1, (self.heads, -1)) for each in projected)
        mixed: Tensor = self.out_proj(self.attention(query, key, value, length, mask, key_length).flatten(2))
        return mixed


class _Layer(bmt.DistributedModule):  # type: ignore[misc]  # BMTrain has no types
    """Base of encoder and decoder layers: self-attention and the feed-forward network, each with its norm."""

    def __init__(
        self, width: int, heads: int, inner: int, attention: BurstAttention, policy: Policy, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.policy = policy
        self.self_attn = Attention(width, heads, attention, dtype=dtype)
        self.self_attn_layer_norm = LayerNorm(width, dtype=dtype)
        self.fc1 = Linear(width, inner, dtype=dtype, bias=True)
        self.fc2 = Linear(inner, width, dtype=dtype, bias=True)
        self.final_layer_norm = LayerNorm(width, dtype=dtype)

    def forward(self, hidden: Tensor, *args: Any) -> Tensor:
        """Return the hidden states after this layer; positional arguments only, `bmt.Block` drops keyword arguments."""
        result: Tensor = checkpoint(self.policy, self._forward, hidden, *args)
        return result

    def _forward(self, hidden: Tensor, *args: Any) -> Tensor:
        raise NotImplementedError

    def _attended(self, hidden: Tensor, length: int | None, mask: MaskOption | None) -> Tensor:
        normed: Tensor = self.self_attn_layer_norm(hidden + self.self_attn(hidden, length, mask))
        return normed

    def _fed(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self.final_layer_norm(hidden + self.fc2(gelu(self.fc1(hidden))))
        return normed


class EncoderLayer(_Layer):
    """A layer of the encoder: `(hidden, batch)` to hidden."""

    def _forward(self, hidden: Tensor, batch: Seq2SeqBatch) -> Tensor:
        return self._fed(self._attended(hidden, batch.lengths[0], batch.masks.source))


class DecoderLayer(_Layer):
    """A layer of the decoder: `(hidden, batch, encoded)` to hidden."""

    def __init__(
        self,
        width: int,
        heads: int,
        inner: int,
        attention: BurstAttention,
        policy: Policy,
        dtype: torch.dtype,
        cross: BurstAttention,
    ) -> None:
        super().__init__(width, heads, inner, attention, policy, dtype)
        self.encoder_attn = Attention(width, heads, cross, dtype=dtype)
        self.encoder_attn_layer_norm = LayerNorm(width, dtype=dtype)

    def _forward(self, hidden: Tensor, batch: Seq2SeqBatch, encoded: Tensor) -> Tensor:
        (key_length, length), masks = batch.lengths, batch.masks
        hidden = self._attended(hidden, length, masks.target)
        hidden = self.encoder_attn_layer_norm(
            hidden + self.encoder_attn(hidden, length, masks.cross, encoded, key_length)
        )
        return self._fed(hidden)


class Stack(bmt.DistributedModule):  # type: ignore[misc]  # BMTrain has no types
    """The encoder or the decoder: positions, a norm of the embeddings, and layers."""

    def __init__(self, config: Seq2SeqConfig, layers: Sequence[_Layer], dtype: torch.dtype, zero_level: int) -> None:
        super().__init__()
        self.config = config
        self.embed_positions = Table(config.max_position_embeddings + POSITION_OFFSET, config.d_model, dtype=dtype)
        self.layernorm_embedding = LayerNorm(config.d_model, dtype=dtype)
        # bmburst.recompute replaces BMTrain's checkpointing, which would communicate a second time.
        self.layers = bmt.TransformerBlockList(
            [bmt.Block(layer, use_checkpoint=False, zero_level=zero_level) for layer in layers]
        )

    def forward(self, part: ShardedBatch, table: Tensor, *args: Any) -> Tensor:
        """Return `[batch, local_tokens, d_model]`; `table` is the gathered embedding, `args` those of the layers."""
        factor = math.sqrt(self.config.d_model) if self.config.scale_embedding else 1.0
        # Padding follows the last token, where the table may have no row.
        places = part.positions.clamp(max=self.config.max_position_embeddings - 1) + POSITION_OFFSET
        words = rows_of(part.tokens, table, factor=factor, padding=self.config.pad_token_id)
        hidden = self.layernorm_embedding(words + rows_of(places, self.embed_positions.weight))
        last: Tensor = self.layers(hidden, *args)
        return last


class Seq2SeqModel(bmt.DistributedModule):  # type: ignore[misc]  # BMTrain has no types
    """The shared embedding, encoder and decoder: the module `model` in transformers' parameter names."""

    def __init__(self, config: Seq2SeqConfig, encoder: Stack, decoder: Stack, dtype: torch.dtype) -> None:
        super().__init__()
        self.shared = Table(config.vocab_size, config.d_model, dtype=dtype)
        self.encoder, self.decoder = encoder, decoder


class Seq2Seq(bmt.DistributedModule):  # type: ignore[misc]  # BMTrain has no types
    """BART with its language model head, on this rank's shards of source and target.

    Every rank must build the model with the same arguments and call the same methods in the same order. The methods
    take batches from `model.cut.batch`, which shards whole sequences in the model's layouts.

    Args:
        config: The model's configuration.
        source_layout: Layout of the source's `SequenceShard`, not "balanced".
        target_layout: Layout of the target's `SequenceShard`, not "balanced".
        attention: Further options of all `BurstAttention` modules, for example `{"strategy": "gather"}`.
        group: The ranks that share the sequences, for example `mesh.sequence`; see `BurstAttention`.
        dtype: dtype of weights and activations.
        recompute: "none", "block", "block-keep-attention" or "block-keep-attention:0.5". The fraction applies to the
            decoder's self-attention, whose layout must allow it; the results of other attention are saved completely.
        zero_level: BMTrain's ZeRO stage, 2 or 3.
        seed: Seed of the initial weights, which do not depend on the number of ranks; GPUs draw others than CPUs. None
            leaves them uninitialized.

    Raises:
        UserError: An option has an unknown value, options exclude each other, or BMTrain was started with tensor
            parallelism.
    """

    def __init__(
        self,
        config: Seq2SeqConfig,
        *,
        source_layout: str = "contiguous",
        target_layout: str = "zigzag",
        attention: Mapping[str, Any] | None = None,
        group: object = None,
        dtype: torch.dtype = torch.float32,
        recompute: str | Policy = "none",
        zero_level: int = 3,
        seed: int | None = 0,
    ) -> None:
        super().__init__()
        if bmt.config["tp_size"] > 1:
            raise UserError(f"tensor parallelism {bmt.config['tp_size']} with an encoder-decoder\nfix: tensor=1")
        if zero_level not in (2, 3):
            raise UserError(f"zero_level {zero_level}\nfix: 2 or 3")
        if "balanced" in (source_layout, target_layout):
            raise UserError("layout 'balanced' is made for one mask, and an encoder-decoder has 3\nfix: 'zigzag'")
        policy = Policy.parse(recompute)
        if policy.is_of_model or policy.offload != "nothing":
            raise UserError(
                f"recompute policy '{policy.name}' for an encoder-decoder\nfix: block-keep-attention or none"
            )
        require_end(policy.attention, target_layout, resolve_group(group).size)
        if taken := sorted({"mask", "layout", "key_layout", "group"} & set(attention or ())):
            raise UserError(f"attention has {taken[0]!r}, which the model sets\nfix: source_layout or target_layout")
        group = None if group is None and current_mesh() is None else resolve_group(group)
        attend = partial(BurstAttention, group=group, **(attention or {}))
        of_source = partial(attend, mask="full", layout=source_layout)
        of_target = partial(attend, mask="causal", layout=target_layout)
        across = partial(attend, mask="full", layout=target_layout, key_layout=source_layout)
        whole = replace(policy, attention=float(policy.attention > 0))  # a full mask has no prefix
        encoder = config.d_model, config.encoder_attention_heads, config.encoder_ffn_dim
        decoder = config.d_model, config.decoder_attention_heads, config.decoder_ffn_dim
        encoders = [EncoderLayer(*encoder, of_source(), whole, dtype) for _ in range(config.encoder_layers)]
        decoders = [DecoderLayer(*decoder, of_target(), policy, dtype, across()) for _ in range(config.decoder_layers)]
        self.config = config
        self.cut = Seq2SeqCut(config=config, source_layout=source_layout, target_layout=target_layout, group=group)
        self.model = Seq2SeqModel(
            config, Stack(config, encoders, dtype, zero_level), Stack(config, decoders, dtype, zero_level), dtype
        )
        if seed is not None:
            self._initialize(seed)

    def forward(self, batch: Seq2SeqBatch) -> Tensor:
        """Return the decoder's hidden states of this rank's target tokens, `[batch, local_tokens, d_model]`."""
        return self._hidden(batch, self.model.shared.weight)

    def logits(self, batch: Seq2SeqBatch) -> Tensor:
        """Return the logits of this rank's target tokens, `[batch, local_tokens, vocab_size]`."""
        table = self.model.shared.weight
        return linear(self._hidden(batch, table), table)

    def loss(self, batch: Seq2SeqBatch, *, chunk: int = DEFAULT_CHUNK) -> Tensor:
        """Return the sum of this rank's token losses in nats, for `bmburst.loss.global_mean`.

        Args:
            batch: From `cut.batch`, with labels.
            chunk: Number of tokens whose logits are computed at once.
        """
        table = self.model.shared.weight
        return token_loss_sum(self._hidden(batch, table), table, batch.target.labels, chunk=chunk)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load the weights of a `BartForConditionalGeneration.state_dict()`, which every rank has. No communication.

        Raises:
            UserError: A tensor is missing, unknown or has another shape, or the bias of the logits is not 0.
        """
        shards = named_shards(self)
        bias = weights.get(_LOGITS_BIAS)
        if bias is not None and bool(bias.any()):
            raise UserError(f"{_LOGITS_BIAS} is not 0\nfix: a model without a bias of logits")
        unknown = sorted(weights.keys() - {shard.name for shard in shards} - {*_TIED, _LOGITS_BIAS})
        if unknown:
            raise UserError(f"the model has no parameter {unknown[0]}\nfix: weights of BartForConditionalGeneration")
        for name in _TIED:
            if name in weights and not torch.equal(weights[name], weights.get(_TABLE, weights[name])):
                raise UserError(
                    f"{name} differs from {_TABLE}, but the model has one table for both\nfix: a model with a tied head"
                )
        for shard in shards:
            given = weights.get(shard.name)
            if given is None or tuple(given.shape) != shard.shape:
                found = "missing" if given is None else f"of shape {list(given.shape)}"
                raise UserError(f"{shard.name} is {found}\nallowed: {list(shard.shape)}\nfix: weights of this config")
        for shard in shards:
            if shard.count:
                scatter(shard, weights[shard.name])

    def weights(self) -> dict[str, Tensor]:
        """Gather the weights for `BartForConditionalGeneration.load_state_dict` on every rank.

        Every rank must call it.
        """
        found = {shard.name: whole for shard in named_shards(self) if (whole := gather(shard)) is not None}
        table = found[_TABLE]
        return {**found, **dict.fromkeys(_TIED, table), _LOGITS_BIAS: table.new_zeros(1, len(table))}

    def _initialize(self, seed: int) -> None:
        """Initialize norms with 1, biases with 0, and other weights with N(0, init_std), as in BART."""
        for shard in named_shards(self):
            if not shard.count:
                continue
            if len(shard.shape) == 1:
                value = 0.0 if shard.name.endswith("bias") else 1.0
                scatter(shard, torch.full(shard.shape, value, device=shard.device))
            else:
                scatter(shard, draw_normal(shard.shape, self.config.init_std, f"{seed} {shard.name}", shard.device))

    def _hidden(self, batch: Seq2SeqBatch, table: Tensor) -> Tensor:
        if not isinstance(batch, Seq2SeqBatch):
            raise UserError(f"a batch must be a Seq2SeqBatch, got {type(batch).__name__}\nfix: model.cut.batch(...)")
        encoded = self.model.encoder(batch.source, table, batch)
        hidden: Tensor = self.model.decoder(batch.target, table, batch, encoded)
        return hidden
