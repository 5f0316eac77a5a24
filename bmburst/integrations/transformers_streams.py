"""Iterable data sets on split sequences: rank 0 reads the batches, and every rank gets those of its sequence group.

Only one rank reads, because the order of an iterable data set may differ from rank to rank, such as that of a shuffle
without a seed, and because ranks that read a stream each would load all of it.
"""

from collections.abc import Iterator
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, IterableDatasetShard
from torch.utils.data import DataLoader, IterableDataset

from bmburst.comm.communicator import broadcast_object
from bmburst.errors import UserError
from bmburst.mesh import Mesh

_Round = tuple[list[Any], int]


class _Rounds(IterableDataset[_Round]):
    """The samples of a data set, for one batch of each group at a time, and how many of them are in no batch before.

    Several groups end together. So the last round is filled with the first samples as accelerate does where one rank
    reads, with as few as groups of equal size need, or as where each rank reads, up to full batches. A single group
    gets a last batch with fewer samples, as a single process does.

    Args:
        source: The data set.
        size: Samples of a batch.
        groups: The number of groups.
        drop_last: Whether to leave out a last round that is not full.
        full: Whether to fill up to full batches.
    """

    def __init__(self, source: Any, size: int, groups: int, *, drop_last: bool, full: bool) -> None:
        self._source, self._total = source, size * groups
        self._drops, self._multiple = drop_last, self._total if full and groups > 1 else groups

    def __iter__(self) -> Iterator[_Round]:
        first: list[Any] = []
        found: list[Any] = []
        for sample in self._source:
            found.append(sample)
            if len(found) == self._total:
                yield found, len(found)
                first, found = first or found, []
        if found and not self._drops:
            first, count = first or [*found], len(found)
            while missing := -len(found) % self._multiple:
                found += first[:missing]
            yield found, count


class _Collated:
    """Makes the batches of all groups from the samples of a round; workers of the reader call it."""

    def __init__(self, collate: Any, groups: int) -> None:
        self._collate, self._groups = collate, groups

    def __call__(self, read: _Round) -> _Round:
        samples, count = read
        size = len(samples) // self._groups
        return [self._collate(samples[i * size : (i + 1) * size]) for i in range(self._groups)], count


class Stream(IterableDataset[Any]):
    """The batches of this rank's sequence group. All ranks iterate over it together.

    The collator and the workers run on rank 0.

    Args:
        loader: A loader of accelerate that is `is_stream`.
        mesh: The ranks.
        by_rank: Whether batches are those of `dispatch_batches=False`, where accelerate lets each rank read, and every
            batch counts as full.

    Attributes:
        source: The data set.
        last: The number of samples in the last round of batches that was read, without those that fill it; 0 if every
            batch counts as full.

    Raises:
        UserError: While it is read, on every rank: rank 0 cannot read the data set or send a batch.
    """

    def __init__(self, loader: Any, mesh: Mesh, *, by_rank: bool) -> None:
        groups = mesh.shape.data
        size: int = loader.batch_size
        self.source, self.last = _source(loader), 0
        self._error: Exception | None = None
        self._mesh, self._size, self._drops, self._by_rank = mesh, size * groups, loader.drop_last, by_rank
        self._reader: DataLoader[Any] = DataLoader(
            _Rounds(self.source, size, groups, drop_last=self._drops, full=by_rank),
            batch_size=None,
            collate_fn=_Collated(loader.collate_fn, groups),  # type: ignore[arg-type]
            num_workers=loader.num_workers,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            in_order=loader.in_order,
        )

    def set_epoch(self, epoch: int) -> None:
        """Tell the data set, which may shuffle by it."""
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)

    def batches(self) -> int:
        """Return the number of batches of each group; TypeError if the data set has no length."""
        samples: int = len(self.source)
        whole, more = divmod(samples, self._size)
        return whole + (more > 0 and not self._drops)

    def __iter__(self) -> Iterator[Any]:
        world = self._mesh.world
        rounds: Iterator[tuple[str | None, list[Any], int]] = iter(())
        if world.rank == 0:
            # What the loader of a single process draws, this rank has drawn. Ranks go on with equal random numbers.
            self._reader.generator = torch.Generator()
            self._reader.generator.set_state(torch.get_rng_state())
            rounds = self._rounds()
        while True:
            with world.first_calls("batches of an iterable data set"):
                problem, batches, count = broadcast_object(world, next(rounds, None))
            if problem is not None:
                raise UserError(problem) from self._error
            if not count:
                return
            self.last = 0 if self._by_rank else count
            yield batches[self._mesh.data_rank]

    def _rounds(self) -> Iterator[tuple[str | None, list[Any], int]]:
        """Return what to send: batches of all groups, then the end or an error. The other ranks wait for each."""
        try:
            for batches, count in self._reader:
                yield None, batches, count
        except Exception as error:  # of the caller's data set, or of its collator
            self._error = error
            yield told_of(error, type(self.source).__name__), [], 0
        yield None, [], 0


def told_of(error: Exception, source: str) -> str:
    """Return an error of a data set, of the class `source`, or of its collator, as the ranks tell it."""
    kind = type(error).__name__
    told = str(error).rsplit(f"{kind}: ", 1)[-1].strip()  # a worker's has its traceback before
    if isinstance(error, UserError):
        return told
    first = (told.splitlines() or [""])[0]
    return f"rank 0 cannot read {source}: {kind}: {first}\nfix: the data set or the collator"


class _StreamLoader(DataLoaderShard):  # type: ignore[misc]
    """accelerate's loader, which says when the last batch comes, with the length of a stream.

    Trainer makes a `DataLoaderShard` of it where it resumes. The data set, not the loader, is what splits.
    """

    def __len__(self) -> int:
        found: int = self.dataset.batches()
        return found


def is_stream(loader: Any) -> bool:
    """Return whether a loader that accelerate prepared reads an iterable data set in a way that can be shared.

    It is not if accelerate gave each rank a part of the data set itself (shards of `datasets`), or of each batch.
    """
    is_whole = isinstance(loader, DataLoaderDispatcher) or isinstance(loader.dataset, IterableDatasetShard)
    return (
        is_whole
        and isinstance(_source(loader), IterableDataset)
        and loader.batch_size is not None
        and not (getattr(loader, "split_batches", False) or getattr(loader.dataset, "split_batches", False))
        and not loader.use_stateful_dataloader
    )


def stream_loader(loader: Any, mesh: Mesh, *, by_rank: bool) -> DataLoader[Any]:
    """Return a loader of the batches of this rank's sequence group. The arguments are those of `Stream`.

    Raises:
        UserError: The data set has the samples of one rank only.
    """
    stream = Stream(loader, mesh, by_rank=by_rank)
    part = getattr(stream.source, "_distributed", None)  # of datasets.distributed.split_dataset_by_node
    if getattr(part, "world_size", 1) > 1:
        raise UserError(
            "the data set was split by rank, but only rank 0 reads it, for all ranks\n"
            "fix: leave split_dataset_by_node out"
        )
    device = loader.state.device if isinstance(loader, DataLoaderDispatcher) else loader.device
    found: DataLoader[Any] = _StreamLoader(
        stream, device=device, batch_size=None, collate_fn=_as_it_is, iteration=loader.iteration
    )
    return found


def _as_it_is(batch: Any) -> Any:
    return batch


def _source(loader: Any) -> Any:
    """Return the data set that a loader of accelerate reads, without accelerate's choice of samples."""
    return loader.dataset.dataset if isinstance(loader.dataset, IterableDatasetShard) else loader.dataset
