"""What decides an evaluation. Imports neither torch nor ranks."""

import dataclasses
from pathlib import Path
from typing import Literal

from bmburst.config import check_fields, field
from bmburst.runtime.launch.spec import DEFAULT_HANG_TIMEOUT


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """An evaluation of one checkpoint on one held-out text."""

    checkpoint: Path = field(  # noqa: RUF009
        "Checkpoint, run folder (its newest checkpoint), or Hugging Face model directory."
    )
    data: str = field("Held-out text: a text file, JSONL file, directory of them, or token file.")
    sequence_length: int = field("Tokens of a sequence, over all of its ranks.", default=4096, unit="tokens", minimum=1)
    pack: Literal["stream", "documents"] = field(
        "What a token sees; stream: all text before it in its sequence; documents: only its own document.",
        default="stream",
    )
    tokenizer: str | None = field(
        "Tokenizer: 'bytes', a tokenizer.json, a directory that has one, or the name of a Hugging Face tokenizer.",
        default=None,
        default_text="the run's, else bytes",
    )
    text_field: str = field("Field of a JSONL line that holds the text.", default="text")
    max_sequences: int | None = field(
        "Largest number of sequences to evaluate.", default=None, default_text="all", unit="sequences", minimum=1
    )
    dtype: Literal["float32", "bfloat16"] = field("Data type of weights and activations.", default="float32")
    layout: Literal["contiguous", "zigzag", "striped", "balanced"] = field(
        "Which rank holds which tokens of a sequence.", default="zigzag"
    )
    loss_chunk_tokens: int = field(
        "Tokens of a rank whose logits are computed at once.", default=1024, unit="tokens", minimum=1
    )
    hang_timeout: float = field(
        "Time after which a sequence without progress ends the evaluation; 0: no limit.",
        default=DEFAULT_HANG_TIMEOUT,
        unit="seconds",
        minimum=0,
        below=1e9,
    )
    nproc: int | None = field(
        "Number of ranks to start on this machine; they share every sequence.",
        default=None,
        default_text="all GPUs, else 2",
        unit="processes",
        minimum=1,
    )

    def __post_init__(self) -> None:
        check_fields(self)
