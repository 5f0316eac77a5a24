"""Tokenizers: the protocol, the byte tokenizer, and Hugging Face tokenizers from a file or the hub."""

import contextlib
import difflib
import hashlib
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bmburst.data.tokenizer_folder import (
    ADDED_TOKENS,
    CHAT_TEMPLATE,
    MODEL_CONFIG,
    SPECIAL_TOKENS,
    TEMPLATES,
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
    TokenizerFolder,
    read_folder,
)
from bmburst.errors import UserError, first_line, unknown

TokenIds = npt.NDArray[np.int64]


class Tokenizer(Protocol):
    """Interface of a tokenizer for the data pipeline.

    All ids are in [0, vocab_size). `encode` adds no special tokens, and does not parse special tokens in the text:
    `</s>` in a file is four characters, not the end of a document.
    """

    @property
    def name(self) -> str:
        """Name given by the user; `load_tokenizer(name)` returns the tokenizer."""
        ...

    @property
    def identity(self) -> str:
        """Equal for two tokenizers only if they return the same ids for every text. Independent of the name."""
        ...

    @property
    def vocab_size(self) -> int:
        """Largest possible id plus one."""
        ...

    @property
    def eos_id(self) -> int:
        """The end-of-document id. It also precedes the first document, so it serves as the start of a text."""
        ...

    def encode(self, text: str) -> TokenIds:
        """Return the ids of `text`, int64 `[tokens]`."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return `encode` of each text, in parallel if the tokenizer supports it."""
        ...

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        """Return the text of `ids`; ids outside the vocabulary are skipped."""
        ...


class PromptTokenizer(Tokenizer, Protocol):
    """Additional interface of a tokenizer for generation."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, such as the one that ends an answer."""
        ...

    def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> TokenIds:
        """Return the ids of a prompt, int64 `[tokens]`, as transformers' tokenizers do.

        Special tokens in the text are parsed.

        Args:
            text: The prompt.
            add_special_tokens: Whether to add the tokens that the tokenizer puts around a text, such as a start token.
        """
        ...

    def encode_with_ends(self, text: str) -> tuple[TokenIds, npt.NDArray[np.int64]]:
        """Return `encode_prompt` of a text and the end of each token in it, in characters, both int64 `[tokens]`.

        A token without text ends at 0.
        """
        ...

    def decode_all(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        """Return the text of `ids` with the names of special tokens, for people to read."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255; 256 ends a document, 257 and 258 are reserved for start and padding.

    Packed text has no start or padding tokens. The two ids exist for formats that must name them, such as a Hugging
    Face configuration.
    """

    name = "bytes"
    identity = "bytes-1"
    vocab_size = 259
    eos_id = 256
    bos_id = 257
    pad_id = 258
    special_ids = frozenset({eos_id, bos_id, pad_id})

    def encode(self, text: str) -> TokenIds:
        """Return one id per byte, int64 `[bytes]`; an unpaired surrogate becomes "?"."""
        return np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return `encode` of each text."""
        return [self.encode(text) for text in texts]

    def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> TokenIds:  # noqa: ARG002
        """Return `encode` of the text: special tokens have no text form, and none are added."""
        return self.encode(text)

    def encode_with_ends(self, text: str) -> tuple[TokenIds, npt.NDArray[np.int64]]:
        """Return the bytes and the end of the character of each byte, both int64 `[bytes]`."""
        sizes = [len(character.encode("utf-8", "replace")) for character in text]
        return self.encode(text), np.repeat(np.arange(1, len(text) + 1), sizes)

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        """Return the text; invalid UTF-8 becomes U+FFFD, ids above 255 are skipped."""
        values = np.asarray(ids, np.int64).reshape(-1)
        return values[(values >= 0) & (values < 256)].astype(np.uint8).tobytes().decode("utf-8", "replace")

    def decode_all(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        """Return the text, with "<eos>" for the end of a document."""
        values = np.asarray(ids, np.int64).reshape(-1)
        return "<eos>".join(map(self.decode, np.split(values, np.flatnonzero(values == self.eos_id))))


def load_tokenizer(name_or_path: str) -> PromptTokenizer:
    """Return the tokenizer of that name.

    Args:
        name_or_path: "bytes", a `tokenizer.json`, a directory with one, or a name on the Hugging Face hub, whose files
            are read from the local cache or downloaded.

    Raises:
        UserError: There is no such tokenizer, or it cannot be read or fetched.
    """
    if name_or_path == ByteTokenizer.name:
        return ByteTokenizer()
    try:
        return load_huggingface_tokenizer(name_or_path)
    except OSError as error:
        raise UserError(
            f"cannot read tokenizer '{error.filename or name_or_path}': {error.strerror or error}\n"
            "fix: give read permission for it and its folder, or another tokenizer"
        ) from error


GENERATION_CONFIG = "generation_config.json"
TOKENIZER_FILES = (
    TOKENIZER_FILE,
    "tokenizer.model",
    TOKENIZER_CONFIG,
    SPECIAL_TOKENS,
    ADDED_TOKENS,
    "vocab.json",
    "vocab.txt",
    "vocab.model",
    "merges.txt",
    "spiece.model",
    CHAT_TEMPLATE,
    "chat_template.json",
    GENERATION_CONFIG,
)
"""Files of a tokenizer's directory that belong to the model; further chat templates are in the folder `TEMPLATES`."""
_UNREAD = ("tekken.json", "tiktoken.model", "sentencepiece.bpe.model")
"""Further files of which each is a tokenizer."""
_BESIDE = (TOKENIZER_CONFIG, SPECIAL_TOKENS, ADDED_TOKENS, CHAT_TEMPLATE)
"""Files that are read beside a tokenizer.json that is given by its path."""
# Common end-of-document tokens, for a tokenizer.json without tokenizer_config.json.
END_TOKENS = ("</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>", "<|eos|>", "<|end|>", "[EOS]", "[SEP]")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


class HuggingFaceTokenizer:
    """Adapter of a `tokenizers.Tokenizer` to the data pipeline: no truncation, no padding, no added tokens.

    Args:
        name: Name given by the user.
        folder: The `tokenizers.Tokenizer`, whose truncation and padding are disabled here, its special tokens and its
            chat template. Without an `eos_token`, the end-of-document token is the first of `END_TOKENS` in the
            vocabulary.

    Attributes:
        special_ids: Ids of all special tokens, and of the end-of-document token.
        special_tokens: Special tokens by name, "eos_token" and others.
        chat_template: The chat template, or templates by name; None without one.

    Raises:
        UserError: It has no end-of-document token.
    """

    def __init__(self, name: str, folder: TokenizerFolder) -> None:
        tokenizer, eos_token = folder.tokenizer, folder.special_tokens.get("eos_token")
        self.special_tokens, self.chat_template = folder.special_tokens, folder.chat_template
        self._splits = folder.split_special_tokens
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # encode special tokens in the text as plain text
        candidates = END_TOKENS if eos_token is None else (eos_token,)
        eos_id = next((i for i in map(tokenizer.token_to_id, candidates) if i is not None), None)
        if eos_id is None:
            raise UserError(
                f"tokenizer '{name}' has no end-of-document token\nallowed: {', '.join(candidates)}\n"
                f'fix: name it in {TOKENIZER_CONFIG} beside {TOKENIZER_FILE}: {{"eos_token": "..."}}'
            )
        self._tokenizer = tokenizer
        self.name = name
        self.eos_id = int(eos_id)
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset({self.eos_id, *(i for i, token in added.items() if token.special)})
        parts = f"{self.eos_id} {tokenizer.to_str()}{' splits special tokens' * self._splits}"
        digest = hashlib.sha256(parts.encode()).hexdigest()
        self.identity = f"huggingface-{digest[:16]}"

    def for_transformers(self, template: str | dict[str, str]) -> Any:
        """Return the same tokenizer as an object of transformers, with a chat template."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_object=self._tokenizer,
            chat_template=template,
            split_special_tokens=self._splits,
            **self.special_tokens,
        )

    def encode(self, text: str) -> TokenIds:
        """Return the ids of `text`, int64 `[tokens]`."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return the ids of each text; the package tokenizes them in parallel."""
        try:
            encodings = self._tokenizer.encode_batch(list(map(_valid, texts)), add_special_tokens=False)
        except Exception as error:
            raise self._unknown(error) from error
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> TokenIds:
        """Return the ids of a prompt, int64 `[tokens]`; special tokens in the text are parsed."""
        return np.array(self._prompt(text, add_special_tokens=add_special_tokens).ids, np.int64)

    def encode_with_ends(self, text: str) -> tuple[TokenIds, npt.NDArray[np.int64]]:
        """Return the ids of a prompt and the end of each in the text, both int64 `[tokens]`."""
        encoding = self._prompt(text, add_special_tokens=True)
        return np.array(encoding.ids, np.int64), np.array([end for _, end in encoding.offsets], np.int64)

    def _prompt(self, text: str, *, add_special_tokens: bool) -> Any:
        self._tokenizer.encode_special_tokens = self._splits
        try:
            return self._tokenizer.encode(_valid(text), add_special_tokens=add_special_tokens)
        except Exception as error:
            raise self._unknown(error) from error
        finally:
            self._tokenizer.encode_special_tokens = True

    def _unknown(self, error: Exception) -> UserError:
        """Return the error of a text that cannot be encoded; the package raises bare Exception for it."""
        return UserError(
            f"tokenizer '{self.name}' cannot encode the text: {first_line(error)}\n"
            "allowed: words of its vocabulary, if that has no token for unknown words\n"
            f"fix: give the {TOKENIZER_FILE} that belongs to the model, or add the missing token to it"
        )

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        """Return the text without special tokens; ids outside the vocabulary are skipped."""
        values = [i for i in np.asarray(ids, np.int64).reshape(-1).tolist() if 0 <= i < self.vocab_size]
        return str(self._tokenizer.decode(values, skip_special_tokens=True))

    def decode_all(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        """Return the text with special tokens."""
        return str(self._tokenizer.decode(np.asarray(ids, np.int64).tolist(), skip_special_tokens=False))


def tokenizer_folder(name_or_path: str) -> Path | None:
    """Return the local directory of a tokenizer; None for "bytes" and for a name on the hub."""
    path = Path(name_or_path)
    if name_or_path == ByteTokenizer.name:
        return None
    return path if path.is_dir() else path.parent if path.is_file() else None


def other_files(folder: Path) -> list[str]:
    """Return the names of the files of a tokenizer in a folder without tokenizer.json; empty with it."""
    if (folder / TOKENIZER_FILE).is_file():
        return []
    known = (*TOKENIZER_FILES, *_UNREAD)
    names = (name for name in known if name != GENERATION_CONFIG and (folder / name).is_file())
    return [*names, *sorted(path.name for path in folder.glob("*.tiktoken"))]


def tokenizer_files(name_or_path: str) -> dict[str, Path]:
    """Return the local files of a tokenizer, by their names in a model's directory.

    If the name is that of a tokenizer.json, these are that file, and what is read beside it: its configuration, special
    and added tokens, and chat templates. For a name on the hub, they are the files in the local cache. Empty for
    "bytes", and if tokenizer.json is not there.
    """
    path, folder = Path(name_or_path), tokenizer_folder(name_or_path)
    if folder is None:
        return {} if name_or_path == ByteTokenizer.name else _cached_files(name_or_path)
    names = TOKENIZER_FILES if folder == path else _BESIDE
    found = {name: folder / name for name in names if (folder / name).is_file()}
    found |= {f"{TEMPLATES}/{file.name}": file for file in sorted((folder / TEMPLATES).glob("*.jinja"))}
    return found if folder == path else found | {TOKENIZER_FILE: path}


def _cached_files(name: str) -> dict[str, Path]:
    """Return the files of a name on the hub that the local cache has; empty without a tokenizer.json."""
    if not _HUB_NAME.fullmatch(name):
        return {}
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = {file: try_to_load_from_cache(name, file) for file in TOKENIZER_FILES}
    except ValueError:  # a path that is no longer there, whose name the hub does not allow
        return {}
    found = {file: Path(path) for file, path in cached.items() if isinstance(path, str)}
    return found if TOKENIZER_FILE in found else {}


def load_huggingface_tokenizer(name_or_path: str) -> HuggingFaceTokenizer:
    """Return the tokenizer of a file, a directory or a hub name.

    Raises:
        UserError: There is no such file, directory or name, the hub cannot be reached, or a file cannot be read.
    """
    path = Path(name_or_path)
    if path.is_dir() and not (path / TOKENIZER_FILE).is_file():
        others = other_files(path)
        raise UserError(
            f"no {TOKENIZER_FILE} in tokenizer directory '{path}'{', which has ' * bool(others)}{', '.join(others)}\n"
            f"allowed: a directory with {TOKENIZER_FILE}\n"
            + (
                'fix: let transformers write it: python -c "from transformers import AutoTokenizer as T; '
                f"T.from_pretrained('{path}').save_pretrained('{path}')\"; or give the directory of the same tokenizer "
                f"with {TOKENIZER_FILE}"
                if others
                else "fix: write it with the tokenizers package: Tokenizer.save('tokenizer.json')"
            )
        )
    if path.exists():
        files = tokenizer_files(name_or_path)
        if TOKENIZER_FILE not in files:  # a pipe or a device
            raise UserError(
                f"tokenizer '{path}' is no file\nfix: give a {TOKENIZER_FILE}, or a directory that holds one"
            )
        model = files[TOKENIZER_FILE].parent / MODEL_CONFIG
        return HuggingFaceTokenizer(
            name_or_path, read_folder(files | ({MODEL_CONFIG: model} if model.is_file() else {}))
        )
    looks_like_a_path = path.suffix == ".json" or name_or_path.startswith((".", "/", "~"))
    if looks_like_a_path or not _HUB_NAME.fullmatch(name_or_path):
        raise UserError(
            f"no tokenizer at '{name_or_path}'\n"
            f"allowed: 'bytes', a {TOKENIZER_FILE}, a directory with one, or a name on the Hugging Face hub\n"
            "fix: correct the path or the name"
        )
    if difflib.get_close_matches(name_or_path, ["bytes"], n=1):
        raise unknown("tokenizer", name_or_path, ["bytes", TOKENIZER_FILE, "a Hugging Face name"])
    return load_from_hub(name_or_path)


def load_from_hub(name: str, hub: Any = None) -> HuggingFaceTokenizer:
    """Load a tokenizer from the local cache of the Hugging Face hub, or fetch it into the cache.

    Args:
        name: Name on the hub.
        hub: The package huggingface_hub, or what stands in for it.

    Raises:
        UserError: There is no such tokenizer, or the hub cannot be reached.
    """
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    hub = hub or huggingface_hub

    def fetch(file: str) -> Path:
        cached = hub.try_to_load_from_cache(name, file)
        if isinstance(cached, str):
            return Path(cached)
        try:  # first a single request: without network, hf_hub_download retries for half a minute
            hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(name, file))
        except (HfHubHTTPError, ValueError):
            raise
        except Exception as error:  # errors of the HTTP package, which depends on the version of huggingface_hub
            raise LocalEntryNotFoundError(f"it cannot be reached: {first_line(error)}") from error
        return Path(hub.hf_hub_download(name, file))

    try:
        with _quiet("huggingface_hub"):
            files = {TOKENIZER_FILE: fetch(TOKENIZER_FILE)}
            for file in (*_BESIDE, MODEL_CONFIG):
                with contextlib.suppress(EntryNotFoundError):  # many tokenizers have some of them only
                    files[file] = fetch(file)
    except (OSError, ValueError) as error:  # base classes of the package's errors
        raise UserError(
            f"no file or directory '{name}', and no tokenizer from the Hugging Face hub: {first_line(error)}\n"
            f"fix: correct the path or the name; without a network, give 'bytes', a {TOKENIZER_FILE} or a directory "
            "with one"
        ) from error
    return HuggingFaceTokenizer(name, read_folder(files))


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Silence a package's log of retries: the error that follows describes the problem."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _valid(text: str) -> str:
    """Return the text with "?" for unpaired surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()
