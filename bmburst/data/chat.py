"""Chat templates, and tokenization of records with masks of their answers, equal to transformers."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bmburst.data.records import Pair, Record, template_text
from bmburst.data.token_writer import Masked
from bmburst.data.tokenizer import (
    CHAT_TEMPLATE,
    TOKENIZER_CONFIG,
    PromptTokenizer,
    TokenIds,
    template_source,
    tokenizer_folder,
)
from bmburst.errors import UserError, first_line

Messages = Sequence[Mapping[str, Any]]
Mask = npt.NDArray[np.bool_]
ANSWERS_VERSION = 2
"""Version of the rules that find answers. Cached tokens of another version are made again."""
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OPTION = "--chat-template FILE, in bmburst train --data.chat_template FILE"
_MARK = f"mark answers in it with {{% generation %}} ... {{% endgeneration %}}: {_OPTION}"


class ChatTemplate:
    """Renders messages to text with the chat template of a model.

    Args:
        directory: Contains tokenizer.json, and the template in chat_template.jinja or tokenizer_config.json.
        file: A template that replaces that of the directory.

    Raises:
        UserError: There is no template, it cannot be read, or transformers is not installed.
    """

    def __init__(self, directory: Path, file: Path | None = None) -> None:
        try:
            from transformers import PreTrainedTokenizerFast
        except ImportError as error:
            raise UserError(
                "chat templates need transformers, and importing it failed\nfix: pip install 'bmburst[hugging-face]'"
            ) from error
        try:
            # Not AutoTokenizer: it would ask for permission to run code of the directory.
            self.tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
        except Exception as error:  # OSError, JSON errors, or a bare Exception of the tokenizers package
            raise UserError(
                f"{directory}: cannot read the tokenizer for its chat template: {first_line(error)}\n"
                "fix: copy the directory again, or give prompts as text without chat"
            ) from error
        if file is not None:
            self.tokenizer.chat_template = template_text(file)
        if not self.tokenizer.chat_template:
            raise UserError(
                f"{directory} has no chat template, in chat_template.jinja or tokenizer_config.json\n"
                "allowed: prompts and tokens\nfix: leave chat and messages out, or add the template"
            )

    def render(self, messages: Messages) -> str:
        """Return the text of messages, including the generation prompt of the answer.

        Raises:
            Exception: The template rejects the messages, or fails.
        """
        text = self.tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
        return str(text)


class RecordEncoder:
    """Tokenizes records and finds their answers.

    A conversation's ids are those of transformers' `apply_chat_template`, and its answers those of
    `return_assistant_tokens_mask`. If the template has no {% generation %}, an answer is the text that a message of the
    assistant adds after the generation prompt of the messages before it. White space after a final special token is
    excluded, because it separates turns.

    Args:
        tokenizer: Tokenizer of the model.
        chat_template: A file whose template replaces that of the tokenizer.

    Raises:
        UserError: The file cannot be read.
    """

    def __init__(self, tokenizer: PromptTokenizer, chat_template: Path | None = None) -> None:
        self.tokenizer = tokenizer
        self._file = chat_template
        self._loaded: ChatTemplate | None = None
        if chat_template is not None:
            template_text(chat_template)

    @property
    def identity(self) -> str:
        """Equal for two encoders only if they return the same ids and answers, with the same transformers version."""
        files = [self._file] if self._file else []
        if (folder := tokenizer_folder(self.tokenizer.name)) is not None:
            files += [folder / TOKENIZER_CONFIG, folder / CHAT_TEMPLATE]
            files += sorted((folder / "additional_chat_templates").glob("*.jinja"))
        digest = hashlib.sha256(self.tokenizer.identity.encode())
        for path in files:
            digest.update(path.read_bytes() if path.is_file() else b"")
        return digest.hexdigest()

    def encode(self, record: Record | Pair) -> Masked:
        """Return a record's ids and the mask of its answers; for a pair, the chosen answer, then the rejected one.

        Prompt and completion are tokenized together, like a prompt of `bmburst generate`, and followed by an
        end-of-document id. A text is enclosed by two end-of-document ids, as in files of text.

        Raises:
            UserError: There is no chat template, it rejects the messages, or no answer is found; the message names
                file and line.
        """
        if isinstance(record, Pair):
            chosen, rejected = self.encode(record.chosen), self.encode(record.rejected)
            return Masked(
                np.concatenate([chosen.ids, rejected.ids]),
                np.concatenate([chosen.answers, rejected.answers]),
                chosen.answer_bytes + rejected.answer_bytes,
                _key(f"{chosen.key} {rejected.key}"),
                (len(chosen.ids), chosen.answer_bytes),
            )
        if record.messages is not None:
            ids, answers, size = self._conversation(record)
            text = json.dumps([record.messages, record.tools, record.template_options], sort_keys=True)
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
                "allowed: a message of the assistant, or a completion\n"
                "fix: correct that line, or remove it"
            )
        return Masked(ids, answers, size, _key(text))

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
            folder = template_source(self.tokenizer.name)
            if folder is None:
                fix = "give --tokenizer DIR, in bmburst train --data.tokenizer DIR, with a chat template"
                raise UserError(f"{missing}\nfix: {fix}")
            try:
                self._loaded = ChatTemplate(folder, self._file)
            except UserError as error:
                if "has no chat template" in str(error):
                    raise UserError(f"{missing}\nfix: give {_OPTION}, or a tokenizer that has one") from None
                raise UserError(f"{name}: {error}") from None
        return self._loaded

    def _conversation(self, record: Record) -> tuple[TokenIds, Mask, int]:
        """Return ids, mask of answers, and the bytes of the answers' text."""
        template = self._template(record.name).tokenizer
        chosen = template.get_chat_template(None, record.tools)
        options = {**record.template_options, "tools": _valid(record.tools)}
        messages = _valid([dict(message) for message in record.messages or ()])
        if _MARKER.search(chosen) is None:
            text, spans = self._by_prefixes(template, record, messages, options)
            out = template(text, add_special_tokens=False, return_offsets_mapping=True)
            answers = np.zeros(len(out["input_ids"]), bool)
            starts, ends = np.array(out["offset_mapping"], np.int64).reshape(-1, 2).T
            for begin, end in spans:  # some tokenizers give white space the empty span at its end
                answers |= (ends > begin) & ((starts < end) | ((starts == ends) & (ends <= end)))
            size = sum(len(text[begin:end].encode("utf-8", "replace")) for begin, end in spans)
            return np.array(out["input_ids"], np.int64), answers, size
        try:
            out = template.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **options
            )
        except Exception as error:  # from jinja2, or any error raised by the template's code
            raise _refusal(record.name, error) from error
        ids, answers = np.array(out["input_ids"], np.int64), np.array(out["assistant_masks"], bool)
        if record.answers_from:
            prompt = template.apply_chat_template(messages[: record.answers_from], return_dict=True, **options)
            answers[: len(prompt["input_ids"])] = False
        return ids, answers, len(template.decode(ids[answers]).encode("utf-8", "replace"))

    def _by_prefixes(
        self, template: Any, record: Record, messages: list[dict[str, Any]], options: dict[str, Any]
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and the (start, end) characters of its answers.

        Renders the messages up to each answer, with and without the answer, and compares the texts.
        """

        def rendered(count: int, *, asks: bool) -> str:
            try:
                return str(
                    template.apply_chat_template(
                        messages[:count], tokenize=False, add_generation_prompt=asks, **options
                    )
                )
            except Exception as error:  # from jinja2, or any error raised by the template's code
                raise _refusal(record.name, error) from error

        whole, spans = rendered(len(messages), asks=False), []
        special = tuple(t.content for t in template.added_tokens_decoder.values() if t.special)
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or index < record.answers_from:
                continue
            if not index:
                raise UserError(
                    f"{record.name}: the conversation begins with an answer, and the chat template marks none\n"
                    f"fix: begin with another role, or {_MARK}"
                )
            before, through = rendered(index, asks=True), rendered(index + 1, asks=False)
            if not (whole.startswith(through) and through.startswith(before)):
                raise UserError(
                    f"{record.name}: the chat template writes earlier messages differently when later ones follow, so "
                    f"that answers are not found\nallowed: a template that marks answers, or adds text\nfix: {_MARK}"
                )
            end = through.rstrip()
            end = end if end.endswith(special) and len(end) > len(before) else through
            if len(end) > len(before):
                spans.append((len(before), len(end)))
        return whole, spans


def _valid(value: Any) -> Any:
    """Return a value of JSON with "?" for unpaired surrogates in its texts, which UTF-8 cannot encode."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.loads(text.encode("utf-8", "replace"))
    return value


def _key(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "little")


def _refusal(name: str, error: BaseException) -> UserError:
    return UserError(
        f"{name}: the chat template refuses the messages: {first_line(error)}\n"
        "fix: write them as this template takes them, give another template, or remove the line"
    )
