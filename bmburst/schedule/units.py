"""Which heads a kernel attends with at once while others are exchanged or gathered."""

from itertools import accumulate, pairwise
from typing import NamedTuple

from bmburst.schedule.tiles import Span
from bmburst_ops.constants import ATTENTION_BACKWARD, TILE_ROWS

_OUTBOX_BYTES = 1 << 30
_GATHERED_BYTES = 4 << 30
_RECORDED_SUMS = 512 << 20  # bytes
_PIPELINED_WORK = 5e10  # FLOPs of one head: below, a kernel is too short to hide anything and only its launch counts


class Unit(NamedTuple):
    """Heads of a rank's share: query heads, the KV heads they attend to, and those that no unit before has brought."""

    heads: Span
    kv_heads: Span
    new_kv_heads: Span


def make_units(heads: int, kv_heads: int, *, most: int, pace: float = 0.0, backward: bool) -> tuple[Unit, ...]:
    """Return what a rank's share is cut into, one kernel call each, so that blocks move while kernels run.

    The first unit and the last are small: nothing hides the first one's way in and the last one's way out. Those
    between them are few: each call costs the host time. Where the heads of a group are parted, those that stay together
    fill a kernel's tile evenly if they can, which is what lets it share keys and values among them.

    Args:
        heads: Query heads of the share.
        kv_heads: KV heads of the share.
        most: KV heads a unit may have, to bound the outbox; `kv_heads` or more for no bound, 0 for a single unit.
        pace: Time in which one tensor's part of one head moves, over that in which a query head is attended with
            forward: a unit has no more heads than come in while those before it are attended with.
        backward: Whether the query heads of a KV head stay together, since its gradient is their sum, and more moves.
    """
    group = heads // kv_heads
    if most == 0 or heads == 1:
        cuts = [(Span(0, heads), Span(0, kv_heads))]
    elif kv_heads <= min(2, most) and heads >= 3 and group > 1 and not backward:
        fitting = (n for n in range(1, heads // 4 + 1) if TILE_ROWS % ((heads - 2 * n) // kv_heads) == 0)
        edge = next(fitting, 1)
        cuts = [
            (Span(0, edge), Span(0, 1)),
            (Span(edge, heads - edge), Span(0, kv_heads)),
            (Span(heads - edge, heads), Span(kv_heads - 1, kv_heads)),
        ]
    else:
        moved, attended = (2 * group + 2, ATTENTION_BACKWARD * group) if backward else (group + 2, group)
        edges = accumulate(_counts(kv_heads, most, pace * moved / attended), initial=0)
        spans = [Span(a, b) for a, b in pairwise(edges)]
        cuts = [(Span(span.start * group, span.stop * group), span) for span in spans]
    units, brought = [], 0
    for own, kv in cuts:
        units.append(Unit(own, kv, Span(min(max(brought, kv.start), kv.stop), kv.stop)))
        brought = max(brought, kv.stop)
    return tuple(units)


def even_units(heads: int, kv_heads: int, most: int) -> tuple[Unit, ...]:
    """Return the heads of a gather in as few units of at most `most` KV heads (0: no bound) as there can be, and even.

    None is small: a rank has few queries, and a kernel of few heads would leave most of the GPU idle. What hides the
    first unit's way in is the attention to own keys.
    """
    count = -(-kv_heads // most) if most else 1
    spans = [Span(a, b) for a, b in pairwise(i * kv_heads // count for i in range(count + 1))]
    group = heads // kv_heads
    return tuple(Unit(Span(span.start * group, span.stop * group), span, span) for span in spans)


def hides_transfers(transport: str, work: float) -> bool:
    """Return whether moving some heads beside attending with others pays.

    Kernels must be long enough, and the transport must leave them alone.

    Args:
        transport: What moves them.
        work: FLOPs of one head forward, over all ranks.
    """
    return transport == "peer" and work >= _PIPELINED_WORK


def records_kernels(transport: str, sums: float) -> bool:
    """Return whether a rank starts the kernels of an exchange of heads as CUDA graphs.

    What they read and write must stay where it is, as the boxes of `peer` do. And what they take for themselves must be
    little: it stays with the graphs. Where it is more, kernels are long, and hide the host's time.

    Args:
        transport: What moves the heads.
        sums: Bytes of a sum for each number of the queries of a rank's heads: most of what a backward takes.
    """
    return transport == "peer" and sums <= _RECORDED_SUMS


def most_exchanged(heads: int, kv_heads: int, head_bytes: int, *, hides: bool) -> int:
    """Return how many KV heads one step of an exchange of heads moves, at least 1; 0: all in one step.

    In two steps or more where one `hides` the other, else in as few as an outbox of 1 GiB allows.

    Args:
        heads: Query heads of a rank's share.
        kv_heads: KV heads of the share.
        head_bytes: Of one head of a tensor, after the exchange.
        hides: See `hides_transfers`.
    """
    most = _OUTBOX_BYTES // (head_bytes * (heads // kv_heads + 2))
    return _bounded(most, kv_heads, hides=hides)


def most_gathered(kv_heads: int, head_bytes: int, *, hides: bool) -> int:
    """Return the same of a gather, whose boxes and buffers may take 4 GiB.

    Args:
        kv_heads: KV heads of a rank.
        head_bytes: Of one head of a tensor, of the whole sequence.
        hides: See `hides_transfers`.
    """
    bound = _GATHERED_BYTES // (12 * head_bytes)  # backward's formula in `bmburst.attention.gather`, of many ranks
    return _bounded(min(-(-kv_heads // 2), bound) if hides else bound, kv_heads, hides=hides)


def _bounded(most: int, kv_heads: int, *, hides: bool) -> int:
    return max(1, most) if hides or most < kv_heads else 0


def _counts(kv_heads: int, most: int, ratio: float) -> list[int]:
    """Return the KV heads of each unit: one, as many as come in meanwhile or twice as many, up to the last, one.

    While the units of `done` heads are attended with, `done / ratio` come in, and the first was here before.
    """
    counts = [1]
    while (left := kv_heads - 1 - sum(counts)) > 0:
        done = sum(counts)
        in_time = left if ratio * (done + left - 1) <= done else int(done / ratio) + 1 - done
        counts.append(min(left, most, max(2 * counts[-1], in_time)))
    return counts + [1] * (kv_heads > 1)
