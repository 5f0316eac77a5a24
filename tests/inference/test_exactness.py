"""Inference over 1 to 4 ranks, with every split of the cache: transformers' own tokens and logits."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bmburst.comm.checks import CheckedCommunicator
from bmburst.inference.replay import Phases, result_of
from bmburst.inference.session import GenerationBatch
from bmburst.inference.short_prompts import ShortPrompts
from bmburst.plan.inference import SHORT_STEP as STEP
from tests.distributed.threads import run_ranks
from tests.inference.models import FAMILIES, Greedy, after_a_turn, engine, greedy, logits, prompt, weights
from tests.pairs import Cases, in_turn, long, pairwise

UNEVEN = (13, 5, 1, 30)
STEPS = 10
WHOLE = 10_000


def few_ranks(*axes: Iterable[Any]) -> Cases:
    """Return all combinations with 1 to 4 ranks. Of those with 1 and 3, any two values meet in one that is not long."""
    return [*pairwise([1, 3], *axes), *long(*(each.values for each in pairwise([2, 4], *axes)))]


def answers(
    comm: CheckedCommunicator, family: str, cache: str, chunk: int, prompts: list[tuple[int, ...]]
) -> list[list[int]]:
    made = engine(family, comm, cache, chunk)
    batch = GenerationBatch(made, made.new_cache(len(prompts), max(map(len, prompts)) + STEPS))
    batch.prefill(prompts)
    return torch.stack([chosen.tokens for chosen in batch.decode(Greedy(), STEPS)], 1).tolist()


@pytest.mark.parametrize(
    ("ranks", "family", "cache", "chunk"),
    [
        *few_ranks(FAMILIES, ["auto", "tokens"], [WHOLE]),
        *few_ranks(["llama", "llama-dynamic", "mistral"], ["auto", "tokens"], [1, 7]),
    ],
)
def test_greedy_tokens_of_an_uneven_batch_are_transformers_own(family: str, ranks: int, cache: str, chunk: int) -> None:
    prompts = [prompt(length) for length in UNEVEN]
    expected = [greedy(family, each, STEPS) for each in prompts]
    for found in run_ranks(ranks, answers, family, cache, chunk, prompts):
        assert found == expected


def test_ranks_that_could_exchange_more_heads_exchange_those_of_the_cache() -> None:
    """8 ranks keep 2 groups of heads; 4 of them could exchange the 4 query heads."""
    for found in run_ranks(8, answers, "llama", "auto", WHOLE, [prompt(13)]):
        assert found == [greedy("llama", prompt(13), STEPS)]


SHORT = (STEP + 2, 5, 2 * STEP + 1, STEP, 1)  # shorter ones after longer ones, whose tokens must not be seen


def repeated(work: Callable[[], Phases]) -> Callable[[], torch.Tensor]:
    return lambda: result_of(work())


def short_answers(comm: CheckedCommunicator, family: str, cache: str) -> list[list[int]]:
    short = ShortPrompts(weights(family), comm, "auto", 4 * STEP * comm.size, repeated)
    made = replace(engine(family, comm, cache), prefill=lambda cache, turns, *_: short(cache, 0, np.array(turns[0])))
    found = []
    for length in SHORT:
        batch = GenerationBatch(made, made.new_cache(1, length + STEPS))
        batch.prefill([prompt(length)])
        found.append([chosen.tokens.item() for chosen in batch.decode(Greedy(), STEPS)])
        assert batch.cache.lengths[0] == length + STEPS - 1
    return found


@pytest.mark.parametrize(
    ("ranks", "family", "cache"),
    [
        *((1, "mistral", "auto"), (1, "qwen3", "auto"), (2, "llama", "heads"), (3, "llama", "tokens")),
        *((2, "qwen3", "auto"), (3, "mistral", "auto"), (4, "llama", "auto")),
    ],
)
def test_short_prompts_are_padded_divided_and_copied_to_their_cache(ranks: int, family: str, cache: str) -> None:
    expected = [greedy(family, prompt(length), STEPS) for length in SHORT]
    for found in run_ranks(ranks, short_answers, family, cache):
        assert found == expected


def turns(comm: CheckedCommunicator, family: str, cache: str, chunk: int, texts: list[tuple[int, ...]]) -> Any:
    """Return the logits behind each turn and behind each of the steps that follow it, and the text."""
    made = engine(family, comm, cache, chunk)
    batch = GenerationBatch(made, made.new_cache(1, sum(map(len, texts)) + len(texts) * STEPS))
    seen, text = [], []
    for turn in texts:
        batch.prefill([turn])
        text += turn
        for _ in range(3):
            seen.append((len(text) - 1, batch.logits[0]))
            token = batch.logits.argmax(-1)
            text += token.tolist()
            batch.logits = batch._decoder.step(token)
    return seen, text


@pytest.mark.parametrize(
    ("ranks", "family", "chunk", "cache"),
    few_ranks([("llama", 8), ("mistral", 7), ("qwen3", WHOLE), ("minicpm", WHOLE)], ["auto", "tokens"]),
)
def test_logits_of_turns_are_those_of_one_forward_pass(family: str, chunk: int, ranks: int, cache: str) -> None:
    texts = [prompt(17), prompt(2, seed=1), prompt(1, seed=2), prompt(12, seed=3)]
    for seen, text in run_ranks(ranks, turns, family, cache, chunk, texts):
        expected = logits(family, text)
        assert len(seen) == 12
        for position, found in seen:
            torch.testing.assert_close(found, expected[position], rtol=1e-5, atol=1e-5)


def second_turn(comm: CheckedCommunicator, cache: str, first: int) -> tuple[list[int], Any]:
    """Return a text of two turns and the logits behind it. The last token of the answer between them is not cached."""
    made = engine("llama-dynamic", comm, cache, WHOLE)
    batch = GenerationBatch(made, made.new_cache(1, 100))
    batch.prefill([prompt(first)])
    text = [*prompt(first), *(int(chosen.tokens[0]) for chosen in batch.decode(Greedy(), STEPS)), *prompt(7, seed=1)]
    batch.prefill([text[batch.cache.lengths[0] :]])
    return text, batch.logits[0]


@pytest.mark.parametrize(("ranks", "cache"), in_turn([1, 3, 2], ["auto", "tokens"]))
def test_dynamic_frequencies_of_a_turn_are_those_of_the_whole_text(ranks: int, cache: str) -> None:
    """Around 16 tokens, the original length. Ranks that share tokens compute the first tokens of a turn apart."""
    for first in (15, 16, 17, 30):
        text, expected = after_a_turn("llama-dynamic", prompt(first), STEPS, prompt(7, seed=1))
        for found, logits_found in run_ranks(ranks, second_turn, cache, first):
            assert found == text
            torch.testing.assert_close(logits_found, expected, rtol=1e-5, atol=1e-5)
