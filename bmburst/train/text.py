"""The data of a run: checks them before ranks start, tokenizes them on the first rank of each host, opens them."""

import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path

from bmburst import data
from bmburst.data import Text, find_corpus, has_tokens, require_cache, tokenize, unused_names
from bmburst.data.batches import Sequences
from bmburst.data.documents import check_arrays
from bmburst.data.mixture import MixedFiles, mixed, read_mixture, shares_of
from bmburst.data.records import PAIRS
from bmburst.data.report import described
from bmburst.data.tokenizer import PromptTokenizer, tokenizer_files
from bmburst.data.whole_documents import WholeDocuments, pack_sequences
from bmburst.errors import UserError
from bmburst.launch.start import Runtime
from bmburst.launch.watchdog import beat
from bmburst.train.config import TrainConfig
from bmburst.train.kept import read_tokenizer
from bmburst.train.sections import HELD_OUT, HELD_OUT_FRACTION

_PLENTY = 16  # bytes of text, or tokens, per token of a sequence: above this the text is certainly long enough
_QUICK = 8 << 20  # bytes of text that are tokenized in one or two seconds


def token_cache(config: TrainConfig, folder: Path) -> Path:
    """Return the folder of a run's token cache: as configured, else beside the run folder."""
    return config.data.cache or folder.parent / "tokens"


def find_text(config: TrainConfig, on_skip: Callable[[str], object] = lambda _: None) -> data.TokenFile | Text:
    """Return the token file or the text of a configuration; `on_skip` as in `find_sources`.

    Raises:
        UserError: There is none, or its tokenizer cannot be loaded.
    """
    wanted = config.data
    return find_corpus(
        wanted.source, wanted.tokenizer, form=wanted, chat_template=wanted.chat_template, on_skip=on_skip
    )


def parts_of(config: TrainConfig) -> list[TrainConfig]:
    """Return one configuration per source of a mixture; the configuration alone if its data are one source.

    Raises:
        UserError: The file of the mixture is not valid.
    """
    if (sources := read_mixture(config.data.source)) is None:
        return [config]
    return [config.replace(data=replace(config.data, source=source.path, **source.names)) for source in sources]


def validation_of(config: TrainConfig, tokenizer: str | None) -> dict[str, TrainConfig]:
    """Return for each validation file, by its name, the configuration whose only data it is.

    Args:
        config: The run.
        tokenizer: Name of the tokenizer of the training data.
    """
    fraction = config.data.held_out_fraction or HELD_OUT_FRACTION  # without effect: all of a file is evaluated
    named = tuple(each for each in config.data.columns if not each.startswith("weight="))  # each token counts once
    wanted = replace(config.data, validation=(), held_out_fraction=fraction, tokenizer=tokenizer, columns=named)
    return {
        name: config.replace(data=replace(wanted, source=path)) for name, path in config.data.validation_files.items()
    }


def check_text(config: TrainConfig, cache: Path | None = None) -> data.TokenFile | Text:
    """Check, before ranks start, that the text has at least one training sequence, if this is uncertain.

    A short text is tokenized in a temporary folder, as the ranks will do. Of a long text, only JSON arrays are
    checked here.

    Args:
        config: The run.
        cache: The ranks' token cache, which is checked for write permission; None: no check.

    Returns:
        The token file or the text of the configuration.

    Raises:
        UserError: The tokenizer or one of its files cannot be read, the cache is not writable, or the text is too
            short, cannot be read, or has token ids outside the model's vocabulary.
    """
    parts = parts_of(config)
    # A run that began with settings without effect goes on.
    needs_messages = config.resume is not True and any(part.data.of_messages for part in parts)
    if needs_messages and not config.data.validation:  # before the text is tokenized
        data.require_messages(config.data.source, ((find_text(part), part.data) for part in parts))
    text, *_ = [_check_source(part, cache) for part in parts]
    tokenizer = text.tokenizer_name if isinstance(text, data.TokenFile) else text.tokenizer.name
    validation = validation_of(config, tokenizer)
    for part in validation.values():
        _check_validation(part, cache)
    if not validation:
        return text
    parts += [each for part in validation.values() for each in parts_of(part)]
    if all(unused_names(find_text(part), part.data) for part in parts):
        raise _without_names(config.data.source, text)
    if needs_messages:
        data.require_messages(config.data.source, ((find_text(part), part.data) for part in parts))
    return text


def _without_names(source: str, text: data.TokenFile | Text) -> UserError:
    what = "a token file" if isinstance(text, data.TokenFile) else "text, or its columns have other names"
    return UserError(
        f"data {source}: names of columns, fields or roles are given, and it is {what}\n"
        "allowed: records, of which the first line has the columns that are named; rows of JSONL with the text field\n"
        "fix: correct --data.messages_field, --data.columns or --data.text_field, or leave them out; in a mixture, "
        "name them at the source that has them"
    )


def _check_source(config: TrainConfig, cache: Path | None) -> data.TokenFile | Text:
    source = config.data.source
    not_read: list[str] = []
    text = find_text(config, not_read.append)
    if unused_names(text, config.data) and not config.data.validation:  # else they are of the validation files
        raise _without_names(source, text)
    if isinstance(text, data.TokenFile):
        _require_sequence(text, config)
        _require_kept(text.tokenizer_name, text.tokenizer_identity, config)
        if config.sampled:
            _require_tokenizer(text)
        return text
    _require_kept(text.tokenizer.name, None, config)
    if cache is not None:
        require_cache("data.cache", cache, text)
    if text.encoder is not None:
        _check_records(config, cache)
        return text
    if config.dpo.is_on:
        raise _misfit(source, config, pairs=False)
    enough = min(_QUICK, _PLENTY * config.sequence_length / (1 - config.data.held_out_fraction))
    if any(size > enough for size in accumulate(file.path.stat().st_size for file in text.files)):
        if cache is None or not has_tokens(cache, text):
            check_arrays(text.files)
        return text
    with tempfile.TemporaryDirectory(prefix="bmburst-text-") as folder:
        try:
            corpus = tokenize(text, Path(folder) / "text.tokens", on_skip=not_read.append)
            corpus = replace(corpus, path=Path(source))  # for messages: the temporary folder will be deleted
            corpus.require_vocab(config.model.vocab_size)
            _require_sequence(corpus, config)
        except UserError:
            for line in not_read:  # without an error, the ranks report them
                say_left_out(line)
            raise
    return text


def _require_kept(tokenizer: str, identity: str | None, config: TrainConfig) -> None:
    """Check that the files of a tokenizer and the chat template, which checkpoints include, can be read.

    Raises:
        UserError: They cannot, or there are no files and the chat template has no effect.
    """
    template = config.data.chat_template
    if not read_tokenizer(tokenizer, identity, template) and template is not None:
        raise UserError(
            f"data.chat_template {template} has no effect: the tokenizer '{tokenizer}' has no files with which "
            "checkpoints could include it\nallowed: a Hugging Face tokenizer\n"
            "fix: leave data.chat_template out, or --data.tokenizer DIR"
        )


def _check_validation(config: TrainConfig, cache: Path | None) -> None:
    """Tokenize a validation file into the ranks' cache and check it, so that no rank finds a fault in it."""
    for part in parts_of(config):
        text = find_text(part)
        if cache is not None and isinstance(text, Text):
            require_cache("data.cache", cache, text)
    with tempfile.TemporaryDirectory(prefix="bmburst-text-") as folder:
        sequences_of(_tokens_of(config, cache or Path(folder)), config, "all")


def _tokens_of(config: TrainConfig, cache: Path, *, progress: bool = True) -> data.TokenFile | MixedFiles:
    """Return the token files of a configuration's sources, tokenized into a cache if they are not there."""

    def opened(part: TrainConfig) -> data.TokenFile:
        file = replace(_open_corpus(part, cache, progress=progress), path=Path(part.data.source))  # for messages
        file.require_vocab(config.model.vocab_size)
        return file

    return _of_sources(config, opened)


def _of_sources(config: TrainConfig, open_one: Callable[[TrainConfig], data.TokenFile]) -> data.TokenFile | MixedFiles:
    """Return the token file of a configuration, or the files of the parts of a mixture, as `open_one` opens them."""
    sources, files = read_mixture(config.data.source), tuple(map(open_one, parts_of(config)))
    return files[0] if sources is None else MixedFiles(files, shares_of(sources, files))


def _open_corpus(
    config: TrainConfig, cache: Path, *, progress: bool, on_skip: Callable[[str], object] = lambda _: None
) -> data.TokenFile:
    """Return the token file of a configuration's one source; see `data.open_corpus`."""
    wanted = config.data
    return data.open_corpus(
        wanted.source,
        wanted.tokenizer,
        cache,
        form=wanted,
        chat_template=wanted.chat_template,
        progress=progress,
        on_skip=on_skip,
    )


def steps_of_epochs(config: TrainConfig, cache: Path, done: tuple[int, int] = (0, 0)) -> int:
    """Return the number of steps of a run of `epochs`, after `check_text`.

    Args:
        config: The run; `epochs` is set.
        cache: The ranks' token cache; the training data are tokenized into it.
        done: Steps and sequences of the checkpoint that the run continues from.

    Raises:
        UserError: The data cannot be read.
    """
    steps, samples = done
    left = sequences_of_epochs(config, sequences_of(_tokens_of(config, cache), config, "train")) - samples
    return steps + max(-(-left // config.batch_size), 0)


def sequences_of_epochs(config: TrainConfig, sequences: Sequences) -> int:
    """Return the number of sequences that a run of `epochs` takes, rounded up."""
    assert config.epochs is not None
    return max(math.ceil(config.epochs * len(sequences) - 1e-6), 1)


def _check_records(config: TrainConfig, cache: Path | None) -> None:
    """Tokenize all records into the ranks' token cache and check them, so that no rank finds an invalid line.

    Args:
        config: The run.
        cache: As in `check_text`; None: a temporary folder.
    """
    with tempfile.TemporaryDirectory(prefix="bmburst-text-") as folder:
        corpus = _tokens_of(config, cache or Path(folder), progress=cache is not None)
        sequences = sequences_of(corpus, config, "train")
        say_too_long(sequences)
        if config.data.held_out_fraction:
            sequences_of(corpus, config, "held_out")


def bytes_of_tokens(config: TrainConfig, cache: Path, text: data.TokenFile | Text) -> int:
    """Estimate the bytes that `open_text` will write to a cache: 0 if the tokens are cached.

    For the byte tokenizer the estimate is exact except for the table of documents. For other tokenizers, four bytes per
    token are assumed.

    Args:
        config: The run.
        cache: Folder of the token cache.
        text: Result of `check_text`.
    """
    if len(parts := parts_of(config)) > 1:
        return sum(bytes_of_tokens(part, cache, find_text(part)) for part in parts)
    if isinstance(text, data.TokenFile) or has_tokens(cache, text):
        return 0
    tokenizer, size = text.tokenizer, sum(file.path.stat().st_size for file in text.files)
    each = 1 if tokenizer.name == data.ByteTokenizer.name else 4
    return size // each * (2 if tokenizer.vocab_size <= 1 << 16 else 4)


def _require_sequence(corpus: data.TokenFile, config: TrainConfig) -> None:
    plenty = _PLENTY * config.sequence_length
    if (
        config.dpo.is_on
        or corpus.loss_mask is not None
        or corpus.token_count * (1 - config.data.held_out_fraction) <= plenty
    ):  # otherwise the text is certainly long enough
        sequences_of(corpus, config, "train")


def _require_tokenizer(corpus: data.TokenFile) -> None:
    """Check that the tokenizer of a token file can be loaded. Training does not need it, but the final sample does."""
    name = corpus.tokenizer_name
    try:
        is_same = data.load_tokenizer(name).identity == corpus.tokenizer_identity
        problem = "" if is_same else f"tokenizer '{name}' is not the one that '{corpus.path}' was made with"
    except UserError as error:
        problem, *_ = str(error).splitlines()
    if problem:
        raise UserError(
            f"{problem}\nthe sample at the end of training needs the tokenizer of '{corpus.path}'\n"
            "fix: --data.tokenizer with its present path, or --sample-tokens 0"
        )


def open_text(config: TrainConfig, folder: Path, runtime: Runtime) -> data.TokenFile | MixedFiles:
    """Return the token files of a run; every rank calls it. The first rank of each host tokenizes, the others wait.

    Args:
        config: The run.
        folder: The run folder, see `token_cache`.
        runtime: This rank; rank 0 shows progress and skipped files.

    Raises:
        UserError: On all ranks, if the text or the tokenizer cannot be read on a host, a host has another text, or
            there are token ids outside the model's vocabulary.
    """
    return _of_sources(config, partial(_open_one, folder=folder, runtime=runtime))


def _open_one(config: TrainConfig, folder: Path, runtime: Runtime) -> data.TokenFile:
    from bmburst.checkpoint.sharded_files import on_every_rank, require_same

    cache = token_cache(config, folder)
    is_main = runtime.rank == 0
    opened = partial(_open_corpus, config, cache, progress=is_main)

    def prepare() -> None:
        if runtime.local_rank != 0:
            return
        began = time.time()
        corpus = opened(on_skip=say_left_out) if is_main else opened()
        # A file that was written just now is not verified.
        if config.data.verify and corpus.path.stat().st_mtime < began:
            corpus.verify(beat)

    on_every_rank(prepare)
    corpus = opened()
    require_same(f"data {config.data.source}", lambda: corpus.fingerprint)
    corpus.require_vocab(config.model.vocab_size, config.data.source)
    return corpus


def sequences_of(corpus: data.TokenFile | MixedFiles, config: TrainConfig, split: str) -> Sequences:
    """Return the run's sequences of a split: "train", "held_out", or "all" of a validation file.

    Raises:
        UserError: There is none, or the data are preference pairs without preference training or the reverse.
    """
    for file in (corpus,) if isinstance(corpus, data.TokenFile) else corpus.files:
        if file.pairs != config.dpo.is_on:
            raise _misfit(file.path, config, pairs=file.pairs)
    make = partial(
        pack_sequences,
        split=split,
        sequence_length=config.sequence_length,
        held_out_fraction=config.data.held_out_fraction,
        pack=config.pack,
    )
    return mixed(corpus, make)


def _misfit(source: str | Path, config: TrainConfig, *, pairs: bool) -> UserError:
    if pairs:
        return UserError(
            f"data {source}: holds preference pairs, and dpo.beta is not given\n"
            "allowed: pairs in preference training only\nfix: --dpo.beta 0.1"
        )
    return UserError(
        f"data {source}: holds no preference pairs, and dpo.beta is {config.dpo.beta}\nallowed: JSONL of {PAIRS}\n"
        "fix: give such data, or leave dpo.beta out"
    )


@dataclass(frozen=True, slots=True)
class RunText:
    """The text of a run, open on this rank. Make it with `open`.

    Attributes:
        corpus: The training data.
        validation: The validation data, by name.
        evaluated: What evaluations read, by name: the held-out sequences first, then those of the validation data.
    """

    corpus: data.TokenFile | MixedFiles
    validation: Mapping[str, data.TokenFile | MixedFiles]
    evaluated: Mapping[str, Sequences]

    @classmethod
    def open(cls, config: TrainConfig, folder: Path, runtime: Runtime) -> "RunText":
        """Return the text of a run. Every rank calls it.

        Raises:
            UserError: As `open_text` and `sequences_of`, or validation data have another tokenizer than training data.
        """
        corpus = open_text(config, folder, runtime)
        validation: dict[str, data.TokenFile | MixedFiles] = {}
        for name, part in validation_of(config, corpus.tokenizer_name).items():
            validation[name] = found = open_text(part, folder, runtime)
            if found.tokenizer_identity != corpus.tokenizer_identity:
                raise UserError(
                    f"data.validation {part.data.source} was made with tokenizer '{found.tokenizer_name}', and the "
                    f"training data with '{corpus.tokenizer_name}'\nallowed: one tokenizer\nfix: make one of them again"
                )
        evaluated: dict[str, Sequences] = {}
        if config.data.held_out_fraction:
            evaluated[HELD_OUT] = sequences_of(corpus, config, "held_out")
        evaluated |= {name: sequences_of(each, config, "all") for name, each in validation.items()}
        return cls(corpus, validation, evaluated)

    @property
    def first_evaluated(self) -> Sequences:
        """The sequences that an evaluation without a name reads."""
        return next(iter(self.evaluated.values()))

    def tokenizer(self) -> PromptTokenizer:
        """Return the tokenizer of the data."""
        return data.load_tokenizer(self.corpus.tokenizer_name)

    def reports(self, config: TrainConfig) -> Iterator[str]:
        """Yield the reports on the data of a run: on each source, and on each source of the validation data."""
        own = self.corpus.tokenizer_name
        is_there = own == data.ByteTokenizer.name or tokenizer_files(own)
        tokenizer, parts = self.tokenizer() if is_there else None, validation_of(config, own)
        validation = ((name, parts[name], self.validation[name]) for name in parts)
        for name, given, found in (("data", config, self.corpus), *validation):
            files = (found,) if isinstance(found, data.TokenFile) else found.files
            for part, file in zip(parts_of(given), files, strict=True):
                yield described(f"{name}: {part.data.source}", file, config.sequence_length, config.pack, tokenizer)


def say_too_long(sequences: Sequences) -> None:
    """Print how many records were left out because they are longer than a sequence, if any."""
    if isinstance(sequences, WholeDocuments) and sequences.left_out:
        records = "1 record" if sequences.left_out == 1 else f"{sequences.left_out} records"
        say_left_out(f"{records} longer than sequence_length {sequences.sequence_length}")


def say_left_out(what: str) -> None:
    """Print what is not read of the data."""
    sys.stderr.write(f"left out: {what}\n")
