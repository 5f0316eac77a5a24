"""Configuration of the encoder-decoder, and the pairs packed into its sequences. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from bmburst.amounts import whole_number, whole_numbers
from bmburst.blocks.family_keys import NOTES
from bmburst.config.foreign import Key, keys, require_keys
from bmburst.errors import UserError
from bmburst.schedule.documents import Documents

_DROPOUT = ("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop", "decoder_layerdrop")
_SIZES = (
    *("vocab_size", "d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads", "encoder_ffn_dim"),
    *("decoder_attention_heads", "decoder_ffn_dim", "max_position_embeddings"),
)
KEYS: Mapping[str, Key] = {
    "model_type": Key("read", ("bart",)),
    **keys(_SIZES, "read: the shape of the weights"),
    "scale_embedding": Key("read"),
    "pad_token_id": Key("read: its embedding gets a gradient from the head alone, as in transformers"),
    "decoder_start_token_id": Key("read: the decoder's first token"),
    "init_std": Key("read: initial weights"),
    "activation_function": Key("read", ("gelu",)),
    "tie_word_embeddings": Key("read", (True,)),
    **keys(_DROPOUT, "read: there is no dropout", 0),
    "is_encoder_decoder": Key("read", (True,)),
    **keys(("is_decoder", "add_cross_attention", "tie_encoder_decoder"), "read", None, False),
    "cross_attention_hidden_size": Key("read", (None,)),
    **keys(
        ("add_bias_logits", "add_final_layer_norm", "normalize_before", "static_position_embeddings"), "read", False
    ),
    "normalize_embedding": Key("read", (True,)),
    "extra_pos_embeddings": Key("read", (2,)),
    "quantization_config": Key("read: weights are not quantized", (None, {})),
    "pruned_heads": Key("read", (None, {}, [])),
    **keys(("hidden_size", "num_hidden_layers", "num_attention_heads"), "no effect: other keys say it for each side"),
    **keys(("classifier_dropout", "classif_dropout"), "no effect: dropout of classifiers"),
    **keys(("bos_token_id", "eos_token_id"), "no effect: the tokenizer adds tokens"),
    **keys(("architectures", "output_past"), "no effect: a note about the model"),
    **NOTES,
}
"""Keys of a BART's config.json that are understood."""


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
                a size is missing, or a key is unknown.
        """
        if (kind := values.get("model_type", "bart")) != "bart":
            raise UserError(
                f"model_type {kind!r} is not supported: other encoder-decoders have a position bias, norms before the "
                "layers or gates\nallowed: 'bart'\nfix: a BART model"
            )
        if dropped := {name: 0.0 for name in _DROPOUT if values.get(name)}:
            said = ", ".join(f"{name} {values[name]!r}" for name in dropped)
            raise UserError(
                f"{said}: the model has no dropout\nfix: train it without: from_hugging_face(values | {dropped})"
            )
        require_keys(values, KEYS, "a BART model", "another model")
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
