"""Pictures of what moves between ranks: heads, blocks of a ring, and how many bytes of gradients."""

from typing import NamedTuple

from bmburst.schedule.cost import Placement
from bmburst.schedule.hardware import load_hardware
from bmburst.schedule.heads_plan import HeadsPlan, Strides, make_heads_plan
from bmburst.schedule.layout import Contiguous, Layout, make_layout, rank_areas
from bmburst.schedule.mask import Causal
from bmburst.schedule.parallelism import RingTensors, Strategy
from bmburst.schedule.ring_schedule import RingOrder, layout_ring_order, make_schedule
from bmburst.schedule.strategy import choose_strategy
from bmburst.schedule.units import HeadShapes, backward_bytes, choose_ring_tensors
from docs.tools.svg import Drawing

RANKS = 4
LENGTH, HEADS, KV_HEADS, HEAD_DIM = 1 << 15, 32, 32, 128
NODES, PLACES = 2, 4
MACHINE = "h200"
_TICK = 5e-4  # seconds


def heads(*, split: bool) -> Drawing:
    """Tokens of all heads on each rank, before and after an exchange, or `split`, in between, all tokens of some."""
    owners = [held for _, held in sorted((run.start, rank) for rank in range(RANKS) for run in _layout().runs(rank))]
    unit, side, x = 24.0, 24.0 * len(owners), 66.0
    says = "in between: all tokens, some heads" if split else "before and after: some tokens, all heads"
    drawing = Drawing(side + 2 * x, 246, f"An exchange of heads, {says}")
    drawing.text(x + side / 2, 18, says, "strong", anchor="middle")
    for i, owner in enumerate(owners):
        if split:
            drawing.rect(x + i * unit + 0.5, 30, unit - 1, side, f"r{i * RANKS // len(owners)}", radius=1.5)
        else:
            drawing.rect(x, 30 + i * unit + 0.5, side, unit - 1, f"r{owner}", radius=1.5)
    drawing.text(x + side / 2, side + 48, "heads", "soft", anchor="middle")
    drawing.text(x - 12, 30 + side / 2, "tokens", "soft", anchor="end")
    return drawing


class Times(NamedTuple):
    """Start and end, in seconds, of a unit's way in, its attention, and its results' way home."""

    arrives: tuple[float, float]
    attends: tuple[float, float]
    returns: tuple[float, float]


def timeline() -> Drawing:
    """When the units of an exchange of heads come in, are attended with, and go home."""
    plan = heads_plan()
    times = heads_times(plan)
    left, width, top, end = 80.0, 268.0, 54.0, times[-1].returns[1]
    drawing = Drawing(left + width + 12, top + 150, "Timeline of a forward pass with an exchange of heads")
    scale = width / end
    attended = sum(at.attends[1] - at.attends[0] for at in times)
    drawing.text(0, 16, f"Forward pass in {len(plan.units)} units, {HEADS // RANKS} heads a rank in all", "strong")
    drawing.text(0, 34, f"attention {attended * 1e3:.1f} ms, together {end * 1e3:.1f} ms", "soft")
    for lane, says in enumerate(("heads come", "attention", "heads return")):
        y = top + lane * 40
        drawing.rect(left, y, width, 30, "ground", radius=2)
        drawing.text(left - 4, y + 20, says, anchor="end", size=11)
    for i, (unit, at) in enumerate(zip(plan.units, times, strict=True)):
        for lane, (start, stop) in enumerate(at):
            x, y, long = left + start * scale, top + lane * 40, (stop - start) * scale
            drawing.rect(x + 0.5, y, max(long - 1, 1.5), 30, f"r{i % 4}", radius=1.5)
            if long > 46:
                count = len(unit.heads)
                drawing.text(x + long / 2, y + 20, f"{count} head{'s' * (count > 1)}", "on", anchor="middle")
    for tick in range(int(end / _TICK) + 1):
        x = left + tick * _TICK * scale
        drawing.line([(x, top + 116), (x, top + 122)], "rule")
        if tick % 2 == 0:
            drawing.text(x, top + 138, f"{tick * _TICK * 1e3:g} ms", "soft", anchor="middle", size=11)
    return drawing


def heads_plan() -> HeadsPlan:
    """Return rank 0's plan of a forward pass over 4 ranks of one host, as `burst_attention` makes it."""
    shapes, strategy = _shapes(), _strategy()
    token = Strides(LENGTH // RANKS * HEADS * HEAD_DIM * 2, HEADS * HEAD_DIM * 2, HEAD_DIM * 2)
    return make_heads_plan(shapes, 0, (token, token, token), backward=False, units=strategy.forward_units)


def heads_times(plan: HeadsPlan) -> tuple[Times, ...]:
    """Return when each unit's parts happen, by the planner's rates: a transfer in begins with the kernel before it."""
    machine = load_hardware(MACHINE)
    scores = sum(rank_areas(_layout(), LENGTH, Causal()))
    found: list[Times] = []
    came, attended, returned = 0.0, 0.0, 0.0
    for i, unit in enumerate(plan.units):
        sent = [plan.inbound[i].bytes_sent, plan.outbound[i].exchange.bytes_sent]
        moving = [machine.peer_latency + nbytes / machine.peer_bandwidth for nbytes in sent]
        arrives = max(came, found[-1].attends[0] if found else 0.0)
        came = arrives + moving[0]
        attends = max(came, attended)
        attended = attends + 4.0 * scores * HEAD_DIM * len(unit.heads) / machine.attention_forward
        returns = max(attended, returned)
        returned = returns + moving[1]
        found.append(Times((arrives, came), (attends, attended), (returns, returned)))
    return tuple(found)


def visits(*, double: bool) -> Drawing:
    """Whose block a rank has at each step of one ring over two nodes, or of a double ring."""
    says = "double ring" if double else "one ring"
    drawing = Drawing(346, 388, f"Whose block each rank has at each step, {says} over two nodes")
    layout, length = _around()
    flat = [
        [step.owner for step in make_schedule(layout, length, Causal(), rank, "kv").steps]
        for rank in range(layout.size)
    ]
    _visits(drawing, 66, [list(_ring_order().owners(rank)) for rank in range(layout.size)] if double else flat, says)
    for x, y, kind, meaning in (
        (66, 352, "r0", "block of node 0"),
        (206, 352, "r1", "block of node 1"),
        (66, 372, "mark", "has just come over the slow link"),
    ):
        drawing.rect(x, y - 11, 14, 14, kind, radius=2)
        drawing.text(x + 20, y, meaning)
    return drawing


def crossings(owners: list[list[int]]) -> list[tuple[int, int]]:
    """Return step and rank of each block that came from the other node for this step.

    A block comes from where it was at the step before. Where it was at the same place of the other node when that
    node's window began, it has been on its way since then.
    """
    found = []
    for step in range(1, len(owners[0])):
        before = {row[step - 1]: rank for rank, row in enumerate(owners)}
        for rank, row in enumerate(owners):
            if before[row[step]] // PLACES != rank // PLACES:
                found.append((step, rank))
    return found


def ring_tensors() -> Drawing:
    """Bytes that a rank sends backward, if keys and values travel or queries."""
    drawing = Drawing(360, 262, "Bytes sent backward, keys and values against queries")
    size, tokens, wide = 8, 8192, 190
    kinds: tuple[RingTensors, ...] = ("kv", "q")
    ratios = (1, 2, 4, 8)
    shapes = [
        HeadShapes(
            layout=Contiguous(size, tokens),
            degree=1,
            batch=1,
            heads=32,
            kv_heads=32 // n,
            head_dim=128,
            itemsize=2,
            statistics_itemsize=4,
        )
        for n in ratios
    ]
    most = max(backward_bytes(shape, kind) for shape in shapes for kind in kinds)
    for i, (ratio, shape) in enumerate(zip(ratios, shapes, strict=True)):
        y = 14 + i * 54
        drawing.text(0, y, f"32 heads, {32 // ratio} KV heads", "strong")
        for j, kind in enumerate(kinds):
            nbytes, at = backward_bytes(shape, kind), y + 6 + j * 17
            chosen = choose_ring_tensors(shape) == kind
            drawing.rect(0, at, wide * nbytes / most, 14, f"r{j}{'' if chosen else ' faint'}", radius=1.5)
            says = f"{nbytes / 2**30:.2f} GiB{', chosen' * chosen}"
            drawing.text(wide * nbytes / most + 8, at + 11, says, "strong" if chosen else "soft", size=11)
    for j, says in enumerate(
        ("kv: keys, values and their gradients go round", "burst: queries and their gradients go round")
    ):
        drawing.rect(0, 226 + j * 20, 11, 11, f"r{j}", radius=1.5)
        drawing.text(16, 236 + j * 20, says)
    return drawing


def _visits(drawing: Drawing, x: float, owners: list[list[int]], says: str) -> None:
    unit, top = 34.0, 54.0
    slow = set(crossings(owners))
    steps = sorted({step for step, _ in slow})
    behind = steps[0]  # the first block to cross left when the first step began
    drawing.text(0, 16, f"{says}: {len(steps)} crossing{'s' * (len(steps) > 1)} of the slow link", "strong", size=13)
    drawing.text(0, 33, f"each has {behind} step{'s' * (behind > 1)} of attention to hide behind", "soft")
    for rank, row in enumerate(owners):
        y = top + rank * unit + (8 if rank >= PLACES else 0)
        drawing.text(x - 8, y + 20, f"rank {rank}", "soft", anchor="end", size=11)
        for step, owner in enumerate(row):
            drawing.rect(x + step * unit + 1, y + 1, unit - 4, unit - 4, f"r{owner // PLACES}", radius=2)
            drawing.text(x + step * unit + unit / 2 - 1, y + 20, str(owner), "on", anchor="middle")
            if (step, rank) in slow:
                drawing.rect(x + step * unit, y, unit - 2, unit - 2, "mark", radius=3)


def _layout() -> Layout:
    return make_layout("zigzag", RANKS, LENGTH // RANKS)


def _shapes() -> HeadShapes:
    return HeadShapes(
        layout=_layout(),
        degree=RANKS,
        batch=1,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        itemsize=2,
        statistics_itemsize=4,
    )


def _strategy() -> Strategy:
    return choose_strategy("heads", _shapes(), LENGTH, Causal(), Placement("peer"), load_hardware(MACHINE))


def _ring_order() -> RingOrder:
    return layout_ring_order(*_around(), Causal(), "kv", NODES, returning=False)


def _around() -> tuple[Layout, int]:
    """Return a layout over all ranks of both nodes, and its tokens."""
    return make_layout("zigzag", NODES * PLACES, 2), NODES * PLACES * 2
