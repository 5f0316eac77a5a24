"""Weights for inference: replicated on every rank, with projections that share an input fused into one matrix.

ZeRO shards would have to be gathered for every token, and decoding is bounded by memory bandwidth. So each rank holds
the whole weights once, in the dtype of inference. In prefill, a rank multiplies its own tokens with all weights. In
decoding, it reads only a slice, as a view: tensor parallelism as in Megatron-LM (arXiv:1909.08053).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from bmburst.blocks.config import LlamaConfig
from bmburst.checkpoint.derived import EMBEDDING, HEAD
from bmburst_ops.nf4 import dequantize

if TYPE_CHECKING:
    from bmburst.blocks.model import Llama
    from bmburst.checkpoint.hugging_face import Weights
    from bmburst.zero import NamedShard

_PIECE_BYTES = 64 << 20
_LAYER = "model.layers."
NORM = "model.norm.weight"


@dataclass(frozen=True, eq=False, slots=True)
class LayerWeights:
    """Weights of one transformer block.

    Attributes:
        input_norm: `[hidden_size]`.
        qkv: `[(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]`: queries, keys, values.
        qkv_bias: `[(num_heads + 2 * num_kv_heads) * head_dim]`, or None.
        q_norm: `[head_dim]`, or None.
        k_norm: `[head_dim]`, or None.
        out: `[hidden_size, num_heads * head_dim]`.
        mlp_norm: `[hidden_size]`.
        gate_up: `[2 * intermediate_size, hidden_size]`: gate, up.
        down: `[hidden_size, intermediate_size]`.
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor

    @classmethod
    def empty(cls, config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> "LayerWeights":
        """Return a block with uninitialized weights."""
        hidden, mlp, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        rows = (config.num_heads + 2 * config.num_kv_heads) * head_dim

        def make(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            input_norm=make(hidden),
            qkv=make(rows, hidden),
            qkv_bias=make(rows) if config.qkv_bias else None,
            q_norm=make(head_dim) if config.qk_norm else None,
            k_norm=make(head_dim) if config.qk_norm else None,
            out=make(hidden, config.num_heads * head_dim),
            mlp_norm=make(hidden),
            gate_up=make(2 * mlp, hidden),
            down=make(hidden, mlp),
        )

    def places(self, config: LlamaConfig) -> Mapping[str, Tensor]:
        """Return a view for each weight of the block, by its Hugging Face name without the prefix `model.layers.N.`."""
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        gate, up = self.gate_up.chunk(2)
        found = {
            "input_layernorm.weight": self.input_norm,
            "self_attn.o_proj.weight": self.out,
            "post_attention_layernorm.weight": self.mlp_norm,
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": self.down,
        }
        for kind, joined in (("weight", self.qkv), ("bias", self.qkv_bias)):
            if joined is not None:
                parts = joined.split((query, kv, kv))
                found |= {f"self_attn.{name}_proj.{kind}": part for name, part in zip("qkv", parts, strict=True)}
        if self.q_norm is not None and self.k_norm is not None:
            found |= {"self_attn.q_norm.weight": self.q_norm, "self_attn.k_norm.weight": self.k_norm}
        return found


class ModelWeights(Protocol):
    """A model's weights on this rank.

    Attributes:
        config: The model's configuration.
        dtype: dtype of all weights.
        device: Device of the weights.
        is_resident: Whether they stay on the device, so that views of them may be kept.
    """

    config: LlamaConfig
    dtype: torch.dtype
    device: torch.device
    is_resident: bool

    def table(self, name: str) -> Tensor:
        """Return a weight outside of the blocks: `EMBEDDING`, `NORM` or `HEAD`; a tied head is the embedding."""
        ...

    def layer(self, index: int) -> LayerWeights:
        """Return a block. Every rank must request the same blocks in the same order."""
        ...


class ResidentWeights:
    """Weights that stay on this rank's device. A `ModelWeights`.

    Args:
        config: The model's configuration.
        dtype: dtype of the weights.
        device: Device of the weights.
    """

    is_resident = True

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self._layers = [LayerWeights.empty(config, dtype, device) for _ in range(config.num_layers)]
        shapes = {EMBEDDING: (config.vocab_size, config.hidden_size), NORM: (config.hidden_size,)}
        if not config.tie_embeddings:
            shapes[HEAD] = shapes[EMBEDDING]
        self._tables = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in shapes.items()}

    @classmethod
    def read(
        cls,
        source: "Weights",
        dtype: torch.dtype,
        device: torch.device,
        on_bytes: Callable[[int], object] = lambda _: None,
    ) -> "ResidentWeights":
        """Read a directory's weights piece by piece, so that the host never holds a whole tensor.

        Args:
            source: The result of `bmburst.checkpoint.hugging_face.open_weights`.
            dtype: dtype to convert to.
            device: Device of the weights.
            on_bytes: Called with the number of bytes read since the last call, counted in `dtype`.
        """
        self = cls(source.config, dtype, device)
        for name, target in self.places().items():
            begin = 0
            for piece in target.view(-1).split(_PIECE_BYTES // dtype.itemsize):
                piece.copy_(source.read(name, begin, begin + len(piece), dtype))
                on_bytes(piece.nbytes)
                begin += len(piece)
        return self

    @classmethod
    def of(cls, model: "Llama") -> "ResidentWeights":
        """Gather the weights of a model in training, with adapters merged. Every rank must call it."""
        source = GatheredWeights(model)
        self = cls(source.config, source.dtype, source.device)
        for name, target in self.places().items():
            target.copy_(source.whole(name))
        return self

    def places(self) -> Mapping[str, Tensor]:
        """Return a writable view of every weight, by its Hugging Face name."""
        found = dict(self._tables)
        for i, layer in enumerate(self._layers):
            found |= {f"{_LAYER}{i}.{name}": place for name, place in layer.places(self.config).items()}
        return found

    def table(self, name: str) -> Tensor:
        """See `ModelWeights.table`."""
        return self._tables[EMBEDDING if name == HEAD and self.config.tie_embeddings else name]

    def layer(self, index: int) -> LayerWeights:
        """See `ModelWeights.layer`."""
        return self._layers[index]


class GatheredWeights:
    """The weights of a model in training, gathered from all ranks on each read. A `ModelWeights`.

    Adapters are merged into the gathered weights. A gathered block is freed when the caller drops it. Every rank must
    read the same weights in the same order. Use it for a few tokens of a model that is already in memory; for more
    tokens, save the model and read it as `ResidentWeights`.

    Args:
        model: The model, on all ranks.
    """

    is_resident = False

    def __init__(self, model: "Llama") -> None:
        from bmburst.blocks.layers import quantized_linears
        from bmburst.zero import named_shards

        self.config, self._lora = model.config, model.lora
        self._shards: dict[str, NamedShard] = {shard.name: shard for shard in named_shards(model)}
        self._quantized = {
            f"{words.rpartition('.')[0]}.weight": (words, each.shape)
            for words, each in quantized_linears(model).items()
        }
        first = self._shards[EMBEDDING]
        self.dtype, self.device = first.dtype, first.device

    def table(self, name: str) -> Tensor:
        """See `ModelWeights.table`."""
        return self.whole(EMBEDDING if name == HEAD and self.config.tie_embeddings else name)

    def layer(self, index: int) -> LayerWeights:
        """See `ModelWeights.layer`."""
        layer = LayerWeights.empty(self.config, self.dtype, self.device)
        for name, place in layer.places(self.config).items():
            place.copy_(self.whole(f"{_LAYER}{index}.{name}"))
        return layer

    def whole(self, name: str) -> Tensor:
        """Gather a weight by its Hugging Face name, with its adapter merged."""
        from bmburst.zero import gather

        stem = name.removesuffix(".weight")
        held, shape = self._quantized.get(name, (name, None))
        full = gather(self._shards[held])
        assert full is not None  # every rank receives it
        if shape is not None:
            full = dequantize(full, shape, self.dtype)
        a, b = (self._shards.get(f"{stem}.lora_{letter}") for letter in "AB")
        if a is None or b is None or self._lora is None:
            return full.detach()
        wide = torch.promote_types(full.dtype, torch.float32)
        outward, inward = (self.whole(each.name).to(wide) for each in (b, a))
        return torch.addmm(full.detach().to(wide), outward, inward, alpha=self._lora.scale_of(stem)).to(full.dtype)
