"""The number of kernel calls of a pass over several ranks, for the cost model. Imports no torch."""

from bmburst.schedule.gather_plan import Visibility, tile_counts
from bmburst.schedule.ring_schedule import tiles
from bmburst.schedule.units import Sizes
from bmburst_ops.bounded_cache import bounded_cache


def kernel_calls(sizes: Sizes, visible: Visibility, stops: int, *, backward: bool) -> int:
    """Return the number of kernel calls of a pass.

    Under a mask with levels, and in layout "balanced", where chunks of two ranks may alternate in a document, it is the
    number of tiles of a rank in the middle. Elsewhere two ranks have a tile, as under every block-sparse mask.

    Args:
        sizes: The strategy, and the sizes with its degree.
        visible: Layout, length and mask of the ring or the gather, over groups that exchange heads.
        stops: As in `Sizes.calls`.
        backward: Whether it is a backward pass.
    """
    mask, names = visible.mask, (visible.layout.queries.name, visible.layout.keys.name)
    if len(mask.levels) == 1 and (mask.blocks is not None or "balanced" not in names):
        return sizes.calls(stops, backward=backward)
    units, gathers = sizes.unit_count(backward=backward), sizes.inner_units
    if stops == 1 or sizes.strategy.outer != "gather":
        return units * _ring_tiles(visible)
    own, forward, of_keys = tile_counts(visible, visible.layout.size // 2)
    return units * (gathers * (own + of_keys) if backward else own + gathers * forward)


@bounded_cache(maxsize=64)
def _ring_tiles(visible: Visibility) -> int:
    """Return the tiles of the queries of a rank in the middle with the keys of all ranks."""
    layout, length, mask = visible.layout, visible.length, visible.mask
    return sum(len(tiles(layout, length, mask, layout.size // 2, rank)) for rank in range(layout.size))
