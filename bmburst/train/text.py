"""The text of a run: tokenized once a host, and cut into sequences to train on and sequences held out."""

import sys
from pathlib import Path

from bmburst import data
from bmburst.runtime import Runtime
from bmburst.train.config import STANDARD_LIBRARY, TrainConfig


def open_text(config: TrainConfig, folder: Path, runtime: Runtime) -> data.TokenFile:
    """Return the tokens of a run; every rank calls it. The first rank of each host tokenizes, the others wait.

    Args:
        config: The run.
        folder: Its folder, beside which tokens are kept unless the configuration says where.
        runtime: This rank; the job's first shows progress, and says which files are left out.

    Raises:
        UserError: The text cannot be read, or has tokens that the model does not know.
    """
    import bmtrain as bmt

    source = None if config.data.source == STANDARD_LIBRARY else config.data.source
    cache = config.data.cache or folder.parent / "tokens"
    is_main = runtime.rank == 0

    def opened() -> data.TokenFile:
        return data.open_corpus(
            source,
            config.data.tokenizer,
            cache,
            text_field=config.data.text_field,
            progress=is_main,
            on_skip=_say_left_out if is_main else lambda _: None,
        )

    if runtime.local_rank == 0:
        opened()
    bmt.synchronize()
    corpus = opened()
    corpus.require_vocab(config.model.vocab_size)
    return corpus


def sequences_of(corpus: data.TokenFile, config: TrainConfig, split: str) -> data.PackedSequences:
    """Return the run's sequences of a split: "train" or "held_out"."""
    return data.PackedSequences(
        corpus,
        split=split,
        sequence_length=config.sequence_length,
        held_out_fraction=config.data.held_out_fraction,
        pack=config.pack,
    )


def _say_left_out(file: str) -> None:
    sys.stderr.write(f"left out: {file}\n")
