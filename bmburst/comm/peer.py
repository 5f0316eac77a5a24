"""The communicator of transport "peer": copy engines move blocks between the GPUs of one host.

NCCL's kernels occupy multiprocessors, for which attention kernels then wait; copy engines occupy none. Ranks are
synchronized by 32-bit words in shared memory that streams write and wait for: the host never waits. The transfers of a
lane are numbered. A word holds the number of the last signal from one rank to another, so that no signal is lost:

    pull: kernels fill the outbox -> READY to its readers -> they copy -> DONE to its owner -> it is filled again
    push: kernels have read the inbox -> OFFER to its writers -> they copy -> DONE to its owner
"""

import atexit
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from bmburst.comm.collectives import ProcessGroupCommunicator
from bmburst.comm.communicator import Communicator, Transfer, gather_objects
from bmburst.comm.memory import copy_own, ring_by_pull
from bmburst.comm.shared_memory import (
    Copies,
    Copy,
    DriverError,
    SharedMemory,
    SharedMemoryError,
    Signals,
    gather_or_raise,
    host_identity,
)
from bmburst.comm.streams import FIRST, CurrentStream, SideStreamTransfer, StreamOrder, current_stream
from bmburst.comm.waits import PeerWatch
from bmburst.errors import UserError
from bmburst.schedule.exchange import Block, Exchange, Move
from bmburst_ops.bounded_cache import bounded_cache

LANES = 4
_OUTBOXES = 2
_OFFER, _READY, _DONE = _KINDS = range(3)
_WORD = 64  # bytes between words: each has its own cache line
_MOST = 1 << 30  # bytes of a row: the driver takes less than 2 GiB


@dataclass(slots=True)
class _Buffer:
    """An outbox or inbox of a lane."""

    memory: SharedMemory | None = None
    readers: tuple[int, ...] = ()
    """The ranks that read the outbox's current content."""
    number: int = 0
    """The number of that read in the lane, or of the inbox's offer."""
    done: Any = None
    """The event after this rank's own transfers with the buffer."""
    user: Any = None
    """The stream whose kernels fill or read its current content."""
    offered: Any = None
    """The event at which it was offered; pushed tensors are computed before it."""
    pushed: list[SideStreamTransfer] = field(default_factory=list)
    """Pushes since the offer. No kernel reads the inbox before one of them is waited for."""


def _outboxes() -> tuple[_Buffer, ...]:
    return tuple(_Buffer() for _ in range(_OUTBOXES))


@dataclass(slots=True)
class _Lane:
    stream: Any
    outboxes: tuple[_Buffer, ...] = field(default_factory=_outboxes)
    inbox: _Buffer = field(default_factory=_Buffer)
    turn: int = 0
    number: int = 0

    def next(self) -> int:
        self.number += 1
        return self.number


class PeerCommunicator:
    """A `Communicator` with copy engines for `pull`, `push` and `ring`; collectives use the inner communicator.

    Memory: each lane keeps two outboxes and an inbox, each of the largest size requested so far, until `release`.

    Args:
        inner: The group's communicator; it exchanges memory handles at construction and when a buffer grows.
        device: This rank's GPU.
        host: Identity of this rank's host; default: `host_identity`.

    Raises:
        SharedMemoryError: On every rank, with the reason, if a rank cannot access the memory of another.
    """

    transport = "peer"

    def __init__(self, inner: Communicator, device: torch.device, host: str | None = None) -> None:
        self._inner, self._device = inner, device
        self.rank, self.size = inner.rank, inner.size
        self.all_to_all, self.all_gather = inner.all_to_all, inner.all_gather
        self.reduce_scatter, self.all_reduce = inner.reduce_scatter, inner.all_reduce
        _require_one_host(inner, host or host_identity())
        self._words = SharedMemory(inner, LANES * len(_KINDS) * self.size * _WORD, device)
        *streams, self._local = (torch.cuda.Stream(device, priority=FIRST) for _ in range(LANES + 1))
        self._lanes = [_Lane(stream) for stream in streams]
        self._index = self._local.device_index
        self._order = StreamOrder()
        self._prepared = bounded_cache(maxsize=1024)(self._prepare)
        self._signals = lru_cache(maxsize=256)(self._make_signals)
        self._others = tuple(p for p in range(self.size) if p != self.rank)
        self._try()
        self._watch = PeerWatch(inner, device)
        atexit.register(self._finish)

    def outbox(self, nbytes: int, lane: int = 0) -> Tensor:
        """See `BlockMover.outbox`. The current stream waits until all readers of its last content are done.

        Raises:
            UserError: On every rank, if a GPU has too little free memory, or a CUDA graph is being captured.
        """
        at = self._lanes[lane]
        buffer = at.outboxes[at.turn % _OUTBOXES]
        at.turn += 1
        current = self._turn(buffer)
        if buffer.readers:
            self._signals(lane, _DONE, (), buffer.readers).enqueue(current.cuda_stream, buffer.number)
            buffer.readers = ()
        return self._sized(buffer, nbytes, current)

    def pull(self, exchange: Exchange, outbox: Tensor, targets: Sequence[Tensor], lane: int = 0) -> Transfer:
        """See `BlockMover.pull`."""
        at = self._lanes[lane]
        buffer = at.outboxes[(at.turn - 1) % _OUTBOXES]
        assert buffer.memory is not None
        assert outbox.data_ptr() == buffer.memory.addresses[self.rank] or not outbox.numel()
        calls = self._prepared(exchange, pulled=True)
        transfer = SideStreamTransfer(at.stream, tuple(targets), ())
        buffer.readers, buffer.number = calls.receivers, at.next()
        self._order.after(at.stream, self._current())
        handle = at.stream.cuda_stream
        self._signals(lane, _READY, calls.receivers, calls.senders).enqueue(handle, buffer.number)
        calls.copies.enqueue(handle, [target.data_ptr() for target in targets], buffer.memory.addresses)
        self._signals(lane, _DONE, calls.senders, ()).enqueue(handle, buffer.number)
        if exchange.receives[self.rank]:  # false in a ring, where a rank sends nothing to itself
            with CurrentStream(at.stream):
                copy_own(exchange, (outbox,), targets)
        self._under_way(transfer, buffer)
        buffer.user = None  # `done` comes after the kernels that filled it; later work of that stream does not matter
        return transfer

    def inbox(self, nbytes: int, lane: int = 0) -> Tensor:
        """See `BlockMover.inbox`. The other ranks may write to it once the current stream reaches this point.

        Raises:
            UserError: As `outbox`.
        """
        at = self._lanes[lane]
        current = self._turn(at.inbox)
        memory = self._sized(at.inbox, nbytes, current)
        at.inbox.number, at.inbox.offered = at.next(), current.record_event()
        at.inbox.pushed = []
        self._signals(lane, _OFFER, self._others, ()).enqueue(current.cuda_stream, at.inbox.number)
        return memory

    def push(self, exchange: Exchange, sources: Sequence[Tensor], inbox: Tensor, lane: int = 0) -> Transfer:
        """See `BlockMover.push`."""
        at = self._lanes[lane]
        assert at.inbox.memory is not None
        assert inbox.data_ptr() == at.inbox.memory.addresses[self.rank] or not inbox.numel()
        calls = self._prepared(exchange, pulled=False)
        transfer = SideStreamTransfer(at.stream, (inbox,), tuple(sources))
        number = at.next()
        at.stream.wait_event(at.inbox.offered)
        handle = at.stream.cuda_stream
        self._signals(lane, _OFFER, (), calls.receivers).enqueue(handle, at.inbox.number)
        own, inboxes = [source.data_ptr() for source in sources], at.inbox.memory.addresses
        calls.copies.enqueue(handle, inboxes, own)
        self._signals(lane, _DONE, calls.receivers, calls.senders).enqueue(handle, number)
        if exchange.sends[self.rank]:  # blocks of all later units are copied with the second unit
            self._local.wait_event(at.inbox.offered)
            if not any(before.waited for before in at.inbox.pushed):
                calls.kept.enqueue(self._local.cuda_stream, inboxes, own)
            else:  # the driver's copies inside one device can wait long for a running kernel
                with CurrentStream(self._local):
                    copy_own(exchange, sources, (inbox,))
            self._order.after(at.stream, self._local)
        at.inbox.pushed.append(transfer)
        self._under_way(transfer, at.inbox)
        return transfer

    def ring(self, *tensors: Tensor, shift: int = 1) -> Transfer:
        """See `BlockMover.ring`."""
        return ring_by_pull(self, tensors, shift)

    def release(self) -> None:
        """Free the outboxes and inboxes; the next calls allocate new ones. Every rank must call it.

        The host waits until the transfers of all ranks are done. Buffers of a destroyed process group are not freed:
        its ranks can no longer tell each other that they are done with them.
        """
        if isinstance(self._inner, ProcessGroupCommunicator) and self._inner.is_destroyed:
            return
        for lane in self._lanes:
            for buffer in (*lane.outboxes, lane.inbox):
                if buffer.memory is not None:
                    buffer.memory.close()
            lane.outboxes, lane.inbox = _outboxes(), _Buffer()

    def _current(self) -> Any:
        if torch.cuda.is_current_stream_capturing():
            raise UserError("transport 'peer' cannot be captured in a CUDA graph\nfix: transport='nccl' inside graphs")
        return current_stream(self._index)

    def _turn(self, buffer: _Buffer) -> Any:
        """Return the current stream, ordered after the stream that used the buffer last."""
        current = self._current()
        if buffer.user not in (None, current):
            self._order.after(current, buffer.user)
        buffer.user = current
        return current

    def _try(self) -> None:
        """Try each driver call once on memory of this rank, then clear the words before any rank signals.

        Raises:
            SharedMemoryError: On every rank, if the driver of any rank does not support them.
        """
        own, stream, problem = self._words.addresses[self.rank], self._local.cuda_stream, ""
        try:
            Signals([own], [own]).enqueue(stream, 1)
            Copies([Copy(_WORD, 0, _WORD)], [0], [0]).enqueue(stream, [own], [own])
        except (AttributeError, DriverError) as error:
            problem = f"rank {self.rank} has a driver that cannot signal or copy in streams: {error}"
        torch.cuda.synchronize(self._device)
        self._words.local.zero_()
        torch.cuda.synchronize(self._device)
        try:
            gather_or_raise(self._inner, problem, "")
        except SharedMemoryError:
            self._words.close()
            raise

    def _finish(self) -> None:
        """Wait, before this process ends, until other ranks have read its memory and its own transfers are done."""
        for i, lane in enumerate(self._lanes):
            for buffer in lane.outboxes:
                if buffer.readers:
                    self._signals(i, _DONE, (), buffer.readers).enqueue(self._local.cuda_stream, buffer.number)
        self._watch.expect(self._local.record_event())
        torch.cuda.synchronize(self._device)
        self._watch.close()

    def _sized(self, buffer: _Buffer, nbytes: int, current: Any) -> Tensor:
        """Return the buffer's memory, after this rank's last transfers with it; it grows if it is too small."""
        if buffer.done is not None:
            current.wait_event(buffer.done)
        try:
            if buffer.memory is None:
                buffer.memory = SharedMemory(self._inner, nbytes, self._device)
            elif buffer.memory.nbytes < nbytes:
                buffer.memory.grow(nbytes)
        except SharedMemoryError as error:
            raise UserError(f"{error}\nfix: transport='nccl', shorter sequences, or more free memory") from None
        return buffer.memory.local[:nbytes]

    def _under_way(self, transfer: SideStreamTransfer, buffer: _Buffer) -> None:
        buffer.done = transfer.done = transfer.side.record_event()
        self._watch.expect(transfer.done)

    def _make_signals(self, lane: int, kind: int, raised: tuple[int, ...], awaited: tuple[int, ...]) -> Signals:
        """Return the signals of one kind: writes to the `raised` ranks and waits for the `awaited` ranks."""

        def word(owner: int, by: int) -> int:
            return self._words.addresses[owner] + ((lane * len(_KINDS) + kind) * self.size + by) * _WORD

        return Signals([word(rank, self.rank) for rank in raised], [word(self.rank, rank) for rank in awaited])

    def _prepare(self, exchange: Exchange, *, pulled: bool) -> "_Calls":
        # Each rank starts with a different neighbour, so that no GPU serves all ranks at once.
        neighbours = [(self.rank + step) % self.size for step in range(1, self.size)]
        moves = [
            (peer, move) for peer in neighbours for move in (exchange.receives if pulled else exchange.sends)[peer]
        ]
        return _Calls(
            receivers=tuple(p for p in self._others if exchange.sends[p]),
            senders=tuple(p for p in self._others if exchange.receives[p]),
            copies=_copies(moves, pulled=pulled),
            kept=_copies([(self.rank, move) for move in exchange.sends[self.rank]], pulled=False),
        )


@dataclass(frozen=True, slots=True)
class _Calls:
    """The driver calls of an exchange, and the ranks that take part."""

    receivers: tuple[int, ...]
    senders: tuple[int, ...]
    copies: Copies
    kept: Copies
    """In a push, the copies from this rank to itself."""


def _copies(moves: Sequence[tuple[int, Move]], *, pulled: bool) -> Copies:
    """Return the copies between buffers of other ranks (by rank) and own buffers (by number)."""
    copies, ranks, own = [], [], []
    for rank, move in moves:
        for copy in _copy(*move):
            copies.append(copy)
            ranks.append(rank)
            own.append(move.target.buffer if pulled else move.source.buffer)
    return Copies(copies, *((own, ranks) if pulled else (ranks, own)))


def _copy(source: Block, target: Block) -> list[Copy]:
    assert (source.width, source.rows) == (target.width, target.rows)
    if not (source.dense and target.dense):
        return [Copy(target.offset, source.offset, source.width, source.rows, target.pitch, source.pitch)]
    starts = range(0, source.nbytes, _MOST)
    return [Copy(target.offset + i, source.offset + i, min(_MOST, source.nbytes - i)) for i in starts]


def _require_one_host(inner: Communicator, mine: str) -> None:
    hosts = gather_objects(inner, mine)
    for rank, host in enumerate(hosts):
        if host != hosts[0]:
            raise SharedMemoryError(f"ranks 0 and {rank} are on different hosts")
