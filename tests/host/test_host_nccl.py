"""The stand-in's messages, every rank a thread of this process; its collectives are in test_host_collectives.py."""

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bmburst.host.cuda import Stream, Streams
from bmburst.host.gloo import HostRuntimeError
from bmburst.host.nccl import DTYPES, OPERATORS, Nccl, Rendezvous
from tests.distributed.threads import on_ranks

NUMBER = {dtype: number for number, dtype in DTYPES.items()}
SECONDS = 30  # after which a lost message fails a test
LARGE = 2 << 20  # fp32 numbers: 8 MB, more than any socket holds


class Rank:
    """`bmtrain.nccl` for one rank: tensors in place of addresses, a communicator in place of handles."""

    def __init__(self, streams: Streams, nccl: Nccl, unique_ids: Sequence[bytes], size: int, rank: int) -> None:
        self.rank, self.size, self.streams, self.nccl = rank, size, streams, nccl
        self.comms = [nccl.ncclCommInitRank(unique_id, size, rank) for unique_id in unique_ids]
        self.next, self.previous = (rank + 1) % size, (rank - 1) % size

    @property
    def stream(self) -> int:
        return self.streams.current().cuda_stream

    def send(self, data: Tensor, peer: int, comm: int = 0) -> None:
        self.nccl.ncclSend(data.data_ptr(), data.numel(), NUMBER[data.dtype], peer, self.comms[comm], self.stream)

    def recv(self, data: Tensor, peer: int, comm: int = 0) -> None:
        self.nccl.ncclRecv(data.data_ptr(), data.numel(), NUMBER[data.dtype], peer, self.comms[comm], self.stream)

    def all_reduce(self, source: Tensor, target: Tensor, op: str, comm: int = 0) -> None:
        numbers = (source.numel(), NUMBER[source.dtype], OPERATORS.index(op))
        self.nccl.ncclAllReduce(source.data_ptr(), target.data_ptr(), *numbers, self.comms[comm], self.stream)


class InProcess(Rendezvous):
    """Ranks that are threads meet in memory."""

    def __init__(self, store: object, seconds: float) -> None:
        super().__init__({"BMBURST_TIMEOUT": str(seconds)})
        self._store = store

    def open(self, unique_id: bytes) -> object:
        return dist.PrefixStore(unique_id.decode(), self._store)


def run(size: int, body: Callable[[Rank], object], communicators: int = 1, seconds: float = SECONDS) -> list[object]:
    """Call `body` on `size` ranks; return what it returns, or raise what it raises."""
    store, streams = dist.HashStore(), [Streams() for _ in range(size)]
    nccls = [Nccl(each, InProcess(store, seconds)) for each in streams]
    unique_ids = [str(number).encode() for number in range(communicators)]

    def enter(rank: int) -> object:
        return body(Rank(streams[rank], nccls[rank], unique_ids, size, rank))

    try:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(enter, range(size)))
    finally:
        for nccl in nccls:
            nccl.close(patience=1.0)


def message(*what: int, count: int = 13) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(hash(what) % 2**31))


def empty(count: int = 13) -> Tensor:
    return torch.full((count,), torch.nan)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("order", ["send first", "group: send first", "group: receive first"])
@on_ranks(run=run)
def test_ring(me: Rank, size: int, order: str) -> None:
    for step in range(3):
        outgoing, incoming = message(step, me.rank), empty()
        calls = [lambda out=outgoing: me.send(out, me.next), lambda into=incoming: me.recv(into, me.previous)]
        if order == "group: receive first":
            calls.reverse()
        if order != "send first":
            me.nccl.ncclGroupStart()
        for call in calls:
            call()
        if order != "send first":
            me.nccl.ncclGroupEnd()
        assert torch.equal(incoming, message(step, me.previous))


@pytest.mark.parametrize("size", [2, 3])
@on_ranks(run=run)
def test_large_messages_in_both_directions_before_any_receive(me: Rank, size: int) -> None:
    for peer in {me.next, me.previous}:
        me.send(message(me.rank, peer, count=LARGE), peer)
    for peer in {me.next, me.previous}:
        incoming = empty(LARGE)
        me.recv(incoming, peer)
        assert torch.equal(incoming, message(peer, me.rank, count=LARGE))


@pytest.mark.parametrize("count", [13, LARGE])
def test_send_returns_before_the_peer_receives(count: int) -> None:
    returned = threading.Event()

    def body(me: Rank) -> None:
        if me.rank == 0:
            data = message(7, count=count)
            me.send(data, 1)
            data.zero_()  # what was sent is what it was when it was sent
            returned.set()
        else:
            assert returned.wait(SECONDS), "send has waited for its receive"
            incoming = empty(count)
            me.recv(incoming, 0)
            assert torch.equal(incoming, message(7, count=count))

    run(2, body)


@pytest.mark.parametrize("how", ["stream", "event", "synchronize", "other stream", "device"])
def test_receive_on_a_side_stream_waits_for_nobody(how: str) -> None:
    posted = threading.Event()

    def wait(streams: Streams, side: Stream) -> None:
        if how == "stream":
            streams.default.wait_stream(side)
        elif how == "event":
            streams.default.wait_event(side.record_event())
        elif how == "synchronize":
            side.synchronize()
        elif how == "device":
            streams.synchronize()
        else:
            other = streams.Stream()
            other.wait_stream(side)
            assert other.pending, "a side stream that waits for another one must not block"
            streams.default.wait_stream(other)

    def body(me: Rank) -> None:
        if me.rank == 0:
            assert posted.wait(SECONDS), "receive has waited for its message"
            me.send(message(1, count=LARGE), 1)
            return
        side, incoming = me.streams.Stream(priority=-1), empty(LARGE)
        with me.streams.use(side):
            me.recv(incoming, 0)
        posted.set()
        time.sleep(0.05)
        assert incoming.isnan().all(), "written before anybody has waited"
        wait(me.streams, side)
        assert torch.equal(incoming, message(1, count=LARGE))
        assert not side.pending

    run(2, body)


@on_ranks(2, run=run)
def test_an_event_waits_only_for_what_came_before_it(me: Rank) -> None:
    if me.rank == 0:
        me.send(message(1), 1)
        got = empty()
        me.recv(got, 1)  # the second message leaves only once the first was waited for
        me.send(message(2), 1)
        return
    side, first, second = me.streams.Stream(), empty(), empty()
    with me.streams.use(side):
        me.recv(first, 0)
        event = side.record_event()
        me.recv(second, 0)
    event.synchronize()
    assert torch.equal(first, message(1))
    me.send(first, 0)
    side.synchronize()
    assert torch.equal(second, message(2))


@pytest.mark.parametrize("size", [2, 3, 4])
@on_ranks(run=run)
def test_what_arrives_on_a_stream_can_be_sent_on_without_waiting(me: Rank, size: int) -> None:
    side, held = me.streams.Stream(), [message(me.rank), *(empty() for _ in range(size - 1))]
    with me.streams.use(side):
        for here, there in itertools.pairwise(held):
            me.nccl.ncclGroupStart()
            me.send(here, me.next)
            me.recv(there, me.previous)
            me.nccl.ncclGroupEnd()
    me.streams.default.wait_stream(side)
    for hops, data in enumerate(held):
        assert torch.equal(data, message((me.rank - hops) % size))


def test_recorded_memory_lives_until_the_message_has_arrived() -> None:
    streams = Streams()
    side, tensor = streams.Stream(), torch.zeros(3)
    arrived = threading.Event()

    class Slow:
        finished = False

        def finish(self) -> None:
            self.finished = arrived.is_set()

        def overlaps(self, *_: int) -> bool:
            return False

    side.keep(tensor)
    alive = weakref.ref(tensor)
    del tensor
    assert alive() is None, "nothing is pending: nothing to keep for"
    side.add(Slow())
    tensor = torch.zeros(3)
    side.keep(tensor)
    alive = weakref.ref(tensor)
    del tensor
    assert alive() is not None
    arrived.set()
    side.synchronize()
    assert alive() is None


@on_ranks(2, run=run, communicators=2)
def test_two_communicators_in_flight_do_not_mix(me: Rank) -> None:
    peer = 1 - me.rank
    for step in range(5):
        for comm in (0, 1):
            me.send(message(step, me.rank, comm), peer, comm)
    for step in range(5):
        for comm in (1, 0):
            incoming = empty()
            me.recv(incoming, peer, comm)
            assert torch.equal(incoming, message(step, peer, comm))


@on_ranks(2, run=run)
def test_messages_of_different_sizes_and_dtypes_keep_their_order(me: Rank) -> None:
    sent = [
        torch.arange(n).to(d)
        for n, d in [(1, torch.int64), (40_001, torch.bfloat16), (3, torch.uint8), (7, torch.float64)]
    ]
    if me.rank == 0:
        for data in sent:
            me.send(data, 1)
    else:
        me.send(torch.empty(0), 0)  # nothing moves, and nothing waits for it
        for data in sent:
            incoming = torch.zeros_like(data)
            me.recv(incoming, 0)
            assert torch.equal(incoming, data)


@on_ranks(2, run=run, communicators=2)
def test_a_group_launches_both_communicators_whatever_their_order(me: Rank) -> None:
    data = [torch.full((3,), float(10**comm * (me.rank + 1))) for comm in (0, 1)]
    me.nccl.ncclGroupStart()
    for comm in (0, 1) if me.rank else (1, 0):
        me.nccl.ncclGroupStart()
        me.all_reduce(data[comm], data[comm], "sum", comm)
        me.nccl.ncclGroupEnd()
        assert float(data[comm][0]) == 10**comm * (me.rank + 1), "launched before the outermost group ended"
    me.nccl.ncclGroupEnd()
    assert [float(t[0]) for t in data] == [3.0, 30.0]


def test_a_message_that_never_comes_is_one_clear_line_in_time() -> None:
    over = threading.Event()

    def body(me: Rank) -> str:
        if me.rank == 0:
            assert over.wait(SECONDS), "the other rank waits for ever"
            return ""
        with pytest.raises(HostRuntimeError) as caught:
            me.recv(empty(), 0)
        over.set()
        return str(caught.value)

    text = run(2, body, seconds=1.5)[1]
    assert text == "rank 1 of 2: receive from rank 0: Timed out waiting 1500ms for recv operation to complete"


@on_ranks(2, run=run)
def test_mistakes_are_errors(me: Rank) -> None:
    with pytest.raises(RuntimeError, match="rank 2 is not one of this communicator's 2"):
        me.send(empty(), 2)
    with pytest.raises(RuntimeError, match="ncclGroupEnd without"):
        me.nccl.ncclGroupEnd()
    with pytest.raises(RuntimeError, match="data type 3"):
        me.nccl.ncclSend(0, 1, 3, 0, me.comms[0], me.stream)
    with pytest.raises(RuntimeError, match="operator 5"):
        me.nccl.ncclAllReduce(0, 0, 0, 7, 5, me.comms[0], me.stream)
    with pytest.raises(HostRuntimeError, match="nothing was sent"):
        me.recv(empty(), me.rank)
    assert me.nccl.ncclCommCount(me.comms[0]) == 2
    assert me.nccl.ncclCommUserRank(me.comms[0]) == me.rank
    me.nccl.ncclCommDestroy(me.comms[0])
    with pytest.raises(RuntimeError, match="not an open communicator"):
        me.nccl.ncclCommCount(me.comms[0])


@on_ranks(2, run=run)
def test_a_destroyed_communicator_delivers_what_was_sent(me: Rank) -> None:
    if me.rank == 0:
        me.send(message(3, count=LARGE), 1)
        me.nccl.ncclCommDestroy(me.comms[0])
    else:
        time.sleep(0.2)
        incoming = empty(LARGE)
        me.recv(incoming, 0)
        assert torch.equal(incoming, message(3, count=LARGE))
