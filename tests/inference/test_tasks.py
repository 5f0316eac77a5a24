"""`bmburst eval --tasks`: the texts give the expected answers, lengths are exact, ranks agree, and refusals."""

import json
import re
from collections import Counter
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest

from bmburst.cli import main
from bmburst.comm.checks import CheckedCommunicator
from bmburst.data.tokenizer import ByteTokenizer, PromptTokenizer
from bmburst.inference.generator import Generator, Source
from bmburst.inference.prompts import PromptEncoder
from bmburst.inference.tasks import TASKS, TaskPrompts, TaskTest, measure, score_of
from bmburst.outputs import is_picture
from tests.cli.commands import refused
from tests.distributed.threads import mesh_of, run_ranks
from tests.inference.test_passkey import MODEL, tokenizer  # noqa: F401
from tests.refusals import refused as raises
from tests.refusals import says


def prompts_of(tokenizer: PromptTokenizer, **changes: Any) -> TaskPrompts:  # noqa: F811
    test = TaskTest(**{"lengths": (1024, 2001), "samples": 3, **changes})
    return TaskPrompts(tokenizer, test, PromptEncoder(tokenizer, 300))


def solved(task: str, text: str) -> set[str]:
    """Return the right answer of a prompt's text, found by reading it."""
    if task == "needle":
        asked = re.findall(r"The special number of (\w+) is$", text)
        (number,) = re.findall(rf"The special number of {asked[0]} is (\d+)\.", text)
        return {number}
    if task == "variables":
        text = text.partition("KLMNO.")[2]  # without the example
        values: dict[str, str] = {}
        for name, value in re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)\.", text):
            assert name not in values
            values[name] = values.get(value, value)
        asked = re.findall(r"with the value (\d+) are$", text)
        return {name for name, value in values.items() if value == asked[0]}
    (words,) = re.findall(r"red box top\..* List: ([a-z ]+)\. Which", text)
    counts = Counter(words.split()).most_common()
    assert counts[2][1] > counts[3][1]
    return {word for word, _ in counts[:3]}


def test_texts_have_their_length_and_give_the_expected_answer(tokenizer: PromptTokenizer) -> None:  # noqa: F811
    prompts, seen = prompts_of(tokenizer), set()
    for task in TASKS:
        for length in (1024, 2001):
            for sample in range(3):
                prompt, expected = prompts.prompt(task, length, sample)
                assert len(prompt) == length
                text = tokenizer.decode(prompt.tokens)
                assert solved(task, text) == set(expected), text
                assert len(expected) == {"needle": 1, "variables": 5, "aggregation": 3}[task]
                assert prompts.new_tokens(expected) >= len(tokenizer.encode(" ".join(expected)))
                seen.add((task, expected))
    assert len(seen) == 18


def test_prompts_depend_on_the_seed_alone() -> None:
    first, other = (
        prompts_of(ByteTokenizer()),
        prompts_of(ByteTokenizer(), lengths=(2001,), samples=1, tasks=TASKS[::-1]),
    )
    seeded = prompts_of(ByteTokenizer(), seed=1)
    for task in TASKS:
        prompt, expected = first.prompt(task, 2001, 0)
        again, same = other.prompt(task, 2001, 0)
        assert np.array_equal(prompt.tokens, again.tokens) and expected == same
        assert expected != seeded.prompt(task, 2001, 0)[1]


def test_scores_are_shares_of_the_expected_words() -> None:
    assert score_of(("12", "34"), " 34, and 12.") == 1 and score_of(("12", "34"), "34") == 0.5
    assert score_of(("12",), "") == 0


@pytest.mark.parametrize("cache", ["auto", pytest.param("tokens", marks=pytest.mark.long)])
def test_ranks_that_share_the_text_give_the_same_answers(cache: str) -> None:
    test = TaskTest(lengths=(700, 901), samples=1)

    def body(comm: CheckedCommunicator) -> Any:
        mesh = mesh_of(comm)
        source = Source.open(MODEL, None, "bytes")
        made = Generator(source, mesh=mesh, cache=cache, dtype="float32")
        encoder = PromptEncoder(source.tokenizer, made.config.vocab_size)
        prompts = TaskPrompts(ByteTokenizer(), test, encoder)
        return [cell for length in test.lengths for cell in measure(made, prompts, test, length, lambda _: None)]

    (alone,) = run_ranks(1, body)
    assert [(cell.length, cell.task) for cell in alone] == [(n, task) for n in (700, 901) for task in TASKS]
    for cells in run_ranks(2, body):
        assert cells == alone


@pytest.mark.parametrize("ranks", ["1", pytest.param("2", marks=pytest.mark.long)])
def test_checkpoints_are_compared_in_a_table(ranks: str, tmp_path: Path, capfd: Any) -> None:
    copytree(MODEL, tmp_path / "other-with-a-long-name")
    given = ("--checkpoint", str(MODEL), "--compare", str(tmp_path / "other-with-a-long-name"), "--nproc", ranks)
    words = ("--tasks", "needle,variables", "--lengths", "576,1K", "--samples", "2", "--tokenizer", "bytes")
    output = tmp_path / "found.json"
    assert main(["eval", *given, *words, "--output", str(output)]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 5 and max(map(len, lines)) <= 80
    assert lines[0].split() == ["checkpoint", "tokens", "needle", "variables", "mean"]
    assert lines[3].split()[1:] == lines[1].split()[1:] and lines[1].split()[1] == "576"
    found = json.loads(output.read_text())
    one, two = found["checkpoints"].values()
    assert one == two and [cell["length"] for cell in one] == [576, 576, 1024, 1024]
    for cell in one:
        assert cell["score"] == sum(each["score"] for each in cell["answers"]) / 2
    assert found["settings"]["tasks"] == ["needle", "variables"] and is_picture(output.with_suffix(".png"))


def test_bad_input_is_refused_before_weights_are_read(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    given = ("eval", "--checkpoint", str(MODEL), "--tokenizer", "bytes", "--nproc", "1")
    for words, said in (
        (("--tasks", "all"), "--tasks | --lengths"),
        (("--tasks", "needle,speed", "--lengths", "4K"), "needle,speed | aggregation | --tasks all"),
        (("--tasks", "all", "--lengths", "100"), "100 tokens | allowed: at least"),
        (("--tasks", "all", "--lengths", "4K", "--samples", "0"), "samples 0 | 1"),
        (("--tasks", "all", "--lengths", "4K", "--depths", "0"), "--depths | --passkey"),
        (("--tasks", "all", "--lengths", "4K", "--passkey"), "--passkey and --tasks"),
        (("--tasks", "all", "--lengths", "4K", "--data", "x"), "--data | --tasks"),
        (("--tasks", "all", "--lengths", "4K", "--compare", str(MODEL)), "--compare | twice"),
        (("--tasks", "all", "--lengths", "4K", "--compare", "gone"), "gone"),
        (("--passkey", "--lengths", "4K", "--compare", "gone"), "--compare | --tasks"),
        (("--data", "x", "--lengths", "4K"), "--lengths | --passkey or --tasks"),
    ):
        says(refused(capsys, *given, *words), said)
    with raises("tasks", "each once"):
        TaskTest(tasks=("needle", "needle"), lengths=(4096,))
