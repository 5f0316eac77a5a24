"""Encodes prompts (text, files, token ids, messages) as token ids, and writes answers as JSON lines."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bmburst.amounts import finite, require_flag
from bmburst.config.fields import shown
from bmburst.config.files import parse_json, read_bytes, unique_keys
from bmburst.data.chat import ChatTemplate
from bmburst.data.documents import SetupError, with_others
from bmburst.data.messages import Message, read_conversations, read_messages, template_variables
from bmburst.data.tokenizer import PromptTokenizer, TokenIds
from bmburst.errors import UserError, first_line

Messages = Sequence[Mapping[str, Any]]
Finish = Literal["length", "stop", "eos", "refused"]
"""Why an answer ended; see `Answer`."""
PROMPT_KEYS = {
    "prompt": "a text",
    "tokens": "token ids",
    "messages": "a conversation; a final message of the assistant is continued",
    "conversations": "a conversation of turns with from and value",
    **dict.fromkeys(("system", "tools", "chat_template_kwargs"), "beside a conversation, as in training"),
}
"""Keys of a line of prompts: what they hold. Others are refused."""
_KINDS = ("prompt", "tokens", "messages", "conversations")
_LINE = (
    'one of {"prompt": "..."}, {"tokens": [...]} and {"messages": [...]}, the last with tools and chat_template_kwargs '
    "if needed"
)
_MOST_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt of a model.

    Attributes:
        tokens: Its token ids, int64 `[tokens]`, at least one, read-only.
        source: Its origin for error messages: "--prompt" or "prompts.jsonl:3".
    """

    tokens: TokenIds
    source: str

    def __len__(self) -> int:
        return len(self.tokens)


class PromptEncoder:
    """Checks a user's prompts and encodes them as token ids.

    Args:
        tokenizer: The model's tokenizer; None: only token ids are accepted. Its chat template is read on first use.
        vocab_size: Token ids must be less than this.
        chat: Whether a text is a user message to which the chat template is applied.

    Raises:
        UserError: `chat` is not a bool, or true without a tokenizer or chat template.
    """

    def __init__(self, tokenizer: PromptTokenizer | None, vocab_size: int, *, chat: bool = False) -> None:
        self._tokenizer, self._vocab_size, self._chat = tokenizer, vocab_size, chat
        require_flag("chat", chat)
        self._loaded: ChatTemplate | None = None
        if chat:
            self._loaded = self._template("chat")

    def encode(self, value: str | Sequence[int] | TokenIds | Messages | Mapping[str, Any], source: str) -> Prompt:
        """Return the prompt of a text, of token ids, of messages, or of a line of a file of prompts (`PROMPT_KEYS`).

        Raises:
            UserError: It is empty, has another type, or `text`, `ids`, `messages` or `line` rejects it.
        """
        if isinstance(value, Mapping):
            return self.line(value, source)
        if isinstance(value, str):
            return self.text(value, source)
        if isinstance(value, Sequence) and value and all(isinstance(each, Mapping) for each in value):
            return self.messages(value, source)
        return self.ids(value, source)

    def text(self, text: Any, source: str) -> Prompt:
        """Return the prompt of a text, with the special tokens that the tokenizer adds.

        Raises:
            UserError: It is empty or not text, or there is no tokenizer.
        """
        if not isinstance(text, str):
            raise UserError(f"{source}: prompt {shown(text)}\nallowed: text, not empty\nfix: give the prompt as text")
        if not text:
            raise UserError(f"{source}: the prompt is empty\nallowed: at least one token\nfix: give some text")
        if self._chat:
            return self.messages([{"role": "user", "content": text}], source)
        return self._encoded(self._require_tokenizer(source, "a prompt as text"), text, source)

    def ids(self, ids: Any, source: str) -> Prompt:
        """Return the prompt of token ids.

        Raises:
            UserError: They are not a list of integers, the list is empty, or an id is not in the vocabulary.
        """
        if (wrong := _not_ids(ids)) is not None:
            raise UserError(
                f"{source}: tokens {wrong}\nallowed: a list of integers from 0 to {self._vocab_size - 1}\n"
                "fix: give token ids, or a prompt"
            )
        outside = next((int(each) for each in ids if not 0 <= each < self._vocab_size), None)
        if outside is not None:
            raise self._outside(outside, source)
        return self._checked(np.asarray(ids, np.int64), source)

    def line(self, line: Any, source: str) -> Prompt:
        """Return the prompt of a line, an object of one prompt, token ids or a conversation.

        A conversation is read as in training: with `tools`, `chat_template_kwargs` and `system`, without null values.

        Raises:
            UserError: It has none of them or several, an unknown key, or a value that is rejected.
        """
        if isinstance(line, UserError):  # it is not valid JSON
            raise line
        kinds = [kind for kind in _KINDS if isinstance(line, Mapping) and kind in line]
        alone = len(kinds) == 1 and line.keys() <= (set(PROMPT_KEYS) - set(_KINDS)) | set(kinds)
        if not alone or (kinds[0] in ("prompt", "tokens") and len(line) > 1):
            what = f"the keys {', '.join(map(shown, line)) or 'none'}" if isinstance(line, Mapping) else shown(line)
            raise UserError(f"{source} holds {what}\nallowed: exactly {_LINE}\nfix: correct that line")
        if kinds[0] == "prompt":
            return self.text(line["prompt"], source)
        if kinds[0] == "tokens":
            return self.ids(line["tokens"], source)
        tools, options = template_variables(source, line)
        messages = read_conversations(source, line, is_prompt=True)
        if messages is None:
            raise UserError(
                f"{source}: {kinds[0]} null\nallowed: a list of messages, at least one\nfix: correct that line"
            )
        return self._conversation(messages, tools, options, source)

    def messages(self, messages: Any, source: str) -> Prompt:
        """Return the prompt of messages, `[{"role": "user", "content": "..."}, ...]`, by the chat template.

        The template writes all special tokens, including the first. The tokenizer adds none. If the last message is of
        the assistant, the prompt ends where its text ends, so that the model continues it.

        Raises:
            UserError: They are not such a list, there is no tokenizer or chat template, or the template rejects them.
        """
        return self._conversation(read_messages(source, "messages", messages, is_prompt=True), None, {}, source)

    def _conversation(
        self, messages: tuple[Message, ...], tools: list[Any] | None, options: dict[str, Any], source: str
    ) -> Prompt:
        tokenizer = self._require_tokenizer(source, "messages")
        if self._loaded is None:
            self._loaded = self._template(source)
        text = self._loaded.prompt(source, messages, tools, options)
        return self._encoded(tokenizer, text, source, add_special_tokens=False)

    def _encoded(
        self, tokenizer: PromptTokenizer, text: str, source: str, *, add_special_tokens: bool = True
    ) -> Prompt:
        try:
            ids = tokenizer.encode_prompt(text, add_special_tokens=add_special_tokens)
        except UserError as error:
            raise UserError(f"{source}: {error}") from error
        return self._checked(ids, source)

    def _template(self, source: str) -> ChatTemplate:
        tokenizer = self._require_tokenizer(source, "a chat template")
        try:
            return ChatTemplate(tokenizer)
        except UserError as error:
            raise SetupError(f"{source}: {error}") from None

    def _require_tokenizer(self, source: str, what: str) -> PromptTokenizer:
        if self._tokenizer is None:
            raise SetupError(
                f"{source}: {what} needs a tokenizer, and the model comes without one\n"
                'allowed: {"tokens": [...]}\nfix: give token ids, add tokenizer.json to the directory, or use '
                "bmburst generate --tokenizer NAME"
            )
        return self._tokenizer

    def _checked(self, ids: TokenIds, source: str) -> Prompt:
        if not len(ids):
            raise UserError(f"{source}: the prompt has no tokens\nallowed: at least one\nfix: give another prompt")
        if ids.max() >= self._vocab_size:
            raise self._outside(int(ids.max()), source)
        ids = ids.copy()
        ids.flags.writeable = False
        return Prompt(ids, source)

    def _outside(self, token: int, source: str) -> UserError:
        return UserError(
            f"{source}: token id {shown(token)} is not in the vocabulary\n"
            f"allowed: 0 to {self._vocab_size - 1}\nfix: the tokenizer that belongs to the model"
        )


def require_list(prompts: Any) -> None:
    """Raise UserError unless prompts are a list or array of one or more."""
    is_array = isinstance(prompts, np.ndarray) and prompts.ndim > 0
    if isinstance(prompts, str | bytes) or not (is_array or isinstance(prompts, Sequence)):
        reason = f"prompts is {'one text' if isinstance(prompts, str) else f'of type {type(prompts).__name__}'}"
    elif len(prompts):
        return
    else:
        reason = "no prompt"
    raise UserError(f"{reason}\nallowed: a list of prompts, at least one\nfix: give a list, ['Once upon a time']")


def read_prompts(
    encoder: PromptEncoder, *, prompt: str | None = None, prompt_file: Path | None = None, prompts: Path | None = None
) -> list[Prompt]:
    """Return the prompts of `--prompt`, `--prompt-file` or `--prompts`, at least one.

    Args:
        encoder: Encodes them.
        prompt: The text of one prompt.
        prompt_file: A UTF-8 file whose whole content is one prompt.
        prompts: A JSON Lines file; each object is a prompt, tokens or messages. Empty lines are skipped.

    Raises:
        UserError: Not exactly one of them is given, a file cannot be read, or a prompt is rejected; the message names
            the line, and further bad lines.
    """
    given = [
        name
        for name, value in (("--prompt", prompt), ("--prompt-file", prompt_file), ("--prompts", prompts))
        if value is not None
    ]
    if len(given) != 1:
        raise UserError(
            f"{' and '.join(given) or 'no prompt'} given\nallowed: exactly one of --prompt, --prompt-file, --prompts\n"
            f"fix: {'keep one' if given else '--prompt TEXT'}"
        )
    if prompt is not None:
        return [encoder.text(prompt, "--prompt")]
    if prompt_file is not None:
        try:
            text = _read(prompt_file).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{prompt_file}: not UTF-8 text at byte {error.start}\nallowed: UTF-8\nfix: save it as UTF-8"
            ) from None
        return [encoder.text(text, str(prompt_file))]
    assert prompts is not None
    found, lines = [], _lines(prompts)
    for source, values in lines:
        try:
            found.append(encoder.line(values, source))
        except UserError as error:
            raise with_others(error, lines, lambda name, value: encoder.line(value, name)) from error
    if not found:
        raise UserError(f"{prompts} holds no prompt\nallowed: a line each, {_LINE}\nfix: write at least one line")
    return found


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each line; of one that is not JSON, its UserError."""
    for number, line in enumerate(_read(path).split(b"\n"), 1):
        if not line.strip(b" \t\r\n\xef\xbb\xbf"):
            continue
        source = f"{path}:{number}"
        try:
            yield source, parse_json(line, finite=True, pairs=unique_keys)
        except ValueError as error:
            reason = first_line(error)
            yield source, UserError(f"{source} {reason}\nallowed: {_LINE}\nfix: correct that line")


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path, _MOST_BYTES)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read: {error.strerror}\nallowed: a file\nfix: give the path of a file you may read"
        ) from None


def _not_ids(ids: object) -> str | None:
    """Return why `ids` is not a list of integers, as text; None if it is one."""
    if isinstance(ids, np.ndarray):
        is_one = ids.ndim == 1 and np.issubdtype(ids.dtype, np.integer)
        return None if is_one else f"of shape {list(ids.shape)} and dtype {ids.dtype}"
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        return shown(ids)
    wrong = (each for each in ids if isinstance(each, bool) or not isinstance(each, int | np.integer))
    return next((f"hold {shown(each)}" for each in wrong), None)


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a new token, before penalty and temperature.

    Attributes:
        token: The token id.
        logprob: Its log-probability.
        top: The requested number of most probable tokens, each with its log-probability.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer to a prompt.

    Attributes:
        prompt_tokens: Length of the prompt.
        tokens: The new token ids.
        text: Their text up to the stop string; None without a tokenizer and for a refused prompt.
        finish: Why it ends: `max_new_tokens` reached, a stop string, an end-of-text token, or the prompt was refused.
        reason: Why the prompt was refused; None unless it was.
        first_token_seconds: Time from the start of prefill to the first token; None if there was none.
        seconds_per_token: Mean time of each token after the first; None if there was none.
        peak_gib: Peak memory in GiB, maximum over the ranks; None if not measured.
        logprobs: One entry per token; None unless requested.
        sample: Index among the answers to the prompt; None if there is only one.
    """

    prompt_tokens: int
    tokens: tuple[int, ...] = ()
    text: str | None = None
    finish: Finish
    reason: str | None = None
    first_token_seconds: float | None = None
    seconds_per_token: float | None = None
    peak_gib: float | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    sample: int | None = None

    def __post_init__(self) -> None:
        assert (self.finish == "refused") == (self.reason is not None), (self.finish, self.reason)
        assert self.logprobs is None or len(self.logprobs) == len(self.tokens)

    @classmethod
    def refused(cls, prompt: "Prompt", problem: str) -> "Answer":
        """Return the answer to a prompt that cannot be answered; `problem` can have several lines."""
        return cls(prompt_tokens=len(prompt), finish="refused", reason="; ".join(problem.splitlines()))

    def to_json(self) -> str:
        """Return the answer as one line of JSON, without a newline.

        `reason`, `logprobs` and `sample` are included only if not None. Numbers that are not finite become null.
        """
        values: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "tokens": list(self.tokens),
            "text": self.text,
            "finish": self.finish,
            "first_token_seconds": self.first_token_seconds,
            "seconds_per_token": self.seconds_per_token,
            "peak_gib": self.peak_gib,
        }
        if self.reason is not None:
            values["reason"] = self.reason
        if self.logprobs is not None:
            values["logprobs"] = [
                {**_entry(each.token, each.logprob), "top_logprobs": [_entry(*pair) for pair in each.top]}
                for each in self.logprobs
            ]
        if self.sample is not None:
            values["sample"] = self.sample
        return json.dumps(finite(values), ensure_ascii=False, allow_nan=False)


def _entry(token: int, logprob: float) -> dict[str, float]:
    return {"token": token, "logprob": logprob}
