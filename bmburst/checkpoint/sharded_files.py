"""Writes tensors that are sharded over all ranks to files of whole tensors. Several ranks write.

A `TensorSource` gives a writing rank its whole tensors. `GatheredTensors` gathers them one at a time, while training
stands still. A rank then never holds more than three whole tensors: one being gathered, one waiting, and one being
written. `bmburst.checkpoint.staging` has the source that lets training go on.
"""

import contextlib
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from bmburst.checkpoint.tensor_files import SafetensorsWriter, write_json
from bmburst.config import read_json
from bmburst.errors import UserError
from bmburst.outputs import FULL, replacing

if TYPE_CHECKING:
    from bmburst.zero import NamedShard

Result = TypeVar("Result")
PART_BYTES = 2 << 30
"""Bytes per part: for each further part another rank of the first host writes, as long as there are ranks."""


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """A sharded tensor of a file.

    Attributes:
        name: Name in the file.
        shard: The parameter that it belongs to: its shape, and each rank's part.
        dtype: Data type in the file.
        piece: Returns this rank's part, flat, in `dtype`.
    """

    name: str
    shard: "NamedShard"
    dtype: torch.dtype
    piece: Callable[[], Tensor]

    @classmethod
    def of_weights(cls, name: str, shard: "NamedShard") -> "ShardedTensor":
        """Return the weights of a parameter."""
        return cls(name, shard, shard.dtype, shard.local)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shard.shape) * self.dtype.itemsize

    def gather(self, root: int) -> Tensor | None:
        """Return the whole tensor on rank `root`, and None on the others. Every rank must call it."""
        from bmburst.zero import gather

        return gather(self.shard, self.piece(), dtype=self.dtype, root=root)


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """The tensors of `STEM.safetensors`, or of its parts and their index.

    Attributes:
        stem: Beginning of the names of the files.
        tensors: The tensors, the same on all ranks.
        metadata: Strings for the header.
        part_bytes: Bytes per part.
    """

    stem: str
    tensors: tuple[ShardedTensor, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)
    part_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Contents:
    """What a directory of weights will hold.

    Attributes:
        groups: The sharded tensors.
        files: Contents of the other files by name; rank 0 writes its own.
    """

    groups: tuple[TensorGroup, ...]
    files: Mapping[str, bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for group in self.groups for tensor in group.tensors)

    def write(self, folder: Path, source: "TensorSource") -> dict[str, int]:
        """Write all files. Every rank must call it. Only ranks of the first host write.

        Each file gets its name only when it is complete.

        Returns:
            On every rank, the CRC-32 of each file by its name.

        Raises:
            OSError: On all ranks, if a rank cannot write.
        """
        import bmtrain as bmt

        is_main = bmt.rank() == 0

        def describe() -> dict[str, int]:
            if not is_main:
                return {}
            for name, content in self.files.items():
                with replacing(folder / name) as partial:
                    partial.write_bytes(content)
            return {name: zlib.crc32(content) for name, content in self.files.items()}

        source.on_every_rank(lambda: folder.mkdir(parents=True, exist_ok=True) if is_main else None)
        checksums: dict[str, int] = {}
        for group in self.groups:
            checksums |= _write_group(folder, group, source)
        return checksums | source.on_every_rank(describe)[0]


class TensorSource(Protocol):
    """Where the ranks that write get whole tensors from. Every rank makes the same calls."""

    def on_every_rank(self, action: Callable[[], Result]) -> list[Result]:
        """See the function `on_every_rank`."""

    def fill(
        self, file: SafetensorsWriter | None, tensors: Sequence[ShardedTensor], owners: Sequence[int], rank: int
    ) -> None:
        """Open a file and write the tensors that `rank` owns; None: it owns none."""


class GatheredTensors:
    """A `TensorSource` that gathers one tensor after another. While a rank writes to disk, the others go on."""

    def on_every_rank(self, action: Callable[[], Result]) -> list[Result]:
        """See `TensorSource`."""
        return on_every_rank(action)

    def fill(
        self, file: SafetensorsWriter | None, tensors: Sequence[ShardedTensor], owners: Sequence[int], rank: int
    ) -> None:
        """See `TensorSource`."""
        del rank
        pending = zip(tensors, owners, strict=True)
        try:
            if file is not None:
                writes: deque[Future[None]] = deque()  # one that runs, and one that waits
                with file, ThreadPoolExecutor(1, thread_name_prefix="bmburst-weights") as thread:
                    for tensor, owner in pending:
                        full = tensor.gather(root=owner)
                        if full is not None:
                            if len(writes) == 2:
                                writes.popleft().result()
                            writes.append(thread.submit(file.write, full.cpu()))
                    for write in writes:
                        write.result()
        finally:
            for tensor, owner in pending:  # gather the rest for the other ranks, also after an error
                tensor.gather(root=owner)


def index_name(stem: str) -> str:
    """Return the name of the index file, which maps tensors to parts if there are several parts."""
    return f"{stem}.safetensors.index.json"


def part_names(stem: str, parts: int) -> list[str]:
    """Return the names of a model's safetensors files, as Hugging Face names them."""
    if parts == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{part + 1:05}-of-{parts:05}.safetensors" for part in range(parts)]


def write_index(folder: Path, stem: str, places: Mapping[str, str], nbytes: int) -> dict[str, int]:
    """Write the index file, and return its CRC-32 by its name.

    Args:
        folder: Folder of the files.
        stem: Beginning of their names.
        places: For each tensor the name of its file.
        nbytes: Bytes of all tensors.
    """
    name = index_name(stem)
    return {name: write_json(folder / name, {"metadata": {"total_size": nbytes}, "weight_map": places})}


def owners_of(sizes: Sequence[int], writers: int, part_bytes: int) -> list[int]:
    """Assign each tensor to the writing rank with the fewest bytes so far. Few bytes are written by rank 0 alone.

    Args:
        sizes: Bytes of each tensor.
        writers: Largest number of ranks that write.
        part_bytes: Bytes per part; each further part adds a rank.
    """
    parts = max(1, min(writers, len(sizes), -(-sum(sizes) // part_bytes)))
    loads, owners = [0] * parts, []
    for size in sizes:
        owner = loads.index(min(loads))
        loads[owner] += size
        owners.append(owner)
    return owners


def _write_group(folder: Path, group: TensorGroup, source: TensorSource) -> dict[str, int]:
    """Write `STEM.safetensors`, or for large models its parts and their index, named as by Hugging Face."""
    import bmtrain as bmt

    tensors, rank = group.tensors, bmt.rank()
    owners = owners_of([t.nbytes for t in tensors], bmt.config["local_size"], group.part_bytes or PART_BYTES)
    files = part_names(group.stem, max(owners) + 1)
    single = folder / f"{group.stem}.safetensors"

    def write() -> dict[str, int]:
        mine = [(t.name, t.shard.shape, t.dtype) for t, owner in zip(tensors, owners, strict=True) if owner == rank]
        file = SafetensorsWriter(folder / files[rank], mine, group.metadata) if mine else None
        source.fill(file, tensors, owners, rank)
        return {} if file is None else {files[rank]: file.checksum}

    def finish() -> dict[str, int]:
        if rank != 0:
            return {}
        if len(files) == 1:
            (folder / index_name(group.stem)).unlink(missing_ok=True)
            return {}
        places = {tensor.name: files[owner] for tensor, owner in zip(tensors, owners, strict=True)}
        checksums = write_index(folder, group.stem, places, sum(tensor.nbytes for tensor in tensors))
        single.unlink(missing_ok=True)  # an old single file would be read first
        return checksums

    return {
        name: crc for action in (write, finish) for each in source.on_every_rank(action) for name, crc in each.items()
    }


def parts_of(index: Path) -> set[str]:
    """Return the names of the files that an index lists. They must be in its directory and of its type.

    A file may be a symbolic link: the directories of Hugging Face's cache consist of links.

    Raises:
        UserError: The index lists no file, or a file in another directory or of another type.
    """
    where = read_json(index).get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(part, str) for part in where.values()):
        raise UserError(f"{index} has no weight_map of tensor names to files\nfix: copy the file again")
    suffix = Path(index.name.removesuffix(".index.json")).suffix  # an index of safetensors must not lead to a pickle
    for part in sorted(set(where.values())):
        if Path(part).name != part or "\0" in part or Path(part).suffix != suffix:
            raise UserError(
                f"{index} names {part}\nallowed: {suffix} files in its own directory, without a path\n"
                "fix: copy the files beside it, and their names without directories into it"
            )
    return set(where.values())


def on_every_rank(action: Callable[[], Result], all_gather: Callable[[Any], list[Any]] | None = None) -> list[Result]:
    """Run an action on every rank, and return the results of all ranks.

    Args:
        action: The action.
        all_gather: Returns the value that each rank gives; by default BMTrain's.

    Raises:
        UserError: A rank raised it. It is raised on all ranks, so that no rank waits for another forever.
        OSError: The same, with errno, text and file of that rank.
    """
    import bmtrain as bmt

    result: Result | None = None
    problem: tuple[object, ...] | None = None
    try:
        result = action()
    except UserError as error:
        # Rank 0 shows it, perhaps on another host, where a file may be there that this one lacks.
        problem = (f"rank {bmt.rank()} on host {gethostname()}: {error}" if bmt.rank() else str(error),)
    except OSError as error:
        problem = (error.errno, error.strerror, None if error.filename is None else str(error.filename))
    everywhere = (all_gather or bmt.store.allgather_objects)((result, problem))
    for _, found in everywhere:
        if found is not None:
            raise UserError(*found) if len(found) == 1 else OSError(*found)
    return [each for each, _ in everywhere]


def require_same(what: str, read: Callable[[], str]) -> None:
    """Check that all ranks read the same file. Hosts may have files of their own under the same name.

    Args:
        what: The file, for the message.
        read: Reads it, and returns what tells its contents from those of another. It may raise, see `on_every_rank`.

    Raises:
        UserError: On all ranks, if one has read another file than rank 0.
    """
    found = on_every_rank(lambda: (read(), gethostname()))
    first, host = found[0]
    if other := next(((rank, own[1]) for rank, own in enumerate(found) if own[0] != first), None):
        raise UserError(
            f"{what}: rank {other[0]} on host {other[1]} has read another one than rank 0 on host {host}\n"
            "fix: give all hosts the same files, for example in a folder that they share, by its whole path"
        )


@contextlib.contextmanager
def os_error_as_user_error(folder: Path) -> Iterator[None]:
    """Turn an OSError into a UserError that names the output folder."""
    try:
        yield
    except OSError as error:
        fix = "make room" if error.errno in FULL else "name a writable directory"
        raise UserError(f"cannot write to {folder}: {error.strerror}\nfix: {fix}") from error
