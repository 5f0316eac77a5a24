"""torch's current stream without what its public way costs the host: attention asks for it forty times a call."""

from types import TracebackType
from typing import Any

import torch

FIRST = -3
"""Priority of streams whose work goes before all other work: the highest that torch has."""


def current_stream(device: int) -> Any:
    """Return the current stream of a GPU, given by its index: without one, torch looks around first."""
    return torch.cuda.current_stream(device)


class Order:
    """Lets streams wait for streams. `Stream.wait_stream` makes an event for each wait, this one for all of its own.

    It belongs to one thread at a time: between two of its steps another's record would take the place of its own.
    """

    def __init__(self) -> None:
        self._event = torch.cuda.Event()

    def after(self, stream: Any, *others: Any) -> None:
        """Let a stream wait for all that was launched on others."""
        for other in others:
            self._event.record(other)
            stream.wait_event(self._event)


class On:
    """Makes a stream the current one, as `torch.cuda.stream` does, which takes the host four times as long."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._before: Any = None
        self._device = 0

    def __enter__(self) -> None:
        self._device = torch.cuda.current_device()
        self._before = current_stream(self._stream.device_index)
        torch.cuda.set_stream(self._stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.cuda.set_stream(self._before)
        if self._device != self._stream.device_index:
            torch.cuda.set_device(self._device)
