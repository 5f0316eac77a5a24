"""Loads this rank's part of each batch, and prefetches the batch of the next step."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from threading import Thread
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from bmburst.mesh import Mesh
from bmburst.plan.counts import causal_pairs, hardware_flops
from bmburst.schedule.documents import Documents
from bmburst.schedule.tree import Tree
from bmburst.sequence import Ids, SequenceShard
from bmburst_ops.dropout import keys as dropout_keys

if TYPE_CHECKING:
    from bmburst.blocks.config import LlamaConfig
    from bmburst.blocks.model import Llama
    from bmburst.data.batches import Samples, Sequences


def causal_cut(mesh: Mesh, length: int, layout: str) -> SequenceShard:
    """Return this rank's shard of sequences with causal attention.

    Raises:
        UserError: The layout is unknown, or there are fewer tokens than ranks that share a sequence.
    """
    return SequenceShard.cut(length, layout=layout, size=mesh.shape.sequence, rank=mesh.sequence_rank, mask="causal")


@dataclass(frozen=True, slots=True)
class LocalBatch:
    """Input of the model on one rank.

    Attributes:
        ids: int64 `[3, rows, local_tokens]`: tokens, labels, and positions, which start at 0 in each document.
        length: Tokens of each whole sequence, without padding.
        masks: Mask of each row, documents or trees of them; None: each row is one text.
        weights: float64 `[rows, local_tokens]`: factors of the losses of the labels; None: 1.
        numbers: Numbers of this rank's tokens in the step, int64 `[rows, local_tokens]`: the row in the whole batch
            times the tokens of a sequence, plus the place in the sequence. None: they are not needed.
        dropout_seed: What dropout depends on beside the numbers; None: no dropout.
    """

    ids: Tensor
    length: int
    masks: tuple[Documents | Tree, ...] | None
    weights: Tensor | None = None
    numbers: Tensor | None = None
    dropout_seed: str | None = None

    @classmethod
    def read(cls, cut: SequenceShard, rows: "Samples", *, numbered: bool = False) -> "LocalBatch":
        """Read this rank's part of sequences to the CPU; only this part is read.

        Args:
            cut: This rank's shard of a sequence.
            rows: The sequences.
            numbered: Whether to number the tokens.

        Raises:
            UserError: The documents do not fit the sequences.
        """
        documents = rows.documents
        masks = None if documents is None else tuple(map(_mask, documents, rows.parents))
        of_rows = masks or (None,) * len(rows)
        parts = [cut.read(partial(rows.read, row), mask) for row, mask in enumerate(of_rows)]
        numbers = None
        if numbered:
            tokens = [cut.under(mask).positions() if mask else cut.positions() for mask in of_rows]
            numbers = torch.stack([own + row * cut.length for row, own in zip(rows.places, tokens, strict=True)])
        weights = _weights(cut, rows, of_rows) if rows.weighted else None
        return cls(torch.from_numpy(np.stack(parts, 1)), cut.length, masks, weights, numbers)

    @property
    def labels(self) -> Tensor:
        """This rank's labels, `[rows, local_tokens]`; `IGNORE_INDEX` where there is no loss."""
        return self.ids[1]

    def query_key_pairs(self, window: int | None) -> float:
        """Return the number of query-key pairs of all rows in one head and layer; `window` as in `causal_pairs`."""
        if self.masks is None:
            return len(self.labels) * causal_pairs([self.length], window)
        return sum(_pairs(mask, window) for mask in self.masks)

    def to(self, device: torch.device, *, pinned: bool = False) -> "LocalBatch":
        """Return a copy on a device; with `pinned`, through pinned host memory, without waiting for it."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.pin_memory().to(device, non_blocking=True) if pinned else tensor.to(device)

        return self._changed(move)

    def _changed(self, change: Callable[[Tensor], Tensor], **others: Any) -> "LocalBatch":
        """Return a copy with changed tensors, and other values of other fields."""
        tensors: dict[str, Any] = {name: change(tensor) for name, tensor in self.tensors().items()}
        return replace(self, **tensors, **others)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by their names."""
        found = {"ids": self.ids, "weights": self.weights, "numbers": self.numbers}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    @property
    def dropout_keys(self) -> Tensor | None:
        """Keys of the tokens for dropout, int32 `[rows, local_tokens]`; None: no dropout."""
        if self.numbers is None or self.dropout_seed is None:
            return None
        return dropout_keys(self.numbers, self.dropout_seed)

    def micro_batches(self, size: int) -> Iterator["LocalBatch"]:
        """Yield `size` rows at a time."""
        for first in range(0, self.ids.shape[1], size):
            rows = slice(first, first + size)
            yield self._changed(itemgetter((..., rows, slice(None))), masks=self.masks and self.masks[rows])


def evaluated_part(model: "Llama", cut: SequenceShard, samples: "Samples") -> LocalBatch:
    """Return this rank's part of samples of an evaluation, on the CPU.

    Under dynamic scaling the rotary embedding depends on the length of a sequence. A last sample with fewer tokens than
    the others is then split over the ranks without padding: only tokens that make one a rank are added.

    Args:
        model: The model.
        cut: This rank's shard of a sequence.
        samples: The samples of a data rank, of one length.
    """
    scaling = model.config.rope_scaling
    if scaling is not None and scaling.kind == "dynamic":
        own = max((samples.sequences.labels_in(row) for row in samples.rows if row is not None), default=cut.length)
        if own < cut.length:
            size, layout = cut.layout.size, cut.layout.name
            cut = SequenceShard.cut(max(own, size), layout=layout, size=size, rank=cut.rank, mask="causal")
    return LocalBatch.read(cut, samples)


def _weights(cut: SequenceShard, samples: "Samples", masks: Sequence[Documents | Tree | None]) -> Tensor:
    """Return the weights of this rank's labels, read to the places of the labels: their bits take the place of ids."""

    def bits(row: int, places: range) -> tuple[Ids, Ids]:
        found: Ids = samples.weights(row, places).astype(np.float64).view(np.int64)
        return found, found

    found = [cut.read(partial(bits, row), mask)[0].view(np.float64) for row, mask in enumerate(masks)]
    return torch.from_numpy(np.stack(found))


def sample_cost(sequences: "Sequences", model: "LlamaConfig", recompute: str) -> Callable[[int], float] | None:
    """Return the function from the index of a sample to the FLOPs that it takes; None if all take the same.

    Args:
        sequences: The data set.
        model: The model's configuration.
        recompute: A policy of `bmburst.recompute.policy`.
    """
    if sequences.pack == "stream":
        return None

    def cost(index: int) -> float:
        mask = _mask(sequences.documents(index) or (sequences.sequence_length,), sequences.parents(index))
        return hardware_flops(model, sequences.sequence_length, _pairs(mask, model.sliding_window), recompute)

    return cost


def _pairs(mask: Documents | Tree, window: int | None) -> float:
    below = mask.tokens_below_ancestors if isinstance(mask, Tree) else 0
    return causal_pairs(mask.lengths, window) + below


def _mask(lengths: tuple[int, ...], parents: tuple[int, ...] | None) -> Documents | Tree:
    return Documents(lengths) if parents is None else Tree(parents, lengths)


def token_losses(model: "Llama", batch: LocalBatch, *, per_token: bool = False, stream: Tensor | None = None) -> Tensor:
    """Return the sum of the token losses of this rank's part of sequences, in nats.

    Args:
        model: The model, sharded over all ranks.
        batch: Batch on this rank's device; every rank has its part of the same sequences.
        per_token: Whether to return the loss of each token, `[rows, local_tokens]`, instead of the sum.
        stream: On the last stage of a pipeline, the stream of the stage before.

    Raises:
        UserError: Layout "balanced" gets several sequences with documents.
    """
    tokens, labels, positions = batch.ids
    options: dict[str, Any] = {"per_token": True} if per_token else {}  # a class may have a `loss` without it
    if (keys := batch.dropout_keys) is not None:
        options["keys"] = keys
    loss = model.loss if stream is None else partial(model.stage_loss, stream)
    return loss(tokens, positions, labels, *_extent(batch), **options)


def token_stream(model: "Llama", batch: LocalBatch, stream: Tensor | None) -> Tensor:
    """Return the stream after a stage of a pipeline that is not the last; arguments as in `token_losses`."""
    tokens, _, positions = batch.ids
    return model.advance(tokens, positions, *_extent(batch), keys=batch.dropout_keys, stream=stream)


def _extent(batch: LocalBatch) -> tuple[Any, ...]:
    """Return length and mask as the model takes them."""
    if batch.masks is None:
        return (batch.length,)
    return None, batch.masks[0] if len(batch.masks) == 1 else batch.masks  # no length: the masks define it


_Key = TypeVar("_Key")
_Made = TypeVar("_Made")
_LAST_SECONDS = 5.0


class Prefetch(Generic[_Key, _Made]):
    """Calls a function in a background thread for the key that will be requested next.

    Each call runs in a separate thread, which ends with the call, so there is nothing to close. The thread does not
    keep the process alive. At exit the process waits a few seconds for it, because a thread inside torch must not
    outlive the interpreter; then it is abandoned.

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

        If `key` is not the previous `following`, `make(key)` is called now and the prefetched result is dropped.

        Raises:
            Exception: Any exception of `make(key)`. The next request calls it again.
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
            except BaseException as error:  # `take` raises it
                future.set_exception(error)

        thread = Thread(target=work, name="bmburst-prefetch", daemon=True)
        self._threads[:] = [thread]
        thread.start()
        return future


def _wait(threads: list[Thread]) -> None:
    for thread in threads:
        thread.join(_LAST_SECONDS)


class Loader:
    """Loads batches one step ahead. Copies to a GPU from pinned memory on a separate stream, so that no kernel waits.

    Args:
        cut: This rank's shard of a sequence.
        device: Device of the batches.
        numbered: Whether tokens are numbered, for dropout.

    Attributes:
        cut: As above.
    """

    def __init__(self, cut: SequenceShard, device: torch.device, *, numbered: bool = False) -> None:
        self.cut, self._numbered = cut, numbered
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._prefetch = Prefetch(self._prepare)

    def load(self, samples: "Samples", following: "Samples | None" = None) -> LocalBatch:
        """Return this rank's part of the samples on its device, and start to load `following`.

        Raises:
            UserError: The samples' documents do not fit the sequences.
        """
        batch, copied = self._prefetch.take(samples, following)
        if copied is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(copied)
            for tensor in batch.tensors().values():
                tensor.record_stream(current)
        return batch

    def _prepare(self, samples: "Samples") -> tuple[LocalBatch, Any]:
        """Return the batch and, on a GPU, the event after its copy. Runs in the background thread."""
        batch = LocalBatch.read(self.cut, samples, numbered=self._numbered)
        if self._stream is None:
            return batch.to(self._device), None
        with torch.cuda.stream(self._stream):  # also sets the device: a new thread would use GPU 0
            # torch's pinned allocator does not reuse the memory before the copy is done.
            batch = batch.to(self._device, pinned=True)
            return batch, self._stream.record_event()
