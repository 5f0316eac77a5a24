"""Evaluates a model: loss, bits per byte and perplexity of held-out text, and a generated sample."""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bmburst.checkpoint.files import STATE_FILE, read_progress, verified, verified_together, warn
from bmburst.checkpoint.sharded_files import together
from bmburst.data import PackedSequences, Samples, TokenFile, evaluation_batches, open_corpus
from bmburst.data.corpus import find_corpus, require_cache
from bmburst.errors import UserError
from bmburst.mesh import Mesh
from bmburst.runtime import start
from bmburst.runtime.watchdog import beat
from bmburst.sequence import SequenceShard
from bmburst.train.config import check_packing
from bmburst.train.loading import LocalBatch, causal_cut, token_losses
from bmburst.train.resolve import EvalConfig

if TYPE_CHECKING:
    from bmburst.blocks.config import LlamaConfig
    from bmburst.blocks.model import Llama
    from bmburst.inference.sampling import Sampled

_TEMPERATURE = 0.7  # divides the logits


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """What a model gives on a text.

    Attributes:
        loss: Mean over the labels, in nats per token.
        bits_per_byte: The same in bits per byte of the text in UTF-8.
        perplexity: exp(loss).
        tokens: Labels it was measured on.
    """

    loss: float
    bits_per_byte: float
    perplexity: float
    tokens: int


def measure(
    model: "Llama", mesh: Mesh, cut: SequenceShard, batches: Iterable[Samples], device: torch.device
) -> Measurement:
    """Return what the model gives on batches; every rank calls it with its own part of the same ones."""
    nats = torch.zeros((), dtype=torch.float64, device=device)
    tokens = text_bytes = 0
    with torch.no_grad():
        for batch in batches:
            part = LocalBatch.read(cut, batch)
            nats += token_losses(model, part.on(part.ids.to(device)))
            tokens, text_bytes = tokens + batch.label_count, text_bytes + batch.text_bytes
            beat()
    total = mesh.sum(nats.item())
    loss = total / max(tokens, 1)
    return Measurement(
        loss=loss,
        bits_per_byte=total / math.log(2) / max(text_bytes, 1),
        perplexity=math.exp(min(loss, 700.0)),  # beyond that it is no float any more
        tokens=tokens,
    )


def run(config: EvalConfig) -> Measurement:
    """Evaluate a checkpoint as `bmburst eval` does: every rank calls it, and all share every sequence.

    Raises:
        UserError: The checkpoint or the text cannot be read, or they do not go together.
    """
    runtime = start()
    from bmburst.attention.module import BurstAttention
    from bmburst.blocks.model import Llama
    from bmburst.checkpoint import hugging_face

    mesh = Mesh.over_bmtrain(data=1)
    directory, tokenizer, shape = read_model(config, verified_together(config.checkpoint))
    corpus = open_corpus(config.data, tokenizer, user_cache(), text_field=config.text_field)
    together(corpus.verify if runtime.rank == 0 else _nothing)
    corpus.require_vocab(shape.vocab_size)
    model = Llama(
        shape,
        attention=partial(BurstAttention, group=mesh.sequence, layout=config.layout),
        dtype=getattr(torch, config.dtype),
        seed=None,
        loss_chunk=config.loss_chunk_tokens,
    )
    hugging_face.load(model, directory)
    model.eval()
    # What is longer than the text would be padded, and padding takes time and memory. Each rank has a token at least.
    length = max(min(config.sequence_length, corpus.token_count), runtime.world_size)
    cut = causal_cut(mesh, length, config.layout)
    sequences = PackedSequences(corpus, split="all", sequence_length=length, pack=config.pack)
    batches = evaluation_batches(sequences, limit=config.max_sequences)
    return measure(model, mesh, cut, batches, runtime.device)


def check(config: EvalConfig) -> Path:
    """Check, before ranks start, what they will read: the model, the tokenizer and a place for the text's tokens.

    Returns:
        The directory with the weights, verified if it is a checkpoint.

    Raises:
        UserError: `read_model` refuses the checkpoint, there is no such tokenizer, or tokens cannot be kept.
    """
    directory, tokenizer, _ = read_model(config, verified(config.checkpoint, warn))
    text = find_corpus(config.data, tokenizer)
    if not isinstance(text, TokenFile):
        require_cache("XDG_CACHE_HOME", user_cache(), text, text_field=config.text_field)
    return directory


def read_model(config: EvalConfig, directory: Path) -> "tuple[Path, str | None, LlamaConfig]":
    """Return the directory with the weights, the tokenizer to read text with, and the model's shape.

    Args:
        config: What is to be evaluated.
        directory: What `checkpoint.verified` makes of its checkpoint.

    Raises:
        UserError: There are no weights of a model that is known, they do not fit it, or the model cannot tell packed
            documents apart.
    """
    from bmburst.checkpoint import hugging_face

    directory, tokenizer = find_model(config, directory)
    shape = hugging_face.read_config(directory)
    hugging_face.check(directory, shape)
    check_packing(config.pack, shape)
    return directory, tokenizer, shape


def find_model(config: EvalConfig, directory: Path) -> tuple[Path, str | None]:
    """Return the directory with the weights, and the tokenizer to read text with; None leaves it to the text.

    Raises:
        UserError: The run folder has no complete checkpoint.
    """
    if (directory / STATE_FILE).exists():
        return directory, config.tokenizer or read_progress(directory).tokenizer
    if not (directory / "config.json").exists() or (directory / "metrics.jsonl").exists():
        raise UserError(
            f"{directory} has no complete checkpoint and no weights\n"
            "fix: give a run folder with checkpoints, one of its checkpoints, or a directory of a Hugging Face LLaMA"
        )
    return directory, config.tokenizer


def _nothing() -> None:
    """Take part in what another rank does."""


def user_cache() -> Path:
    """Return the folder where this user's tokenized texts are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bmburst"


def generate(model: "Llama", mesh: Mesh, prompt: list[int], count: int, *, allowed: int, seed: int) -> list[int]:
    """Return `count` token ids that follow `prompt`; every rank calls it and gets the same ones.

    Args:
        model: On all ranks.
        mesh: The ranks; each sequence group computes the same text.
        prompt: At least one token.
        count: Tokens to generate.
        allowed: Only ids below this are drawn: a model may have more rows than its tokenizer has tokens.
        seed: Of the draw.
    """
    from bmburst.inference.batch import Batch, Engine
    from bmburst.inference.weights import GatheredWeights

    engine = Engine.over(GatheredWeights(model), mesh.sequence)
    batch = Batch(engine, engine.new_cache(1, len(prompt) + count))
    batch.prefill([prompt])
    ids = []
    for chosen in batch.decode(_Drawing(allowed, seed), count):
        ids.append(int(chosen.tokens.item()))
        beat()
    return ids


class _Drawing:
    """Draws tokens at a fixed temperature, on the host."""

    def __init__(self, allowed: int, seed: int) -> None:
        self._allowed, self._generator = allowed, torch.Generator().manual_seed(seed)

    def step(self, logits: torch.Tensor) -> "Sampled":
        """Draw the next token of each row; see `bmburst.inference.batch.Chooser`."""
        from bmburst.inference.sampling import Sampled

        # A model that has diverged gives NaN, which cannot be drawn from: it then draws at random.
        known = logits[:, : self._allowed].float().cpu().nan_to_num()
        drawn = torch.multinomial(torch.softmax(known / _TEMPERATURE, 1), 1, generator=self._generator)
        return Sampled(drawn[:, 0].to(logits.device))
