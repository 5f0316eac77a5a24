"""What a run of queries sees, as boolean masks: for kernels in plain torch, a slab of rows at a time."""

import numpy as np
import torch
from torch import Tensor

from bmburst_ops.pattern import FULL, Cells, IntArray, Pattern, rows_of


class Visibility:
    """A pattern of so many queries and keys, asked for a slab of queries at a time: memory stays linear in the keys."""

    def __init__(self, pattern: Pattern, queries: int, keys: int) -> None:
        self.keys = keys
        self.is_full = pattern == FULL
        self.rows = rows_of(pattern, queries, keys)
        self.cells = pattern if isinstance(pattern, Cells) else None

    def block(self, queries: slice) -> tuple[slice, Tensor | None]:
        """Return the keys that any of these queries may see, and which see which, `[queries, keys]`; None for all."""
        if self.is_full or queries.start == queries.stop:
            return slice(0, self.keys), None
        start, stop = self.rows.start[queries], self.rows.stop[queries]
        seen = slice(int(start[0]), int(stop[-1]))
        columns = np.arange(seen.start, seen.stop)
        mask = (columns >= start[:, None]) & (columns < stop[:, None])
        if self.cells is not None:
            query_cells = cell_of(self.cells.query_edges, queries.start, queries.stop)
            key_cells = cell_of(self.cells.key_edges, seen.start, seen.stop)
            mask &= self.cells.cells[query_cells[:, None], key_cells]
        return seen, torch.from_numpy(mask)


def cell_of(edges: IntArray, start: int, stop: int) -> IntArray:
    """Return in which cell each of the places `start` to `stop` lies."""
    return np.searchsorted(edges, np.arange(start, stop), side="right") - 1
