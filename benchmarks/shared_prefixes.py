"""Measures training steps on rows with a shared prompt, as a prefix tree and row by row.

The step is that of `benchmarks.hugging_face`: a transformers model under FSDP2 with random weights. A case is a prompt
and answers of equal length, `8K+8x4K` by default among others. "tree" computes `bmburst.pack_tree` of the rows in one
call of the model. "rows" computes the rows one after another and adds up their gradients. Both have the mean loss over
the labels of all rows, and one update, with a learning rate of 0. FLOPs are those of the model's matrix products and
attention, with attention's backward counted 2.5 times; the ideal speedup is their ratio. Of many rows only `--rows` are
measured, and the time of the rest is that of their median.
"""

import argparse
import statistics
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

import bmburst
from benchmarks.engine.machine import RankGroup, start_ranks
from benchmarks.engine.report import markdown_table
from benchmarks.engine.rows import Measured, RowBenchmark
from benchmarks.engine.timing import once
from benchmarks.hugging_face import Training, shape_of
from bmburst.amounts import GIB, short, tokens
from bmburst.blocks.presets import PRESETS
from bmburst.errors import UserError
from bmburst.integrations.transformers import register

CASES = "8K+8x4K,64K+2x4K,64K+16x4K"


class Case(NamedTuple):
    """Rows with a shared prompt."""

    prompt: int  # tokens of the prompt
    answers: int  # number of rows
    answer: int  # tokens of each answer

    @classmethod
    def parse(cls, text: str) -> "Case":
        """Return the case of a text such as `8K+8x4K`."""
        try:
            prompt, rest = text.split("+")
            answers, answer = rest.split("x")
            return cls(tokens(prompt), int(answers), tokens(answer))
        except ValueError:
            raise UserError(f"--cases {text}\nallowed: PROMPT+ANSWERSxTOKENS\nfix: for example 8K+8x4K") from None

    @property
    def name(self) -> str:
        """The text that `parse` reads."""
        return f"{short(self.prompt)}+{self.answers}x{short(self.answer)}"

    @property
    def pairs(self) -> tuple[float, float]:
        """Visible pairs of a query and a key, of the tree and of the rows."""
        node = self.answer * (self.prompt + self.answer / 2)
        return self.prompt**2 / 2 + self.answers * node, self.answers * (self.prompt**2 / 2 + node)

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens of the tree and of the rows."""
        return self.prompt + self.answers * self.answer, self.answers * (self.prompt + self.answer)

    def flops(self, config: Any, weights: int) -> tuple[float, float]:
        """Return the FLOPs of a step, of the tree and of the rows.

        `weights` are those that are multiplied, for each token once: without the embedding.
        """
        attention = 4 * 3.5 * config.num_attention_heads * config.head_dim * config.num_hidden_layers
        tree, rows = (6.0 * weights * n + attention * pairs for n, pairs in zip(self.tokens, self.pairs, strict=True))
        return tree, rows


def _configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="llama-3-8b", choices=PRESETS, help="preset (default: llama-3-8b)")
    add("--layers", type=int, help="number of layers (default: that of the preset)")
    add("--cases", default=CASES, help=f"default: {CASES}")
    add("--recompute", default="block-keep-attention", help="policy (default: block-keep-attention)")
    add("--steps", type=int, default=3, help="measured steps (default: 3)")
    add("--rows", type=int, default=4, help="measured rows of a step (default: 4)")


def _measure(options: argparse.Namespace) -> Measured:
    cases = [Case.parse(text) for text in options.cases.split(",")]
    group = RankGroup.world(start_ranks())
    register()
    # Without a learning rate the weights stay, so that the losses of the tree and of the rows can be compared.
    training = Training(
        shape_of(options.model, options.layers), group.device, policy=options.recompute, lr=0.0, layout="balanced"
    )
    layers = training.model.config.num_hidden_layers
    facts = {"model": options.model, "layers": layers, "recompute": options.recompute}
    return facts, (_row(training, case, options, group) for case in cases)


def _row(training: Training, case: Case, options: argparse.Namespace, group: RankGroup) -> dict[str, Any]:
    vocabulary = training.model.config.vocab_size
    generator = torch.Generator().manual_seed(0)
    prompt, *answers = (
        torch.randint(vocabulary, (n,), generator=generator).tolist()
        for n in (case.prompt, *[case.answer] * case.answers)
    )
    rows = [prompt + answer for answer in answers]
    packed = bmburst.pack_tree(rows)
    assert packed.length == case.tokens[0] - 1, f"the prompt of {case.name} is too short to be shared"
    tree_seconds, tree_loss, tree_peak = _tree(training, packed, options.steps, group)
    row_seconds, row_loss, row_peak = _rows(training, rows[: options.rows], len(rows), group)
    embedding = training.model.get_input_embeddings().weight.numel()
    ideal = case.flops(training.model.config, training.num_weights - embedding)
    return {
        "case": case.name,
        "tree_seconds": tree_seconds,
        "rows_seconds": row_seconds,
        "measured_rows": min(options.rows, len(rows)),
        "speedup": row_seconds / tree_seconds,
        "flops_ratio": ideal[1] / ideal[0],
        "tree_loss": tree_loss,
        "rows_loss": row_loss,
        "tree_peak_gib": tree_peak / GIB,
        "rows_peak_gib": row_peak / GIB,
    }


def _tree(training: Training, packed: Any, steps: int, group: RankGroup) -> tuple[float, float, float]:
    """Return the seconds of a step, the first loss, and the peak memory of the slowest rank."""
    losses: list[float] = []

    def step() -> None:
        loss = training.split.part(tree=packed).loss(training.model)
        loss.backward()
        training.update()
        losses.append(training.split.mean(loss.detach()))

    _, *times = [once(step, group) for _ in range(1 + steps)]  # the first is for warm-up
    return statistics.median(times) / 1e3, losses[0], _peak(group)


def _rows(training: Training, rows: list[list[int]], count: int, group: RankGroup) -> tuple[float, float, float]:
    """Return the seconds of a step over `count` rows like these, the mean of the first losses, and the peak memory."""
    losses: list[float] = []

    def step(row: list[int]) -> None:
        loss = training.split.part(torch.tensor([row])).loss(training.model) / count
        loss.backward()
        losses.append(training.split.mean(loss.detach()) * count)

    _, *times = [once(partial(step, row), group) for row in (rows[0], *rows)]  # the first is for warm-up
    update = once(training.update, group)
    seconds = (count * statistics.median(times) + update) / 1e3
    return seconds, statistics.fmean(losses[1:]), _peak(group)


def _peak(group: RankGroup) -> float:
    on_gpu = group.device.type == "cuda"
    peak = group.largest(torch.cuda.max_memory_allocated() if on_gpu else 0)
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return peak


def table(found: Mapping[str, Any]) -> str:
    """Return a record as Markdown."""
    columns = ["rows", "s a step, tree", "s a step, rows", "speedup", "ratio of FLOPs", "GiB, tree", "GiB, rows"]
    forms = {"tree_seconds": ".3f", "rows_seconds": ".3f", "speedup": ".2f", "flops_ratio": ".2f"}
    forms |= {"tree_peak_gib": ".1f", "rows_peak_gib": ".1f"}
    lines = ([row["case"], *(format(row[name], form) for name, form in forms.items())] for row in found["rows"])
    title = f"{found['model']}, {found['layers']} layers, recompute {found['recompute']}:"
    return "\n".join([title, "", *markdown_table(columns, lines)])


BENCHMARKS = (
    RowBenchmark(name="shared-prefixes", about=__doc__, configure=_configure, measure=_measure, table=table, ranks=2),
)
