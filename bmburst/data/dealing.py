"""Deals the samples of a step to data groups so that none waits long for another: equal counts, nearly equal costs.

Data groups meet in every micro-batch: each gathers the weights of every block from all ranks (ZeRO). So a step takes
the sum over micro-batches of the time of the slowest group, not the time of the group with the most work.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bmburst.schedule.balance import balance_chunks

_UNITS = 1 << 40  # of the largest cost; sums of as many as 2**22 samples fit in 63 bits


class Balance(NamedTuple):
    """The cost of a step divided by the mean over data groups, 1 or more: see `slowest`.

    Attributes:
        dealt: With the samples as they are dealt.
        drawn: With equal shares in the order in which they are drawn.
    """

    dealt: float
    drawn: float


def contiguous(count: int, groups: int) -> tuple[tuple[int, ...], ...]:
    """Return equal shares of `count` samples in order: the places of each group."""
    size = count // groups
    return tuple(tuple(range(first, first + size)) for first in range(0, count, size))


def deal_samples(costs: Sequence[float], groups: int, together: int) -> tuple[tuple[int, ...], ...]:
    """Return the places of each group's samples, in the order of its micro-batches: from the dearest to the cheapest.

    Samples are sorted by cost and taken in rounds of one micro-batch per group, so groups meet with like samples. A
    round is dealt by `bmburst.schedule.balance.balance_chunks`, and the group with the least work so far gets its
    dearest part. If all costs are equal, or there is one group, the order stays as drawn.

    Args:
        costs: Predicted cost of each sample of the step, 0 or more, in any unit; a multiple of `groups`.
        groups: Number of data groups.
        together: Samples of a micro-batch of one group.
    """
    if groups == 1 or min(costs) == max(costs):
        return contiguous(len(costs), groups)
    weights = np.rint(np.asarray(costs) / max(costs) * _UNITS).astype(np.int64)
    order = np.argsort(-weights, kind="stable")
    sums, found = np.zeros(groups, np.int64), [[] for _ in range(groups)]  # type: ignore[var-annotated]
    for first in range(0, len(order), groups * together):
        places = order[first : first + groups * together]
        owners = np.array(balance_chunks(weights[places].tolist(), groups))
        parts = [places[owners == part] for part in range(groups)]
        works = np.array([weights[part].sum() for part in parts])
        for part, group in zip(np.argsort(-works, kind="stable"), np.argsort(sums, kind="stable"), strict=True):
            found[group] += parts[part].tolist()
            sums[group] += works[part]
    return tuple(map(tuple, found))


def slowest(costs: Sequence[float], shares: Sequence[Sequence[int]], together: int) -> float:
    """Return the sum over micro-batches of the dearest group's cost, divided by the mean cost of a group.

    Args:
        costs: As in `deal_samples`.
        shares: The places of each group's samples.
        together: Samples of a micro-batch of one group.
    """
    of_groups = np.asarray(costs, float)[np.array(shares)]  # [groups, samples]
    starts = np.arange(0, of_groups.shape[1], together)
    parts = np.add.reduceat(of_groups, starts, axis=1)
    return float(parts.max(axis=0).sum() / of_groups.sum() * len(shares))
