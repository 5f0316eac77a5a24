"""Kernels that need not wait for each other, one after another without a gap between them.

A kernel's last blocks leave multiprocessors idle: with packed documents, of which one is long, for half of a short
kernel's time. Each kernel has a stream of its own, so that the next one's blocks take them as soon as they are free.
What follows a kernel is not to wait for the next kernel's blocks, or its results would go home too late to be hidden:
earlier turns have a higher priority, since a kernel call may convert or copy its results after the kernel proper.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch

from bmburst.comm.streams import On, Order

_PRIORITIES = (-1, -2, -2)
"""Of the turns before the last one, from the end, two streams alternating further ahead. Copies between ranks have a
higher one."""


class Succession:
    """A stream for each turn, the last one's being the current stream; on CPUs, or for one turn alone, nothing.

    What is launched in a turn comes after everything launched before this was made. Its results may be used after
    `join`.

    Args:
        device: Where the kernels run.
        turns: How many there will be.
    """

    def __init__(self, device: torch.device, turns: int) -> None:
        self._current: Any = None
        self._before: tuple[Any, ...] = ()
        if device.type == "cuda" and turns > 1:
            self._current = torch.cuda.current_stream(device)
            streams = _streams(device)
            self._before = tuple(streams[_place(turns, turn)] for turn in range(turns - 1))
            self._beginning = self._current.record_event()
            self._begun = set[Any]()

    def turn(self, i: int) -> AbstractContextManager[None]:
        """Return a context in which the stream of turn `i` is the current one."""
        if i >= len(self._before):
            return nullcontext()
        if (stream := self._before[i]) not in self._begun:  # not before: what comes first is not to wait for the host
            self._begun.add(stream)
            stream.wait_event(self._beginning)
        return On(stream)

    def join(self) -> None:
        """Let the current stream wait for all that was launched."""
        if self._before:
            Order().after(self._current, *set(self._before))


def _place(turns: int, turn: int) -> int:
    """Return which stream a turn before the last has."""
    ahead = turns - 2 - turn
    return ahead if ahead < 1 else 1 + (ahead - 1) % 2


@lru_cache(maxsize=64)
def _streams(device: torch.device) -> tuple[Any, ...]:
    """Return a device's streams: always the same, since torch keeps free memory for each stream apart."""
    return tuple(torch.cuda.Stream(device, priority=priority) for priority in _PRIORITIES)
