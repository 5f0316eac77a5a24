"""Configuration of the encoder-decoder, and the pairs packed into its sequences. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from bmburst.amounts import whole_number, whole_numbers
from bmburst.errors import UserError
from bmburst.schedule.documents import Documents

_DROPOUT = ("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop", "decoder_layerdrop")


@dataclass(frozen=True, kw_only=True)
class Seq2SeqConfig:
    """Sizes of an encoder-decoder. Fields are named as in transformers' `BartConfig`.

    Raises:
        UserError: A size is not a whole number above 0, heads do not divide `d_model`, or a token is not one of the
            vocabulary.
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
    """Maximum length of a source or target, in tokens."""
    scale_embedding: bool = False
    """Whether token embeddings are multiplied by sqrt(d_model)."""
    pad_token_id: int | None = None
    """Id of padding. Its row of the tied table gets a gradient only from the head, not from the embeddings."""
    decoder_start_token_id: int | None = None
    """The decoder's first input token; None: every batch must contain decoder_input_ids."""
    init_std: float = 0.02

    def __post_init__(self) -> None:
        sizes = {field.name: getattr(self, field.name) for field in fields(self) if field.type is int}
        for name, size in sizes.items():
            whole_number(name, size, 1)
        for name in ("encoder_attention_heads", "decoder_attention_heads"):
            if self.d_model % sizes[name]:
                raise UserError(f"{name} {sizes[name]} do not divide d_model {self.d_model}\nfix: a divisor of d_model")
        for name in ("pad_token_id", "decoder_start_token_id"):
            token = getattr(self, name)
            if token is not None and whole_number(name, token, 0) >= self.vocab_size:
                raise UserError(f"{name} {token}\nallowed: 0 to {self.vocab_size - 1}\nfix: a token of the vocabulary")

    @classmethod
    def from_hugging_face(cls, values: Mapping[str, Any]) -> "Seq2SeqConfig":
        """Return the configuration of a BART `config.json`, or of `BartConfig.to_dict()`.

        Raises:
            UserError: The model is not BART (T5, mBART), has dropout, an activation other than GELU or an untied head,
                or a size is missing.
        """
        if (kind := values.get("model_type", "bart")) != "bart":
            raise UserError(
                f"model_type {kind!r} is not supported: other encoder-decoders have a position bias, norms before the "
                "layers or gates\nallowed: 'bart'\nfix: a BART model"
            )
        for name, wanted in (("activation_function", "gelu"), ("tie_word_embeddings", True)):
            if values.get(name, wanted) != wanted:
                raise UserError(f"{name} {values[name]!r} is not supported\nfix: a model with {wanted!r}")
        if dropped := {name: 0.0 for name in _DROPOUT if values.get(name)}:
            said = ", ".join(f"{name} {values[name]!r}" for name in dropped)
            raise UserError(
                f"{said}: the model has no dropout\nfix: train it without: from_hugging_face(values | {dropped})"
            )
        given = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        try:
            return cls(**given)
        except TypeError as error:
            raise UserError(f"a BART configuration is incomplete: {error}\nfix: a whole config.json") from None


@dataclass(frozen=True)
class Pairs:
    """Source-target pairs that are packed into one source and one target sequence. Pairs do not attend to each other.

    Tokens after the last pair are padding, so padded samples are described by one `Pairs` per sample.

    Attributes:
        sources: Number of source tokens of each pair; some may be 0.
        targets: Number of target tokens of each pair; some may be 0.

    Raises:
        UserError: A value is not a list of whole numbers >= 0, the lists differ in length, or all entries are 0.
    """

    sources: tuple[int, ...]
    targets: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("sources", "targets"):
            tokens = tuple(whole_number(f"{name} of a pair", n, 0) for n in whole_numbers(name, getattr(self, name)))
            object.__setattr__(self, name, tokens)
        if len(self.sources) != len(self.targets):
            raise UserError(
                f"{len(self.sources)} sources and {len(self.targets)} targets\nfix: both of each pair, 0 for no token"
            )
        for name in ("sources", "targets"):
            if not any(getattr(self, name)):
                raise UserError(f"the {name} of {len(self.sources)} pairs have no token\nfix: at least one token")

    @property
    def source(self) -> Documents:
        """The encoder's mask."""
        return Documents(tuple(tokens for tokens in self.sources if tokens), False)

    @property
    def target(self) -> Documents:
        """The mask of the decoder's self-attention."""
        return Documents(tuple(tokens for tokens in self.targets if tokens))

    @property
    def cross(self) -> Documents:
        """The mask of cross-attention."""
        return Documents(self.targets, False, self.sources)
