"""A tiny chat tokenizer and conversations for tests.

chat.directory(tmp_path / "tokenizer")                 # answers found by rendering prefixes
chat.directory(tmp_path / "tokenizer", chat.MARKED)    # answers marked with {% generation %}
chat.write(tmp_path / "chats.jsonl", *chat.records(20))
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<pad>", "</s>", "<|im_start|>", "<|im_end|>")
VOCAB = 264
_TURN = "{{ '<|im_start|>' + m.role + '\n' }}"
_ASKS = "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
PLAIN = "{% for m in messages %}" + _TURN + "{{ m.content + '<|im_end|>' + '\n' }}" + _ASKS
MARKED = (
    "{% for m in messages %}{% if m.role not in ['user', 'system', 'assistant'] %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}"
    + _TURN
    + "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    + "{% else %}{{ m.content + '<|im_end|>' + '\n' }}{% endif %}"
    + _ASKS
)
LEAVES_OUT = MARKED.replace(
    "{% if m.role == 'assistant' %}{% generation %}",
    "{% if m.role == 'assistant' and m.out %}{{ m.content + '<|im_end|>' + '\n' }}"
    "{% elif m.role == 'assistant' %}{% generation %}",
)
"""Writes an answer with the key "out" as it stands, without the mark of an answer."""
FORGETS = "{% for m in messages %}" + _TURN + "{{ m.content if loop.last else '' }}{{ '<|im_end|>' }}" + _ASKS
"""Writes earlier messages differently when later ones follow."""


def directory(path: Path, template: str | None = PLAIN) -> Path:
    """Write a byte-level tokenizer with a chat template; ids are below `VOCAB`."""
    path.mkdir(exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: i for i, word in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(path / "tokenizer.json"))
    values: dict[str, Any] = {"eos_token": "</s>", "pad_token": "<pad>"}
    (path / "tokenizer_config.json").write_text(json.dumps(values | ({"chat_template": template} if template else {})))
    return path


def conversation(*texts: str) -> list[dict[str, str]]:
    """Return messages of a user and an assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def records(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Return conversations of one or two turns and of different lengths."""
    rng, found = np.random.default_rng(seed), []
    for number in range(count):
        words = [" ".join(rng.choice(["one", "two", "\u4e16"], int(rng.integers(1, 5)))) for _ in range(2)]
        more = ["and?", f"so {number}"] * int(rng.integers(0, 2))
        found.append({"messages": conversation(f"{number} {words[0]}", words[1], *more)})
    return found


def write(path: Path, *lines: Any) -> Path:
    """Write a JSONL file; text stands as it is."""
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text + "\n")
    return path
