"""This rank's part of each batch, and prefetching of the next step's batch."""

import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from bmburst.mesh import Mesh
from bmburst.schedule.documents import Documents
from bmburst.sequence import Ids, SequenceShard

if TYPE_CHECKING:
    from bmburst.blocks.model import Llama


def causal_cut(mesh: Mesh, length: int, layout: str) -> SequenceShard:
    """Return this rank's part of sequences in which a token sees what is before it.

    Raises:
        UserError: The layout is unknown, or there are fewer tokens than ranks that share a sequence.
    """
    return SequenceShard.cut(length, layout=layout, size=mesh.shape.sequence, rank=mesh.sequence_rank, mask="causal")


class SequenceSource(Protocol):
    """Sequences that are read a part at a time, as `bmburst.data.Samples`."""

    @property
    def documents(self) -> tuple[tuple[int, ...], ...] | None:
        """Tokens of each document of each row; what lies behind them is padding. None: a row is one text."""

    def __len__(self) -> int:
        """Return how many rows there are."""

    def read(self, row: int, places: range) -> tuple[Ids, Ids]:
        """Return inputs and labels of a row at some places; `IGNORE_INDEX` is no label."""


@dataclass(frozen=True, slots=True)
class LocalBatch:
    """What the model is given of some sequences on one rank.

    Attributes:
        ids: int64 `[3, rows, local_tokens]`: tokens, labels, and positions, which count from 0 in each document.
        length: Real tokens of each whole sequence.
        masks: The documents of each row, of which a token sees only its own; None where a row is one text.
    """

    ids: Tensor
    length: int
    masks: tuple[Documents, ...] | None

    @classmethod
    def read(cls, cut: SequenceShard, rows: SequenceSource) -> "LocalBatch":
        """Return this rank's part of sequences, on the CPU. No more of them is read.

        Raises:
            UserError: The documents do not fit the sequences.
        """
        documents = rows.documents
        masks = None if documents is None else tuple(map(Documents, documents))
        of_rows = masks or (None,) * len(rows)
        parts = [cut.read(partial(rows.read, row), mask) for row, mask in enumerate(of_rows)]
        return cls(torch.from_numpy(np.stack(parts, 1)), cut.length, masks)

    @property
    def labels(self) -> Tensor:
        """This rank's labels, `[rows, local_tokens]`; `IGNORE_INDEX` where there is no loss."""
        return self.ids[1]

    @property
    def texts(self) -> list[tuple[int, ...]]:
        """Of each row, the tokens of each text in it."""
        return [mask.lengths for mask in self.masks] if self.masks else [(self.length,)] * len(self.labels)

    def on(self, ids: Tensor) -> "LocalBatch":
        """Return the same with its numbers in another place."""
        return replace(self, ids=ids)

    def micro_batches(self, size: int) -> Iterator["LocalBatch"]:
        """Yield `size` rows at a time."""
        for first in range(0, self.ids.shape[1], size):
            rows = slice(first, first + size)
            yield replace(self, ids=self.ids[:, rows], masks=self.masks and self.masks[rows])


def token_losses(model: "Llama", batch: LocalBatch, *, per_token: bool = False) -> Tensor:
    """Return the sum of the token losses of this rank's part of sequences, in nats.

    Args:
        model: On all ranks.
        batch: Of this rank, on its device; every rank has its part of the same sequences.
        per_token: Whether losses are returned for each token, `[rows, local_tokens]`, in place of their sum.

    Raises:
        UserError: Layout "balanced" gets several sequences with documents.
    """
    tokens, labels, positions = batch.ids
    loss = partial(model.loss, per_token=True) if per_token else model.loss  # a class may have a `loss` without it
    if batch.masks is None:
        return loss(tokens, positions, labels, batch.length)
    mask = batch.masks[0] if len(batch.masks) == 1 else batch.masks
    # The masks know how many tokens are real.
    return loss(tokens, positions, labels, None, mask)


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

    def load(self, samples: SequenceSource, following: SequenceSource | None = None) -> LocalBatch:
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

    def _prepare(self, samples: SequenceSource) -> tuple[LocalBatch, Any]:
        """Return the batch and, on a GPU, the event after its copy. Runs in the background thread."""
        batch = LocalBatch.read(self._cut, samples)
        if self._stream is None:
            return batch.on(batch.ids.to(self._device)), None
        with torch.cuda.stream(self._stream):  # of the right GPU: a new thread would be on the first
            # The allocator of pinned memory does not give it to another before the copy is done.
            ids: Tensor = batch.ids.pin_memory().to(self._device, non_blocking=True)
            return batch.on(ids), self._stream.record_event()
