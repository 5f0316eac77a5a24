"""Reads fine-tuning records: conversations, prompts with completions, preference pairs, texts."""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bmburst.data.documents import KINDS, first_row, rows
from bmburst.data.sources import SourceFile, unreadable
from bmburst.errors import UserError

_KEYS = (
    *({"messages"}, {"conversations"}, {"prompt", "completion"}, {"instruction", "output"}),
    *({"chosen"}, {"rejected"}),
)
"""Keys that distinguish a record from a line of text."""
PAIRS = (
    '{"prompt": "...", "chosen": "...", "rejected": "..."}, each as text or as a list of messages; '
    "without prompt, it is what both answers begin with"
)
_SHOWN, _MOST_LINES = 5, 1_000_000  # malformed lines that a message names; lines that are searched for them
_ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    **{"human": "user", "gpt": "assistant", "observation": "tool"},
}
"""Roles of messages, by their names in ShareGPT's records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One record: messages, or a prompt and a completion as text, or a text.

    Attributes:
        name: Its origin for error messages, "chats.jsonl:3".
        messages: Messages of a conversation, each with its role; None for text.
        answers_from: Index of the first message that can be an answer; earlier ones have no loss, whatever their role.
        prompt: Text before the completion; None for a text alone.
        text: The completion or the text; None for a conversation.
        tools: Variable `tools` of the chat template.
        template_options: Further variables of the chat template.
    """

    name: str
    messages: tuple[dict[str, Any], ...] | None = None
    answers_from: int = 0
    prompt: str | None = None
    text: str | None = None
    tools: list[Any] | None = None
    template_options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt; the first is preferred.

    Attributes:
        chosen: The prompt with the preferred answer.
        rejected: The prompt with the other one.
    """

    chosen: Record
    rejected: Record

    @property
    def name(self) -> str:
        """Its origin for error messages, "pairs.jsonl:3"."""
        return self.chosen.name


def hold_records(files: Sequence[SourceFile], text_field: str = "text") -> bool:
    """Return whether files contain records, judged by the keys of the first line of the first file that is not text.

    Lines with the text field are text.

    Raises:
        UserError: That line is not valid JSON.
        OSError: The file cannot be read.
    """
    for file in files:
        if file.kind == "text":
            continue
        for _, value in first_row(file):
            keys = set(value) if isinstance(value, dict) else set()
            return text_field not in keys and any(known <= keys for known in _KEYS)
    return False


def read_records(
    files: Sequence[SourceFile], *, text_field: str = "text", on_read: Callable[[int], object] = lambda _: None
) -> Iterator[Record | Pair]:
    """Yield the records of files in order, one line in memory at a time; either all are preference pairs, or none is.

    Args:
        files: From `find_sources`; none is plain text.
        text_field: Key of the text in a line.
        on_read: Called with the number of bytes of each read.

    Raises:
        UserError: A file cannot be read, a line is malformed or has no known key, or pairs are mixed with other
            records; the message names file and line, and further malformed lines of the file.
    """
    first: Record | Pair | None = None
    for file in files:
        if file.kind == "text":
            raise UserError(
                f"'{file.name}' is plain text beside records\nallowed: JSONL files and data sets of records\n"
                "fix: leave it out, or make a mixture of both: docs/fine_tuning_data.md"
            )
        try:
            lines = rows(file, on_read)
            for name, value in lines:
                try:
                    record = _record(name, value, text_field)
                except UserError as error:
                    raise _with_others(error, lines, text_field) from None
                first = first or record
                if isinstance(record, Pair) != isinstance(first, Pair):
                    is_pair, other = ("a", "none") if isinstance(record, Pair) else ("no", "one")
                    raise UserError(
                        f"{name}: the line is {is_pair} preference pair, and {first.name} is {other}\n"
                        "allowed: only pairs, or none, in the files of one source\nfix: keep them in files of their own"
                    )
                yield record
        except OSError as error:
            raise unreadable(file.name, error) from error


def _with_others(error: UserError, rest: Iterator[tuple[str, Any]], text_field: str) -> UserError:
    """Return the error of a line with the names of the malformed lines after it, so that all can be corrected at once.

    Args:
        error: The error.
        rest: The lines after it.
        text_field: See `read_records`.
    """
    names = []
    with contextlib.suppress(UserError):  # a line that is not JSON ends the search
        for name, value in itertools.islice(rest, _MOST_LINES):
            try:
                _record(name, value, text_field)
            except UserError:
                names.append(name)
    if not names:
        return error
    first, *fix = str(error).split("\n")
    lines = "1 further line is" if len(names) == 1 else f"{len(names):,} further lines are"
    shown = ", ".join(names[:_SHOWN]) + ", ..." * (len(names) > _SHOWN)
    return UserError("\n".join([f"{first}; {lines} malformed: {shown}", *fix]))


def _record(name: str, value: Any, text_field: str) -> Record | Pair:
    if not isinstance(value, dict):
        raise UserError(f"{name}: the line is not a JSON object: {_short(value)}\nallowed: {KINDS}\nfix: correct it")
    tools, options = value.get("tools"), value.get("chat_template_kwargs") or {}
    if isinstance(tools, str) and tools:  # data sets store tools as JSON, since a column has one type
        try:
            tools = json.loads(tools)
        except ValueError:
            raise _wrong(name, "tools", tools, "a list of tools, or its JSON") from None
    if tools and not isinstance(tools, list):
        raise _wrong(name, "tools", tools, "a list of tools")
    if not isinstance(options, dict):
        raise _wrong(name, "chat_template_kwargs", options, "an object of variables")
    if {"chosen", "rejected"} & set(value):
        return _pair(name, value, tools or None, options)
    if (messages := _conversation(name, value)) is not None:
        return Record(name=name, messages=messages, tools=tools or None, template_options=options)
    if {"prompt", "completion"} <= set(value):
        return _answered(name, value, "completion", tools or None, options)
    if text_field in value:
        text = value[text_field]
        if not isinstance(text, str):
            raise _wrong(name, text_field, text, "text")
        if not text:
            raise _empty(name, text_field)
        return Record(name=name, text=text)
    keys = ", ".join(map(repr, list(value)[:10])) or "none"
    raise UserError(
        f"{name}: no known key, the line has {keys}\nallowed: {KINDS}; pairs: {PAIRS}\n"
        "fix: rename the keys of that line"
    )


def _conversation(name: str, value: dict[str, Any]) -> tuple[dict[str, Any], ...] | None:
    """Return the messages of a line with `messages` or the keys of ShareGPT or Alpaca; None if it has none of them."""
    if "messages" in value:
        return _messages(name, "messages", value["messages"])
    if "conversations" in value:
        turns = value["conversations"]
        if isinstance(turns, list):
            turns = [_turn(name, number, turn) for number, turn in enumerate(turns, 1)]
        return _system(name, value) + _messages(name, "conversations", turns)
    if {"instruction", "output"} <= set(value):
        return _system(name, value) + _instructed(name, value)
    return None


def _turn(name: str, number: int, turn: Any) -> Any:
    """Convert a turn of ShareGPT, {"from": "human", "value": "..."}, to a message with role and content."""
    if not isinstance(turn, dict) or "from" not in turn:
        return turn
    if not isinstance(turn["from"], str) or turn["from"] not in _ROLES:
        raise _wrong(name, f"conversations: from of message {number}", turn["from"], ", ".join(_ROLES))
    return {"role": _ROLES[turn["from"]], "content": turn.get("value")}


def _system(name: str, value: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the system message of the key `system`; empty without text."""
    text = value.get("system") or ""
    if not isinstance(text, str):
        raise _wrong(name, "system", text, "text")
    return ({"role": "system", "content": text},) if text else ()


def _instructed(name: str, value: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the messages of a line of Alpaca. Instruction and input form one message, as in LLaMA-Factory."""
    given = {key: value.get(key) or "" for key in ("instruction", "input", "output")}
    for key, text in given.items():
        if not isinstance(text, str):
            raise _wrong(name, key, text, "text")
    history = value.get("history") or []
    if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise _wrong(name, "history", history, 'a list of ["question", "answer"]')
    asked = "\n".join(given[key] for key in ("instruction", "input") if given[key])
    turns = [text for turn in history for text in turn] + [asked, given["output"]]
    return _messages(
        name,
        "history, instruction and output",
        [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(turns)],
    )


def _answered(name: str, value: Any, key: str, tools: list[Any] | None, options: dict[str, Any]) -> Record:
    """Return a record of the line's prompt and the answer of `key`: both text, or both lists of messages."""
    prompt, answer = value["prompt"], value[key]
    if isinstance(prompt, list) and isinstance(answer, list):
        before = _messages(name, "prompt", prompt)
        both = before + _messages(name, key, answer)
        return Record(name=name, messages=both, answers_from=len(before), tools=tools, template_options=options)
    for each, text in (("prompt", prompt), (key, answer)):
        if not isinstance(text, str):
            raise _wrong(name, each, text, "text, or in both a list of messages")
    if not answer:
        raise _empty(name, key if key == "completion" else f"{key} answer")
    return Record(name=name, prompt=prompt, text=answer)


def _pair(name: str, value: dict[str, Any], tools: list[Any] | None, options: dict[str, Any]) -> Pair:
    for key in ("chosen", "rejected"):
        if key not in value:
            raise UserError(f"{name}: the preference pair has no {key}\nallowed: {PAIRS}\nfix: add it to that line")
    if value["chosen"] == value["rejected"]:
        raise UserError(
            f"{name}: chosen and rejected are equal: {_short(value['chosen'])}\n"
            "allowed: two different answers\nfix: correct that line, or remove it"
        )
    prompt, are_lists = value.get("prompt"), all(isinstance(value[key], list) for key in ("chosen", "rejected"))
    # Some data sets repeat the question as text beside conversations that contain it.
    if prompt is None or (isinstance(prompt, str) and are_lists):
        value = _split(name, value["chosen"], value["rejected"])
    return Pair(*(_answered(name, value, key, tools, options) for key in ("chosen", "rejected")))


def _split(name: str, chosen: Any, rejected: Any) -> dict[str, Any]:
    """Return a pair with its prompt: what both answers begin with, as `extract_prompt` of TRL finds it.

    For messages, these are the first messages up to the first that differs; for text, the characters, without a space
    at the end. If one answer continues the other, the last message or character of the shorter one is an answer.
    """
    if isinstance(chosen, list) and isinstance(rejected, list):
        for key, messages in (("chosen", chosen), ("rejected", rejected)):
            _messages(name, key, messages)
        what = "message"
    elif isinstance(chosen, str) and isinstance(rejected, str):
        what = "text"
    else:
        raise _wrong(name, "chosen", chosen, "text, or in both answers a list of messages")
    most = min(len(chosen), len(rejected)) - 1
    end = next((at for at in range(most) if chosen[at] != rejected[at]), max(most, 0))
    if chosen[end - 1 : end] == " ":
        end -= 1
    if not end:
        raise UserError(
            f"{name}: the preference pair has no prompt, and chosen and rejected do not begin with the same {what}\n"
            f"allowed: {PAIRS}\nfix: add the prompt to that line, or to both answers"
        )
    return {"prompt": chosen[:end], "chosen": chosen[end:], "rejected": rejected[end:]}


def _messages(name: str, key: str, value: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise _wrong(name, key, value, 'a list of {"role": "...", "content": "..."}, at least one')
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"]:
            raise _wrong(name, f"{key}: message {number}", message, '{"role": "user", "content": "..."}')
        content, calls = message.get("content"), message.get("tool_calls")
        if not isinstance(content, str | list) and not (content is None and calls):
            raise _wrong(name, f"{key}: content of message {number}", content, "text")
        if message["role"] == "assistant" and not content and not calls:
            raise _empty(name, f"answer in message {number}")
    # as in transformers, null values of a message are dropped before rendering
    return tuple({k: v for k, v in message.items() if v is not None} for message in value)


def _wrong(name: str, key: str, value: Any, allowed: str) -> UserError:
    return UserError(f"{name}: {key} is {_short(value)}\nallowed: {allowed}\nfix: correct that line")


def _empty(name: str, what: str) -> UserError:
    return UserError(
        f"{name}: the {what} is empty\nallowed: at least one token to learn\nfix: correct that line, or remove it"
    )


def _short(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def template_text(path: Path) -> str:
    """Return the chat template in a file.

    Raises:
        UserError: The file cannot be read, or is empty.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"chat template {path}: cannot be read: {reason}\nfix: give a file with a template") from None
    if not text.strip():
        raise UserError(f"chat template {path}: is empty\nfix: give a file with a jinja template")
    return text
