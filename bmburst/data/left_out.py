"""Finds what a chat template leaves out of a conversation: messages, contents, calls of tools and reasoning."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bmburst.data.messages import REASONING, SPEAKERS, Message, is_learned, short, with_joined_parts

_Messages = tuple[Message, ...]
_Render = Callable[[_Messages], str | None]
_BEGINNING = re.compile(r"((?:<[^<>]*>|[^\w<])*)(\w+)")
"""Tags and signs at the beginning of a text, and the first word behind them."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What is left out: a phrase for error messages, the number of its message, its value, and what to do."""

    what: str
    number: int
    value: Any
    fix: str


def left_out(text: str, messages: _Messages, render: _Render, *, learns: bool) -> LeftOut | None:
    """Return what a template leaves out of the text of a conversation; None: nothing.

    The conversation is rendered once more with words in place of its contents, which are looked for in the output, also
    where contents are short. A template may write earlier messages without a part, for example without their reasoning:
    that is its own rule. So a part is left out only if it is missing where its message is the last one too, except for
    system messages, which later ones replace in some templates. And the output must be the same with another part.

    Args:
        text: The rendered text.
        messages: The messages.
        render: Renders messages; None if the template refuses them.
        learns: Whether the answers are learned. Then their reasoning and the beginning of their text must be written.
    """
    named = tuple(_named(number, message) for number, message in enumerate(messages, 1))
    output = render(named)

    def misses(number: int, key: str, call: int = 0) -> bool:
        """Return whether the word in place of a part is missing, but of a system also where its message is the last."""
        word = _word(number, key, call)
        if output is None or word in output:
            return False
        is_system = messages[number - 1]["role"] in ("system", "developer")
        through = None if is_system else render(named[:number])
        return through is None or word not in through

    def needs(number: int, other: Message | None) -> bool:
        """Return whether the output is another one with another message; None: without the message."""
        changed = () if other is None else (other,)
        return render(messages[: number - 1] + changed + messages[number:]) != text

    for number, message in enumerate(messages, 1):
        role, content = message["role"], message.get("content") or ""
        if _has_text(content) and misses(number, "content"):
            if isinstance(content, list) and _word(number, "content") in (render(with_joined_parts(named)) or ""):
                return LeftOut("parts of the content", number, content, "write the content as text")
            if not needs(number, None):
                return LeftOut(f"messages of the role '{role}'", number, content, _fix_role(role))
            if not needs(number, {**message, "content": named[number - 1]["content"]}):
                beside = " beside tool_calls" if message.get("tool_calls") else ""
                fix = "write it in a message of its own, or remove it" if beside else "write it as a list of parts"
                return LeftOut(f"the content{beside}", number, content, fix)
        calls = message.get("tool_calls", [])
        for place, call in enumerate(calls):
            others = {**message, "tool_calls": calls[:place] + calls[place + 1 :]}
            others = others if len(calls) > 1 else {key: value for key, value in message.items() if key != "tool_calls"}
            if misses(number, "tool_calls", place) and not needs(number, others):
                fix = "write each call in a message of its own, before its result"
                return LeftOut(f"call {place + 1} of {len(calls)} in tool_calls", number, call, fix)
        if not learns or role != "assistant" or not is_learned(message):
            continue
        key = next((key for key in REASONING if key in message), "content")
        without = {name: value for name, value in message.items() if name not in REASONING}
        if key != "content" and message[key] and misses(number, key) and not needs(number, without):
            return LeftOut(f"the key '{key}'", number, message[key], f"remove {key}")
        if isinstance(content, str) and content.strip() not in text and _is_cut(messages[:number], render):
            return LeftOut("the beginning of the content", number, content, "remove the part that it drops")
    return None


def _named(number: int, message: Message) -> Message:
    """Return a message with words in place of its contents, its reasoning and the names of its calls."""
    found = dict(message)
    content = message.get("content")
    if _has_text(content or ""):
        word = _word(number, "content")
        found["content"] = word if isinstance(content, str) else [{"type": "text", "text": word}]
    found |= {key: _word(number, key) for key in REASONING if isinstance(message.get(key), str)}
    if "tool_calls" in message:
        found["tool_calls"] = [
            _called(call, _word(number, "tool_calls", place)) for place, call in enumerate(message["tool_calls"])
        ]
    return found


def _called(call: dict[str, Any], name: str) -> dict[str, Any]:
    function = call.get("function")
    return {**call, "function": {**function, "name": name}} if isinstance(function, dict) else {**call, "name": name}


def _word(number: int, key: str, place: int = 0) -> str:
    return f"word{number}of{key.replace('_', '')}{place}end"


def _has_text(content: str | list[Any]) -> bool:
    return any(part.strip() for part in ([content] if isinstance(content, str) else [part["text"] for part in content]))


def _is_cut(messages: _Messages, render: _Render) -> bool:
    """Return whether the last message is written without the beginning of its text, such as what is in `<think>`."""
    message = messages[-1]
    if (found := _BEGINNING.match(message["content"])) is None:
        return False
    rest = message["content"][: found.end(1)] + message["content"][found.end() :]
    whole = render(messages)
    return whole is not None and render((*messages[:-1], {**message, "content": rest})) == whole


def _fix_role(role: str) -> str:
    known = SPEAKERS.get(role.lower(), role)
    if known != role:
        return f"write the role as '{known}', of data also by --roles {role}={known}, in bmburst train --data.roles"
    return "write calls as tool_calls of the assistant, other messages in a role that the template names"


def refused(name: str, part: LeftOut) -> str:
    """Return the text of the error about a part of a conversation of this name."""
    return (
        f"{name}: the chat template leaves out {part.what}, as in message {part.number}: {short(part.value)}\n"
        f"allowed: messages that the template writes\nfix: {part.fix}, or give a template that writes it"
    )
