"""How blocks move in the double ring: inside nodes and between them. What is computed with them is `ring.py`'s.

Memory, in blocks of what travels, own ones included: five at most (the own one, the one that entered the node and is
being sent on, the one that visits, and one on its way on each level), and five of gradients (the share of a step, the
last one, still being sent, one on its way on each level, and what the own node has gathered). It does not grow with
nodes or ranks.
"""

from collections.abc import Callable, Iterator
from itertools import zip_longest

from torch import Tensor

from bmburst.attention.single_ring import Blocks, add_blocks, collect_shares
from bmburst.comm.levels import Levels
from bmburst.comm.protocol import Arrived, BlockMover, Transfer
from bmburst.schedule.double_schedule import Itinerary


def visits(levels: Levels, itinerary: Itinerary, *own: Tensor) -> Iterator[Blocks]:
    """Yield the blocks of each step of an itinerary, our own first.

    While the caller works on a step the next hop inside the node is under way, and during a whole window the block that
    the next one begins with.
    """
    windows = itinerary.windows
    held, far = own, _hop(levels.outer, own, 0)
    for window, following in zip_longest(windows, windows[1:]):
        base = own
        if window.nodes:
            base = far.wait()
            held = _hop(levels.inner, base, window.stops[0]).wait()  # at once, unless a mask leaves out the first stop
        if following is not None and following.nodes:
            far = _hop(levels.outer, base, following.nodes - window.nodes)
        for hop in window.hops:
            near = _hop(levels.inner, held, hop)
            yield held
            held = near.wait()
        if following is None or following.nodes:
            yield held
        else:  # own blocks go round again, from where they stopped
            near = _hop(levels.inner, own, following.stops[0])
            yield held
            held = near.wait()


def carry_home(levels: Levels, itinerary: Itinerary, guests: Blocks, work: Callable[[Blocks], Blocks]) -> Blocks:
    """Let guests visit; send what `work` gives for them after them, one step behind, until it is home.

    A guest's gradients leave a rank as its next host still computes; when they arrive, the host's share is added. What
    a node has gathered goes to the next one while that gathers its own, and is added to it before it goes on.
    """
    windows = itinerary.windows
    visiting = visits(levels, itinerary, *guests)
    far: Transfer | None = None
    kept: Transfer | None = None
    for window, following in zip_longest(windows, windows[1:]):
        shares = collect_shares(levels.inner, window.hops, visiting, work)
        place = window.stops[-1]
        if following is not None and not window.nodes:  # this node's own: they are home but for the place
            kept = _hop(levels.inner, shares, -place)
            continue
        if kept is not None:
            kept.wait()  # it has long arrived: what was sent is freed
        shares = _hop(levels.inner, shares, itinerary.exit - place).wait()  # at once, unless a mask leaves out stops
        if far is not None:
            add_blocks(shares, far.wait())
        far = _hop(levels.outer, shares, (0 if following is None else following.nodes) - window.nodes)
        del shares
    assert far is not None  # the last window sent it
    home = _hop(levels.inner, far.wait(), -itinerary.exit).wait()
    if kept is not None:
        add_blocks(home, kept.wait())
    return home


def _hop(mover: BlockMover, blocks: Blocks, shift: int) -> Transfer:
    return mover.ring(*blocks, shift=shift) if shift % mover.size else Arrived(blocks)
