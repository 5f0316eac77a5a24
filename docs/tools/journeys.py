"""Pictures of what moves between ranks: heads, blocks of a ring, and how many bytes of gradients."""

from typing import NamedTuple

from bmburst.schedule.cost import Placement
from bmburst.schedule.hardware import load_hardware
from bmburst.schedule.heads_plan import HeadsPlan, Strides, make_heads_plan
from bmburst.schedule.layout import Contiguous, Layout, make_layout, rank_areas
from bmburst.schedule.mask import Causal
from bmburst.schedule.ring_schedule import DoubleRingOrder, layout_ring_order, make_schedule
from bmburst.schedule.strategy import choose_strategy
from bmburst.schedule.strategy_names import RingTensors, Strategy
from bmburst.schedule.units import HeadShapes, backward_bytes, choose_ring_tensors
from docs.tools.svg import Drawing

RANKS = 4
LENGTH, HEADS, KV_HEADS, HEAD_DIM = 1 << 15, 32, 32, 128
NODES, PLACES = 2, 4
MACHINE = "h200"
_TICK = 5e-4  # seconds


def heads() -> Drawing:
    """Tokens of all heads against all tokens of some heads."""
    drawing = Drawing(720, 246, "An exchange of heads: before, each rank has some tokens; after, some heads")
    owners = [held for _, held in sorted((run.start, rank) for rank in range(RANKS) for run in _layout().runs(rank))]
    unit, side = 24.0, 24.0 * len(owners)
    for x, says, columns in (
        (60.0, "before and after: some tokens, all heads", False),
        (440.0, "in between: all tokens, some heads", True),
    ):
        drawing.text(x + side / 2, 18, says, "strong", anchor="middle")
        for i, owner in enumerate(owners):
            if columns:
                drawing.rect(x + i * unit + 0.5, 30, unit - 1, side, f"r{i * RANKS // len(owners)}", radius=1.5)
            else:
                drawing.rect(x, 30 + i * unit + 0.5, side, unit - 1, f"r{owner}", radius=1.5)
        drawing.text(x + side / 2, side + 50, "heads", "soft", anchor="middle")
        drawing.text(x - 12, 30 + side / 2, "tokens", "soft", anchor="end")
    for y, points in ((90.0, (280.0, 380.0)), (160.0, (380.0, 280.0))):
        drawing.line([(points[0], y), (points[1], y)], "arrow", arrow=True)
    drawing.text(330, 80, "q, k, v", anchor="middle")
    drawing.text(330, 180, "output", anchor="middle")
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
    left, width, end = 96.0, 640.0, times[-1].returns[1]
    drawing = Drawing(left + width + 24, 180, "An exchange of heads over time")
    scale = width / end
    lanes = ("come in", "attention", "go home")
    for lane, says in enumerate(lanes):
        y = 34 + lane * 40
        drawing.rect(left, y, width, 30, "ground", radius=2)
        drawing.text(left - 10, y + 20, says, anchor="end")
    for i, (unit, at) in enumerate(zip(plan.units, times, strict=True)):
        for lane, (start, stop) in enumerate(at):
            x, y, long = left + start * scale, 34 + lane * 40, (stop - start) * scale
            drawing.rect(x + 0.5, y, max(long - 1, 1.5), 30, f"r{i % 4}", radius=1.5)
            if long > 46:
                count = len(unit.heads)
                drawing.text(x + long / 2, y + 20, f"{count} head{'s' * (count > 1)}", "on", anchor="middle")
    for tick in range(int(end / _TICK) + 1):
        x = left + tick * _TICK * scale
        drawing.line([(x, 150), (x, 156)], "rule")
        drawing.text(x, 170, f"{tick * _TICK * 1e3:g} ms", "soft", anchor="middle", size=11)
    attended = sum(at.attends[1] - at.attends[0] for at in times)
    alone = f"attention {attended * 1e3:.1f} ms, together {end * 1e3:.1f} ms"
    drawing.text(left + width, 20, alone, "soft", anchor="end")
    drawing.text(left, 20, f"forward, {len(plan.units)} units of {HEADS // RANKS} heads a rank", "strong")
    return drawing


def heads_plan() -> HeadsPlan:
    """Return rank 0's plan of a forward pass over 4 ranks of one host, as `burst_attention` makes it."""
    shapes, strategy = _shapes(), _strategy()
    token = Strides(LENGTH // RANKS * HEADS * HEAD_DIM * 2, HEADS * HEAD_DIM * 2, HEAD_DIM * 2)
    most, pace = strategy.most_kv_heads, strategy.pace
    return make_heads_plan(shapes, 0, (token, token, token), backward=False, most=most, pace=pace)


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


def double_ring() -> Drawing:
    """Whose block a rank has at each step of one ring and of a double ring."""
    drawing = Drawing(742, 376, "One ring over two nodes, and a double ring")
    layout, length = _around()
    flat = [
        [step.owner for step in make_schedule(layout, length, Causal(), rank, "kv").steps]
        for rank in range(layout.size)
    ]
    double = [list(_ring_order().owners(rank)) for rank in range(layout.size)]
    _visits(drawing, 78, flat, "one ring")
    _visits(drawing, 446, double, "double ring")
    drawing.rect(78, 352, 14, 14, "r0", radius=2)
    drawing.text(98, 364, "block of node 0")
    drawing.rect(206, 352, 14, 14, "r1", radius=2)
    drawing.text(226, 364, "block of node 1")
    drawing.rect(336, 352, 14, 14, "mark", radius=2)
    drawing.text(356, 364, "has just come over the slow link")
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
    drawing = Drawing(720, 214, "Bytes sent backward, keys and values against queries")
    size, tokens, left = 8, 8192, 170.0
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
        drawing.text(left - 12, 42 + i * 44, f"32 heads, {32 // ratio} KV heads", anchor="end")
        for j, kind in enumerate(kinds):
            nbytes, y = backward_bytes(shape, kind), 24 + i * 44 + j * 17
            chosen = choose_ring_tensors(shape) == kind
            drawing.rect(left, y, 440 * nbytes / most, 14, f"r{j}{'' if chosen else ' faint'}", radius=1.5)
            says = f"{nbytes / 2**30:.2f} GiB{', chosen' * chosen}"
            drawing.text(left + 440 * nbytes / most + 8, y + 11, says, "strong" if chosen else "soft", size=11)
    drawing.rect(left, 200, 11, 11, "r0", radius=1.5)
    drawing.text(left + 16, 210, "kv: keys, values and their gradients go round")
    drawing.rect(left + 316, 200, 11, 11, "r1", radius=1.5)
    drawing.text(left + 332, 210, "burst: queries and theirs")
    return drawing


def _visits(drawing: Drawing, x: float, owners: list[list[int]], says: str) -> None:
    unit, top = 34.0, 54.0
    slow = set(crossings(owners))
    steps = sorted({step for step, _ in slow})
    behind = steps[0]  # the first block to cross left when the first step began
    drawing.text(x, 16, f"{says}: {len(steps)} crossing{'s' * (len(steps) > 1)} of the slow link", "strong", size=13)
    drawing.text(x, 33, f"each has {behind} step{'s' * (behind > 1)} of attention to hide behind", "soft")
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


def _ring_order() -> DoubleRingOrder:
    return layout_ring_order(*_around(), Causal(), "kv", NODES, returning=False)


def _around() -> tuple[Layout, int]:
    """Return a layout over all ranks of both nodes, and its tokens."""
    return make_layout("zigzag", NODES * PLACES, 2), NODES * PLACES * 2
