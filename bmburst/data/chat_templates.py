"""Chat templates by name, for tokenizers that come without one: the formats of well-known models, with marked answers.

Each writes what the model's own template writes for messages of text, and marks an answer with the token that ends it:
these are learned. None has a default system message, and none writes tools.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from bmburst.errors import UserError


class _Named(NamedTuple):
    """A template.

    Attributes:
        source: Its Jinja source.
        tokens: The special tokens that it writes beside those of the beginning and the end of a text.
    """

    source: str
    tokens: tuple[str, ...]


def _answer(text: str) -> str:
    """Return the source that writes an answer, marked as one."""
    return "{% generation %}{{ " + text + " }}{% endgeneration %}"


def _turns(header: str, text: str, after: str, asks: str) -> str:
    """Return the source of a template whose turns are alike, apart from the mark of answers."""
    return (
        "{% for message in messages %}{{ " + header + " }}{% if message.role == 'assistant' %}" + _answer(text)
        + "{% else %}{{ " + text + " }}{% endif %}" + after + "{% endfor %}{% if add_generation_prompt %}" + asks
        + "{% endif %}"
    )  # fmt: skip


_NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('the format of gemma has no system message') }}{% endif %}"
)
_LLAMA2 = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for message in messages[(1 if system else 0):] %}"
    "{% if message.role != ('assistant' if loop.index0 % 2 else 'user') %}"
    "{{ raise_exception('user and assistant must alternate, after one system message at most') }}{% endif %}"
    "{% if message.role == 'user' %}{{ bos_token + '[INST] ' }}"
    "{{ (('<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' if system and loop.first else '') + message.content).strip() }}"
    "{{ ' [/INST]' }}{% else %}"
    + _answer("' ' + message.content.strip() + ' ' + eos_token")
    + "{% endif %}{% endfor %}"
)
TEMPLATES: Mapping[str, _Named] = MappingProxyType(
    {
        "chatml": _Named(
            _turns(
                "'<|im_start|>' + message.role + '\\n'",
                "message.content + '<|im_end|>'",
                "{{ '\\n' }}",
                "{{ '<|im_start|>assistant\\n' }}",
            ),
            ("<|im_start|>", "<|im_end|>"),
        ),
        "gemma": _Named(
            "{{ bos_token }}" + _NO_SYSTEM
            + _turns(
                "'<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n'",
                "message.content | trim + '<end_of_turn>'",
                "{{ '\\n' }}",
                "{{ '<start_of_turn>model\\n' }}",
            ),
            ("<start_of_turn>", "<end_of_turn>"),
        ),
        "llama2": _Named(_LLAMA2, ()),
        "llama3": _Named(
            "{{ bos_token }}"
            + _turns(
                "'<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n'",
                "message.content | trim + '<|eot_id|>'",
                "",
                "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}",
            ),
            ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        ),
    }
)  # fmt: skip
"""Templates by name: chatml is the format of Qwen, llama3 that of Llama 3 and later, without their system messages."""


def template_text(given: Path) -> str:
    """Return the chat template of a name in `TEMPLATES`, or in a file; UserError if it is unreadable or empty."""
    if (named := TEMPLATES.get(str(given))) is not None:
        return named.source
    try:
        text = given.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"chat template {given}: cannot be read: {reason}\nallowed: {', '.join(TEMPLATES)}, or a Jinja file\n"
            "fix: give one of these names, or a file with a template"
        ) from None
    if not text.strip():
        raise UserError(f"chat template {given}: is empty\nfix: give a file with a jinja template")
    return text


def require_tokens(given: Path, name: str, tokenizer: Any) -> None:
    """Check that a tokenizer has the special tokens that a template of `TEMPLATES` writes.

    Args:
        given: As in `template_text`; a file is not checked.
        name: Name of the tokenizer.
        tokenizer: The tokenizer of transformers.

    Raises:
        UserError: A token is missing, so that its letters would be learned as text.
    """
    if (named := TEMPLATES.get(str(given))) is None:
        return
    has = tokenizer.get_vocab()
    ends = () if named.tokens else (tokenizer.bos_token or "bos_token", tokenizer.eos_token or "eos_token")
    if missing := [token for token in (*named.tokens, *ends) if token not in has]:
        raise UserError(
            f"chat template {given}: it writes {missing[0]}, and {name} has no such token\n"
            f"allowed: the names of {', '.join(TEMPLATES)} whose tokens it has, or a Jinja file\n"
            "fix: add the tokens to the tokenizer and the model, or give a file"
        )
