"""Loads the next step's batch onto this rank's device while the current step runs."""

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from bmburst.sequence import SequenceShard
from bmburst.train.local_batch import LocalBatch, Rows

_Key = TypeVar("_Key")
_Made = TypeVar("_Made")
_LAST_SECONDS = 5.0


class Prefetch(Generic[_Key, _Made]):
    """Calls a function in a background thread for the key that will be requested next.

    Each call runs in a thread of its own, which ends with the call, so there is nothing to close. The thread does not
    keep the process alive. At exit it gets a few seconds, because a thread inside torch must not outlive the
    interpreter, and is then abandoned.

    Args:
        make: The function. It runs in a thread other than the caller's.
    """

    def __init__(self, make: Callable[[_Key], _Made]) -> None:
        self._make = make
        self._coming: tuple[_Key, Future[_Made]] | None = None
        self._threads: list[Thread] = []  # at most one
        weakref.finalize(self, _wait, self._threads)

    def take(self, key: _Key, following: _Key | None = None) -> _Made:
        """Return `make(key)`, and start `make(following)` in the background if `following` is given.

        If `key` is not the announced one, it is computed now and the announced result is dropped.

        Raises:
            Exception: Whatever `make` raised for `key`. The next request calls it again.
        """
        coming, self._coming = self._coming, None
        made = coming[1] if coming is not None and coming[0] == key else self._begin(key)
        result = made.result()
        if following is not None:
            self._coming = following, self._begin(following)
        return result

    def _begin(self, key: _Key) -> Future[_Made]:
        future: Future[_Made] = Future()

        def work() -> None:
            try:
                future.set_result(self._make(key))
            except BaseException as error:  # the waiting caller gets any exception
                future.set_exception(error)

        thread = Thread(target=work, name="bmburst-prefetch", daemon=True)
        self._threads[:] = [thread]
        thread.start()
        return future


def _wait(threads: list[Thread]) -> None:
    for thread in threads:
        thread.join(_LAST_SECONDS)


class Loader:
    """Reads one step ahead. On a GPU it copies from pinned memory on a separate stream, so that no kernel waits.

    Args:
        cut: This rank's part of a sequence.
        device: Where batches are used.
    """

    def __init__(self, cut: SequenceShard, device: torch.device) -> None:
        self._cut = cut
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._prefetch = Prefetch(self._prepare)

    def load(self, samples: Rows, following: Rows | None = None) -> LocalBatch:
        """Return this rank's part of the samples on its device, and start reading those of the next step.

        Raises:
            UserError: The samples' documents do not fit the cut.
        """
        batch, copied = self._prefetch.take(samples, following)
        if copied is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(copied)
            batch.ids.record_stream(current)
        return batch

    def _prepare(self, samples: Rows) -> tuple[LocalBatch, Any]:
        """Return the batch and, on a GPU, the event after its copy. Runs in the background thread."""
        batch = LocalBatch.read(self._cut, samples)
        if self._stream is None:
            return batch.on(batch.ids.to(self._device)), None
        with torch.cuda.stream(self._stream):  # of the right GPU: a new thread would be on the first
            # The allocator of pinned memory does not give it to another before the copy is done.
            ids: Tensor = batch.ids.pin_memory().to(self._device, non_blocking=True)
            return batch.on(ids), self._stream.record_event()
