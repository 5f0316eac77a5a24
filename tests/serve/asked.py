"""What tests of `bmburst serve` ask, the right answers, and many clients at once."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import openai

from bmburst.inference.generator import Generator
from tests import chat

LONG = 20_000
ASK = {"model": "tiny", "max_tokens": 6}
FOREVER = {**ASK, "max_tokens": LONG - 500, "temperature": 1.0}


def conversation(number: int) -> list[dict[str, str]]:
    return chat.conversation(f"Document {number % 5}: " + "words and words. " * 6 + f"Question {number}?")


def expected(generator: Generator, messages: list[dict[str, str]], **options: Any) -> str:
    (answer,) = generator.generate([messages], **{"max_new_tokens": 6, **options})
    return answer.text


def right_answers(generator: Generator) -> dict[tuple[int, int | None], str]:
    options: dict[int | None, dict[str, Any]] = {None: {}, 3: {"temperature": 0.9, "seed": 3}}
    return {(n, seed): expected(generator, conversation(n), **options[seed]) for n in range(11) for seed in options}


async def crowd(url: str, right: dict[tuple[int, int | None], str], clients: int, enough: Callable[[int], bool]) -> int:
    """Let clients ask, one question after the other, some as a stream, and some leave; return the answers.

    A question that the server refuses because others wait, or does not answer in time, is asked again.
    """
    ids: list[str] = []
    client = openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0, timeout=600)
    keys = list(right)

    async def ask(asked: int) -> None:
        question, seed = keys[asked % len(keys)]
        options: dict[str, Any] = {**ASK, "messages": conversation(question)}
        options |= {} if seed is None else {"temperature": 0.9, "seed": seed}
        if asked % 5 == 4:  # leaves
            with contextlib.suppress(asyncio.TimeoutError):
                async with asyncio.timeout(0.05):
                    await client.chat.completions.create(**options | {"max_tokens": 5000})
        elif asked % 2:
            pieces = [event async for event in await client.chat.completions.create(**options, stream=True)]
            assert len({event.id for event in pieces}) == 1
            ids.append(pieces[0].id)
            text = "".join(choice.delta.content or "" for event in pieces for choice in event.choices)
            assert text == right[question, seed]
            assert [choice.finish_reason for event in pieces for choice in event.choices][-1] is not None
        else:
            answer = await client.chat.completions.create(**options)
            ids.append(answer.id)
            assert answer.choices[0].message.content == right[question, seed]

    async def one(number: int) -> None:
        while not enough(len(ids)):
            number += 7
            try:
                await ask(number)
            except openai.APIStatusError as error:
                if error.status_code not in (429, 504):
                    raise
                number -= 7
                await asyncio.sleep(0.1)

    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(one(number))
    assert len(set(ids)) == len(ids)
    await client.close()
    return len(ids)
