"""Tiny models of every family, in directories as transformers saves them, and what transformers generates with them."""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import transformers
from torch import Tensor

from bmburst.comm.checks import CheckedCommunicator
from bmburst.convert.weights import open_weights
from bmburst.inference.batch import Engine
from bmburst.inference.sampling import Sampled
from bmburst.inference.weights import ResidentWeights
from tests.blocks.minicpm import MiniCPM

VOCAB = 67
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-6-heads": ("Llama", {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-dynamic": ("Llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 16}),
    "mistral": ("Mistral", {"sliding_window": 9}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "minicpm": ("Llama", {}),
}
_MINICPM = {"model_type": "minicpm", "scale_emb": 3.0, "scale_depth": 1.4, "dim_model_base": 16}


@lru_cache(maxsize=16)
def directory(family: str) -> Path:
    """A directory of a tiny model with random weights, large enough that attention matters."""
    kind, changes = FAMILIES[family]
    torch.manual_seed(len(family))
    settings = {**SIZES, **changes, "tie_word_embeddings": "tied" in family, "initializer_range": 0.2}
    config = getattr(transformers, f"{kind}Config")(**settings)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    folder = Path(mkdtemp(prefix=f"bmburst-{family}-"))
    model.save_pretrained(folder)
    if family == "minicpm":
        path = folder / "config.json"
        values = json.loads(path.read_text())
        values |= _MINICPM | {"tie_word_embeddings": False, "rope_theta": 10000.0}
        path.write_text(json.dumps(values))
    return folder


@lru_cache(maxsize=16)
def reference(family: str) -> Any:
    """The same model for transformers, in fp32."""
    if family == "minicpm":
        return MiniCPM(directory(family)).eval()
    return transformers.AutoModelForCausalLM.from_pretrained(directory(family), dtype=torch.float32).eval()


@lru_cache(maxsize=16)
def weights(family: str, dtype: torch.dtype = torch.float32) -> ResidentWeights:
    """The same model for inference."""
    return ResidentWeights.read(open_weights(directory(family)), dtype, torch.device("cpu"))


def engine(family: str, comm: CheckedCommunicator, cache: str = "auto", chunk_tokens: int | None = None) -> Engine:
    """The same model over some ranks."""
    return Engine.over(weights(family), comm, cache, chunk_tokens)


@lru_cache(maxsize=256)
def greedy(family: str, prompt: tuple[int, ...], count: int) -> list[int]:
    """Return what transformers' `generate` gives greedily."""
    model = reference(family)
    if family == "minicpm":  # no class of transformers
        ids = list(prompt)
        for _ in range(count):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        return ids[len(prompt) :]
    ids = torch.tensor([prompt])
    whole = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
    )
    return whole[0, len(prompt) :].tolist()


def logits(family: str, tokens: Sequence[int]) -> Tensor:
    """Return transformers' logits behind every token, `[tokens, vocab_size]`."""
    with torch.no_grad():
        found: Tensor = reference(family)(torch.tensor([tokens]), use_cache=False).logits[0]
    return found


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Return random token ids."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist())


class Greedy:
    """Chooses the most likely token."""

    def step(self, logits: Tensor) -> Sampled:
        """See `bmburst.inference.batch.Chooser`."""
        return Sampled(logits.argmax(-1))
