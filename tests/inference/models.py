"""Tiny models of every family, in directories as transformers saves them, and what transformers generates with them."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from bmburst.checkpoint.hugging_face import open_weights
from bmburst.comm.checks import CheckedCommunicator
from bmburst.inference.sampling import Sampled
from bmburst.inference.session import Engine
from bmburst.inference.weights import ResidentWeights
from tests import tiny

VOCAB = 67
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 50,
    "max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama again": ("llama", {}),  # with other weights
    "llama-tied-6-heads": (
        "llama",
        {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "tie_word_embeddings": True},
    ),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 16}),
    "mistral": ("mistral", {"sliding_window": 9}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "minicpm": ("minicpm", {}),
}


@lru_cache(maxsize=16)
def directory(family: str) -> Path:
    """A directory of a tiny model with random weights, large enough that attention matters."""
    kind, changes = FAMILIES[family]
    folder = Path(mkdtemp(prefix=f"bmburst-{family}-"))
    return tiny.save(folder, kind, seed=len(family), **SIZES | changes)


@lru_cache(maxsize=16)
def reference(family: str) -> Any:
    """The same model for transformers, in fp32."""
    return tiny.load(directory(family))


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


def after_a_turn(family: str, first: Sequence[int], count: int, second: Sequence[int]) -> tuple[list[int], Tensor]:
    """Return a turn, its greedy answer and a second turn, and the logits behind them, of transformers with one cache.

    The model has seen no other text: it remembers the length of the longest one.
    """
    model = tiny.load(directory(family))
    options: dict[str, Any] = {"past_key_values": DynamicCache(config=model.config), "do_sample": False}
    options |= {"eos_token_id": None, "return_dict_in_generate": True, "output_logits": True}
    ids = torch.tensor([list(first)])
    ids = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **options).sequences
    ids = torch.cat((ids, torch.tensor([list(second)])), 1)
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, **options).logits[0][0]
    return ids[0].tolist(), found


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
        """See `bmburst.inference.session.Chooser`."""
        return Sampled(logits.argmax(-1))
