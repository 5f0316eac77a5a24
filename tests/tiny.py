"""Tiny models and token files for tests: the one place that knows their sizes.

    tiny.config(num_layers=1)                        # ours, LLaMA
    tiny.config("mistral", vocab_size=tiny.BYTES)    # ours, with its window
    tiny.transformers_config("qwen3", head_dim=16)   # transformers' own, in its names
    tiny.save(folder, "minicpm", seed=3)             # a Hugging Face directory of random weights
    tiny.save(folder, tiny.config(num_heads=6))      # of one of our configurations
    tiny.load(folder)(ids).logits                    # the reference: transformers, fp32, eager attention
    tiny.token_file(tmp_path / "x", ["one text", "another"])

Weights depend on the seed only, not on what was drawn before. Torch and transformers are imported where they are used:
ranks that need a configuration do not pay for them.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from bmburst.blocks.config import LlamaConfig
from bmburst.data.documents import Document
from bmburst.data.token_file import TokenFile
from bmburst.data.token_writer import write_token_file
from bmburst.data.tokenizer import ByteTokenizer, Tokenizer

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

    from tests.blocks.minicpm import MiniCPM

BYTES = 264
"""A vocabulary for `ByteTokenizer` that 2, 4 and 8 tensor ranks divide."""

_SIZES: Mapping[str, int] = MappingProxyType(
    {
        "vocab_size": 61,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "max_position_embeddings": 64,
    }
)
_THEIR_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}
MINICPM: Mapping[str, Any] = MappingProxyType({"scale_emb": 3.0, "scale_depth": 1.4, "dim_model_base": 16})
# What makes each family, in our names and in transformers': written twice, so that neither reading hides the other.
FAMILIES: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = MappingProxyType(
    {
        "llama": ({}, {}),
        "mistral": ({"sliding_window": 7}, {"sliding_window": 7}),
        "qwen2": ({"qkv_bias": True}, {}),
        "qwen3": ({"qk_norm": True, "head_dim": 8}, {"head_dim": 8}),
        "minicpm": ({**MINICPM}, {}),  # for transformers a LLaMA: its factors go into config.json
    }
)
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
_DELTA = {
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "shared_expert_intermediate_size": 16},
}
_THEIR_SIZES: Mapping[str, dict[str, Any]] = MappingProxyType(
    {"qwen3_moe": _EXPERTS, "qwen3_next": {**_EXPERTS, **_DELTA}}
)
"""Sizes of types that have others than `_SIZES`: those of experts and states have defaults of many millions."""


def config(family: str = "llama", /, **changes: Any) -> LlamaConfig:
    """Return a tiny model of a family; changes are fields of `LlamaConfig`."""
    return LlamaConfig(**{**_SIZES, **FAMILIES[family][0], **changes})


def transformers_config(family: str = "llama", /, **changes: Any) -> "PretrainedConfig":
    """Return the same model as transformers describes it, with untied embeddings; changes are in its names.

    A family may also be any other model type of transformers.
    """
    from transformers import AutoConfig

    own = FAMILIES[family][1] if family in FAMILIES else _THEIR_SIZES.get(family, {})
    sizes = {_THEIR_NAMES.get(name, name): value for name, value in _SIZES.items()}
    model_type = "llama" if family == "minicpm" else family
    return AutoConfig.for_model(model_type, **{**sizes, "tie_word_embeddings": False, **own, **changes})


def transformers_model(
    model: "str | LlamaConfig | PretrainedConfig" = "llama",
    /,
    *,
    seed: int = 0,
    std: float = 0.2,
    attention: str = "eager",
    **changes: Any,
) -> "PreTrainedModel":
    """Return transformers' model in fp32, with normal weights: around 1 in norms, around 0 elsewhere.

    Args:
        model: A family, our configuration or transformers' own. MiniCPM becomes a LLaMA without its factors.
        seed: Of the weights.
        std: Standard deviation of the weights; large enough that attention matters.
        attention: `attn_implementation`.
        changes: Of a family's configuration, in transformers' names.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if isinstance(model, str):
        theirs = transformers_config(model, **changes)
    elif isinstance(model, LlamaConfig):
        values = model.to_hugging_face()
        values |= {"model_type": "llama"} if model.scale_emb is not None else {}
        theirs = AutoConfig.for_model(**{key: value for key, value in values.items() if key != "rope_scaling"})
    else:
        theirs = model
    made = AutoModelForCausalLM.from_config(theirs, attn_implementation=attention, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.normal_(float("norm" in name), std, generator=generator)
    found: PreTrainedModel = made
    return found


def save(
    folder: Path,
    model: "str | LlamaConfig | PretrainedConfig" = "llama",
    /,
    *,
    seed: int = 0,
    std: float = 0.2,
    **changes: Any,
) -> Path:
    """Write a Hugging Face directory of `transformers_model`, with MiniCPM's config.json where it is one; return it."""
    made = transformers_model(model, seed=seed, std=std, **changes)
    made.save_pretrained(folder)
    path = folder / "config.json"
    if isinstance(model, LlamaConfig) and model.scale_emb is not None:
        path.write_text(json.dumps(model.to_hugging_face()))
    elif model == "minicpm":
        values = json.loads(path.read_text())
        values |= {"architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm"}
        values |= {"rope_theta": values["rope_parameters"]["rope_theta"], **MINICPM}
        path.write_text(json.dumps(values))
    return folder


def load(folder: Path) -> "PreTrainedModel | MiniCPM":
    """Return the model of a Hugging Face directory for reference: fp32, eager attention."""
    import torch
    from transformers import AutoModelForCausalLM

    from tests.blocks.minicpm import MiniCPM

    if json.loads((folder / "config.json").read_text())["model_type"] == "minicpm":
        return MiniCPM(folder).eval()
    found: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return found


def weights(model: LlamaConfig, *, seed: int = 0) -> "dict[str, Tensor]":
    """Return random fp32 weights by their names in Hugging Face's files, without making a model."""
    import torch

    from bmburst.checkpoint.hugging_face import expected_shapes

    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in expected_shapes(model).items()}


def documents(texts: Iterable[str]) -> Iterator[Document]:
    """Return a document for each text, named by its number."""
    return (Document(name=str(i), pieces=[text]) for i, text in enumerate(texts))


def token_file(path: Path, texts: Iterable[str], tokenizer: Tokenizer | None = None) -> TokenFile:
    """Write a token file of some texts, a document each; ids are bytes by default."""
    return write_token_file(path, documents(texts), tokenizer or ByteTokenizer())


def random_texts(count: int, *, seed: int, mean: float = 2.0) -> list[str]:
    """Return texts of random letters whose lengths are log-normal: mostly short, some far longer."""
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(mean, 1.5, count) + 1
    return ["".join(map(chr, rng.integers(97, 123, int(length)))) for length in lengths]
