"""Tools, and environments with tools, for runs of GRPO: who calls which depends on the rank, the row and the turn."""

import json
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from torch import Tensor
from transformers import AutoTokenizer

from tests import chat, tiny

WORDS = ("abc", "d e f", "hello there", "x", "12 3", "zz", "qq", "more")
KINDS = ("tools", "environments")


def multiply(a: int, b: int) -> int:
    """Multiply.

    Args:
        a: A number.
        b: A number.
    """
    return len(range(a)) * b


async def repeat(word: str) -> str:
    """Repeat a word.

    Args:
        word: The word.
    """
    return f"{word}...{word}"


class Counter:
    """An environment that owns its reward."""

    def reset(self, **_: object) -> str:
        """Begin."""
        self._count = 0
        return "Begin at nought."

    def increment(self, step: int) -> int:
        """Count.

        Args:
            step: By how much.
        """
        self._count += step
        return self._count

    def get_reward(self) -> float:
        """Return the sum."""
        return float(self._count)


class Echo:
    """An environment without a reward."""

    def reset(self, **_: object) -> None:
        """Begin."""
        self._said = ""

    def say(self, word: str) -> str:
        """Say a word.

        Args:
            word: The word.
        """
        self._said += word
        return self._said


def _rewarded(completions: list[list[dict[str, Any]]], **_: object) -> list[float]:
    """Return what the turns of a completion are worth: their text, and the answers of tools."""
    return [sum(len(turn["content"]) / 7 + (turn["role"] == "tool") for turn in turns) for turns in completions]


class Answers:
    """In place of a model's `generate`: calls of tools, some wrong, up to three turns, and words."""

    def __init__(self, trainer: Any, kind: str) -> None:
        self._trainer, self._kind, self._calls = trainer, kind, 0

    def __call__(self, input_ids: Tensor, **_: object) -> Tensor:
        tokenizer, rank = self._trainer.processing_class, self._trainer.accelerator.process_index
        self._calls += 1
        answers = []
        for i, row in enumerate(input_ids):
            text = tokenizer.decode(row)
            turns = text.count("<tool_response>")
            place = (3 * rank + i + self._calls) % 5
            word = "abcdefgh"[: 1 + (5 * place + 3 * self._calls + rank) % 8]
            if (turns <= 2 and place in (0, 1)) or (rank == 0 and turns == 1):
                call = json.dumps(self._call(text, word, place, is_first=i == 0))
                answers.append(f"<tool_call>\n{call}\n</tool_call><|im_end|>")
            else:
                answers.append(word + "<|im_end|>" * (place != 4))
        found = tokenizer(answers, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
        return torch.cat((input_ids, found), 1)

    def _call(self, text: str, word: str, place: int, *, is_first: bool) -> dict[str, Any]:
        if is_first and place == 1:
            return {"name": "nothing", "arguments": {}}
        if self._kind == "environments":
            is_counter = "increment" in text
            arguments = {"step": len(word)} if is_counter else {"word": word}
            return {"name": "increment" if is_counter else "say", "arguments": arguments}
        if place == 1:
            return {"name": "repeat", "arguments": {"word": word}}
        return {"name": "multiply", "arguments": {"a": len(word), "b": 3} if place == 0 else {"a": word, "b": 3}}


def folder_of(root: Path) -> None:
    """Save a model whose tokenizer writes calls of tools as Qwen3 does."""
    template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    folder = chat.directory(root / KINDS[0], template)
    tiny.transformers_model(vocab_size=chat.VOCAB, max_position_embeddings=2048).double().save_pretrained(folder)


def arguments(root: Path, kind: str) -> dict[str, Any]:
    """Return the arguments of a trainer that are those of a kind of tools."""
    rows = [{"prompt": [{"role": "user", "content": word}]} for word in WORDS]
    if kind == "environments":
        rows = [row | {"environment": ("counter", "echo")[i // 2 % 2]} for i, row in enumerate(rows)]
        more: dict[str, Any] = {"environment_factory": {"counter": Counter, "echo": Echo}}
    else:
        more = {"tools": [multiply, repeat]}
    return {
        "model": str(root / KINDS[0]),
        "processing_class": AutoTokenizer.from_pretrained(root / KINDS[0], eos_token="<|im_end|>"),
        "reward_funcs": _rewarded,
        "train_dataset": Dataset.from_list(rows),
        "eval_dataset": Dataset.from_list(rows[:3]),
        **more,
    }
