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
        "Checkpoint, run folder (its newest one), or directory of a Hugging Face LLaMA."
    )
    data: str = field("Held-out text: text file, JSONL file, directory of them, or token file.")
    sequence_length: int = field("Tokens of a sequence, over all its ranks.", default=4096, unit="tokens", minimum=1)
    pack: Literal["stream", "documents"] = field(
        "What a token sees: all text before it in its sequence, or only its own document; as in training.",
        default="stream",
    )
    tokenizer: str | None = field(
        "'bytes', a tokenizer.json, a directory with one, or the name of a Hugging Face tokenizer.",
        default=None,
        default_text="the run's own, else bytes",
    )
    text_field: str = field("Key of the text in a line of JSONL.", default="text")
    max_sequences: int | None = field(
        "Sequences that are read at most.", default=None, default_text="all", unit="sequences", minimum=1
    )
    dtype: Literal["float32", "bfloat16"] = field("Type of weights and activations.", default="float32")
    layout: Literal["contiguous", "zigzag", "striped", "balanced"] = field(
        "Which rank holds which tokens.", default="zigzag"
    )
    loss_chunk_tokens: int = field(
        "Tokens whose logits exist at once, on a rank.", default=1024, unit="tokens", minimum=1
    )
    hang_timeout: float = field(
        "A sequence that takes longer ends the evaluation; 0: no limit.",
        default=DEFAULT_HANG_TIMEOUT,
        unit="seconds",
        minimum=0,
        below=1e9,
    )
    nproc: int | None = field(
        "Ranks to start on this machine; they share every sequence.",
        default=None,
        default_text="all GPUs, else 2",
        unit="processes",
        minimum=1,
    )

    def __post_init__(self) -> None:
        check_fields(self)
