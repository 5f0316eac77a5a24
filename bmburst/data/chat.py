"""Chat templates, and tokenization of records with masks of their answers, equal to transformers."""

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bmburst.data.chat_templates import TEMPLATES, require_tokens, template_text
from bmburst.data.documents import SetupError
from bmburst.data.left_out import left_out, refused
from bmburst.data.messages import (
    MARKS,
    MESSAGE_KEYS,
    ROLES,
    SPEAKERS,
    Message,
    for_template,
    is_learned,
    unread,
    unread_role,
    with_another_text,
    with_joined_parts,
    with_read_arguments,
    written_as_data,
)
from bmburst.data.record import AnyRecord, Record
from bmburst.data.token_writer import Masked
from bmburst.data.tokenizer import HuggingFaceTokenizer, PromptTokenizer, TokenIds
from bmburst.errors import UserError, first_line
from bmburst.record_format import RecordFormat

Mask = npt.NDArray[np.bool_]
ANSWERS_VERSION = 7
"""Version of the rules that read records and find answers. Cached tokens of another version are made again."""
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OPTION = "--chat-template NAME|FILE, in bmburst train --data.chat_template NAME|FILE"
_MARK = f"mark answers in it with {{% generation %}} ... {{% endgeneration %}}: {_OPTION}"


class ChatTemplate:
    """Renders messages to text with the chat template of a tokenizer.

    Args:
        tokenizer: The tokenizer, whose folder has the template; see `bmburst.data.tokenizer_folder`.
        file: A file, or a name of `bmburst.data.chat_templates`, whose template replaces that of the folder.

    Raises:
        UserError: There is no template, the file cannot be read, a token of a named template is missing, or
            transformers is not installed.
    """

    def __init__(self, tokenizer: PromptTokenizer, file: Path | None = None) -> None:
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise UserError(
                f"messages need a chat template, and the tokenizer '{tokenizer.name}' has none\n"
                "allowed: prompts and tokens\nfix: give the messages' text as a prompt"
            )
        template = tokenizer.chat_template if file is None else template_text(file)
        if not template:
            raise UserError(
                f"{tokenizer.name} has no chat template, in chat_template.jinja or tokenizer_config.json\n"
                "allowed: prompts and tokens\nfix: leave chat and messages out, or add the template"
            )
        try:
            self.tokenizer: Any = tokenizer.for_transformers(template)
        except ImportError as error:
            raise UserError(
                "chat templates need transformers, and importing it failed\nfix: pip install 'bmburst[hugging-face]'"
            ) from error
        if file is not None:
            require_tokens(file, tokenizer.name, self.tokenizer)

    def source(
        self, name: str, messages: tuple[Message, ...], tools: list[Any] | None, variables: Mapping[str, Any]
    ) -> str:
        """Return the source of the template for a conversation, which is another one with tools in some models.

        Args:
            name: Origin of the conversation for error messages.
            messages: From `read_messages`.
            tools: From `template_variables`.
            variables: Further variables, from `template_variables`.

        Raises:
            UserError: The template does not read a part of the conversation that changes the text of others.
        """
        try:
            chosen = str(self.tokenizer.get_chat_template(None, tools))
        except ValueError as error:  # several templates, and none is the default
            raise refusal(name, error) from error
        if (part := unread(chosen, messages, tools, variables)) is not None:
            raise UserError(
                f"{name}: the chat template does not read {part}\n"
                f"allowed: {', '.join(MESSAGE_KEYS)}, and what the template names\n"
                "fix: rename or remove it, or give a template that reads it"
            )
        if (role := unread_role(chosen, messages)) is not None:
            known = SPEAKERS[role.lower()]
            raise UserError(
                f"{name}: the chat template does not read the role '{role}', which others write as '{known}'\n"
                f"allowed: {', '.join(ROLES)}, and roles that the template names\n"
                f"fix: write it as '{known}'; of data also --roles {role}={known}, in bmburst train --data.roles"
            )
        return chosen

    def rendered(self, name: str, messages: tuple[Message, ...], /, **options: Any) -> str:
        """Return the text of messages, as `applied` with `tokenize=False`.

        Args:
            name: Origin of the conversation for error messages.
            messages: From `read_messages`.
            options: Further arguments of `apply_chat_template`.

        Raises:
            UserError: The template rejects the messages, fails, or writes a part of them as quoted data.
        """
        text = str(self.applied(name, messages, tokenize=False, **options))
        if (part := written_as_data(text, messages)) is not None:
            raise UserError(
                f"{name}: the chat template writes {part} as quoted data\n"
                "allowed: what this template takes, mostly content as text and arguments as an object\n"
                "fix: write it so, or give a template that takes it"
            )
        return text

    def whole(self, name: str, messages: tuple[Message, ...], /, *, learns: bool = False, **options: Any) -> str:
        """Return the text of a whole conversation, as `rendered`.

        Args:
            name: Origin of the conversation for error messages.
            messages: From `read_messages`.
            learns: Whether its answers are learned.
            options: Further arguments of `apply_chat_template`.

        Raises:
            UserError: As `rendered`, or the template leaves out a part of a message; see `left_out`.
        """

        def render(others: tuple[Message, ...]) -> str | None:
            try:
                return str(self.applied(name, others, tokenize=False, **options))
            except UserError:
                return None

        text = self.rendered(name, messages, **options)
        if (part := left_out(text, messages, render, learns=learns)) is not None:
            raise UserError(refused(name, part))
        return text

    def applied(self, name: str, messages: tuple[Message, ...], /, **options: Any) -> Any:
        """Return what `apply_chat_template` returns for messages, without marks, with "?" for unpaired surrogates.

        The arguments are those of `rendered`.

        Raises:
            UserError: The template rejects the messages, or fails.
        """
        try:
            options["tools"] = _valid(options.get("tools"))
            return self.tokenizer.apply_chat_template(_valid(for_template(messages)), **options)
        except Exception as error:  # from jinja2, or any error raised by the template's code
            raise refusal(name, error, messages) from error

    def prompt(self, name: str, messages: tuple[Message, ...], tools: list[Any] | None, options: dict[str, Any]) -> str:
        """Return the text of a prompt: with the generation prompt, or up to the end of a final answer, to continue it.

        This is what transformers' pipeline gives the model. If the template does not take the messages so, arguments of
        tool calls that are JSON text are given as objects, and the parts of a content are joined by line breaks, as
        servers of OpenAI's API do.

        Args:
            name: Origin of the messages for error messages.
            messages: From `read_messages`.
            tools: From `template_variables`.
            options: Further variables of the template.

        Raises:
            UserError: As `source` and `rendered`, or the final answer cannot be continued.
        """
        self.source(name, messages, tools, options)
        continues = messages[-1]["role"] == "assistant"
        how = {"add_generation_prompt": not continues, "continue_final_message": continues, "tools": tools, **options}
        joined = with_joined_parts(messages)
        forms = [messages, with_read_arguments(messages), joined, with_read_arguments(joined)]
        *others, last = [form for at, form in enumerate(forms) if form not in forms[:at]]
        for form in others:
            with contextlib.suppress(UserError):  # for example because the template adds a list to a text
                return self.whole(name, form, **how)
        return self.whole(name, last, **how)


class RecordEncoder:
    """Tokenizes records and finds their answers.

    A conversation's ids are those of transformers' `apply_chat_template`, and its answers those of
    `return_assistant_tokens_mask`. If the template has no {% generation %}, an answer is the text that a message of the
    assistant adds after the generation prompt of the messages before it. White space after a final special token is
    excluded, because it separates turns.

    Args:
        tokenizer: Tokenizer of the model.
        chat_template: A file, or a name of `bmburst.data.chat_templates`, whose template replaces that of the
            tokenizer.
        learned_roles: Roles whose messages have a loss. A message of another role than the assistant is found by
            rendering the conversation with and without it, and is learned from its text on.

    Raises:
        UserError: The file cannot be read, or the tokenizer has no messages.
    """

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        chat_template: Path | None = None,
        learned_roles: Sequence[str] = RecordFormat().learned_roles,
    ) -> None:
        self.tokenizer = tokenizer
        self._learned_roles = frozenset(learned_roles)
        self._file = chat_template
        self._loaded: ChatTemplate | None = None
        if chat_template is not None:
            template_text(chat_template)
            if not isinstance(tokenizer, HuggingFaceTokenizer):
                raise UserError(
                    f"the chat template {chat_template} has no effect with the tokenizer '{tokenizer.name}', which "
                    f"encodes no messages\nallowed: a Hugging Face tokenizer\nfix: leave out {_OPTION}"
                )

    @property
    def identity(self) -> str:
        """Equal for two encoders only if they return the same ids and answers, with the same transformers version."""
        template = template_text(self._file) if self._file else getattr(self.tokenizer, "chat_template", None)
        parts = [self.tokenizer.identity, template, getattr(self.tokenizer, "special_tokens", None)]
        parts += [sorted(self._learned_roles)] if self._learned_roles != {"assistant"} else []
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode("utf-8", "replace")).hexdigest()

    def encode(self, record: AnyRecord) -> Masked:
        """Return a record's ids and the mask of its answers; for several answers, those of the prompt with each.

        Prompt and completion are tokenized together, like a prompt of `bmburst generate`, and followed by an
        end-of-document id. A text is enclosed by two end-of-document ids, as in files of text. Segments are tokenized
        one by one, special tokens in them parsed and none added, as in axolotl.

        Raises:
            UserError: There is no chat template, it rejects the messages, or no answer is found; the message names
                file and line.
        """
        if not isinstance(record, Record):
            each = [self.encode(one) for one in record.records]
            if len(each) == 1:
                return each[0]
            return Masked(
                np.concatenate([one.ids for one in each]),
                np.concatenate([one.answers for one in each]),
                sum(one.answer_bytes for one in each),
                _key(" ".join(str(one.key) for one in each)),
                tuple((len(one.ids), one.answer_bytes) for one in each),
                record.is_pair,
                record.weight,
            )
        if record.messages is not None:
            ids, answers, size = self._conversation(record)
            text = json.dumps([record.messages, record.tools, record.template_options], sort_keys=True, default=str)
        elif record.segments is not None:
            parts = [self.tokenizer.encode_prompt(each, add_special_tokens=False) for _, each in record.segments]
            labels = [label for label, _ in record.segments]
            ids, answers = np.concatenate(parts), np.repeat(labels, [len(part) for part in parts])
            size = sum(len(each.encode("utf-8", "replace")) for label, each in record.segments if label)
            text = json.dumps(record.segments)
        else:
            assert record.text is not None
            eos, text = [self.tokenizer.eos_id], record.text
            size = len(text.encode("utf-8", "replace"))
            if record.prompt is None:
                ids = np.concatenate([eos, self.tokenizer.encode(text), eos]).astype(np.int64)
                answers = np.arange(len(ids)) > 0
            else:
                ids, answers = self._completion(record.prompt, text)
                text = json.dumps([record.prompt, text])
        if len(ids):
            answers[0] = False  # no token precedes it from which it could be predicted
        if not answers.any():
            raise UserError(
                f"{record.name}: the record has no answer to learn\n"
                "allowed: a message of a learned role that no mark leaves out, or a completion\n"
                "fix: correct that line, or remove it"
            )
        return Masked(ids, answers, size, _key(text), weight=record.weight)

    def _completion(self, prompt: str, completion: str) -> tuple[TokenIds, Mask]:
        ids, ends = self.tokenizer.encode_with_ends(prompt + completion)
        answers = ends > len(prompt)  # a token that spans both belongs to the completion
        if not len(ids) or ids[-1] != self.tokenizer.eos_id:
            ids, answers = np.append(ids, self.tokenizer.eos_id), np.append(answers, True)
        answers[-1] = True
        return ids, answers

    def _template(self, name: str) -> ChatTemplate:
        if self._loaded is None:
            missing = f"{name}: the tokenizer '{self.tokenizer.name}' has no chat template, which messages need"
            if not isinstance(self.tokenizer, HuggingFaceTokenizer):
                fix = "give --tokenizer DIR, in bmburst train --data.tokenizer DIR, with a chat template"
                raise SetupError(f"{missing}\nfix: {fix}")
            if self._file is None and not self.tokenizer.chat_template:
                names = f"its own, {', '.join(TEMPLATES)}, or a Jinja file"
                raise SetupError(f"{missing}\nallowed: {names}\nfix: give {_OPTION}, or a tokenizer that has one")
            try:
                self._loaded = ChatTemplate(self.tokenizer, self._file)
            except UserError as error:
                raise SetupError(f"{name}: {error}") from None
        return self._loaded

    def _conversation(self, record: Record) -> tuple[TokenIds, Mask, int]:
        """Return ids, mask of answers, and the bytes of the answers' text."""
        template, messages = self._template(record.name), record.messages or ()
        chosen = template.source(record.name, messages, record.tools, record.template_options)
        options = {**record.template_options, "tools": record.tools}
        if _MARKER.search(chosen) is None:
            text, spans = self._by_prefixes(template, record, options, self._learned_roles)
            out = template.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            answers = _covered(out, spans)
            size = sum(len(text[begin:end].encode("utf-8", "replace")) for begin, end in spans)
            return np.array(out["input_ids"], np.int64), answers, size
        text = template.whole(record.name, messages, learns=True, **options)
        ids, answers = self._marked(template, record.name, messages, options)
        if "assistant" not in self._learned_roles:
            answers[:] = False
        learned = list(map(is_learned, messages))
        if count := record.answers_from:
            prompt, _ = self._marked(template, record.name, messages[:count], options)
            if np.array_equal(ids[: len(prompt)], prompt):
                answers[: len(prompt)] = False
            else:  # its answers are written otherwise where others follow, for example with their reasoning
                learned[:count] = [False] * count
        if not all(learned):
            answers &= self._learned(template, record, options, learned)
        if others := self._learned_roles - {"assistant"}:
            _, spans = self._by_prefixes(template, record, options, others)
            out = template.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            answers |= _covered(out, spans)
        return ids, answers, len(template.tokenizer.decode(ids[answers]).encode("utf-8", "replace"))

    def _marked(
        self, template: ChatTemplate, name: str, messages: tuple[Message, ...], options: dict[str, Any]
    ) -> tuple[TokenIds, Mask]:
        """Return ids and mask of answers of messages, by a template that marks answers."""
        out = template.applied(name, messages, return_assistant_tokens_mask=True, **options)
        return np.array(out["input_ids"], np.int64), np.array(out["assistant_masks"], bool)

    def _learned(
        self, template: ChatTemplate, record: Record, options: dict[str, Any], learned: Sequence[bool]
    ) -> Mask:
        """Return a mask without the answers that are not learned, by a template that marks answers.

        The runs of marked tokens are in the order of the messages. Rendering the messages up to each answer, with and
        without it, tells how many runs are its own.

        Args:
            template: The template.
            record: The conversation.
            options: Further arguments of the template.
            learned: Whether each message is learned.

        Raises:
            UserError: An answer has no runs of its own, or another number of them when later messages follow.
        """
        messages = record.messages or ()
        _, whole = self._marked(template, record.name, messages, options)
        numbers = np.cumsum(_starts(whole)) - 1
        left_out, done = np.zeros(len(whole), bool), 0
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            none = np.zeros(0, np.int64), np.zeros(0, bool)
            before = self._marked(template, record.name, messages[:index], options) if index else none
            through = self._marked(template, record.name, messages[: index + 1], options)
            if index and messages[index - 1]["role"] == "assistant" and learned[index - 1] != learned[index]:
                self._require_gap(record.name, before, through)
            runs = int(_starts(through[1]).sum()) - int(_starts(before[1]).sum())
            if not learned[index]:
                left_out |= whole & (numbers >= done) & (numbers < done + runs)
            done += runs
        if done != int(_starts(whole).sum()):
            raise _unclear(record.name, "differently when later messages follow")
        return ~left_out

    def _require_gap(self, name: str, before: tuple[TokenIds, Mask], through: tuple[TokenIds, Mask]) -> None:
        """Check that the marks of an answer do not begin where those of the answer before it end."""
        size = len(before[0])
        is_kept = np.array_equal(through[0][:size], before[0])
        if not is_kept or (before[1][-1:].any() and through[1][size : size + 1].any()):
            raise _unclear(name, "that follow each other as one")

    def _by_prefixes(
        self, template: ChatTemplate, record: Record, options: dict[str, Any], roles: Set[str]
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and the (start, end) characters of its messages of some roles.

        Renders the messages up to each one, with and without it, and compares the texts. An answer of the assistant is
        what follows the generation prompt. Another message is learned from its text on, without its header.
        """
        messages = record.messages or ()

        def rendered(count: int, *last: Message, asks: bool) -> str:
            return template.rendered(record.name, (*messages[:count], *last), add_generation_prompt=asks, **options)

        whole, spans = template.whole(record.name, messages, learns=True, add_generation_prompt=False, **options), []
        special = tuple(t.content for t in template.tokenizer.added_tokens_decoder.values() if t.special)
        for index, message in enumerate(messages):
            role = message["role"]
            if role not in roles or index < record.answers_from or not is_learned(message):
                continue
            if not index and role == "assistant":
                raise UserError(
                    f"{record.name}: the conversation begins with an answer, and the chat template marks none\n"
                    f"fix: begin with another role, or {_MARK}"
                )
            before = rendered(index, asks=role == "assistant") if index else ""
            through = rendered(index + 1, asks=False)
            if not (whole.startswith(through) and through.startswith(before)):
                raise UserError(
                    f"{record.name}: the chat template writes earlier messages differently when later ones follow, so "
                    f"that answers are not found\nallowed: a template that marks answers, or adds text\nfix: {_MARK}"
                )
            end = through.rstrip()
            end = end if end.endswith(special) and len(end) > len(before) else through
            begin = len(before)
            if role != "assistant" and (other := with_another_text(message)) is not None:
                pairs = enumerate(zip(through[begin:], rendered(index, other, asks=False)[begin:], strict=False))
                begin += next((at for at, (one, another) in pairs if one != another), 0)
            if len(end) > begin:
                spans.append((begin, len(end)))
        return whole, spans


def _covered(encoding: Any, spans: list[tuple[int, int]]) -> Mask:
    """Return which tokens of a text lie in spans of (start, end) characters."""
    answers = np.zeros(len(encoding["input_ids"]), bool)
    starts, ends = np.array(encoding["offset_mapping"], np.int64).reshape(-1, 2).T
    for begin, end in spans:  # some tokenizers give white space the empty span at its end
        answers |= (ends > begin) & ((starts < end) | ((starts == ends) & (ends <= end)))
    return answers


def _unclear(name: str, how: str) -> UserError:
    """Return the error of answers to leave out of the loss that a template marks in such a way."""
    return UserError(
        f"{name}: the chat template marks answers {how}, so that those to leave out of the loss are not found\n"
        f"allowed: a template that marks each answer alone\nfix: {_MARK}, or remove the marks of the messages "
        f"({', '.join(MARKS)}) and write a prompt and its completion as messages"
    )


def _starts(mask: Mask) -> Mask:
    """Return which True begins a run of a mask."""
    starts = mask.copy()
    starts[1:] &= ~mask[:-1]
    return starts


def _valid(value: Any) -> Any:
    """Return a value of JSON with "?" for unpaired surrogates in its texts, which UTF-8 cannot encode.

    Raises:
        TypeError: It is no value of JSON: transformers would write a time of Parquet as "<datetime>".
    """
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.loads(text.encode("utf-8", "replace"))
    return value


def _key(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "little")


def refusal(name: str, error: BaseException, messages: tuple[Message, ...] = ()) -> UserError:
    """Return the error of a chat template that rejects messages."""
    shapes = (
        (with_joined_parts, "content as one text, not as a list of parts"),
        (with_read_arguments, "arguments of tool calls as objects, not as JSON text"),
    )
    wanted = [shape for changed, shape in shapes if changed(messages) != messages]
    how = f"with {' and '.join(wanted)}" if wanted else "as this template takes them"
    return UserError(
        f"{name}: the chat template refuses the messages: {first_line(error)}\n"
        f"fix: write them {how}, give another template, or remove the line"
    )
