"""What a trained model does with its context, at the end of a run: losses by position and by length, and pass keys."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bmburst import data
from bmburst.amounts import short
from bmburst.config import write_json
from bmburst.data.batches import Sequences
from bmburst.data.tokenizer import PromptTokenizer
from bmburst.errors import UserError
from bmburst.launch.watchdog import beat
from bmburst.mesh import Mesh
from bmburst.outputs import blank_picture, save_picture
from bmburst.sequence import SequenceShard
from bmburst.train.evaluate import LossByPosition, PositionBin, draw_bins
from bmburst.train.loading import LocalBatch, evaluated_part, token_losses
from bmburst_ops import IGNORE_INDEX

if TYPE_CHECKING:
    from bmburst.blocks.model import Llama
    from bmburst.inference.passkey import PasskeyCell

LONG = 4096
"""Tokens of a sequence from which on a run ends with this report by default."""
CONTEXT_FILE = "context.json"
FORMAT = "bmburst-context-1"
DEPTHS = (0.0, 0.5, 1.0)
_ENOUGH = 0.02  # share of all labels that a bin of the sentence has at least


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The report.

    Attributes:
        by_position: Loss by the number of tokens before the input token in its text.
        by_length: Loss by the tokens of the document; empty where sequences are streams of documents.
        passkeys: Pass keys in a text as long as a sequence, at `DEPTHS`; empty if the tokenizer does not allow them.
    """

    by_position: Sequence[PositionBin]
    by_length: Sequence[PositionBin]
    passkeys: "Sequence[PasskeyCell]"

    def sentence(self) -> str:
        """Return what the report says, in one sentence; empty if nothing was measured."""
        parts = []
        labels = sum(each.tokens for each in self.by_position)
        known = [each for each in self.by_position if each.tokens >= _ENOUGH * labels]
        if len(known) > 1:
            near, far = known[0], known[-1]
            parts.append(
                f"a token costs {far.loss:.3f} nats behind {_span(far)} others, {near.loss:.3f} behind {_span(near)}"
            )
        asked = [cell for cell in self.passkeys if cell.asked]
        if asked:
            found, length = sum(cell.right > 0 for cell in asked), short(asked[0].length, commas=True)
            parts.append(f"a pass key in {length} tokens is found at {found} of {len(asked)} depths")
        return "; ".join(parts)

    def write(self, folder: Path) -> None:
        """Write the report and its picture to the run folder."""
        values = {"format": FORMAT, "sentence": self.sentence(), **asdict(self)}
        write_json(folder / CONTEXT_FILE, values)
        _draw(self, folder / Path(CONTEXT_FILE).with_suffix(".png"))


def measure_context(
    model: "Llama",
    mesh: Mesh,
    cut: SequenceShard,
    sequences: Sequences,
    tokenizer: PromptTokenizer,
    *,
    device: torch.device,
    limit: int | None,
) -> Context:
    """Measure a model in training. Every rank calls it and gets the same report.

    Args:
        model: The model, sharded over all ranks.
        mesh: The ranks.
        cut: This rank's shard of a sequence.
        sequences: Held-out text.
        tokenizer: Its tokenizer.
        device: Device of this rank.
        limit: Most sequences to measure; None: all.
    """
    positions, lengths, has_documents = (
        LossByPosition(cut.length, device),
        LossByPosition(cut.length + 1, device),
        False,
    )
    data_ranks = mesh.shape.data
    batches = data.evaluation_batches(
        sequences, batch_size=data_ranks, limit=limit, data_rank=mesh.data_rank, data_parallel=data_ranks
    )
    with torch.no_grad():
        for batch in batches:
            part = evaluated_part(model, cut, batch).to(device)
            own: Callable[..., Tensor] = model.tensor.own
            losses, labels = token_losses(model, part, per_token=True), own(part.labels, IGNORE_INDEX)
            positions.add(losses, own(part.ids[2]), labels)
            if part.masks is not None:
                has_documents = True
                lengths.add(losses, own(_lengths(cut, part).to(device)), labels)
            beat()
    return Context(
        by_position=positions.bins(mesh),
        by_length=lengths.bins(mesh) if has_documents else (),
        passkeys=_passkeys(model, mesh, cut.length, tokenizer),
    )


def _lengths(cut: SequenceShard, part: LocalBatch) -> Tensor:
    """Return the tokens of the document of each of this rank's tokens, int64 `[rows, local_tokens]`."""
    rows = []
    for mask in part.masks or ():
        of_tokens = torch.tensor(mask.lengths).repeat_interleave(torch.tensor(mask.lengths))
        rows.append(of_tokens[cut.under(mask).positions().clamp(max=len(of_tokens) - 1)])  # padding has no label
    return torch.stack(rows)


def _passkeys(model: "Llama", mesh: Mesh, length: int, tokenizer: PromptTokenizer) -> "Sequence[PasskeyCell]":
    from bmburst.inference.generator import Generator
    from bmburst.inference.passkey import PasskeyPrompts, PasskeyTest, measure
    from bmburst.inference.prompts import PromptEncoder

    test = PasskeyTest(lengths=(length,), depths=DEPTHS, samples=1)
    try:  # the same on every rank
        prompts = PasskeyPrompts(tokenizer, test, PromptEncoder(tokenizer, model.config.vocab_size))
    except UserError:  # the question takes more tokens than a sequence has, or ids that the model lacks
        return ()
    return measure(Generator(model, mesh=mesh), prompts, test, length, lambda _: beat())


def _span(each: PositionBin) -> str:
    return f"{each.first:,}" if each.first == each.last else f"{each.first:,} to {each.last:,}"


def _draw(report: Context, path: Path) -> None:
    panels = [("by position", "tokens before, in the same text", report.by_position)]
    if report.by_length:
        panels.append(("by document length", "tokens of the document", report.by_length))
    figure = blank_picture(4.5 * len(panels), 3.6)
    for axes, (title, label, bins) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        draw_bins(axes, bins, label, f"loss {title}")
    words: list[str] = [f"{cell.depth:g}: {'found' if cell.right else 'not found'}" for cell in report.passkeys]
    if words:
        figure.suptitle(f"pass key at depth {', '.join(words)}", fontsize=9)
    save_picture(figure, path)
