"""A communicator whose blocks are pulled by the copy engines straight from the other GPUs' memory, inside one host.

NCCL's kernels hold multiprocessors, and an attention kernel beside them waits for those; a copy engine holds none.
Ranks tell each other by 32-bit words in shared memory, written and awaited by the streams themselves: the host never
waits. Each lane has its own stream and two outboxes that take turns:

    filled by kernels -> "ready" to all that read it -> pulled -> "free" to its owner -> filled again

A word is set by one rank and cleared by the other, once a turn, so it needs no counter and never overtakes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from bmburst.comm.cuda_driver import Copies, Copy, Signals
from bmburst.comm.exchange import Block, Exchange, Move, make_exchange
from bmburst.comm.liveness import PeerWatch
from bmburst.comm.objects import gather_objects
from bmburst.comm.protocol import Communicator, Transfer
from bmburst.comm.shared_memory import SharedMemory, SharedMemoryError, host_identity
from bmburst.comm.side_stream import SideStreamTransfer
from bmburst.errors import UserError

LANES = 2
_SLOTS = 2
_WORD = 64  # bytes from one signal to the next: each in a cache line of its own
_ALIGN = 512
_READY, _FREE = 0, 1


@dataclass(slots=True)
class _Slot:
    """One of a lane's outboxes, and who reads it in the present turn."""

    number: int
    memory: SharedMemory | None = None
    readers: tuple[int, ...] = ()
    done: Any = None


@dataclass(slots=True)
class _Lane:
    stream: Any
    slots: tuple[_Slot, ...]
    turn: int = 0
    filling: _Slot | None = field(default=None)


class PeerCommunicator:
    """`Communicator` by copy engines for `exchange` and `ring`; the other verbs go over the communicator beneath.

    Memory: each lane keeps two outboxes, each as large as the largest exchange of that lane so far.

    Args:
        inner: The group's own communicator; exchanges handles now and whenever an outbox grows.
        device: This rank's GPU.

    Raises:
        SharedMemoryError: On every rank, with the reason, where some rank cannot read another's memory.
    """

    transport = "peer"

    def __init__(self, inner: Communicator, device: torch.device) -> None:
        self._inner, self._device = inner, device
        self.rank, self.size = inner.rank, inner.size
        _require_one_host(inner)
        self._words = SharedMemory(inner, LANES * _SLOTS * 2 * self.size * _WORD, device)
        self._words.local.zero_()
        torch.cuda.synchronize(device)
        gather_objects(inner, None)  # no rank signals before all words are clear
        self._lanes = [
            _Lane(torch.cuda.Stream(device, priority=-1), tuple(_Slot(lane * _SLOTS + i) for i in range(_SLOTS)))
            for lane in range(LANES)
        ]
        self._prepared = lru_cache(maxsize=1024)(self._prepare)
        self._turn_signals = lru_cache(maxsize=1024)(self._signals_of)
        self._watch = PeerWatch(inner, device)

    def outbox(self, nbytes: int, lane: int = 0) -> Tensor:
        """See `Communicator.outbox`. The current stream waits until every reader of its last turn is done.

        Raises:
            UserError: On every rank, if a GPU has no memory left for it, or a CUDA graph is being captured.
        """
        if torch.cuda.is_current_stream_capturing():
            raise UserError("transport 'peer' cannot be captured in a CUDA graph\nuse transport='nccl' inside graphs")
        at = self._lanes[lane]
        slot = at.slots[at.turn % _SLOTS]
        at.turn += 1
        at.filling = slot
        current = torch.cuda.current_stream(self._device)
        if slot.readers:
            self._turn_signals(slot.number, slot.readers, ()).freed.enqueue(current.cuda_stream)
            slot.readers = ()
        if slot.done is not None:  # our own reading, which no signal tells
            current.wait_event(slot.done)
        if slot.memory is None or slot.memory.nbytes < nbytes:
            self._grow(slot, nbytes)
        assert slot.memory is not None
        return slot.memory.local[:nbytes]

    def exchange(self, exchange: Exchange, outbox: Tensor, targets: Sequence[Tensor], lane: int = 0) -> Transfer:
        """See `Communicator.exchange`."""
        at = self._lanes[lane]
        slot, at.filling = at.filling, None
        assert slot is not None
        assert slot.memory is not None
        assert outbox.data_ptr() == slot.memory.addresses[self.rank]
        prepared = self._prepared(exchange)
        signals = self._turn_signals(slot.number, prepared.readers, prepared.owners)
        transfer = SideStreamTransfer(at.stream, tuple(targets), ())
        at.stream.wait_stream(torch.cuda.current_stream(self._device))
        handle = at.stream.cuda_stream
        signals.ready.enqueue(handle)
        prepared.copies.enqueue(handle, [target.data_ptr() for target in targets], slot.memory.addresses)
        signals.pulled.enqueue(handle)
        slot.readers = prepared.readers
        slot.done = transfer.done = at.stream.record_event()
        self._watch.expect(slot.done)
        return transfer

    def ring(self, *tensors: Tensor, shift: int = 1) -> Transfer:
        """See `Communicator.ring`."""
        sent = [t.detach() for t in tensors]
        sizes = tuple(t.numel() * t.element_size() for t in sent)
        exchange, starts = _ring_exchange(self.rank, self.size, shift % self.size, sizes)
        outbox = self.outbox(exchange.nbytes)
        for tensor, start, size in zip(sent, starts, sizes, strict=True):
            outbox[start : start + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        received = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in sent]
        return self.exchange(exchange, outbox, received)

    def all_to_all(self, tensor: Tensor) -> Transfer:
        """See `Communicator.all_to_all`."""
        return self._inner.all_to_all(tensor)

    def all_gather(self, tensor: Tensor) -> Transfer:
        """See `Communicator.all_gather`."""
        return self._inner.all_gather(tensor)

    def reduce_scatter(self, tensor: Tensor) -> Transfer:
        """See `Communicator.reduce_scatter`."""
        return self._inner.reduce_scatter(tensor)

    def all_reduce(self, tensor: Tensor) -> Transfer:
        """See `Communicator.all_reduce`."""
        return self._inner.all_reduce(tensor)

    def _grow(self, slot: _Slot, nbytes: int) -> None:
        try:
            if slot.memory is None:
                slot.memory = SharedMemory(self._inner, nbytes, self._device)
            else:
                slot.memory.grow(nbytes)
        except SharedMemoryError as error:
            raise UserError(f"{error}\nuse transport='nccl', shorter sequences, or leave more memory free") from None

    def _word(self, owner: int, slot: int, kind: int, by: int) -> int:
        """Return the address of the word in `owner`'s memory that rank `by` sets."""
        return self._words.addresses[owner] + ((slot * 2 + kind) * self.size + by) * _WORD

    def _signals_of(self, slot: int, readers: tuple[int, ...], owners: tuple[int, ...]) -> "_TurnSignals":
        return _TurnSignals(
            freed=Signals(awaited=[self._word(self.rank, slot, _FREE, by=reader) for reader in readers]),
            ready=Signals(
                raised=[self._word(reader, slot, _READY, by=self.rank) for reader in readers],
                awaited=[self._word(self.rank, slot, _READY, by=owner) for owner in owners],
            ),
            pulled=Signals(raised=[self._word(owner, slot, _FREE, by=self.rank) for owner in owners]),
        )

    def _prepare(self, exchange: Exchange) -> "_Prepared":
        others = [p for p in range(self.size) if p != self.rank]
        copies, targets, sources = [], [], []
        # Each rank begins with another neighbour, so that no GPU serves all of them at once.
        for peer in ((self.rank + step) % self.size for step in range(self.size)):
            for source, target in exchange.receives[peer]:
                copies.append(_copy(source, target))
                targets.append(target.buffer)
                sources.append(peer)
        return _Prepared(
            readers=tuple(p for p in others if exchange.sends[p]),
            owners=tuple(p for p in others if exchange.receives[p]),
            copies=Copies(copies, targets, sources),
        )


@dataclass(frozen=True, slots=True)
class _TurnSignals:
    """The signals of one outbox between a rank's readers and the owners that it reads from."""

    freed: Signals
    ready: Signals
    pulled: Signals


@dataclass(frozen=True, slots=True)
class _Prepared:
    """An exchange as driver calls."""

    readers: tuple[int, ...]
    owners: tuple[int, ...]
    copies: Copies


def _copy(source: Block, target: Block) -> Copy:
    if source.dense and target.dense:
        return Copy(target.offset, source.offset, source.nbytes)
    assert source.width == target.width
    assert source.rows == target.rows
    return Copy(
        target.offset,
        source.offset,
        source.width,
        source.rows,
        target.pitch or target.width,
        source.pitch or source.width,
    )


@lru_cache(maxsize=1024)
def _ring_exchange(rank: int, size: int, shift: int, sizes: tuple[int, ...]) -> tuple[Exchange, tuple[int, ...]]:
    """Return the exchange of a hop, and where each tensor starts in the outbox."""
    starts, total = [], 0
    for nbytes in sizes:
        starts.append(total)
        total += -(-nbytes // _ALIGN) * _ALIGN

    def route(source: int, target: int) -> list[Move]:
        if (source + shift) % size != target:
            return []
        return [
            Move(Block(start, nbytes), Block(0, nbytes, buffer=i))
            for i, (start, nbytes) in enumerate(zip(starts, sizes, strict=True))
        ]

    return make_exchange(rank, size, total, route), tuple(starts)


def _require_one_host(inner: Communicator) -> None:
    hosts = gather_objects(inner, host_identity())
    for rank, host in enumerate(hosts):
        if host != hosts[0]:
            raise SharedMemoryError(f"ranks 0 and {rank} are on different hosts")
