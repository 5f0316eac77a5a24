"""Pictures of evaluations: the heat map of passkeys, and loss over position."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bmburst.amounts import short
from bmburst.evaluation.by_position import PositionBin
from bmburst.evaluation.passkey import PasskeyCell
from bmburst.outputs import save_picture

_REFUSED, _LINE = "#bbbbbb", "#1f77b4"
_INCHES = 0.75  # of a cell


def draw_passkeys(cells: Sequence[PasskeyCell], model: str, path: Path) -> None:
    """Draw the share of right answers over length and depth; what was refused is gray.

    Raises:
        OSError: It cannot be written.
    """
    lengths, depths = sorted({cell.length for cell in cells}), sorted({cell.depth for cell in cells})
    found = {(cell.length, cell.depth): cell for cell in cells}
    size = (2.8 + _INCHES * max(len(lengths), 4), 1.6 + _INCHES * max(len(depths), 2))
    figure, axes = _figure(size)
    shares = [[_share(found.get((length, depth))) for length in lengths] for depth in depths]
    image = axes.imshow(shares, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    axes.set_facecolor(_REFUSED)
    for row, depth in enumerate(depths):
        for column, length in enumerate(lengths):
            cell = found.get((length, depth))
            if cell is not None:
                axes.text(column, row, words_of(cell), ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(lengths)), [short(length, commas=True) for length in lengths], rotation=30)
    axes.set_yticks(range(len(depths)), [f"{depth:.4g}" for depth in depths])
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("depth of the pass key")
    axes.set_title(f"passkey retrieval, {Path(model).name}", fontsize=10)
    figure.colorbar(image, ax=axes, label="exact matches")
    save_picture(figure, path)


def draw_positions(bins: Sequence[PositionBin], model: str, path: Path) -> None:
    """Draw the mean loss of each bin over the positions.

    Raises:
        OSError: It cannot be written.
    """
    figure, axes = _figure((7.5, 4.5))
    edges = [each.first + 1 for each in bins] + [bins[-1].last + 2]
    axes.stairs([each.loss for each in bins], edges, color=_LINE, linewidth=2, baseline=None)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens that the model has seen")
    axes.set_ylabel("loss, nats per token")
    axes.set_title(f"loss by position, {Path(model).name}", fontsize=10)
    axes.grid(alpha=0.3)
    save_picture(figure, path)


def words_of(cell: PasskeyCell) -> str:
    """Return what a cell shows, for example "4/5"."""
    return "refused" if cell.refused is not None else f"{cell.right}/{cell.asked}"


def _share(cell: PasskeyCell | None) -> float:
    return cell.right / cell.asked if cell is not None and cell.asked else float("nan")


def _figure(size: tuple[float, float]) -> tuple[Any, Any]:
    # Figure without pyplot: no global state, and no display is looked for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()
