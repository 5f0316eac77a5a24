"""Work on a stream of a communicator's own, and the memory that it uses."""

from typing import Any

import torch
from torch import Tensor


class SideStreamTransfer:
    """Operations under way on a side stream, and every tensor they read or write. A `Transfer`.

    The tensors are kept until the stream that made them has waited, and then simply freed. `record_stream` would keep
    them too, but memory marked by it is free only when the host has seen the side stream pass: a host that runs ahead
    of the GPU, as in a ring it does, would take new memory for every block of the sequence.

    Args:
        side: The stream.
        received: What `wait` returns.
        sent: What is only read.
    """

    def __init__(self, side: Any, received: tuple[Tensor, ...], sent: tuple[Tensor, ...]) -> None:
        self.done: Any = None
        """The event after the operations; set it when they are launched."""
        self._waited = False
        self.side, self._maker = side, torch.cuda.current_stream()
        self._received, self._sent = received, sent

    def wait(self) -> tuple[Tensor, ...]:
        """See `Transfer.wait`."""
        current = torch.cuda.current_stream()
        current.wait_event(self.done)
        if current != self._maker:
            current.wait_stream(self._maker)  # which may have copied what this rank keeps
            self._mark(current)  # it has waited, but the stream that will use the memory again has not
        self._waited, self._sent = True, ()
        return self._received

    def __del__(self) -> None:
        if not self._waited:  # an exception came between: nobody knows when the operations end
            self._mark(self.side)

    def _mark(self, stream: Any) -> None:
        for tensor in (*self._received, *self._sent):
            tensor.record_stream(stream)
