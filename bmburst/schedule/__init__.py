"""Plans attention over several ranks: layouts, masks, tiles, schedules, communication, and its cost.

Nothing here imports torch or communicates, so that `bmburst plan` works without torch and GPUs. The executors in
`bmburst.attention` and `bmburst.comm` follow these plans.

- `layout.py`, `mask.py`, `documents.py`, `tree.py`: which rank holds which tokens, which keys a query sees
- `tiles.py`, `ring_schedule.py`: which rank computes which tile of the score matrix at which step
- `heads_plan.py`, `gather_plan.py`, `units.py`, `exchange.py`: which bytes move between which ranks
- `strategy.py`, `cost.py`, `hardware.py`: the choice of the fastest strategy
- `cross.py`: cross-attention as a pair of layouts and a mask
- `cache_split.py`: which heads and tokens of a KV cache each rank keeps
- `parallelism.py`: data, sequence and tensor groups of ranks, and the strategies of attention by name
"""

from typing import TYPE_CHECKING, Any

from bmburst import public_name

if TYPE_CHECKING:
    from bmburst.schedule.documents import Documents, PrefixLM
    from bmburst.schedule.layout import Layout, make_layout
    from bmburst.schedule.mask import BlockSparse, Causal, Full, Mask, SlidingWindow, make_mask
    from bmburst.schedule.ring_schedule import Schedule, make_schedule
    from bmburst.schedule.tree import Tree

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
    "Tree",
    "make_layout",
    "make_mask",
    "make_schedule",
]

_HOMES = {
    "documents": ("Documents", "PrefixLM"),
    "layout": ("Layout", "make_layout"),
    "mask": ("BlockSparse", "Causal", "Full", "Mask", "SlidingWindow", "make_mask"),
    "ring_schedule": ("Schedule", "make_schedule"),
    "tree": ("Tree",),
}


def __getattr__(name: str) -> Any:
    """Import a name from its module."""
    return public_name(__name__, name, _HOMES)


def __dir__() -> list[str]:
    """Show the names to completion."""
    return sorted({*globals(), *__all__})
