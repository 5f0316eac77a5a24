"""Draw the figures of the documentation from the library's own schedules: `python -m docs.tools.figures`.

They are kept in docs/figures/, so that pages show them wherever they are read; a test draws them again and compares.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from bmburst.schedule.mask import Causal
from docs.tools import journeys, memory, scores
from docs.tools.svg import Drawing

FOLDER = Path(__file__).parents[1] / "figures"
FIGURES: dict[str, Callable[[], Drawing]] = {
    "layouts_causal": partial(scores.layouts, Causal(), "one causal document"),
    "layouts_documents": partial(scores.layouts, scores.PACKED, "packed documents"),
    **{f"ring_step_{step}": partial(scores.ring, step) for step in range(scores.RANKS)},
    **{f"masks_{name}": partial(scores.masks, name) for name in scores.SHOWN},
    "heads_before": partial(journeys.heads, split=False),
    "heads_between": partial(journeys.heads, split=True),
    "timeline": journeys.timeline,
    "ring_tensors": journeys.ring_tensors,
    "ring_single": partial(journeys.visits, double=False),
    "ring_double": partial(journeys.visits, double=True),
    "memory_gpu": partial(memory.bytes_of, "gpu"),
    "memory_host": partial(memory.bytes_of, "host"),
}
"""One panel each, so that a page can put them beside or below each other, as its width allows."""


def main() -> None:
    """Write every figure."""
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.svg"):
        old.unlink()
    for name, draw in FIGURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
