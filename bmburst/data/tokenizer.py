"""Text to token ids and back: what a tokenizer is, and the one that needs no file."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int64]


class Tokenizer(Protocol):
    """What the data pipeline and the sampler ask of a tokenizer.

    Every id it gives is in [0, vocab_size). It adds no special token by itself, and text that spells a special
    token is text: `</s>` in a file is four characters, not the end of a document.
    """

    @property
    def name(self) -> str:
        """What the user called it; `load_tokenizer(name)` gives it again."""
        ...

    @property
    def identity(self) -> str:
        """Equal for two tokenizers only if they give the same ids for every text, whatever they are called."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest id it can give."""
        ...

    @property
    def eos_id(self) -> int:
        """The id that ends a document. It also stands before the first one, so it serves as the start of a text."""
        ...

    def encode(self, text: str) -> TokenIds:
        """Return the ids of `text`, int64 `[tokens]`."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return `encode` of each text, on several cores where the tokenizer can."""
        ...

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        """Return the text of `ids`; an id outside the vocabulary stands for no text."""
        ...


class ByteTokenizer:
    """Ids 0..255 are the bytes of the text in UTF-8; 256 ends a document, 257 and 258 are kept for start and padding.

    Packed text holds no start and no padding token. The two ids are there for what wants to name them, such as a
    Hugging Face configuration.
    """

    name = "bytes"
    identity = "bytes-1"
    vocab_size = 259
    eos_id = 256
    bos_id = 257
    pad_id = 258

    def encode(self, text: str) -> TokenIds:
        """Return one id a byte, int64 `[bytes]`; half of a surrogate pair, which is no character, becomes "?"."""
        return np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return `encode` of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        """Return the text; bytes that are not UTF-8 become U+FFFD, ids that are no byte are left out."""
        values = np.asarray(ids, np.int64).reshape(-1)
        return values[(values >= 0) & (values < 256)].astype(np.uint8).tobytes().decode("utf-8", "replace")


def load_tokenizer(name_or_path: str) -> Tokenizer:
    """Return the tokenizer of that name.

    Args:
        name_or_path: "bytes"; or a `tokenizer.json`, or a directory that holds one; or a name on the Hugging Face
            hub, whose files are taken from the local cache or else fetched.

    Raises:
        UserError: There is no such tokenizer, or it cannot be read or fetched.
    """
    if name_or_path == ByteTokenizer.name:
        return ByteTokenizer()
    # The byte tokenizer must work where the tokenizers package is missing.
    from bmburst.data.huggingface import load_huggingface_tokenizer

    return load_huggingface_tokenizer(name_or_path)
