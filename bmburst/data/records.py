"""Reads fine-tuning records: conversations, prompts with completions, preference pairs, segments, texts."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, TypeVar

from bmburst.data.documents import KINDS, column_meant, first_row, rows, with_others
from bmburst.data.messages import (
    MARKS,
    empty,
    read_conversations,
    read_messages,
    read_turn,
    short,
    system_message,
    template_variables,
    wrong,
)
from bmburst.data.record import AnyRecord, Group, Reading, Record
from bmburst.data.sources import SourceFile, unreadable
from bmburst.errors import UserError
from bmburst.record_format import RecordFormat, messages_in

T = TypeVar("T")
_KEYS = (
    *({"messages"}, {"conversations"}, {"prompt", "completion"}, {"prompt", "completions"}, {"instruction", "output"}),
    *({"chosen"}, {"rejected"}, {"segments"}),
)
"""Keys that distinguish a record from a line of text."""
PAIRS = (
    '{"prompt": "...", "chosen": "...", "rejected": "..."}, each as text or as a list of messages; '
    "without prompt, it is what both answers begin with"
)
RECORD_KEYS = {
    **dict.fromkeys(("messages", "conversations"), "the conversation"),
    **dict.fromkeys(("prompt", "completion"), "a prompt and the answer to learn"),
    "completions": "several answers to learn, to the prompt, or to the conversation of messages",
    **dict.fromkeys(("instruction", "input", "output", "history"), "a conversation"),
    **dict.fromkeys(("chosen", "rejected"), "the answers of a preference pair"),
    "segments": "a list of label and text: the texts after one another, and whether each is learned",
    "system": "the first message of conversations, messages and instructions",
    "text": "a text to learn; --data.text_field names another key",
    **dict.fromkeys(("tools", "chat_template_kwargs"), "variables of the chat template"),
    "loss_mask": "an entry for each message: 0 or false leaves an answer out of the loss",
    "weight": "the factor of the losses of the record's tokens, or of the pair; 0: the record is left out",
}
"""Keys of a record: what is done with them. Other keys than `UNSUPPORTED` are columns without effect, and named."""
_TALK = frozenset({"system", "tools", "chat_template_kwargs"})
_READ: Mapping[str, frozenset[str]] = {
    "messages": _TALK | {"messages", "loss_mask"},
    "conversations": _TALK | {"conversations", "loss_mask"},
    "instruction": _TALK | {"instruction", "input", "output", "history"},
    "lists": frozenset({"prompt", "completion", "tools", "chat_template_kwargs"}),
    "prompt": frozenset({"prompt", "completion"}),
    "segments": frozenset({"segments"}),
}
"""Keys that have an effect in a record of a kind, beside `weight`."""
_OTHER_PROMPTS = ("question", "query", "input", "system")  # without them, a pair's prompt would be another one
DEFAULT = RecordFormat()
_MOST_CHECKED = 20_000  # lines to render after a bad one: half a minute
_ONLY_TEXT = "only text is read: remove the record, or the column"
UNSUPPORTED = {
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), _ONLY_TEXT),
    **dict.fromkeys(("label", "kto_tag"), "a record with a good or a bad answer: keep the good ones, without the key"),
    "labels": "marks of steps, or ids of tokens: keep the good answers as text, without the key",
    **dict.fromkeys(("functions", "function_call"), "the older format of tools: write them as tools and tool_calls"),
    "documents": 'write them as "chat_template_kwargs": {"documents": [...]}',
    "enable_thinking": 'write it as "chat_template_kwargs": {"enable_thinking": ...}',
    "objects": "places in images, for <ref-object> and <bbox> in messages; " + _ONLY_TEXT,
    **dict.fromkeys(("train", "loss"), "mark its messages, or give the record a weight; a column of notes: rename it"),
}
"""Keys of a record that change the training of other libraries and have no equal here: what to do. They are refused."""


def _as_it_is(record: AnyRecord) -> Any:
    return record


def hold_records(files: Sequence[SourceFile], form: RecordFormat = DEFAULT) -> bool:
    """Return whether files contain records, judged by the keys of the first line of the first file that is not text.

    Lines with the text field are text; with "text", only if they have no keys of records, as in TRL.

    Raises:
        UserError: That line is not valid JSON, or the file cannot be read.
    """
    keys = _first_keys(files, form)
    is_text = form.text_field in keys and form.names_text  # data sets have the default field beside their records
    return not is_text and any(known <= keys for known in _KEYS)


def hold_groups(files: Sequence[SourceFile], form: RecordFormat) -> bool:
    """Return whether files contain records with several answers, judged and refused as in `hold_records`."""
    return "completions" in _first_keys(files, form)


def hold_messages(files: Sequence[SourceFile], form: RecordFormat) -> bool:
    """Return whether a file contains records of messages, by its first line; errors as in `hold_records`."""
    return any(
        isinstance(value, dict) and _have_messages(form.row(value))
        for file in files
        if file.kind != "text"
        for _, value in first_row(file)
    )


def _have_messages(row: Mapping[str, Any]) -> bool:
    parts = [row.get(key) for key in ("prompt", "completion", "completions", "chosen", "rejected")]
    is_conversation = bool({"messages", "conversations", "instruction"} & set(row))
    return is_conversation or next(messages_in(parts), None) is not None


def _first_keys(files: Sequence[SourceFile], form: RecordFormat) -> set[str]:
    for file in files:
        if file.kind == "text":
            continue
        for _, value in first_row(file):
            if isinstance(value, UserError):
                raise value
            return set(form.row(value)) if isinstance(value, dict) else set()
    return set()


def read_records(
    files: Sequence[SourceFile],
    *,
    form: RecordFormat = DEFAULT,
    on_read: Callable[[int], object] = lambda _: None,
    check: Callable[[AnyRecord], T] = _as_it_is,
    reading: Reading | None = None,
) -> Iterator[T]:
    """Yield the records of files in order, one line in memory at a time; either all are preference pairs, or none is.

    Args:
        files: From `find_sources`; none is plain text.
        form: Names of the user's fields, columns and roles.
        on_read: Called with the number of bytes of each read.
        check: Converts a record, and raises a UserError for one that cannot be used.
        reading: Gets columns without effect, and the number of records of weight 0, which are left out.

    Raises:
        UserError: A file cannot be read, a line is malformed or has no known key, `check` refuses it, or pairs are
            mixed with other records; the message names file and line, and further bad lines of the file. Or no line has
            a column that `form` names.
    """
    first: AnyRecord | None = None
    reading = reading or Reading()
    missing = {*form.theirs.values(), *([form.text_field] if form.names_text else [])}
    of_messages, to_learn = form.unseen()

    def converted(name: str, value: Any) -> tuple[AnyRecord, T]:
        if isinstance(value, dict):
            missing.difference_update(value)
            of_messages.difference_update(form.seen([*value.values()]) if of_messages else ())
            replaced = form.theirs.keys() & value.keys() - set(form.theirs.values())
            reading.columns.update(key for key in replaced if value[key] is not None)
            value = _renamed(name, value, form)
        record = _record(name, value, form.text_field, reading)
        if to_learn:
            to_learn.difference_update(message["role"] for each in record.records for message in each.messages or ())
        return record, check(record)

    for file in files:
        if file.kind == "text":
            raise UserError(
                f"'{file.name}' is plain text beside records\nallowed: JSONL files and data sets of records\n"
                "fix: leave it out, or make a mixture of both: docs/data.md"
            )
        try:
            lines = rows(file, on_read)
            for name, value in lines:
                try:
                    record, found = converted(name, value)
                except UserError as error:
                    raise with_others(error, lines, converted, _MOST_CHECKED) from error
                first = first or record
                if record.is_pair != first.is_pair:
                    is_pair, other = ("a", "none") if record.is_pair else ("no", "one")
                    raise UserError(
                        f"{name}: the line is {is_pair} preference pair, and {first.name} is {other}\n"
                        "allowed: only pairs, or none, in the files of one source\nfix: keep them in files of their own"
                    )
                if record.weight:
                    yield found
                else:
                    reading.left_out["weight 0"] += 1
        except OSError as error:
            raise unreadable(file.name, error) from error
    reading.names = of_messages | to_learn
    if missing:
        raise UserError(
            f"no record has the column {', '.join(map(repr, sorted(missing)))}, which the options name\n"
            "allowed: columns of the data\n"
            "fix: correct --columns, --messages-field or --text-field, in bmburst train --data.columns, "
            "--data.messages_field or --data.text_field"
        )


def _renamed(name: str, value: dict[str, Any], form: RecordFormat) -> dict[str, Any]:
    made = form.row(value)
    if form.messages_field is not None and "messages" not in made:
        keys = ", ".join(map(repr, list(value)[:10])) or "none"
        raise UserError(
            f"{name}: no messages in '{form.messages_field}', the line has {keys}\nallowed: a list of messages\n"
            "fix: correct that line, or --data.messages_field"
        )
    return made


def _record(name: str, value: Any, text_field: str, reading: Reading) -> AnyRecord:
    if isinstance(value, UserError):  # the line is not valid JSON
        raise value
    if not isinstance(value, dict):
        raise UserError(f"{name}: the line is not a JSON object: {short(value)}\nallowed: {KINDS}\nfix: correct it")
    tools, options = template_variables(name, value)
    _require_supported(name, value)
    weight = _weight(name, value.get("weight"))

    def completed(record: Record) -> Record:
        talk: dict[str, Any] = {} if record.messages is None else {"tools": tools, "template_options": options}
        return replace(record, weight=weight, **talk)

    made: AnyRecord
    if {"chosen", "rejected"} & set(value):
        answers, used = _pair(name, value)
        made = Group(tuple(map(completed, answers)), is_pair=True)
    elif value.get("completions") is not None:
        found, used = _group(name, value)
        made = Group(tuple(map(completed, found)))
    else:
        single, used = _single(name, value, text_field)
        made = completed(single)
    reading.echoes += sum(map(_repeats_prompt, made.records))
    _note(reading, value, used)
    return made


def _single(name: str, value: dict[str, Any], text_field: str) -> tuple[Record, Set[str]]:
    """Return the record of a line with one answer or text, and the keys that have an effect in it."""
    if (found := _conversation(name, value)) is not None:
        messages, kind = found
        record = Record(name=name, messages=messages)
    elif {"prompt", "completion"} <= set(value):
        record = _answered(name, value, "completion")
        kind = "prompt" if record.messages is None else "lists"
    elif "segments" in value:
        record, kind = Record(name=name, segments=_segments(name, value["segments"])), "segments"
    elif text_field in value:
        text, kind = value[text_field], text_field
        if not isinstance(text, str):
            raise wrong(name, text_field, text, "text")
        if not text:
            raise empty(name, text_field)
        record = Record(name=name, text=text)
    else:
        keys = ", ".join(map(repr, list(value)[:10])) or "none"
        raise UserError(
            f"{name}: no known key, or null in a table; the line has {keys}{column_meant(value)}\n"
            f"allowed: {KINDS}; pairs: {PAIRS}\n"
            "fix: remove a row without values; rename the keys of that line, or name them: --data.columns "
            "prompt=question,completion=answer"
        )
    return record, _READ.get(kind, {kind})


def _repeats_prompt(record: Record) -> bool:
    """Return whether an answer to a text begins with it. It may be meant, as in an answer with the head of a function.

    Lists of messages that repeat those of the prompt are refused.
    """
    prompt = (record.prompt or "").strip()
    return bool(prompt) and (record.text or "").lstrip().startswith(prompt)


def _note(reading: Reading, value: dict[str, Any], used: Set[str]) -> None:
    """Count the columns that have no effect in a record."""
    reading.columns.update(
        key for key, each in value.items() if key not in used and key != "weight" and each not in (None, "", [], {})
    )


def _weight(name: str, value: Any) -> float:
    if value is None:
        return 1.0
    if not isinstance(value, bool | int | float) or not 0 <= value < math.inf:
        raise wrong(name, "weight", value, "a number at least 0; 0: the record is left out")
    return float(value)


def _segments(name: str, value: Any) -> tuple[tuple[bool, str], ...]:
    """Return the segments of axolotl's input_output: whether each is learned, and its text."""
    is_list = isinstance(value, list) and value
    for each in value if is_list else [value]:
        if not isinstance(each, dict) or not isinstance(each.get("text"), str) or each.get("label") not in (0, 1):
            raise wrong(name, "segments", each, 'a list of {"label": true, "text": "..."}, at least one')
        if rest := set(each) - {"label", "text"}:
            raise wrong(name, "key of a segment", sorted(rest)[0], "label and text")
    return tuple((bool(each["label"]), each["text"]) for each in value)


def _require_supported(name: str, value: dict[str, Any]) -> None:
    for key, fix in UNSUPPORTED.items():
        given = value.get(key)
        has_effect = isinstance(given, bool) if key == "label" else given not in (None, [], "", {})
        if has_effect and not (key in MARKS and given in (1, "")):
            raise UserError(
                f"{name}: the record has {key}, which is {short(given)}\n"
                f"allowed: {', '.join(RECORD_KEYS)}, and columns without effect\nfix: {fix}"
            )


def _conversation(name: str, value: dict[str, Any]) -> tuple[tuple[dict[str, Any], ...], str] | None:
    """Return the messages of a line and their key: `messages`, or those of ShareGPT or Alpaca; None if it has none."""
    if {"messages", "conversations"} & set(value):
        if (messages := read_conversations(name, value)) is not None:
            return messages, "messages" if value.get("messages") is not None else "conversations"
        if not {"instruction", "output"} <= set(value):
            raise wrong(name, "messages" if "messages" in value else "conversations", None, "a list of messages")
    if {"instruction", "output"} <= set(value):
        return system_message(name, value) + _instructed(name, value), "instruction"
    return None


def _instructed(name: str, value: dict[str, Any], answer: str = "output") -> tuple[dict[str, Any], ...]:
    """Return the messages of a line of Alpaca. Instruction and input form one message, as in LLaMA-Factory."""
    given = {key: value.get(key) or "" for key in ("instruction", "input", answer)}
    for key, text in given.items():
        if not isinstance(text, str):
            raise wrong(name, key, text, "text")
    history = value.get("history") or []
    if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise wrong(name, "history", history, 'a list of ["question", "answer"]')
    asked = "\n".join(given[key] for key in ("instruction", "input") if given[key])
    turns = [text for turn in history for text in turn] + [asked, given[answer]]
    return read_messages(
        name,
        f"history, instruction and {answer}",
        [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(turns)],
    )


def _answered(name: str, value: Any, key: str) -> Record:
    """Return a record of the line's prompt and the answer of `key`: text, or messages and a text or messages."""
    prompt, answer = value["prompt"], value[key]
    if isinstance(prompt, list) and isinstance(answer, str) and answer:
        answer = [{"role": "assistant", "content": answer}]
    if isinstance(prompt, list) and isinstance(answer, list):
        before, after = read_messages(name, "prompt", prompt), read_messages(name, key, answer)
        if after[: len(before)] == before:
            raise UserError(
                f"{name}: {key} begins with the messages of the prompt, which would be in the text twice\n"
                f"allowed: prompt and {key} are parts of one conversation\nfix: leave the prompt out of {key}"
            )
        return Record(name=name, messages=before + after, answers_from=len(before))
    for each, text in (("prompt", prompt), (key, answer)):
        if not isinstance(text, str):
            raise wrong(name, each, text, "text, or in both a list of messages, or text behind messages")
    if not answer:
        raise empty(name, key if key.startswith("completion") else f"{key} answer")
    return Record(name=name, prompt=prompt, text=answer)


def _group(name: str, value: dict[str, Any]) -> tuple[list[Record], Set[str]]:
    """Return the answers of `completions` to a line's prompt or conversation, and the keys that have an effect."""
    answers = value["completions"]
    if not isinstance(answers, list) or not answers:
        raise wrong(name, "completions", answers, "a list of answers, at least one")
    others = {"completion", "loss_mask", "instruction", "output"} & {key for key in value if value[key] is not None}
    if others:
        raise UserError(
            f"{name}: the record has completions and {min(others)}\n"
            "allowed: completions with prompt, messages or conversations; only the completions are learned\n"
            f"fix: remove {min(others)} from that line, or write a line for each answer"
        )
    before = read_conversations(name, value, is_prompt=True)
    used = _TALK | {"messages", "conversations"}
    if before is None and isinstance(value.get("prompt"), list):
        before, used = read_messages(name, "prompt", value["prompt"]), _READ["lists"]
    elif before is not None and value.get("prompt") is not None:
        raise wrong(name, "prompt beside messages", value["prompt"], "one of them")
    found = []
    for number, answer in enumerate(answers, 1):
        key = f"completion {number}"
        if before is None:
            if value.get("prompt") is None:
                raise wrong(name, "prompt", None, "the prompt of the completions, or messages or conversations")
            found.append(_answered(name, {"prompt": value["prompt"], key: answer}, key))
            used = _READ["prompt"]
            continue
        one = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
        turns = one if isinstance(one, list) else [one]
        messages = before + read_messages(name, key, [read_turn(name, f"{key}: from", turn) for turn in turns])
        found.append(Record(name=name, messages=messages, answers_from=len(before)))
    return found, used | {"completions"}


def _pair(name: str, value: dict[str, Any]) -> tuple[tuple[Record, Record], Set[str]]:
    """Return the chosen and the rejected answer of a line, and the keys that have an effect in it."""
    for key in ("chosen", "rejected"):
        if key not in value:
            raise UserError(f"{name}: the preference pair has no {key}\nallowed: {PAIRS}\nfix: add it to that line")
    if value["chosen"] == value["rejected"]:
        raise UserError(
            f"{name}: chosen and rejected are equal: {short(value['chosen'])}\n"
            "allowed: two different answers\nfix: correct that line, or remove it"
        )
    if "prompt" not in value and {"instruction", "conversations", "messages"} & set(value):
        made = _asked(name, value, "chosen"), _asked(name, value, "rejected")
        kind = next(key for key in ("instruction", "messages", "conversations") if value.get(key) is not None)
        return made, _READ[kind] - {"output"} | {"chosen", "rejected"}
    prompt, are_lists = value.get("prompt"), all(isinstance(value[key], list) for key in ("chosen", "rejected"))
    # Some data sets repeat the question as text beside conversations that contain it.
    if prompt is None or (isinstance(prompt, str) and are_lists):
        if named := next((key for key in _OTHER_PROMPTS if value.get(key) and not are_lists), None):
            raise UserError(
                f"{name}: the preference pair has no prompt, and a key {named}, which is none\n"
                f"allowed: {PAIRS}\nfix: rename the key to prompt, or write the prompt as a list of messages"
            )
        value = _split(name, value["chosen"], value["rejected"])
    made = _answered(name, value, "chosen"), _answered(name, value, "rejected")
    used = {"chosen", "rejected"} | ({"tools", "chat_template_kwargs"} if made[0].messages is not None else set())
    # as text beside lists, it is read only in so far as it repeats one of their messages
    is_read = value["prompt"] is prompt or prompt in [each.get("content") for each in value["prompt"] if prompt]
    return made, used | ({"prompt"} if is_read else set())


def _asked(name: str, value: dict[str, Any], key: str) -> Record:
    """Return a record of LLaMA-Factory's pairs: an instruction or a conversation, and the answer of `key`."""
    answer = value[key]
    if "instruction" in value:
        messages = system_message(name, value) + _instructed(name, value, key)
    else:
        before = read_conversations(name, value)
        if before is None:
            raise wrong(name, "conversations", None, "a list of messages")
        messages = before + read_messages(name, key, [read_turn(name, f"{key}: from", answer)])
    return Record(name=name, messages=messages, answers_from=len(messages) - 1)


def _split(name: str, chosen: Any, rejected: Any) -> dict[str, Any]:
    """Return a pair with its prompt: what both answers begin with, as `extract_prompt` of TRL finds it.

    For messages, these are the first messages up to the first that differs; for text, the characters, without a space
    at the end. If one answer continues the other, the last message or character of the shorter one is an answer.
    """
    if isinstance(chosen, list) and isinstance(rejected, list):
        for key, messages in (("chosen", chosen), ("rejected", rejected)):
            read_messages(name, key, messages)
        what = "message"
    elif isinstance(chosen, str) and isinstance(rejected, str):
        what = "text"
    else:
        raise wrong(name, "chosen", chosen, "text, or in both answers a list of messages")
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
