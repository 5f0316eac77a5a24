"""Reads messages of conversations, as training and generation take them: roles, speakers, marks, tools, null values."""

import inspect
import json
import re
from collections.abc import Mapping
from typing import Any

from bmburst.errors import UserError

Message = dict[str, Any]
SPEAKERS = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bing", "bard", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
"""Roles of the speakers in `from` of a turn, in lower case. The value of `function_call` is the JSON of its calls.

`human`, `gpt`, `observation` and `function_call` are those of LLaMA-Factory; `user`, `assistant`, `tool` those of
axolotl; `chatgpt`, `bing`, `bard`, `model` those of ShareGPT's dumps; `function_response` that of Glaive's and Hermes'.
"""
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that every chat template is given; another one must stand in the template."""
MARKS = ("weight", "train", "loss", "trainable", "loss_mask")
"""Keys of a message that say whether its answer is learned: 0 or false leaves it out of the loss."""
# transformers gives the template all three, if one is given
REASONING = ("reasoning_content", "reasoning", "thinking")
_NO_EFFECT = "no effect"
MESSAGE_KEYS = {
    **dict.fromkeys(("role", "content"), "rendered by the chat template"),
    **dict.fromkeys(("from", "value"), "role and content, in conversations"),
    **dict.fromkeys(("tool_calls", *REASONING), "rendered; refused if the chat template does not read it"),
    **dict.fromkeys(("name", "tool_call_id"), "given to the chat template; no effect if it does not read it"),
    **dict.fromkeys(MARKS, "0 or false: the message is left out of the loss"),
    **dict.fromkeys(
        ("id", "idx", "uuid", "message_id", "parent_id", "timestamp", "date", "create_time", "lang", "language"),
        _NO_EFFECT,
    ),
}
"""Keys of a message: what is done with them. Any other key must be read by the chat template, or is refused."""
_MUST_BE_READ = frozenset({"tool_calls", *REASONING})


def template_variables(name: str, value: Mapping[str, Any]) -> tuple[list[Any] | None, dict[str, Any]]:
    """Return the tools and the further variables of the chat template that a line gives.

    Args:
        name: Origin of the line for error messages.
        value: The line, with the optional keys `tools` and `chat_template_kwargs`.

    Raises:
        UserError: Their types are others, or a variable is an argument of `apply_chat_template` of another meaning.
    """
    tools, options = value.get("tools"), value.get("chat_template_kwargs") or {}
    if isinstance(tools, str) and tools:  # data sets store tools as JSON, since a column has one type
        try:
            tools = json.loads(tools)
        except ValueError:
            raise wrong(name, "tools", tools, "a list of tools, or its JSON") from None
    if tools and (not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools)):
        raise wrong(name, "tools", tools, "a list of tools, or its JSON")
    if not isinstance(options, dict):
        raise wrong(name, "chat_template_kwargs", options, "an object of variables")
    if options and (taken := sorted(options.keys() & _own_arguments())):
        raise UserError(
            f"{name}: chat_template_kwargs has '{taken[0]}', an argument of apply_chat_template\n"
            "allowed: variables that the chat template reads, for example enable_thinking, and documents\n"
            "fix: remove it from that line"
        )
    return tools or None, options


def _own_arguments() -> frozenset[str]:
    """Return the arguments of `apply_chat_template` that are not variables of the template, and `messages`."""
    try:
        from transformers import PreTrainedTokenizerBase
    except ImportError:  # without transformers, no template is rendered
        return frozenset()
    arguments = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    return arguments - {"kwargs", "documents"} | {"messages"}


def read_messages(name: str, key: str, value: Any, *, is_prompt: bool = False) -> tuple[Message, ...]:
    """Return messages of `role` and `content`, without null values, as transformers drops them before rendering.

    An empty list of `tool_calls` is dropped too: data sets and clients of servers write it for no call.

    Args:
        name: Origin of the line for error messages.
        key: Key of the messages.
        value: The list of messages.
        is_prompt: Whether they are a prompt. Then answers may be empty: they are not learned, and the last one is
            continued.

    Raises:
        UserError: They are not such a list, an answer is empty, or a mark is not known.
    """
    if not isinstance(value, list | tuple) or not value:
        raise wrong(name, key, value, 'a list of {"role": "...", "content": "..."}, at least one')
    found = []
    for number, message in enumerate(value, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not message["role"]:
            raise wrong(name, f"{key}: message {number}", message, '{"role": "user", "content": "..."}')
        content, calls = message.get("content"), message.get("tool_calls")
        if calls is not None and (not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls)):
            raise wrong(name, f"{key}: tool_calls of message {number}", calls, "a list of calls")
        if not isinstance(content, str | list) and not (content is None and calls):
            raise wrong(name, f"{key}: content of message {number}", content, "text, or null beside tool_calls")
        if isinstance(content, list):
            _require_text(name, f"{key}: content of message {number}", content)
        if message["role"] == "assistant" and not content and not calls and not is_prompt:
            raise empty(name, f"answer in message {number}")
        _require_marks(name, f"{key}: message {number}", message)
        # templates that ask whether the key is there would look for calls in an empty list
        found.append({k: v for k, v in message.items() if v is not None and (k != "tool_calls" or v)})
    return tuple(found)


def _require_text(name: str, what: str, parts: list[Any]) -> None:
    for part in parts:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise wrong(name, what, part, 'text, or parts {"type": "text", "text": "..."}')


def _require_marks(name: str, what: str, message: Mapping[str, Any]) -> None:
    given = {mark: message[mark] for mark in MARKS if message.get(mark) is not None}
    for mark, value in given.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise wrong(name, f"{what}: {mark}", value, "1 or true: learned; 0 or false: left out of the loss")
        if value and message["role"] != "assistant":
            raise wrong(
                name, f"{what} is of the role {message['role']}, and its {mark}", value, "a loss on answers only"
            )
    if len({bool(value) for value in given.values()}) > 1:
        raise wrong(name, f"{what}: {' and '.join(given)}", list(given.values()), "marks that agree")


def is_learned(message: Message) -> bool:
    """Return whether no mark leaves a message out of the loss."""
    return all(message.get(mark, 1) for mark in MARKS)


def for_template(messages: tuple[Message, ...]) -> list[Message]:
    """Return messages as the chat template gets them: without marks, and times that have no effect."""
    return [
        {
            key: value
            for key, value in message.items()
            if key not in MARKS and (MESSAGE_KEYS.get(key) != _NO_EFFECT or isinstance(value, str | int | float))
        }
        for message in messages
    ]


def with_joined_parts(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return messages whose contents are text: parts are joined by line breaks."""
    return tuple(
        {**message, "content": "\n".join(part["text"] for part in content)}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    )


def with_another_text(message: Message) -> Message | None:
    """Return a message whose text differs from its first character on that is no white space; None without text."""
    content = message.get("content") or ""
    text = content if isinstance(content, str) else content[0]["text"]
    if not (stripped := text.lstrip()):
        return None
    other = text[: -len(stripped)] + ("-" if stripped[0] == "+" else "+")
    return {**message, "content": other if isinstance(content, str) else [{**content[0], "text": other}]}


def with_read_arguments(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return messages whose tool calls have their arguments as objects where they are the JSON text of one."""

    def read(call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        if isinstance(function := call.get("function"), dict):
            return {**call, "function": read(function)}
        try:
            return {**call, "arguments": _arguments(call["arguments"])}
        except (KeyError, TypeError, ValueError):
            return call

    return tuple(
        {**message, "tool_calls": [read(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    )


def read_conversations(name: str, value: Mapping[str, Any], *, is_prompt: bool = False) -> tuple[Message, ...] | None:
    """Return the messages of a line with `messages` or `conversations`; None if it has neither.

    The text of the key `system` becomes the first message, unless that is a system message. `loss_mask` has an entry
    for each message.

    Args:
        name: Origin of the line for error messages.
        value: The line.
        is_prompt: As in `read_messages`.

    Raises:
        UserError: As `read_messages`, for an unknown speaker, or for another number of marks.
    """
    key = next((key for key in ("messages", "conversations") if value.get(key) is not None), None)
    if key is None:
        return None
    turns = value[key]
    if isinstance(turns, list):
        turns = [read_turn(name, f"{key}: from of message {number}", turn) for number, turn in enumerate(turns, 1)]
        turns = _marked(name, turns, value.get("loss_mask"))
    messages = read_messages(name, key, turns, is_prompt=is_prompt)
    # as in LLaMA-Factory and axolotl, a system message of the conversation comes before that of the key
    return messages if messages[0]["role"] == "system" else system_message(name, value) + messages


def _marked(name: str, turns: list[Any], marks: Any) -> list[Any]:
    if marks is None:
        return turns
    if not isinstance(marks, list) or len(marks) != len(turns):
        raise wrong(name, "loss_mask", marks, f"a list of an entry for each message, here {len(turns)}")
    both = zip(turns, marks, strict=True)
    # as in LLaMA-Factory, entries of messages that are not answers have no effect
    return [
        {**turn, "loss_mask": mark} if isinstance(turn, dict) and turn.get("role") == "assistant" else turn
        for turn, mark in both
    ]


def read_turn(name: str, what: str, turn: Any) -> Any:
    """Convert a turn of ShareGPT, {"from": "human", "value": "..."}, to a message; return others as they are.

    Raises:
        UserError: The speaker is unknown, or the value of `function_call` is not the JSON of calls.
    """
    if not isinstance(turn, dict) or "from" not in turn:
        return turn
    speaker = turn["from"].lower() if isinstance(turn["from"], str) else None
    if speaker not in SPEAKERS:
        raise wrong(name, what, turn["from"], ", ".join(SPEAKERS))
    message = {key: value for key, value in turn.items() if key not in ("from", "value")}
    if speaker == "function_call":
        return {"role": SPEAKERS[speaker], "tool_calls": _calls(name, turn.get("value")), **message}
    return {"role": SPEAKERS[speaker], "content": turn.get("value"), **message}


def _calls(name: str, value: Any) -> list[dict[str, Any]]:
    """Return the calls of a turn of `function_call`: its value is the JSON of one or of a list, as in LLaMA-Factory."""
    try:
        calls = json.loads(value)
        calls = calls if isinstance(calls, list) else [calls]
        found = [{"name": call["name"], "arguments": _arguments(call["arguments"])} for call in calls]
        if not found:
            raise ValueError("no call")
    except (TypeError, ValueError, KeyError):
        allowed = '\'{"name": "...", "arguments": {...}}\', or a list of these'
        raise wrong(name, "conversations: value of function_call", value, allowed) from None
    return [{"type": "function", "function": call} for call in found]


def _arguments(value: Any) -> Any:
    arguments = json.loads(value) if isinstance(value, str) else value
    if not isinstance(arguments, dict):
        raise ValueError("arguments are not an object")
    return arguments


def system_message(name: str, value: Mapping[str, Any]) -> tuple[Message, ...]:
    """Return the system message of the key `system`; empty without text, UserError for other values."""
    text = value.get("system") or ""
    if not isinstance(text, str):
        raise wrong(name, "system", text, "text")
    return ({"role": "system", "content": text},) if text else ()


def unread(
    template: str, messages: tuple[Message, ...], tools: list[Any] | None, variables: Mapping[str, Any]
) -> str | None:
    """Return what of a conversation a chat template does not read, although it changes the text elsewhere; else None.

    Args:
        template: Source of the template.
        messages: From `read_messages`.
        tools: From `template_variables`.
        variables: Further variables, from `template_variables`.
    """
    if tools and not _reads(template, "tools"):
        return "tools"
    for name, value in variables.items():
        if not _is_empty(value) and not _reads(template, name):
            return f"'{name}' of chat_template_kwargs"
    for number, message in enumerate(messages, 1):
        for key, value in message.items():
            if (key in MESSAGE_KEYS and key not in _MUST_BE_READ) or _is_empty(value):
                continue
            if not any(_reads(template, word) for word in (REASONING if key in REASONING else (key,))):
                return f"the key '{key}' of message {number}"
    return None


def _is_empty(value: Any) -> bool:
    return value is None or value in ("", [], {})


def _reads(template: str, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", template) is not None


def unread_role(template: str, messages: tuple[Message, ...]) -> str | None:
    """Return a role of a conversation that a chat template does not name, and that others write otherwise; else None.

    Args:
        template: Source of the template.
        messages: From `read_messages`.
    """
    roles = (message["role"] for message in messages)
    return next((r for r in roles if r not in ROLES and not _reads(template, r) and r.lower() in SPEAKERS), None)


def written_as_data(text: str, messages: tuple[Message, ...]) -> str | None:
    """Return which part of messages a rendered text has as quoted data, where a template reads text; else None.

    A template that knows no parts of a content writes them as Python does, and one that writes arguments of tool calls
    as JSON writes those that are JSON text already with two quotations.
    """
    for number, message in enumerate(messages, 1):
        content = message.get("content")
        if isinstance(content, list) and (str(content) in text or json.dumps(content, ensure_ascii=False) in text):
            return f"the list of parts in content of message {number}"
        for call in message.get("tool_calls", ()):
            given = call.get("function", call)
            given = given.get("arguments") if isinstance(given, dict) else None
            if isinstance(given, str) and json.dumps(given, ensure_ascii=False) in text:
                return f"arguments of a tool call in message {number}, which are JSON text and not an object,"
    return None


def wrong(name: str, key: str, value: Any, allowed: str) -> UserError:
    """Return the error of a value."""
    return UserError(f"{name}: {key} is {short(value)}\nallowed: {allowed}\nfix: correct that line")


def empty(name: str, what: str) -> UserError:
    """Return the error of an empty answer."""
    return UserError(
        f"{name}: the {what} is empty\nallowed: at least one token to learn\nfix: correct that line, or remove it"
    )


def short(value: object) -> str:
    """Return a value as JSON of at most 60 characters."""
    text = json.dumps(value, default=str)  # Parquet has bytes, times and decimals too
    return text if len(text) <= 60 else text[:57] + "..."
