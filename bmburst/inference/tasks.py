"""Synthetic tasks over long texts, of the kinds of RULER (arXiv:2404.06654): needle, variable tracking, aggregation.

- needle: one of several sentences gives the number of a word, among others with numbers of other words.
- variables: assignments that are spread over the text hand a value on; the variables with that value are asked for.
- aggregation: three words of a list stand there more often than all others.

The texts are bmburst's own, and depend on the seed, not on the tokenizer. A prompt has exactly the given number of
tokens. The score of an answer is the share of the expected words that it has, as in RULER.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bmburst.amounts import short
from bmburst.data.tokenizer import PromptTokenizer, TokenIds
from bmburst.errors import UserError
from bmburst.inference.answering import Progress
from bmburst.inference.filler import Filler
from bmburst.inference.generator import Generator
from bmburst.inference.passkey import require_room
from bmburst.inference.prompts import Prompt, PromptEncoder
from bmburst.outputs import blank_picture, save_picture

TASKS = ("needle", "variables", "aggregation")
FORMAT = "bmburst-tasks-1"
_NEEDLES, _HOPS, _COMMON = 4, 4, 3
_EVERY = 10  # words of a list for each time that each common word stands there
_TIMES = 2  # how often another word stands in a list
_SPARE_TOKENS = 12  # tokens of an answer beyond the expected words: spaces, commas, the end of the sentence
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_NEEDLE = " The special number of {word} is {number}."
_NEEDLE_QUESTION = " What is the special number of {word}? The special number of {word} is"
_VALUE, _COPY = " VAR {name} = {value}.", " VAR {name} = VAR {other}."
_VARIABLES_QUESTION = " Which variables have the value {value}? The variables with the value {value} are"
_LIST_QUESTION = " Which three words stand in the list most often? The three words that stand there most often are"
_EXAMPLE = {
    "needle": "",
    "variables": (
        " VAR ABCDE = 11111. VAR FGHIJ = VAR ABCDE. VAR KLMNO = VAR FGHIJ."
        + _VARIABLES_QUESTION.format(value=11111)
        + " ABCDE FGHIJ KLMNO."
    ),
    "aggregation": " List: red box red cup top red box top cup box top sun." + _LIST_QUESTION + " red box top.",
}
"""What stands at the start of a prompt: the same question with its answer, so that a model need not follow orders."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskTest:
    """Settings of a test. The prompts depend only on these values and the tokenizer.

    Attributes:
        tasks: Names of `TASKS`.
        lengths: Lengths of the prompts in tokens, ascending.
        samples: Number of prompts per task and length.
        seed: Seed of the texts.

    Raises:
        UserError: A value is out of bounds.
    """

    tasks: tuple[str, ...] = TASKS
    lengths: tuple[int, ...]
    samples: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.tasks or len(set(self.tasks)) < len(self.tasks) or not set(self.tasks) <= set(TASKS):
            raise UserError(
                f"tasks {','.join(self.tasks)}\nallowed: {', '.join(TASKS)}, each once, or all\nfix: --tasks all"
            )
        for name, least, most in (("samples", 1, 10**6), ("seed", 0, 2**63)):
            if not least <= getattr(self, name) <= most:
                raise UserError(f"{name} {getattr(self, name)}\nallowed: {least} to {most}\nfix: --{name} {least + 9}")

    @property
    def total_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(self.lengths) * len(self.tasks) * self.samples


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskCell:
    """Answers of a model to one task at one length.

    Attributes:
        task: Name of the task.
        length: Number of tokens of each prompt.
        score: Mean share of the expected words that the answers have; None if the length was refused.
        answers: For each prompt: `expected`, `answer` (text), `score`.
        refused: Reason why the length was refused; None if it was measured.
    """

    task: str
    length: int
    score: float | None = None
    answers: tuple[dict[str, Any], ...] = ()
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class _Content:
    """The text of one prompt without its filler: `spread` is put into the filler in order, `whole` before the end."""

    spread: tuple[str, ...]
    question: str
    expected: tuple[str, ...]


class TaskPrompts:
    """Builds prompts with an exact number of tokens.

    As in `PasskeyPrompts`, each piece is tokenized in the context of preceding text, and the pieces are concatenated.

    Args:
        tokenizer: Tokenizer of the model.
        test: Settings of the test.
        encoder: Checks that tokens are in the model's vocabulary.

    Raises:
        UserError: A length is too short for a task, or the tokenizer is not the model's.
    """

    def __init__(self, tokenizer: PromptTokenizer, test: TaskTest, encoder: PromptEncoder) -> None:
        self._test, self._encoder, self._filler = test, encoder, Filler(tokenizer)
        self._piece = lru_cache(1 << 16)(self._filler.piece)  # lists repeat their words
        least = max(self._fixed(task) for task in test.tasks)
        require_room(test.lengths, least, "the tasks")
        self.prompt(test.tasks[0], min(test.lengths), 0)  # refuses tokens outside the model's vocabulary

    def prompt(self, task: str, length: int, sample: int) -> tuple[Prompt, tuple[str, ...]]:
        """Return a prompt of `length` tokens, and the words that the right answer has."""
        random = self._random(task, length, sample)
        parts = [self._filler.start, self._piece(_EXAMPLE[task])] if _EXAMPLE[task] else [self._filler.start]
        if task == "aggregation":
            body, expected = self._list(random, length - sum(map(len, parts)))
        else:
            content = _CONTENTS[task](random)
            body, expected = self._spread(random, content, length - sum(map(len, parts))), content.expected
        ids = np.concatenate([*parts, *body])
        assert len(ids) == length, (task, len(ids), length)
        return self._encoder.ids(ids, f"{task} {short(length)}"), expected

    def new_tokens(self, expected: Sequence[str]) -> int:
        """Return the largest number of tokens of an answer."""
        return sum(len(self._piece(f" {word},")) for word in expected) + _SPARE_TOKENS

    def _random(self, task: str, length: int, sample: int) -> np.random.Generator:
        return np.random.default_rng([self._test.seed, TASKS.index(task), length, sample])

    def _spread(self, random: np.random.Generator, content: _Content, room: int) -> list[TokenIds]:
        """Return the sentences of a content at random places of filler, in their order, and the question."""
        pieces, question = [self._piece(each) for each in content.spread], self._piece(content.question)
        filler, ends = self._filler.text(room - len(question) - sum(map(len, pieces)))
        places = np.sort(random.choice(ends, len(pieces)))
        found, last = [], 0
        for place, piece in zip(places, pieces, strict=True):
            found += [filler[last:place], piece]
            last = place
        return [*found, filler[last:], question]

    def _list(self, random: np.random.Generator, room: int) -> tuple[list[TokenIds], tuple[str, ...]]:
        """Return filler, a shuffled list of words that takes the rest of the room, and the question."""
        head, question = self._piece(" List:"), self._piece(f".{_LIST_QUESTION}")
        room -= len(head) + len(question)
        words = _new_words(random)
        common = [next(words) for _ in range(_COMMON)]
        chosen: list[str] = []
        used = 0
        while True:  # in rounds, so that the shares of the words do not depend on the room
            others = [next(words) for _ in range(_EVERY // _TIMES)]
            turn = [*(others * _TIMES), *common]
            size = sum(len(self._piece(f" {word}")) for word in turn)
            if used + size > room:
                break
            chosen += turn
            used += size
        if not chosen:
            raise UserError("no room for a list\nallowed: a longer prompt\nfix: a longer --lengths")
        order = random.permutation(len(chosen))
        filler, _ = self._filler.text(room - used)
        return [filler, head, *(self._piece(f" {chosen[i]}") for i in order), question], tuple(common)

    def _fixed(self, task: str) -> int:
        """Return a number of tokens that is enough for the fixed parts of every prompt of a task."""
        most = len(self._filler.start) + (len(self._piece(_EXAMPLE[task])) if _EXAMPLE[task] else 0)
        if task == "aggregation":
            word = max(len(self._piece(" zuzuzuzu")), len(self._piece(" babibobu")))
            return most + len(self._piece(" List:")) + len(self._piece(f".{_LIST_QUESTION}")) + 2 * word * (_EVERY + 3)
        contents = [_CONTENTS[task](self._random(task, length, 0)) for length in self._test.lengths]
        # Other samples have other words, which may have some tokens more.
        return most + max(
            sum(len(self._piece(each)) + 8 for each in (*content.spread, content.question)) for content in contents
        )


def _new_words(random: np.random.Generator) -> Iterator[str]:
    """Yield different words of three syllables or more."""
    seen: set[str] = set()
    while True:
        count = 3 + (len(seen) > 2000)
        letters = [(_CONSONANTS[a], _VOWELS[b]) for a, b in random.integers([[len(_CONSONANTS), len(_VOWELS)]] * count)]
        word = "".join(map("".join, letters))
        if word not in seen:
            seen.add(word)
            yield word


def _needle(random: np.random.Generator) -> _Content:
    words = _new_words(random)
    found = [(next(words), str(random.integers(10**5, 10**6))) for _ in range(_NEEDLES)]
    word, number = found[int(random.integers(_NEEDLES))]
    spread = tuple(_NEEDLE.format(word=each, number=value) for each, value in found)
    return _Content(spread, _NEEDLE_QUESTION.format(word=word), (number,))


def _variables(random: np.random.Generator) -> _Content:
    """Return two chains of assignments, of which one is asked for."""
    letters = np.array(list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
    names: list[str] = []
    while len(names) < 2 * (_HOPS + 1):
        name = "".join(random.choice(letters, 5))
        names += [] if name in names or name in ("ABCDE", "FGHIJ", "KLMNO") else [name]
    values = [str(each) for each in random.choice(np.arange(20000, 100000), 2, replace=False)]
    chains = [names[: _HOPS + 1], names[_HOPS + 1 :]]
    lines = [
        [_VALUE.format(name=chain[0], value=value)]
        + [_COPY.format(name=name, other=other) for other, name in pairwise(chain)]
        for chain, value in zip(chains, values, strict=True)
    ]
    order = random.permutation([0] * len(chains[0]) + [1] * len(chains[1]))  # each chain stays in its order
    spread = tuple(lines[which].pop(0) for which in order)
    return _Content(spread, _VARIABLES_QUESTION.format(value=values[0]), tuple(chains[0]))


_CONTENTS: Mapping[str, Callable[[np.random.Generator], _Content]] = {"needle": _needle, "variables": _variables}


def score_of(expected: Sequence[str], answer: str) -> float:
    """Return the share of the expected words that stand in an answer."""
    return sum(word in answer for word in expected) / len(expected)


def measure(
    generator: Generator, prompts: TaskPrompts, test: TaskTest, length: int, on_tokens: Callable[[int], object]
) -> list[TaskCell]:
    """Return a cell for each task at one length; the arguments are those of `bmburst.inference.passkey.measure`."""
    return [_measure(generator, prompts, test, task, length, on_tokens) for task in test.tasks]


def _measure(
    generator: Generator,
    prompts: TaskPrompts,
    test: TaskTest,
    task: str,
    length: int,
    on_tokens: Callable[[int], object],
) -> TaskCell:
    made = [prompts.prompt(task, length, sample) for sample in range(test.samples)]
    new = max(prompts.new_tokens(expected) for _, expected in made)
    if problem := generator.why_too_long(length, new):
        on_tokens(length * test.samples)
        return TaskCell(task=task, length=length, refused="; ".join(problem.splitlines()[:2]))
    options = generator.options(max_new_tokens=new, temperature=0.0, repetition_penalty=1.0, num_samples=1)
    answers = generator.generate([prompt for prompt, _ in made], options, progress=Progress(tokens=on_tokens))
    judged: list[dict[str, Any]] = [
        {"expected": list(expected), "answer": answer.text or "", "score": score_of(expected, answer.text or "")}
        for (_, expected), answer in zip(made, answers, strict=True)
    ]
    score = sum(each["score"] for each in judged) / len(judged)
    return TaskCell(task=task, length=length, score=score, answers=tuple(judged))


def to_json(results: Mapping[str, Sequence[TaskCell]], settings: Mapping[str, Any], test: TaskTest) -> dict[str, Any]:
    """Return the contents of the JSON file: the cells of each checkpoint, by its name."""
    return {
        "format": FORMAT,
        "settings": {**asdict(test), **settings},
        "checkpoints": {name: [asdict(cell) for cell in cells] for name, cells in results.items()},
    }


def table(results: Mapping[str, Sequence[TaskCell]], test: TaskTest) -> str:
    """Return a line for each checkpoint and length: the score of each task in percent, and their mean; 80 columns."""
    tasks = test.tasks
    width = 78 - 8 - 13 * len(tasks) - 7
    lines = [f"{'checkpoint':<{width}}{'tokens':>8}" + "".join(f"{task:>13}" for task in tasks) + f"{'mean':>7}"]
    for name, cells in results.items():
        for length in test.lengths:
            scores = {cell.task: cell.score for cell in cells if cell.length == length}
            known = [score for score in scores.values() if score is not None]
            mean = f"{100 * sum(known) / len(known):.1f}" if known else ""
            shown = "".join(f"{_percent(scores.get(task)):>13}" for task in tasks)
            cut = name if len(name) < width else f"..{name[-(width - 3) :]}"
            lines.append(f"{cut:<{width}}{short(length):>8}{shown}{mean:>7}")
    return "\n".join(lines)


def _percent(score: float | None) -> str:
    return "refused" if score is None else f"{100 * score:.1f}"


def draw(results: Mapping[str, Sequence[TaskCell]], test: TaskTest, path: Path) -> None:
    """Plot the score over length, a panel for each task, a line for each checkpoint; OSError if that fails."""
    figure = blank_picture(3.2 * len(test.tasks) + 1, 3.2)
    panels = figure.subplots(1, len(test.tasks), squeeze=False, sharey=True)[0]
    for panel, task in zip(panels, test.tasks, strict=True):
        for name, cells in results.items():
            points = [(cell.length, 100 * cell.score) for cell in cells if cell.task == task and cell.score is not None]
            panel.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
        panel.set_xscale("log", base=2)
        panel.set_xticks(test.lengths, [short(length) for length in test.lengths])
        panel.minorticks_off()
        panel.set_ylim(-3, 103)
        panel.set_title(task, fontsize=10)
        panel.set_xlabel("tokens of the prompt")
    panels[0].set_ylabel("score, %")
    panels[0].legend(fontsize=7)
    save_picture(figure, path)
