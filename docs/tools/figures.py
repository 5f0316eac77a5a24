"""Draw the figures of the documentation from the library's own schedules: `python -m docs.tools.figures`.

They are kept in docs/figures/, so that pages show them wherever they are read; a test draws them again and compares.
"""

from collections.abc import Callable
from pathlib import Path

from docs.tools import journeys, scores
from docs.tools.svg import Drawing

FOLDER = Path(__file__).parents[1] / "figures"
FIGURES: dict[str, Callable[[], Drawing]] = {
    "layouts": scores.layouts,
    "ring": scores.ring,
    "masks": scores.masks,
    "heads": journeys.heads,
    "timeline": journeys.timeline,
    "ring_tensors": journeys.ring_tensors,
    "double_ring": journeys.double_ring,
}


def main() -> None:
    """Write every figure."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in FIGURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
