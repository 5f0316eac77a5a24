"""`EvalConfig`: the configuration of `bmburst eval`. Does not import torch."""

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
    adapter: Path | None = field("LoRA adapter of the model.", default=None)  # noqa: RUF009
    data: str = field(
        "Held-out data, as training takes them: a text file, JSONL file, directory of them, token file, or mixture of "
        "sources. For records, the loss is that of answers only."
    )
    sequence_length: int = field("Tokens of a sequence, over all of its ranks.", default=4096, unit="tokens", minimum=1)
    pack: Literal["stream", "documents"] = field(
        "What tokens attend to; stream: all text before them in the sequence; documents: only their own document.",
        default="stream",
        default_text="documents for records, else stream",
    )
    tokenizer: str | None = field(
        "Tokenizer: 'bytes', a tokenizer.json, a directory that has one, or the name of a Hugging Face tokenizer.",
        default=None,
        default_text="the model's, else bytes",
    )
    text_field: str = field("Field of a JSONL line that holds the text.", default="text")
    chat_template: Path | None = field(  # noqa: RUF009
        "Jinja file with the chat template of JSONL messages.", default=None, default_text="the tokenizer's"
    )
    max_sequences: int | None = field(
        "Maximum number of sequences to evaluate.", default=None, default_text="all", unit="sequences", minimum=1
    )
    dtype: Literal["float32", "bfloat16", "float16"] = field("Data type of weights and activations.", default="float32")
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
    start_timeout: float | None = field(
        "Time from the start of a rank until its first batch; with hang_timeout 0 there is no limit.",
        default=None,
        default_text="3600, or hang_timeout if that is more",
        unit="seconds",
        above=0,
        below=1e9,
    )
    by_position: bool = field(
        "Also measure the loss by position, the number of tokens before: bins 0, 1, 2-3, 4-7, 8-15 and so on.",
        default=False,
    )
    output: Path | None = field(  # noqa: RUF009
        "JSON file for --by-position or --passkey; the picture has the same path with suffix .png.",
        default=None,
        default_text="by_position.json or passkey.json",
    )
    nproc: int | None = field(
        "Number of ranks to start on this machine; all of them share each sequence.",
        default=None,
        default_text="all GPUs, else 2",
        unit="processes",
        minimum=1,
    )

    def __post_init__(self) -> None:
        check_fields(self)
