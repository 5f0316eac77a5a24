"""Loss of a checkpoint on held-out text, and by position: how much a longer context helps to predict a token."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bmburst.amounts import short
from bmburst.blocks.dtypes import dtype_of
from bmburst.checkpoint.files import STATE_FILE, note_bytes, own_tokenizer, verified, verified_together, warn
from bmburst.checkpoint.sharded_files import require_same
from bmburst.data import (
    TokenFile,
    evaluation_batches,
    find_corpus,
    open_corpus,
    require_cache,
    require_messages,
    unused_names,
)
from bmburst.data.batches import Sequences
from bmburst.data.mixture import MixedFiles, Source, mixed, shares_of, sources_of
from bmburst.data.whole_documents import pack_sequences
from bmburst.errors import UserError, hub_fix, not_a_number
from bmburst.launch.start import start
from bmburst.mesh import Mesh
from bmburst.outputs import blank_picture, save_picture
from bmburst.train.config import EvalConfig
from bmburst.train.loading import causal_cut
from bmburst.train.metrics import Measurement
from bmburst.train.objective import TokenObjective
from bmburst.train.text import say_left_out, say_too_long
from bmburst_ops import IGNORE_INDEX

if TYPE_CHECKING:
    from bmburst.blocks.config import LlamaConfig
    from bmburst.checkpoint.adapter import Adapter

FORMAT = "bmburst-loss-by-position-1"


class EvaluatedModel(NamedTuple):
    """A model as `check_inputs` finds it, before its weights are read."""

    directory: Path
    """Directory with the weights, verified if it is a checkpoint."""
    tokenizer: str | None
    """Name of the text's tokenizer; None: the default of the text."""
    config: "LlamaConfig"


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionBin:
    """Losses of the tokens in a range of positions. A position is the number of tokens before the input token.

    Attributes:
        first: First position.
        last: Last position.
        nats: Sum of the losses, in nats.
        tokens: Number of labels.
        loss: Mean loss, in nats per token.
    """

    first: int
    last: int
    nats: float
    tokens: int
    loss: float


class LossByPosition:
    """Sums token losses in bins of positions: 0, 1, 2 to 3, 4 to 7, and so on in powers of two.

    Args:
        length: Number of tokens in a sequence; positions are below it.
        device: Device of the losses.
    """

    def __init__(self, length: int, device: torch.device) -> None:
        bins = (length - 1).bit_length() + 1
        self._length = length
        self._borders = torch.tensor([1 << index for index in range(bins - 1)], dtype=torch.int64, device=device)
        self._nats = torch.zeros(bins, dtype=torch.float64, device=device)
        self._counts = torch.zeros(bins, dtype=torch.float64, device=device)  # exact up to 2**53

    def add(self, losses: Tensor, positions: Tensor, labels: Tensor) -> None:
        """Add this rank's tokens: losses in nats, positions and labels, all `[rows, tokens]`.

        Tokens with the label `IGNORE_INDEX` do not count.
        """
        counted = labels != IGNORE_INDEX
        index = torch.bucketize(positions[counted], self._borders, right=True)
        self._nats.index_add_(0, index, losses[counted].double())
        self._counts.index_add_(0, index, torch.ones_like(index, dtype=torch.float64))

    def bins(self, mesh: Mesh) -> list[PositionBin]:
        """Return the bins with at least one label, summed over all ranks. Every rank must call it."""
        found = []
        for index in range(len(self._nats)):
            nats, count = mesh.sum(float(self._nats[index])), round(mesh.sum(float(self._counts[index])))
            if count:
                first, last = (1 << index) >> 1, min((1 << index) - 1, self._length - 1)
                found.append(PositionBin(first=first, last=last, nats=nats, tokens=count, loss=nats / count))
        return found


def to_json(settings: Mapping[str, Any], measured: Mapping[str, Any], bins: Sequence[PositionBin]) -> dict[str, Any]:
    """Return the contents of an evaluation's JSON file.

    Args:
        settings: Settings of the evaluation, including `checkpoint`.
        measured: Metrics on the whole text.
        bins: Losses by position.
    """
    return {
        "format": FORMAT,
        "model": settings["checkpoint"],
        "settings": dict(settings),
        "measured": dict(measured),
        "bins": [asdict(each) for each in bins],
    }


def table(bins: Sequence[PositionBin], perplexity: Callable[[float], float]) -> str:
    """Return the bins as a table of at most 80 columns."""
    lines = [f"{'position':>16}  {'tokens':>14}  {'loss':>9}  {'perplexity':>12}"]
    for each in bins:
        span = str(each.first) if each.first == each.last else f"{each.first}-{each.last}"
        lines.append(f"{span:>16}  {each.tokens:>14,}  {each.loss:>9.4f}  {perplexity(each.loss):>12.4f}")
    return "\n".join(lines)


def draw_positions(bins: Sequence[PositionBin], model: str, path: Path) -> None:
    """Plot the mean loss of each bin over the positions; OSError if the file cannot be written."""
    figure = blank_picture(7.5, 4.5)
    draw_bins(figure.subplots(), bins, "tokens that the model has seen", f"loss by position, {Path(model).name}")
    save_picture(figure, path)


def draw_bins(axes: Any, bins: Sequence[PositionBin], label: str, title: str) -> None:
    """Draw the mean loss of each bin into axes of matplotlib; `label` names what the bins count."""
    axes.set_xscale("log", base=2)
    if bins:
        edges = [each.first + 1 for each in bins] + [bins[-1].last + 2]
        axes.stairs([each.loss for each in bins], edges, color="#1f77b4", linewidth=2, baseline=None)
        # Whole octaves, so that the axis has at least two numbers.
        axes.set_xlim(2 ** math.floor(math.log2(edges[0])), 2 ** math.ceil(math.log2(edges[-1])))
    axes.xaxis.set_major_formatter(lambda tokens, _: short(round(tokens)))
    axes.set_xlabel(label)
    axes.set_ylabel("loss, nats per token")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)


def evaluate_checkpoint(
    config: EvalConfig, checked: EvaluatedModel | None = None
) -> tuple[Measurement, list[PositionBin]]:
    """Evaluate a checkpoint: the work of `bmburst eval`. Every rank calls it; all ranks share each sequence.

    Args:
        config: The evaluation.
        checked: What `check_inputs` has returned for it, on the first host. None: every rank reads the model's
            configuration and the headers of its weights itself, and rank 0 names what it does not read of the data.

    Returns:
        The measurement, and the loss by position, which is empty without `config.by_position`.

    Raises:
        UserError: The checkpoint or the text cannot be read, they do not match, or the loss is NaN.
    """
    runtime = start()
    from bmburst.attention.module import BurstAttention
    from bmburst.blocks.model import Llama
    from bmburst.checkpoint import adapter, hugging_face

    mesh = Mesh.over_bmtrain(data=1)
    given = verified_together(config.checkpoint)
    tuned = find_adapter(config, given, verified_together)
    directory, tokenizer, shape = checked or read_model(config, given, tuned)
    says = runtime.rank == 0 and checked is None
    corpus = _open(config, tokenizer, say_left_out if says else lambda _: None)
    for file in corpus.files:
        require_same(f"data {config.data}", partial(_verified, file, is_main=runtime.rank == 0))
    corpus.require_vocab(shape.vocab_size, config.data)
    model = Llama(
        shape,
        attention=partial(BurstAttention, group=mesh.sequence, layout=config.layout),
        dtype=dtype_of(config.dtype),
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
    if runtime.rank == 0:
        _note_length(_longest(corpus, length, config.pack), shape.max_position_embeddings)
    batches = evaluation_batches(sequences, limit=config.max_sequences)
    positions = LossByPosition(length, runtime.device) if config.by_position else None
    measured = TokenObjective(model, mesh, cut, runtime.device).measure(batches, positions)
    if math.isnan(measured.loss):
        raise not_a_number("the loss is", config.dtype)
    return measured, [] if positions is None else positions.bins(mesh)


def _longest(corpus: MixedFiles, length: int, pack: str) -> int:
    """Return the tokens of the longest text in which tokens attend to each other: a sequence, or a document."""
    if pack == "stream":
        return length
    documents = max(int(np.diff(file.document_offsets).max(initial=0)) for file in corpus.files)
    return min(documents, length)


def _note_length(longest: int, most: int) -> None:
    """Print a note if texts of `longest` tokens are longer than the model's limit `most`, as --by-position may want."""
    if longest > most:
        warn(
            f"note: texts of up to {longest:,} tokens, but the model was made for {most:,} (max_position_embeddings): "
            f"the loss can be much higher beyond that; --sequence-length {most} leaves that out"
        )


def check_inputs(config: EvalConfig) -> EvaluatedModel:
    """Check the inputs of an evaluation before ranks start: the model, the tokenizer, the text and the token cache.

    Text that the cache has not is tokenized into it, and what is not read of the data is named.

    Returns:
        The model, for `evaluate_checkpoint`.

    Raises:
        UserError: `read_model` rejects the checkpoint, there is no such tokenizer, the cache is not writable, a source
            cannot be read, contains preference pairs or has tokens that the model has not, or settings of records are
            given and there are none.
    """
    given = verified(config.checkpoint, warn)
    tuned = find_adapter(config, given, partial(verified, say=warn))
    model = read_model(config, given, tuned)
    directory, tokenizer, _ = model
    has_records, uses_names, is_new, found = False, False, False, []
    for source in sources_of(config.data):
        text = find_corpus(source.path, tokenizer, form=source.form(config), chat_template=config.chat_template)
        found.append((text, source.form(config)))
        uses_names = uses_names or not unused_names(*found[-1])
        if not isinstance(text, TokenFile):
            is_new = True
            has_records = has_records or text.encoder is not None
            require_cache("XDG_CACHE_HOME", user_cache(), text)
    if not uses_names or (not has_records and config.chat_template is not None):
        raise UserError(
            f"data {config.data} has no such rows to tokenize, and a chat template or names of columns, fields or "
            "roles are given\nallowed: JSONL of messages, of prompt and completion, or of text\n"
            "fix: leave them out, or correct --data"
        )
    require_messages(config.data, found)
    _open(config, tokenizer, say_left_out, progress=True).require_vocab(model.config.vocab_size, config.data)
    if tokenizer is None and is_new:
        note_bytes(directory, "--tokenizer")
    return model


def _open_one(
    source: Source, tokenizer: str | None, config: EvalConfig, say: Callable[[str], object], *, progress: bool
) -> TokenFile:
    file = open_corpus(
        source.path,
        tokenizer,
        user_cache(),
        form=source.form(config),
        chat_template=config.chat_template,
        progress=progress,
        on_skip=say,
    )
    if file.pairs:
        raise UserError(
            f"data {source.path}: holds preference pairs, whose rejected answers are no text to predict\n"
            "allowed: text, or records with one answer\n"
            "fix: bmburst train --dpo.beta evaluates held-out pairs itself"
        )
    return file


def _open(
    config: EvalConfig, tokenizer: str | None, say: Callable[[str], object], *, progress: bool = False
) -> MixedFiles:
    """Return the token files of all sources; tokenize those that are not cached.

    Args:
        config: The evaluation.
        tokenizer: Name of the text's tokenizer.
        say: Called with a line about each file, or kinds of files, of a folder that is left out.
        progress: Whether to show a progress bar while text is tokenized.

    Raises:
        UserError: A source cannot be read or contains preference pairs, or the sources have different tokenizers.
    """
    sources = sources_of(config.data)
    files = tuple(_open_one(source, tokenizer, config, say, progress=progress) for source in sources)
    return MixedFiles(files, shares_of(sources, files))


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


def _verified(file: TokenFile, *, is_main: bool) -> str:
    """Return the fingerprint of a token file, which one rank reads whole."""
    if is_main:
        file.verify()
    return file.fingerprint


def read_model(config: EvalConfig, directory: Path, tuned: "Adapter | None") -> EvaluatedModel:
    """Return the model of an evaluation.

    Args:
        config: The evaluation.
        directory: Result of `checkpoint.verified` for its checkpoint.
        tuned: The adapter, if there is one: result of `find_adapter`.

    Raises:
        UserError: There is no complete checkpoint and no supported model, its weights do not fit its configuration or
            the adapter, or it does not support packed documents.
    """
    from bmburst.checkpoint import adapter, base_model, hugging_face

    places = [directory]
    if tuned is not None:
        given = None if config.adapter is None else directory
        directory = tuned.find_base(given, "--checkpoint DIR --adapter ADAPTER")
        places = [tuned.directory, directory]
    is_model = (directory / "config.json").exists() and not (directory / "metrics.jsonl").exists()
    if not is_model and not (directory / STATE_FILE).exists():
        raise UserError(
            f"{directory} has no complete checkpoint and no weights\n"
            "fix: give a run folder with checkpoints, one of its checkpoints, or the directory of a Hugging Face model"
            f"{hub_fix(directory)}"
        )
    tokenizer = config.tokenizer or own_tokenizer(*places)
    shape = hugging_face.read_config(directory)
    hugging_face.check_weights(directory, shape)
    if tuned is not None:
        tuned.require_model(shape)
        tuned.require_shapes(adapter.adapter_shapes(tuned.lora, hugging_face.expected_shapes(shape)))
        tuned.require_base(base_model.Base.open(directory, shape))
    shape.require_packing(config.pack)
    return EvaluatedModel(directory, tokenizer, shape)


def user_cache() -> Path:
    """Return this user's cache of tokenized texts; UserError for a user without a folder, as in containers."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if folder.startswith("~"):
        raise UserError(
            f"user {os.getuid()} has no home folder, where tokens of texts are kept\n"
            "fix: set HOME, or XDG_CACHE_HOME, to a folder where you have write permission"
        )
    return Path(folder) / "bmburst"
