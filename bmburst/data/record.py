"""Records for fine-tuning: one answer, several answers to a prompt, or a preference pair, and what is found beside."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, ClassVar

_MOST_COLUMNS = 1000  # a row may name its columns by its own values


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
        segments: Texts after one another, and whether each is learned; None for other records.
        weight: Factor of the losses of its tokens, at least 0.
    """

    name: str
    messages: tuple[dict[str, Any], ...] | None = None
    answers_from: int = 0
    prompt: str | None = None
    text: str | None = None
    tools: list[Any] | None = None
    template_options: dict[str, Any] = field(default_factory=dict)
    segments: tuple[tuple[bool, str], ...] | None = None
    weight: float = 1.0
    is_pair: ClassVar[bool] = False

    @property
    def records(self) -> tuple["Record", ...]:
        """This record alone, as `Group` has several."""
        return (self,)


class Reading:
    """What was found beside the records that are used, while they are read.

    Attributes:
        columns: Number of records with each column that has no effect.
        left_out: Number of records that are left out, by reason.
        echoes: Number of answers to a text that begin with this text, so that a sequence has it twice.
        names: Names of fields and of roles of messages that are given and that no message has.
    """

    def __init__(self) -> None:
        self.columns: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        self.echoes = 0
        self.names: set[str] = set()

    def notes(self) -> dict[str, Any]:
        """Return all as plain values, without what is empty."""
        columns = sorted(self.columns)[:_MOST_COLUMNS]
        found: dict[str, Any] = {"columns": columns, "left_out": dict(self.left_out), "echoes": self.echoes}
        found["names"] = sorted(self.names)
        return {key: value for key, value in found.items() if value}


@dataclass(frozen=True, slots=True)
class Group:
    """Several answers to one prompt: all to be learned, or a preference pair.

    Attributes:
        records: The prompt with each answer, one or more.
        is_pair: Whether the first of two answers is preferred to the other.
    """

    records: tuple[Record, ...]
    is_pair: bool = False

    @property
    def name(self) -> str:
        """Its origin for error messages, "chats.jsonl:3"."""
        return self.records[0].name

    @property
    def weight(self) -> float:
        """Factor of the losses of the answers' tokens, or of the loss of the pair."""
        return self.records[0].weight


AnyRecord = Record | Group
