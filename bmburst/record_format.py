"""Names of the fields, columns and roles of a user's data, and conversion of a row to the names that are read.

RecordFormat(messages_field="dialog", role_field="speaker", content_field="text", roles=("bot=assistant",))
RecordFormat(columns=("prompt=question", "completion=answer"))
"""

import dataclasses
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from bmburst.config import check_fields, field
from bmburst.errors import UserError

COLUMNS = (
    *("messages", "conversations", "prompt", "completion", "completions", "instruction", "input", "output", "history"),
    *("system", "chosen", "rejected", "segments", "text", "tools", "chat_template_kwargs", "loss_mask", "weight"),
)
"""Columns of a record that have a meaning."""
_OF_MESSAGES = ("messages", "conversations", "prompt", "completion", "completions", "chosen", "rejected")
_TEXT = "text"
_ROLE_KEYS, _CONTENT_KEYS = ("role", "from"), ("content", "value")
_DEFAULT_ROLES = ("assistant",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordFormat:
    """How lines of text name their field, and records their columns, fields and roles, and which roles are learned.

    Raises:
        UserError: A mapping has no "=", an unknown column, or two entries for one name.
    """

    text_field: str = field("Field of a JSONL line that holds the text.", default=_TEXT)
    messages_field: str | None = field(
        "Column of the messages of a record.", default=None, default_text="messages or conversations"
    )
    role_field: str | None = field(
        "Field of a message that holds its role or speaker.", default=None, default_text="role or from"
    )
    content_field: str | None = field(
        "Field of a message that holds its text.", default=None, default_text="content or value"
    )
    roles: tuple[str, ...] = field(
        "Roles by the names that messages have, for example bot=assistant,client=user.", default=(), pairs=True
    )
    columns: tuple[str, ...] = field(
        "Columns of records that have other names: ours=theirs, for example prompt=question,completion=answer. Ours: "
        f"{', '.join(COLUMNS)}.",
        default=(),
        pairs=True,
    )
    learned_roles: tuple[str, ...] = field(
        "Roles whose messages have a loss. Of another role than assistant, the text and the end of the message are "
        "learned.",
        default=_DEFAULT_ROLES,
    )

    def __post_init__(self) -> None:
        check_fields(self)
        _pairs("roles", self.roles, "bot=assistant")
        for ours in _pairs("columns", self.columns, "prompt=question", by_first=True):
            if ours not in COLUMNS:
                raise UserError(
                    f"columns: there is no column '{ours}'\nallowed: {', '.join(COLUMNS)}\n"
                    "fix: ours first: columns prompt=question"
                )
        if self.messages_field is not None and any(each.startswith("messages=") for each in self.columns):
            raise UserError(
                f"messages_field {self.messages_field} and columns messages=... are both given\nfix: give one of them"
            )
        if not self.learned_roles:
            raise UserError("learned_roles is empty\nallowed: at least one role\nfix: learned_roles assistant")

    @property
    def record_format(self) -> "RecordFormat":
        """These fields alone, without those of a subclass."""
        return RecordFormat(**{each.name: getattr(self, each.name) for each in dataclasses.fields(RecordFormat)})

    @property
    def renames(self) -> bool:
        """Whether rows of records are converted at all."""
        return bool(self.messages_field or self.role_field or self.content_field or self.roles or self.columns)

    @property
    def is_default(self) -> bool:
        """Whether nothing is set that is for records."""
        return not self.renames and self.learned_roles == _DEFAULT_ROLES

    @property
    def of_messages(self) -> tuple[str, ...]:
        """The fields that are set and are for messages alone."""
        given = {name: bool(getattr(self, name)) for name in ("role_field", "content_field", "roles")}
        given["learned_roles"] = self.learned_roles != _DEFAULT_ROLES
        return tuple(name for name, is_given in given.items() if is_given)

    @property
    def names_text(self) -> bool:
        """Whether another field than the default holds the text."""
        return self.text_field != _TEXT

    @cached_property
    def theirs(self) -> Mapping[str, str]:
        """The user's names of columns, by ours."""
        found = _pairs("columns", self.columns, "prompt=question", by_first=True)
        return found if self.messages_field is None else {**found, "messages": self.messages_field}

    @cached_property
    def _named_roles(self) -> Mapping[str, str]:
        return _pairs("roles", self.roles, "bot=assistant")

    def unseen(self) -> tuple[set[str], set[str]]:
        """Return names that messages of the data should have, their fields and roles, and the roles to learn."""
        fields = {each for each in (self.role_field, self.content_field) if each is not None}
        return fields | set(self._named_roles), set(self.learned_roles) - set(_DEFAULT_ROLES)

    def seen(self, value: Any) -> Iterator[str]:
        """Yield the keys and the roles of the messages in a row of the user, or in a part of it."""
        for message in messages_in(value):
            yield from message
            role = _first(message, (self.role_field,) if self.role_field else _ROLE_KEYS)
            if role is not None and isinstance(message[role], str):
                yield message[role]

    def row(self, value: dict[str, Any]) -> dict[str, Any]:
        """Return a row with our names of columns, fields and roles; a column that another one replaces is left out."""
        if not self.renames:
            return value
        theirs = self.theirs
        ours = {mine: value[name] for mine, name in theirs.items() if value.get(name) is not None}
        left = {key: each for key, each in value.items() if key not in theirs and key not in theirs.values()}
        made = {**left, **ours}
        for key in _OF_MESSAGES:
            if key in made:
                made[key] = self._messages(made[key])
        return made

    def _messages(self, value: Any) -> Any:
        """Return messages with our fields: one, a list of them, or a list of such lists."""
        return [self._messages(each) for each in value] if isinstance(value, list) else self._message(value)

    def _message(self, message: Any) -> Any:
        """Return a message with our fields: from and value if it has the name of a speaker, else role and content."""
        if not isinstance(message, dict):
            return message
        role_key = _first(message, (self.role_field,) if self.role_field else _ROLE_KEYS)
        content_key = _first(message, (self.content_field,) if self.content_field else _CONTENT_KEYS)
        if role_key is None:
            return message
        rest = {key: value for key, value in message.items() if key not in (role_key, content_key)}
        role, named = message[role_key], self._named_roles
        is_mapped = isinstance(role, str) and role in named
        if is_mapped or role_key == "role":
            role_name, content_name = "role", "content"
        else:  # a speaker
            role_name, content_name = "from", "value"
        content = {} if content_key is None else {content_name: message[content_key]}
        return {**rest, role_name: named[role] if is_mapped else role, **content}


def messages_in(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the dictionaries of a value: itself, or those in its lists, however deep."""
    if isinstance(value, list):
        for each in value:
            yield from messages_in(each)
    elif isinstance(value, dict):
        yield value


def _first(message: Mapping[str, Any], keys: tuple[str, ...]) -> str | None:
    return next((key for key in keys if key in message), None)


def _pairs(name: str, given: tuple[str, ...], example: str, *, by_first: bool = False) -> dict[str, str]:
    """Return the pairs of texts such as "bot=assistant"; UserError for another text, or a name given twice."""
    found: dict[str, str] = {}
    for text in given:
        first, sign, second = (part.strip() for part in text.partition("="))
        if not (first and sign and second):
            raise UserError(f"{name}: '{text}' is no pair of names\nallowed: {example}\nfix: write NAME=NAME")
        if first in found or (by_first and second in found.values()):
            raise UserError(f"{name}: '{text}' names a column or a role again\nallowed: each once\nfix: remove one")
        found[first] = second
    return found
