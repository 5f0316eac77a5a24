"""Kernels that need not wait for each other, on two streams in turn.

A kernel's last blocks leave multiprocessors idle: with packed documents, of which one is long, for half of a short
kernel's time. A kernel on the other stream takes them as soon as they are free.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch


class Alternate:
    """The current stream and one beside it, in turn; on CPUs, or for one kernel alone, nothing.

    What is launched in a turn comes after everything launched before this was made. Its results may be used after
    `join`, and on the streams of the same turns before.

    Args:
        device: Where the kernels run.
        turns: How many there will be.
    """

    def __init__(self, device: torch.device, turns: int) -> None:
        self._streams: tuple[Any, ...] = ()
        if device.type == "cuda" and turns > 1:
            self._streams = (torch.cuda.current_stream(device), _beside(device))
            self._streams[1].wait_stream(self._streams[0])

    @contextmanager
    def turn(self, i: int) -> Iterator[None]:
        """Make the stream of turn `i` the current one."""
        if not self._streams:
            yield
            return
        with torch.cuda.stream(self._streams[i % 2]):
            yield

    def join(self) -> None:
        """Let the current stream wait for all that was launched."""
        if self._streams:
            self._streams[0].wait_stream(self._streams[1])


@lru_cache(maxsize=64)
def _beside(device: torch.device) -> Any:
    """Return the second stream of a device: always the same, since torch keeps free memory for each stream apart."""
    return torch.cuda.Stream(device)
