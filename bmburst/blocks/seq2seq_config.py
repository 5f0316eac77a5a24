"""Configuration of the encoder-decoder, and the pairs packed into its sequences: plain data, imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from bmburst.errors import UserError
from bmburst.schedule.documents import Documents


@dataclass(frozen=True, kw_only=True)
class Seq2SeqConfig:
    """Sizes of an encoder-decoder. Fields are named as in transformers' `BartConfig`.

    Raises:
        UserError: A size is below 1, or heads do not divide `d_model`.
    """

    vocab_size: int
    d_model: int
    encoder_layers: int
    decoder_layers: int
    encoder_attention_heads: int
    decoder_attention_heads: int
    encoder_ffn_dim: int
    decoder_ffn_dim: int
    max_position_embeddings: int = 1024
    """Tokens of the longest source or target."""
    scale_embedding: bool = False
    """Whether token embeddings are multiplied by sqrt(d_model)."""
    pad_token_id: int | None = None
    """This token's row gets no gradient from the embeddings, only from the head."""
    init_std: float = 0.02

    def __post_init__(self) -> None:
        sizes = {field.name: getattr(self, field.name) for field in fields(self) if field.type is int}
        for name, size in sizes.items():
            if size < 1:
                raise UserError(f"{name} {size}\nfix: at least 1")
        for name in ("encoder_attention_heads", "decoder_attention_heads"):
            if self.d_model % sizes[name]:
                raise UserError(f"{name} {sizes[name]} do not divide d_model {self.d_model}\nfix: a divisor of d_model")

    @classmethod
    def from_hugging_face(cls, values: Mapping[str, Any]) -> "Seq2SeqConfig":
        """Return the configuration of a BART `config.json`, or of `BartConfig.to_dict()`. Dropout is not used.

        Raises:
            UserError: The activation is not GELU, the head is not tied, or a size is missing.
        """
        for name, wanted in (("activation_function", "gelu"), ("tie_word_embeddings", True)):
            if values.get(name, wanted) != wanted:
                raise UserError(f"{name} {values[name]!r} is not supported\nfix: a model with {wanted!r}")
        given = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        try:
            return cls(**given)
        except TypeError as error:
            raise UserError(f"a BART configuration is incomplete: {error}\nfix: a whole config.json") from None


@dataclass(frozen=True)
class Pairs:
    """Source-target pairs that are packed into one source and one target sequence: no pair sees another.

    A batch of padded samples has one `Pairs` for each, whose last pair is the padding: at least one token of the
    target.

    Attributes:
        sources: Source tokens of each pair.
        targets: Target tokens of each pair.
    """

    sources: tuple[int, ...]
    targets: tuple[int, ...]

    @property
    def source(self) -> Documents:
        """The encoder's mask, also for `SequenceShard.batch` of the source."""
        return Documents(self.sources, False)

    @property
    def target(self) -> Documents:
        """The mask of the decoder's self-attention, also for `SequenceShard.batch` of the target."""
        return Documents(self.targets)

    @property
    def cross(self) -> Documents:
        """The mask of cross-attention."""
        return Documents(self.targets, False, self.sources)
