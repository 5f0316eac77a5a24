"""Pictures of the matrix of scores: who holds which tokens, and who computes which part of it when."""

from collections.abc import Iterator, Mapping
from itertools import groupby
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from bmburst.schedule.documents import Documents
from bmburst.schedule.layout import Layout, make_layout, rank_areas, real_positions
from bmburst.schedule.mask import Causal, Mask, SlidingWindow
from bmburst.schedule.ring_schedule import make_schedule
from bmburst.schedule.tree import Tree
from docs.tools.svg import Drawing

RANKS = 4
TOKENS = 64
PACKED = Documents((26, 7, 5, 14, 12))
ANSWERS = Tree((-1, 0, 0, 0), (28, 12, 12, 12))
NOBODY = -1


WIDTH = 360.0  # of a picture that fills a phone's screen, where the letters keep their size
SHOWN: Mapping[str, tuple[Mask, str, str]] = MappingProxyType(
    {
        "zigzag": (PACKED, "zigzag", "packed documents, zigzag"),
        "balanced": (PACKED, "balanced", "packed documents, balanced"),
        "window": (SlidingWindow(14), "contiguous", "window of 14, contiguous"),
        "tree_zigzag": (ANSWERS, "zigzag", "prefix tree, zigzag"),
        "tree_balanced": (ANSWERS, "balanced", "prefix tree, balanced"),
    }
)
"""What `masks` draws, by name: mask, layout and title."""


def layouts(mask: Mask, says: str) -> Drawing:
    """Who holds which tokens in each layout under a mask, and how much of the work falls on each rank."""
    cell, left, top = 2.9, 74.0, 54.0
    bars = left + TOKENS * cell + 14
    drawing = Drawing(WIDTH, 216, f"The four layouts, {says}: which rank holds which tokens, and the work of each")
    _ranks(drawing, left, 14)
    drawing.text(left, 40, says, "strong")
    drawing.text(bars, 40, "work", "strong")
    if isinstance(mask, Documents):
        for start in (*mask.starts, TOKENS):
            drawing.line([(left + start * cell, top - 8), (left + start * cell, top + 150)], "rule")
    for row, name in enumerate(("contiguous", "zigzag", "striped", "balanced")):
        layout, at = make_layout(name, RANKS, TOKENS // RANKS, mask, TOKENS), top + row * 40
        drawing.text(left - 8, at + 18, name, anchor="end")
        for owner, start, stop in _stretches(owners(layout)):
            drawing.rect(left + start * cell + 0.2, at, (stop - start) * cell - 0.4, 26, f"r{owner}", radius=1)
        areas = rank_areas(layout, TOKENS, mask)
        _work(drawing, bars, at, areas, wide=False)
        drawing.text(bars + 50, at + 18, f"{max(areas) * RANKS / sum(areas):.2f}", "soft", size=11)
    return drawing


def ring(step: int) -> Drawing:
    """The tiles of one step of a ring under a causal mask in zigzag order; pale: the steps before."""
    layout, mask, side = make_layout("zigzag", RANKS, TOKENS // RANKS), Causal(), 158.0
    drawing = Drawing(182, side + 90, f"Ring attention in zigzag order, step {step}")
    x, y = 18.0, 42.0
    _ranks(drawing, x, 14, apart=40, word="")
    _frame(drawing, layout, x, y, side)
    for before in range(step):
        _cells(drawing, computed(layout, mask, before), x, y, side, " faint")
    _cells(drawing, computed(layout, mask, step), x, y, side, "")
    work = (make_schedule(layout, TOKENS, mask, rank, "kv").steps[step].tiles for rank in range(RANKS))
    areas = {sum(tile.area for tile in tiles) for tiles in work}
    whose = "own keys" if step == 0 else f"keys of rank r - {step}"
    drawing.text(x + side / 2, y + side + 22, f"step {step}: {whose}", "strong", anchor="middle")
    drawing.text(x + side / 2, y + side + 40, f"{_numbers(areas)} scores on every rank", "soft", anchor="middle")
    return drawing


def masks(which: str) -> Drawing:
    """What is computed under another mask than the causal one, by whom, and how far a ring goes."""
    mask, name, says = SHOWN[which]
    side, x, y = 208.0, 20.0, 42.0
    drawing = Drawing(side + 32, side + 130, f"Tiles under another mask: {says}")
    _ranks(drawing, x, 14, apart=52, word="")
    layout = make_layout(name, RANKS, TOKENS // RANKS, mask, TOKENS)
    schedules = [make_schedule(layout, TOKENS, mask, rank, "kv") for rank in range(RANKS)]
    _frame(drawing, layout, x, y, side)
    for step in range(len(schedules[0].steps)):
        _cells(drawing, computed(layout, mask, step), x, y, side, "")
    drawing.text(x, y + side + 22, says, "strong")
    _work(drawing, x, y + side + 32, rank_areas(layout, TOKENS, mask))
    stops = len(schedules[0].steps)
    drawing.text(x, y + side + 78, f"a ring makes {stops} of {RANKS} stops", "soft")
    return drawing


def owners(layout: Layout) -> NDArray[np.int64]:
    """Return the rank of each position."""
    found = np.full(TOKENS, NOBODY)
    for rank in range(layout.size):
        found[real_positions(layout, rank, TOKENS)] = rank
    return found


def computed(layout: Layout, mask: Mask, step: int) -> NDArray[np.int64]:
    """Return, for each query and key in global order, the rank that computes their score at a step, or `NOBODY`."""
    found = np.full((TOKENS, TOKENS), NOBODY)
    keys, visible = np.arange(TOKENS)[None], np.zeros((TOKENS, TOKENS), bool)
    for level in mask.levels:
        start, stop = level.rows(np.arange(TOKENS), TOKENS)
        visible |= (keys >= start[:, None]) & (keys < stop[:, None])
    for rank in range(layout.size):
        at = make_schedule(layout, TOKENS, mask, rank, "kv").steps[step]
        rows, columns = (real_positions(layout, held, TOKENS) for held in (rank, at.owner))
        for tile in at.tiles:
            here = np.ix_(rows[tile.queries.slice], columns[tile.keys.slice])
            found[here] = np.where(visible[here], rank, found[here])
    return found


def _frame(drawing: Drawing, layout: Layout, x: float, y: float, side: float) -> None:
    """Draw the empty matrix, with the ranks that hold its rows and columns."""
    unit = side / TOKENS
    drawing.rect(x, y, side, side, "ground")
    for owner, start, stop in _stretches(owners(layout)):
        drawing.rect(x + start * unit, y - 10, (stop - start) * unit, 6, f"r{owner}")
        drawing.rect(x - 10, y + start * unit, 6, (stop - start) * unit, f"r{owner}")


def _cells(drawing: Drawing, cells: NDArray[np.int64], x: float, y: float, side: float, kind: str) -> None:
    """Draw cells of the matrix: equal neighbours of a row as one, and equal rows below each other too."""
    unit, row = side / TOKENS, 0
    for _, rows in groupby(cells.tolist()):
        height = len(list(rows))
        for owner, start, stop in _stretches(cells[row]):
            if owner != NOBODY:
                width = (stop - start) * unit
                drawing.rect(x + start * unit, y + row * unit, width, height * unit, f"cell r{owner}{kind}")
        row += height


def _stretches(values: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """Yield equal neighbours as value, start and stop."""
    start = 0
    for value, run in groupby(values.tolist()):
        stop = start + len(list(run))
        yield value, start, stop
        start = stop


def _work(drawing: Drawing, x: float, y: float, areas: tuple[int, ...], *, wide: bool = True) -> None:
    """Draw the work of each rank, with a line at the mean, and where it is wide, what the slowest one has."""
    most, mean, apart = max(areas), sum(areas) / len(areas), 16 if wide else 11
    for rank, area in enumerate(areas):
        height = 26 * area / max(most, 2 * mean)
        drawing.rect(x + rank * apart, y + 26 - height, apart - 3, height, f"r{rank}")
    level = y + 26 - 26 * mean / max(most, 2 * mean)
    drawing.line([(x - 3, level), (x + 4 * apart, level)], "mean")
    if wide:
        drawing.text(x + 74, y + 18, f"most: {most / mean:.2f} x mean", "soft", size=11)


def _ranks(drawing: Drawing, x: float, y: float, *, apart: float = 70, word: str = "rank ") -> None:
    for rank in range(RANKS):
        drawing.rect(x + rank * apart, y - 9, 11, 11, f"r{rank}", radius=1.5)
        drawing.text(x + rank * apart + 16, y, f"{word}{rank}")


def _numbers(values: set[int]) -> str:
    return " or ".join(map(str, sorted(values)))
