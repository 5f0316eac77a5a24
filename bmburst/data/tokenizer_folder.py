"""Reads the files of a tokenizer's folder as transformers' AutoTokenizer does: tokens, special tokens, chat templates.

A folder whose tokenizer.json is used as it stands (class TokenizersBackend of transformers) is read here, without
transformers. For another class, which builds the tokenizer from the vocabulary and by its own rules, transformers reads
the folder.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bmburst.config import read_json
from bmburst.config.git_lfs import require_content
from bmburst.data.chat_templates import template_text
from bmburst.errors import UserError, first_line

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
CHAT_TEMPLATE = "chat_template.jinja"
TEMPLATES = "additional_chat_templates"
"""Folder of further chat templates, a file each."""
MODEL_CONFIG = "config.json"
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
PLAIN_CLASSES = (None, "PreTrainedTokenizerFast", "TokenizersBackend")
"""Values of `tokenizer_class` for which transformers uses tokenizer.json as it stands."""
_ADDED, _SPECIAL = "tokens of the vocabulary", "special tokens of the vocabulary"
_TEXT, _NONE = "the chat template", "no effect beside tokenizer.json"
TOKENIZER_CONFIG_KEYS = {
    "added_tokens_decoder": _ADDED,
    **dict.fromkeys((*NAMED_TOKENS, "additional_special_tokens", "extra_special_tokens"), _SPECIAL),
    "model_specific_special_tokens": _SPECIAL,
    "chat_template": _TEXT,
    "split_special_tokens": "prompts: special tokens in a text are cut like other text",
    "tokenizer_class": "the class; transformers reads the folder, if it is not one of PLAIN_CLASSES",
    **dict.fromkeys(("add_bos_token", "add_eos_token", "add_prefix_space", "legacy", "do_lower_case"), _NONE),
    **dict.fromkeys(("sp_model_kwargs", "errors", "vocab_file", "merges_file", "tokenizer_file", "from_slow"), _NONE),
    **dict.fromkeys(("name_or_path", "special_tokens_map_file", "is_local", "local_files_only", "backend"), _NONE),
    **dict.fromkeys(("use_default_system_prompt", "processor_class", "device_map", "use_fast"), _NONE),
    **dict.fromkeys(("response_template", "response_schema", "chat_control_tokens", "model_input_names"), _NONE),
    **dict.fromkeys(
        ("model_max_length", "max_len", "max_length", "truncation_side", "truncation_strategy"), "no effect"
    ),
    **dict.fromkeys(("stride", "padding_side", "pad_to_multiple_of", "pad_token_type_id"), "no effect"),
    **dict.fromkeys(
        ("clean_up_tokenization_spaces", "spaces_between_special_tokens"), "no effect: no space is removed"
    ),
}
"""Keys of tokenizer_config.json: what is done with them. A string of another key that ends in "_token" is a special
token. If there is any other key, transformers reads the folder.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFolder:
    """What the files of a tokenizer say.

    Attributes:
        tokenizer: The `tokenizers.Tokenizer` with all tokens.
        special_tokens: Special tokens by name, "eos_token" and others; variables of the chat template.
        chat_template: The template, or templates by name; None without one.
        split_special_tokens: Whether special tokens in a prompt are cut like other text.
    """

    tokenizer: Any
    special_tokens: dict[str, str] = field(default_factory=dict)
    chat_template: str | dict[str, str] | None = None
    split_special_tokens: bool = False


def read_folder(files: Mapping[str, Path]) -> TokenizerFolder:
    """Read a tokenizer.

    Args:
        files: Paths by their names in the folder; tokenizer.json is there.

    Raises:
        UserError: A file cannot be read, or transformers must read the folder and is not installed, or refuses it.
    """
    config, model = ({} if name not in files else read_json(files[name]) for name in (TOKENIZER_CONFIG, MODEL_CONFIG))
    kind = config.get("tokenizer_class") or model.get("tokenizer_class")
    unknown = [key for key in config if key not in TOKENIZER_CONFIG_KEYS and not _is_token(key, config[key])]
    if kind in PLAIN_CLASSES and not unknown:
        return _plain(files, config)
    return _by_transformers(files, f"the key '{unknown[0]}'" if unknown else f"the class {kind}")


def kept_files(files: Mapping[str, Path], chat_template: Path | None = None) -> dict[str, bytes]:
    """Return the contents of a tokenizer's files, without folders: tokenizer_config.json has several chat templates.

    Args:
        files: Paths by their names in the folder.
        chat_template: A file, or a name of `bmburst.data.chat_templates`, that replaces all of the tokenizer.

    Raises:
        OSError: A file cannot be read.
        UserError: tokenizer_config.json is not valid.
    """
    further = [name for name in files if name.startswith(f"{TEMPLATES}/")]
    kept = {name: path.read_bytes() for name, path in files.items() if name not in further}
    if chat_template is not None:
        return kept | {CHAT_TEMPLATE: template_text(chat_template).encode()}
    if further:
        config = read_json(files[TOKENIZER_CONFIG]) if TOKENIZER_CONFIG in files else {}
        templates = _templates(files, config)
        assert isinstance(templates, dict)
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
        kept[TOKENIZER_CONFIG] = (json.dumps(config, indent=2) + "\n").encode()
        kept.pop(CHAT_TEMPLATE, None)
    return kept


def require_tokenizer(file: Path) -> Any:
    """Return the `tokenizers.Tokenizer` of a tokenizer.json; UserError for another file, or a pointer of Git LFS."""
    from tokenizers import Tokenizer

    require_content(file)
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises bare Exception for every problem with the file
        raise UserError(
            f"cannot read tokenizer '{file}': {first_line(error)}\n"
            "fix: give 'bytes', or the tokenizer.json of a Hugging Face tokenizer"
        ) from error


def _plain(files: Mapping[str, Path], config: dict[str, Any]) -> TokenizerFolder:
    """Read a folder by the rules of transformers' TokenizersBackend."""
    tokenizer = require_tokenizer(files[TOKENIZER_FILE])
    try:
        tokens = _Tokens(config)
        if "added_tokens_decoder" in config:
            tokens.add({int(at): _token(each) for at, each in config["added_tokens_decoder"].items()})
        else:  # these two files are older than added_tokens_decoder, and are not read beside it
            if SPECIAL_TOKENS in files:
                tokens.replace(read_json(files[SPECIAL_TOKENS]))
            if ADDED_TOKENS in files:
                tokens.add({at: tokens.of_text(text) for text, at in read_json(files[ADDED_TOKENS]).items()})
            tokens.add(tokenizer.get_added_tokens_decoder())
        if new := tokens.missing(tokenizer.get_added_tokens_decoder()):
            tokenizer.add_tokens(new)
        named = {name: str(token) for name, token in tokens.named().items()}
    except UserError:  # a file that is not JSON
        raise
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        folder = files[TOKENIZER_FILE].parent
        raise UserError(
            f"{folder}: cannot read the special tokens of the tokenizer: {first_line(error)}\n"
            f"allowed: texts, or objects with their content, in {TOKENIZER_CONFIG}, {SPECIAL_TOKENS}, {ADDED_TOKENS}\n"
            "fix: copy the directory again"
        ) from error
    return TokenizerFolder(
        tokenizer=tokenizer,
        special_tokens=named,
        chat_template=_templates(files, config),
        split_special_tokens=bool(config.get("split_special_tokens")),
    )


class _Tokens:
    """Special and added tokens of a folder, as `from_pretrained` of transformers collects them.

    Args:
        config: Contents of tokenizer_config.json.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._named = {name: _token(config[name]) for name in NAMED_TOKENS if config.get(name) is not None}
        self._model: dict[str, Any] = {}
        for key, value in config.items():
            if key not in NAMED_TOKENS and _is_token(key, value):
                self._model[key] = _token(value)
        self._extra: list[Any] = []
        self._set_extra(config.get("extra_special_tokens") or config.get("additional_special_tokens"))
        self._model |= {key: _token(each) for key, each in (config.get("model_specific_special_tokens") or {}).items()}
        self._added: dict[int, Any] = {}
        self._has_extra = "extra_special_tokens" in config or "additional_special_tokens" in config

    def _set_extra(self, value: Any) -> None:
        if isinstance(value, dict):
            self._model |= {key: _token(each) for key, each in value.items()}
        elif value is not None:
            self._extra += [token for token in map(_token, value) if str(token) not in map(str, self._extra)]

    def replace(self, values: Mapping[str, Any]) -> None:
        """Take the tokens of special_tokens_map.json, which come before those of tokenizer_config.json."""
        for key, value in values.items():
            if key == "extra_special_tokens" or (key == "additional_special_tokens" and not self._has_extra):
                self._set_extra(value)
            elif key in NAMED_TOKENS and value is not None:
                token = {**value, "special": True} if isinstance(value, dict) else value
                self._named[key] = _token(token)
            elif _is_token(key, value):
                self._model[key] = _token(value)

    def of_text(self, text: str) -> Any:
        """Return the token of an entry of added_tokens.json; special if it is named in another file."""
        from tokenizers import AddedToken

        special = text in {str(each) for each in (*self._named.values(), *self._extra)}
        return AddedToken(text, normalized=not special, special=special)

    def add(self, tokens: Mapping[int, Any]) -> None:
        """Take added tokens by their ids."""
        self._added |= tokens

    def named(self) -> dict[str, Any]:
        """Return the special tokens by name: those of transformers first, then those of the model."""
        by_text = {str(token): token for token in self._added.values()}
        ordered = {name: self._named[name] for name in NAMED_TOKENS if name in self._named}
        return {name: by_text.get(str(token), token) for name, token in ordered.items()} | self._model

    def missing(self, there: Mapping[int, Any]) -> list[Any]:
        """Return the tokens to add to a tokenizer, in order: their ids follow the vocabulary, if they are not in it.

        Args:
            there: The tokenizer's added tokens.
        """
        from tokenizers import AddedToken

        known = {repr(token) for token in there.values()}
        found = [token for _, token in sorted(self._added.items()) if repr(token) not in known]
        named = self.named()
        texts = {str(token) for token in (*there.values(), *found)}
        for token in (*named.values(), *self._extra):
            if str(token) not in texts:
                texts.add(str(token))
                found.append(AddedToken(token, special=True) if isinstance(token, str) else token)
        names = set(map(str, named.values()))
        for token in found:
            token.special = token.special or str(token) in names
        return found


def _token(value: Any) -> Any:
    """Return a token as text, or as `tokenizers.AddedToken` where its settings are given."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is not a token")
    from tokenizers import AddedToken

    return AddedToken(**{key: each for key, each in value.items() if key != "__type"})


def _is_token(key: str, value: Any) -> bool:
    return key.endswith("_token") and (isinstance(value, str) or (isinstance(value, dict) and "content" in value))


def _templates(files: Mapping[str, Path], config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the chat template: that of files before that of tokenizer_config.json; several by their names."""
    found = {}
    for name, path in files.items():
        if name == CHAT_TEMPLATE:
            found["default"] = _read(path)
        elif name.startswith(f"{TEMPLATES}/"):
            found[Path(name).stem] = _read(path)
    if found:
        return found["default"] if set(found) == {"default"} else found
    template = config.get("chat_template")
    if isinstance(template, list):
        try:
            return {str(each["name"]): str(each["template"]) for each in template}
        except (TypeError, KeyError):
            template = {}
    if template is not None and not isinstance(template, str | dict):
        template = {}
    if template == {}:
        raise UserError(
            f"{files[TOKENIZER_CONFIG]}: chat_template is neither a text nor templates with their names\n"
            'allowed: "...", or [{"name": "default", "template": "..."}, ...]\nfix: copy the file again'
        )
    return template


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text at byte {error.start}\nfix: copy the file again") from None


def _by_transformers(files: Mapping[str, Path], reason: str) -> TokenizerFolder:
    """Read a folder with AutoTokenizer, without running code of the folder."""
    where = files[TOKENIZER_FILE].parent
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UserError(
            f"{where}: {reason} in {TOKENIZER_CONFIG} needs transformers, and importing it failed\n"
            f"allowed without it: tokenizer_class {PLAIN_CLASSES[1]}, which uses {TOKENIZER_FILE} as it stands\n"
            "fix: pip install 'bmburst[hugging-face]'"
        ) from error
    with tempfile.TemporaryDirectory(prefix="bmburst-tokenizer-") as folder:
        for name, path in files.items():
            link = Path(folder, name)
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(path.resolve())
        try:
            found = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
            tokenizer = found.backend_tokenizer
        except Exception as error:  # OSError, JSON errors, a bare Exception of tokenizers, or AttributeError
            raise UserError(
                f"{where}: transformers cannot read the tokenizer, because of {reason}: {first_line(error)}\n"
                f"allowed: a tokenizer that AutoTokenizer reads with the package tokenizers and without own code\n"
                f'fix: to use {TOKENIZER_FILE} as it stands, write "tokenizer_class": "{PLAIN_CLASSES[1]}" and remove '
                f"auto_map and other keys in {TOKENIZER_CONFIG}"
            ) from error
    return TokenizerFolder(
        tokenizer=tokenizer,
        special_tokens=dict(found.special_tokens_map),
        chat_template=found.chat_template,
        split_special_tokens=bool(found.split_special_tokens),
    )
