"""Loss by position: how much a longer context helps a model to predict a token. Sums, table, JSON and image."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bmburst.mesh import Mesh
from bmburst.outputs import blank_picture, save_picture
from bmburst_ops import IGNORE_INDEX

FORMAT = "bmburst-loss-by-position-1"


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionBin:
    """Losses of the tokens in a range of positions. A position is the number of tokens before the input token.

    Attributes:
        first: First position.
        last: Last position.
        nats: Sum of the losses, in nats.
        tokens: Number of labels.
        loss: Mean loss, in nats per token.
    """

    first: int
    last: int
    nats: float
    tokens: int
    loss: float


class LossByPosition:
    """Sums token losses in bins of positions: 0, 1, 2 to 3, 4 to 7, and so on in powers of two.

    Args:
        length: Number of tokens in a sequence; positions are below it.
        device: Device of the losses.
    """

    def __init__(self, length: int, device: torch.device) -> None:
        bins = (length - 1).bit_length() + 1
        self._length = length
        self._borders = torch.tensor([1 << index for index in range(bins - 1)], dtype=torch.int64, device=device)
        self._nats = torch.zeros(bins, dtype=torch.float64, device=device)
        self._counts = torch.zeros(bins, dtype=torch.float64, device=device)  # exact up to 2**53

    def add(self, losses: Tensor, positions: Tensor, labels: Tensor) -> None:
        """Add this rank's tokens: losses in nats, positions and labels, all `[rows, tokens]`.

        Tokens with the label `IGNORE_INDEX` do not count.
        """
        counted = labels != IGNORE_INDEX
        index = torch.bucketize(positions[counted], self._borders, right=True)
        self._nats.index_add_(0, index, losses[counted].double())
        self._counts.index_add_(0, index, torch.ones_like(index, dtype=torch.float64))

    def bins(self, mesh: Mesh) -> list[PositionBin]:
        """Return the bins with at least one label, summed over all ranks. Every rank must call it."""
        found = []
        for index in range(len(self._nats)):
            nats, count = mesh.sum(float(self._nats[index])), round(mesh.sum(float(self._counts[index])))
            if count:
                first, last = (1 << index) >> 1, min((1 << index) - 1, self._length - 1)
                found.append(PositionBin(first=first, last=last, nats=nats, tokens=count, loss=nats / count))
        return found


def to_json(settings: Mapping[str, Any], measured: Mapping[str, Any], bins: Sequence[PositionBin]) -> dict[str, Any]:
    """Return the contents of an evaluation's JSON file.

    Args:
        settings: Settings of the evaluation, including `checkpoint`.
        measured: Metrics on the whole text.
        bins: Losses by position.
    """
    return {
        "format": FORMAT,
        "model": settings["checkpoint"],
        "settings": dict(settings),
        "measured": dict(measured),
        "bins": [asdict(each) for each in bins],
    }


def table(bins: Sequence[PositionBin], perplexity: Callable[[float], float]) -> str:
    """Return the bins as a table of at most 80 columns."""
    lines = [f"{'position':>16}  {'tokens':>14}  {'loss':>9}  {'perplexity':>12}"]
    for each in bins:
        span = str(each.first) if each.first == each.last else f"{each.first}-{each.last}"
        lines.append(f"{span:>16}  {each.tokens:>14,}  {each.loss:>9.4f}  {perplexity(each.loss):>12.4f}")
    return "\n".join(lines)


def draw_positions(bins: Sequence[PositionBin], model: str, path: Path) -> None:
    """Plot the mean loss of each bin over the positions.

    Raises:
        OSError: The file cannot be written.
    """
    figure = blank_picture(7.5, 4.5)
    axes = figure.subplots()
    edges = [each.first + 1 for each in bins] + [bins[-1].last + 2]
    axes.stairs([each.loss for each in bins], edges, color="#1f77b4", linewidth=2, baseline=None)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens that the model has seen")
    axes.set_ylabel("loss, nats per token")
    axes.set_title(f"loss by position, {Path(model).name}", fontsize=10)
    axes.grid(alpha=0.3)
    save_picture(figure, path)
