"""Tensors in host memory from forward to backward, copied beside the kernels (arXiv:2104.07857, section 5.1.1).

What one call keeps is a `Deposit`. Its tensors leave for pinned memory on a stream of their own; the caller's stream
waits for them when the next deposit begins, and only then is their GPU memory given back. In backward, taking a
deposit's tensors back sends for those of the deposit made before it: one is in use and one on its way, never more.

Pinned memory is cut into pieces of `PIECE` bytes, which are used again as soon as a deposit is gone: after the first
step none is allocated, however long the run, and tensors of different sizes share it. (torch rounds pinned memory up to
powers of two: whole tensors would take up to twice their size.)
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from bmburst.comm.memory import bytes_of

PIECE = 1 << 26
"""Bytes of a piece of pinned memory: a copy of 1.3 ms, beside which its launch is nothing."""
_LEAST = 1 << 12


class HostStore:
    """Where deposits go; blocks of a model share one, so that one can send for the tensors of the other.

    Attributes:
        nbytes: Of host memory that it has taken.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._free: dict[tuple[int, bool], list[Tensor]] = {}
        self._latest: weakref.ref[Deposit] | None = None
        self._ahead: weakref.ref[Deposit] | None = None
        self._stream: Any = None

    def deposit(self) -> "Deposit":
        """Return a new deposit, and give back the GPU memory of the one before."""
        before = self._latest() if self._latest is not None else None
        for held in (before, self._ahead() if self._ahead is not None else None):
            if held is not None:
                held.leave()
        made = Deposit(self, before)
        self._latest = weakref.ref(made)
        return made

    def fetch(self, deposit: "Deposit") -> None:
        """Have a deposit's tensors on the GPU, and those of the one before on their way."""
        ahead = self._ahead() if self._ahead is not None else None
        if ahead is not None and ahead is not deposit:
            ahead.leave()  # another one is in use now than was expected
        deposit.send_for()
        before = deposit.before
        if before is not None:
            before.send_for()
        self._ahead = None if before is None else weakref.ref(before)

    def side(self, like: Tensor) -> Any:
        """Return the stream of copies, or None where the tensor is in host memory itself."""
        if not like.is_cuda:
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(like.device)
        assert self._stream.device == like.device, "the copies of a store are ordered by the one stream of one device"
        return self._stream

    def take(self, size: int, *, pinned: bool) -> Tensor:
        """Return a piece of host memory of so many bytes, pinned for a GPU's tensors and for no others.

        Those of a CPU are copied at once, and not behind what the stream of copies still does with a pinned piece.
        """
        free = self._free.setdefault((size, pinned), [])
        if free:
            return free.pop()
        self.nbytes += size
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)

    def give_back(self, pieces: list[Tensor], *, pinned: bool) -> None:
        """Let others use pieces: on the one stream of copies, behind what still reads or writes them."""
        for piece in pieces:
            self._free.setdefault((len(piece), pinned), []).append(piece)


class Deposit:
    """Tensors that one call keeps, numbered in the order in which they were put in."""

    def __init__(self, store: HostStore, before: "Deposit | None") -> None:
        self._store = store
        self._before = None if before is None else weakref.ref(before)
        self._items: list[_Item] = []

    @property
    def before(self) -> "Deposit | None":
        """The deposit made before this one, if something still needs it."""
        return self._before() if self._before is not None else None

    def put(self, tensor: Tensor) -> int:
        """Keep a tensor; return its number. It must not be changed from now on."""
        self._items.append(_Item(self._store, tensor.detach()))
        return len(self._items) - 1

    def begin(self) -> None:
        """Say that the tensors are about to be used: send for them, and for those of the deposit before."""
        self._store.fetch(self)

    def get(self, number: int) -> Tensor:
        """Return a tensor as it was put in, on its device: once after each `begin`, and the caller's from then on."""
        return self._items[number].hand_out()

    def leave(self) -> None:
        """Give back the GPU memory, once the copies are done."""
        for item in self._items:
            item.leave()

    def send_for(self) -> None:
        """Have all tensors on their way to the GPU that are not there."""
        for item in self._items:
            item.send_for()


class _Item:
    """One tensor: in host memory, and for a while on its device too.

    Device memory is let go only when the stream that made it has waited for the copy: then torch may use it at once for
    something else on that stream. `record_stream` would also keep it, but until the host has seen the copy done: a host
    that runs ahead would take new memory for every block.
    """

    def __init__(self, store: HostStore, tensor: Tensor) -> None:
        self._store, self._shape, self._dtype, self._device = store, tensor.shape, tensor.dtype, tensor.device
        self._side: Any = store.side(tensor)
        self._done: Any = None
        source = tensor.contiguous()
        self._here: Tensor | None = source
        self._version = source._version
        flat = bytes_of(source)
        self._pieces = [store.take(size, pinned=tensor.is_cuda) for size in _sizes(len(flat))]
        self._launch(flat, lambda piece, part: piece[: len(part)].copy_(part, non_blocking=True))
        weakref.finalize(self, store.give_back, self._pieces, pinned=tensor.is_cuda).atexit = False

    def send_for(self) -> None:
        """Start the copy to the device, unless it is there."""
        if self._here is not None:
            return
        self._here = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        self._launch(bytes_of(self._here), lambda piece, part: part.copy_(piece[: len(part)], non_blocking=True))
        self._version = self._here._version

    def hand_out(self) -> Tensor:
        """Return the tensor, and no longer hold it."""
        tensor = self._here
        assert tensor is not None, "taken twice, or before it was sent for"
        self.leave()
        return tensor

    def leave(self) -> None:
        """Let the device memory go, after the copies.

        Raises:
            RuntimeError: The tensor was changed in place: nobody knows which of its numbers were copied before that.
        """
        if self._here is not None and self._here._version != self._version:
            raise RuntimeError(
                "a tensor was changed in place while it was on its way to host memory\n"
                "change a copy, or use a recompute policy without '+offload'"
            )
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
        self._here, self._done = None, None

    def _launch(self, flat: Tensor, copy: Callable[[Tensor, Tensor], Tensor]) -> None:
        parts = list(zip(self._pieces, flat.split(PIECE), strict=True)) if len(flat) else []
        if self._side is None:
            for piece, part in parts:
                copy(piece, part)
            return
        # What is to be read has been written, and what used this memory before is done with it.
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            for piece, part in parts:
                copy(piece, part)
            self._done = torch.cuda.Event()
            self._done.record(self._side)

    def __del__(self) -> None:
        if self._done is not None and self._here is not None:  # an exception came between, or nobody came for it
            self._here.record_stream(self._side)


def _sizes(nbytes: int) -> Iterator[int]:
    """Yield the sizes of the pieces that hold so many bytes: all but the last are whole."""
    for start in range(0, nbytes, PIECE):
        rest = min(PIECE, nbytes - start)
        yield PIECE if rest == PIECE else max(_LEAST, 1 << (rest - 1).bit_length())
