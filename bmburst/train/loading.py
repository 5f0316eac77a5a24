"""Samples to this rank's part of them on its device, while the step before is under way."""

from typing import Any

import torch
from torch import Tensor

from bmburst.sequence import SequenceShard
from bmburst.train.ahead import Ahead
from bmburst.train.local_batch import LocalBatch, Rows


class Loader:
    """Reads one step ahead. On a GPU a stream of its own copies from pinned memory, so that no kernel waits for it.

    Args:
        cut: This rank's part of a sequence.
        device: Where batches are used.
    """

    def __init__(self, cut: SequenceShard, device: torch.device) -> None:
        self._cut = cut
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead = Ahead(self._prepare)

    def load(self, samples: Rows, following: Rows | None = None) -> LocalBatch:
        """Return this rank's part of samples on its device, and begin to read those of the next step.

        Raises:
            UserError: The samples' documents do not fit the cut.
        """
        batch, copied = self._ahead.take(samples, following)
        if copied is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(copied)
            batch.ids.record_stream(current)
        return batch

    def _prepare(self, samples: Rows) -> tuple[LocalBatch, Any]:
        """Return the part and, on a GPU, the event after its copy. It runs in a thread."""
        batch = LocalBatch.read(self._cut, samples)
        if self._stream is None:
            return batch.on(batch.ids.to(self._device)), None
        with torch.cuda.stream(self._stream):  # of the right GPU: a new thread would be on the first
            # The allocator of pinned memory does not give it to another before the copy is done.
            ids: Tensor = batch.ids.pin_memory().to(self._device, non_blocking=True)
            return batch.on(ids), self._stream.record_event()
