"""Plans of an attention over ranks: layouts, masks, tiles, schedules, what moves, and what it costs.

Pure: nothing here imports torch or anything that communicates, so that `bmburst plan` and a laptop can use it. The
executors in `bmburst.attention` and `bmburst.comm` obey what is decided here.

- `layout.py`, `mask.py`, `documents.py`: which rank holds which tokens, which keys a query sees
- `tiles.py`, `ring_schedule.py`: who computes which tile of the score matrix when
- `heads_plan.py`, `gather_plan.py`, `units.py`, `exchange.py`: which bytes move between which ranks
- `strategy_names.py`, `strategy.py`, `cost.py`, `hardware.py`: the ways to spread an attention, the fastest
- `mesh_shape.py`: how the ranks are cut into data, sequence and tensor groups
"""

from typing import TYPE_CHECKING, Any

from bmburst.lazy import public_name

if TYPE_CHECKING:
    from bmburst.schedule.documents import Documents, PrefixLM
    from bmburst.schedule.layout import Layout, make_layout
    from bmburst.schedule.mask import BlockSparse, Causal, Full, Mask, SlidingWindow, make_mask
    from bmburst.schedule.ring_schedule import Schedule, make_schedule

__all__ = [
    "BlockSparse",
    "Causal",
    "Documents",
    "Full",
    "Layout",
    "Mask",
    "PrefixLM",
    "Schedule",
    "SlidingWindow",
    "make_layout",
    "make_mask",
    "make_schedule",
]

_HOMES = {
    "BlockSparse": "mask",
    "Causal": "mask",
    "Documents": "documents",
    "Full": "mask",
    "Layout": "layout",
    "Mask": "mask",
    "PrefixLM": "documents",
    "Schedule": "ring_schedule",
    "SlidingWindow": "mask",
    "make_layout": "layout",
    "make_mask": "mask",
    "make_schedule": "ring_schedule",
}


def __getattr__(name: str) -> Any:
    """Import a name from its module."""
    return public_name(__name__, name, _HOMES)


def __dir__() -> list[str]:
    """Show the names to completion."""
    return sorted({*globals(), *__all__})
