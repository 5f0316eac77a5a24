"""Evaluates a model: loss, bits per byte and perplexity of held-out text, and a generated sample."""

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bmburst.checkpoint.files import STATE_FILE, own_tokenizer, verified, verified_together, warn
from bmburst.checkpoint.sharded_files import together
from bmburst.data import Samples, TokenFile, evaluation_batches, find_corpus, has_tokens, open_corpus, require_cache
from bmburst.data.batches import Sequences
from bmburst.data.documents import check_arrays
from bmburst.data.mixture import MixedFiles, Source, mixed, read_mixture
from bmburst.data.tokenizer import Tokenizer
from bmburst.data.whole_documents import pack_sequences
from bmburst.errors import UserError
from bmburst.evaluation.by_position import LossByPosition, PositionBin
from bmburst.mesh import Mesh
from bmburst.runtime import start
from bmburst.runtime.watchdog import beat
from bmburst.sequence import SequenceShard
from bmburst.train.config import check_packing
from bmburst.train.eval_config import EvalConfig
from bmburst.train.loading import LocalBatch, causal_cut, token_losses
from bmburst.train.text import say_left_out, say_too_long

if TYPE_CHECKING:
    from bmburst.blocks.config import LlamaConfig
    from bmburst.blocks.model import Llama
    from bmburst.checkpoint.adapter import Adapter
    from bmburst.inference.sampling import Sampled

_TEMPERATURE = 0.7


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Result of an evaluation.

    Attributes:
        loss: Mean over the labels, in nats per token; for preference pairs the mean over pairs, in nats.
        tokens: Number of evaluated labels.
        bits_per_byte: The loss in bits per byte of the text in UTF-8; None for pairs.
        perplexity: exp(loss); None for pairs.
        reward_margin: Mean over pairs of the chosen answer's reward minus the rejected one's; None without pairs.
        reward_accuracy: Fraction of the pairs with a positive margin; None without pairs.
    """

    loss: float
    tokens: int
    bits_per_byte: float | None = None
    perplexity: float | None = None
    reward_margin: float | None = None
    reward_accuracy: float | None = None


def measure(
    model: "Llama",
    mesh: Mesh,
    cut: SequenceShard,
    batches: Iterable[Samples],
    device: torch.device,
    positions: LossByPosition | None = None,
) -> Measurement:
    """Evaluate the model on batches; every rank calls it with its part of the same batches.

    Args:
        model: The model, sharded over all ranks.
        mesh: The ranks.
        cut: This rank's shard of a sequence.
        batches: The text.
        device: Device of this rank.
        positions: Collects the losses of this rank's tokens by position; None: not collected.
    """
    nats = torch.zeros((), dtype=torch.float64, device=device)
    tokens = text_bytes = 0
    with torch.no_grad():
        for batch in batches:
            part = LocalBatch.read(cut, batch)
            part = part.on(part.ids.to(device))
            losses = token_losses(model, part, per_token=positions is not None)
            nats += losses.sum(dtype=torch.float64)
            if positions is not None:
                positions.add(losses, part.ids[2], part.labels)
            tokens, text_bytes = tokens + batch.label_count, text_bytes + batch.text_bytes
            beat()
    total = mesh.sum(nats.item())
    loss = total / max(tokens, 1)
    return Measurement(
        loss=loss,
        bits_per_byte=total / math.log(2) / max(text_bytes, 1),
        perplexity=perplexity(loss),
        tokens=tokens,
    )


def perplexity(loss: float) -> float:
    """Return exp of a loss in nats."""
    return math.exp(min(loss, 700.0))  # a larger argument overflows a float


def evaluate_checkpoint(config: EvalConfig) -> tuple[Measurement, list[PositionBin]]:
    """Evaluate a checkpoint: the work of `bmburst eval`. Every rank calls it; all ranks share each sequence.

    Returns:
        The measurement, and the loss by position, which is empty without `config.by_position`.

    Raises:
        UserError: The checkpoint or the text cannot be read, or they do not match.
    """
    runtime = start()
    from bmburst.attention.module import BurstAttention
    from bmburst.blocks.model import Llama
    from bmburst.checkpoint import adapter, hugging_face

    mesh = Mesh.over_bmtrain(data=1)
    given = verified_together(config.checkpoint)
    tuned = find_adapter(config, given, verified_together)
    directory, tokenizer, shape = read_model(config, given, tuned)
    corpus = _open(config, tokenizer, say_left_out if runtime.rank == 0 else None)
    for file in corpus.files:
        together(file.verify if runtime.rank == 0 else _nothing)
    corpus.require_vocab(shape.vocab_size)
    model = Llama(
        shape,
        attention=partial(BurstAttention, group=mesh.sequence, layout=config.layout),
        dtype=getattr(torch, config.dtype),
        seed=None,
        loss_chunk=config.loss_chunk_tokens,
        lora=None if tuned is None else tuned.lora,
    )
    hugging_face.load(model, directory)
    if tuned is not None:
        adapter.load(model, tuned.directory)
    model.eval()
    # A sequence longer than the text would waste time and memory on padding. Each rank needs at least one token.
    length = max(min(config.sequence_length, max(file.token_count for file in corpus.files)), runtime.world_size)
    cut = causal_cut(mesh, length, config.layout)

    def packed(file: TokenFile) -> Sequences:
        found = pack_sequences(file, split="all", sequence_length=length, pack=config.pack)
        if runtime.rank == 0:
            say_too_long(found)
        return found

    sequences = mixed(corpus, packed)
    batches = evaluation_batches(sequences, limit=config.max_sequences)
    positions = LossByPosition(length, runtime.device) if config.by_position else None
    measured = measure(model, mesh, cut, batches, runtime.device, positions)
    return measured, [] if positions is None else positions.bins(mesh)


def check_inputs(config: EvalConfig) -> Path:
    """Check the inputs of an evaluation before ranks start: the model, the tokenizer, the text and the token cache.

    Returns:
        The directory with the weights, verified if it is a checkpoint.

    Raises:
        UserError: `read_model` rejects the checkpoint, there is no such tokenizer, the cache is not writable, or a
            source cannot be read or contains preference pairs.
    """
    given = verified(config.checkpoint, warn)
    tuned = find_adapter(config, given, partial(verified, say=warn))
    directory, tokenizer, _ = read_model(config, given, tuned)
    for source in _sources(config):
        text = find_corpus(source.path, tokenizer, text_field=config.text_field, chat_template=config.chat_template)
        if isinstance(text, TokenFile):
            _require_text(source, text)
        else:
            require_cache("XDG_CACHE_HOME", user_cache(), text, text_field=config.text_field)
            if text.encoder is not None:  # tokenize records now, so that an invalid line is found before ranks start
                _open_one(source, tokenizer, config)
            elif not has_tokens(user_cache(), text, text_field=config.text_field):
                check_arrays(text.files)
    return directory


def _sources(config: EvalConfig) -> tuple[Source, ...]:
    """Return the sources of a mixture, or the single source."""
    return read_mixture(config.data) or (Source(config.data, 1.0),)


def _open_one(
    source: Source, tokenizer: str | None, config: EvalConfig, say: Callable[[str], object] | None = None
) -> TokenFile:
    file = open_corpus(
        source.path,
        tokenizer,
        user_cache(),
        text_field=config.text_field,
        chat_template=config.chat_template,
        on_skip=say,
    )
    return _require_text(source, file)


def _require_text(source: Source, file: TokenFile) -> TokenFile:
    if file.pairs:
        raise UserError(
            f"data {source.path}: holds preference pairs, whose rejected answers are no text to predict\n"
            "allowed: text, or records with one answer\n"
            "fix: bmburst train --dpo.beta evaluates held-out pairs itself"
        )
    return file


def _open(config: EvalConfig, tokenizer: str | None, say: Callable[[str], object] | None) -> MixedFiles:
    """Return the token files of all sources; tokenize those that are not cached.

    Args:
        config: The evaluation.
        tokenizer: Name of the text's tokenizer.
        say: Called with a line about each file, or kinds of files, of a folder that is left out; None on other ranks.

    Raises:
        UserError: A source cannot be read or contains preference pairs, or the sources have different tokenizers.
    """
    sources = _sources(config)
    files = tuple(_open_one(source, tokenizer, config, say) for source in sources)
    return MixedFiles(files, tuple(source.weight for source in sources))


def find_adapter(config: EvalConfig, directory: Path, verify: Callable[[Path], Path]) -> "Adapter | None":
    """Return the adapter of `config.adapter`, or of `directory` if it is an adapter's directory; else None.

    Args:
        config: The evaluation.
        directory: See `read_model`.
        verify: `checkpoint.verified`, or `verified_together` in ranks.

    Raises:
        UserError: `config.adapter` is not an adapter.
    """
    from bmburst.checkpoint.adapter import is_adapter_directory, open_adapter

    if config.adapter is not None:
        return open_adapter(verify(config.adapter))
    return open_adapter(directory) if is_adapter_directory(directory) else None


def read_model(
    config: EvalConfig, directory: Path, tuned: "Adapter | None" = None
) -> "tuple[Path, str | None, LlamaConfig]":
    """Return the directory with the weights, the name of the text's tokenizer, and the model's configuration.

    Args:
        config: The evaluation.
        directory: Result of `checkpoint.verified` for its checkpoint.
        tuned: Result of `find_adapter`.

    Raises:
        UserError: There are no weights of a supported model, they do not fit the configuration or the adapter, or the
            model does not support packed documents.
    """
    from bmburst.checkpoint import adapter, hugging_face

    if tuned is not None:
        given = None if config.adapter is None else directory
        directory = tuned.find_base(given, "--checkpoint DIR --adapter ADAPTER")
    directory, tokenizer = find_model(config, directory)
    if tuned is not None:
        tokenizer = config.tokenizer or own_tokenizer(tuned.directory) or tokenizer
    shape = hugging_face.read_config(directory)
    hugging_face.check_weights(directory, shape)
    if tuned is not None:
        tuned.require_shapes(adapter.adapter_shapes(tuned.lora, hugging_face.expected_shapes(shape)))
        tuned.require_base(adapter.Base.open(directory, shape))
    check_packing(config.pack, shape)
    return directory, tokenizer, shape


def find_model(config: EvalConfig, directory: Path) -> tuple[Path, str | None]:
    """Return the directory with the weights, and the name of the text's tokenizer; None: the default of the text.

    Raises:
        UserError: The run folder has no complete checkpoint.
    """
    is_model = (directory / "config.json").exists() and not (directory / "metrics.jsonl").exists()
    if not is_model and not (directory / STATE_FILE).exists():
        raise UserError(
            f"{directory} has no complete checkpoint and no weights\n"
            "fix: give a run folder with checkpoints, one of its checkpoints, or a directory of a Hugging Face LLaMA"
        )
    return directory, config.tokenizer or own_tokenizer(directory)


def _nothing() -> None:
    """Do nothing: the argument of `together` on ranks that only wait."""


def user_cache() -> Path:
    """Return the folder of this user's cache of tokenized texts."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bmburst"


def generate(
    model: "Llama",
    mesh: Mesh,
    prompt: list[int],
    count: int,
    tokenizer: Tokenizer,
    seed: int,
    show: Callable[[str], object] = lambda _: None,
) -> list[int]:
    """Return `count` sampled token ids that follow `prompt`; every rank calls it and gets the same ids.

    Args:
        model: The model, sharded over all ranks.
        mesh: The ranks; each sequence group computes the same text.
        prompt: At least one token.
        count: Number of tokens to generate.
        tokenizer: Only ids below its vocab_size are sampled, because a model's vocabulary may be padded.
        seed: Seed of the sampling.
        show: Called with each piece of text as soon as it is generated.
    """
    from bmburst.inference.batch import Engine, GenerationBatch
    from bmburst.inference.text import TextStream
    from bmburst.inference.weights import GatheredWeights, ModelWeights, ResidentWeights

    weights: ModelWeights = GatheredWeights(model)
    if weights.device.type == "cpu":  # the model is small, and gathering it takes longer than computing a token
        weights = ResidentWeights.of(model)
    engine = Engine.over(weights, mesh.sequence)
    batch = GenerationBatch(engine, engine.new_cache(1, len(prompt) + count))
    batch.prefill([prompt])
    ids, text = [], TextStream(tokenizer)
    for chosen in batch.decode(_Drawing(tokenizer.vocab_size, seed), count):
        ids.append(int(chosen.tokens.item()))
        show(text.push(ids[-1]))
        beat()
    show(text.finish())
    return ids


class _Drawing:
    """Samples tokens at a fixed temperature, on the host."""

    def __init__(self, allowed: int, seed: int) -> None:
        self._allowed, self._generator = allowed, torch.Generator().manual_seed(seed)

    def step(self, logits: torch.Tensor) -> "Sampled":
        """Sample the next token of each row; see `bmburst.inference.batch.Chooser`."""
        from bmburst.inference.sampling import Sampled

        # multinomial raises on NaN; with nan_to_num, a diverged model samples at random.
        known = logits[:, : self._allowed].float().cpu().nan_to_num()
        drawn = torch.multinomial(torch.softmax(known / _TEMPERATURE, 1), 1, generator=self._generator)
        return Sampled(drawn[:, 0].to(logits.device))
