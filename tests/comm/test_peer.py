"""The peer transport without a GPU, on a stand-in for the driver: what is asked of it, and what then lies where."""

import random
import sys
import threading
import time
import weakref
from functools import partial

import numpy as np
import pytest
import torch

import bmburst
from bmburst.attention import heads
from bmburst.comm import peer, shared_memory
from bmburst.comm.communicator import gather_objects
from bmburst.comm.memory import ring_exchange
from bmburst.comm.peer import PeerCommunicator
from bmburst.comm.shared_memory import Copies, Copy, DriverError, SharedMemory, SharedMemoryError, Signals
from bmburst.comm.streams import UnitStreams
from bmburst.schedule.exchange import Block, Move, make_exchange
from bmburst_ops.bounded_cache import bounded_cache
from tests.attention.exchange_ways import move_heads
from tests.attention.oracle import draw, reference
from tests.comm.test_communicators import random_exchanges, verbs
from tests.distributed.threads import on_ranks, run_ranks
from tests.refusals import refused
from tests.stand_in_driver import BATCHED_COPY, as_tensor, install

CPU = torch.device("cpu")
GRANULE = 2 << 20


@pytest.fixture(params=["batches", "an older driver"])
def driver(request, monkeypatch):
    return install(monkeypatch, batches=request.param == "batches")


def test_copies_are_the_rectangles_that_were_asked_for(driver):
    rng = random.Random(0)
    copies, targets, sources, claimed = [], [], [], [0, 0, 0]
    for _ in range(50):
        width, rows = rng.randrange(1, 40), rng.choice([1, 1, 3, 8])
        pitches = [width + rng.choice([0, 3, 16]) for _ in range(2)]
        if rng.random() < 0.3:
            pitches = [0, 0]  # dense
        target, source = rng.randrange(3), rng.randrange(2)
        copies.append(Copy(claimed[target], rng.randrange(3000), width, rows, *pitches))
        claimed[target] += rows * (pitches[0] or width)
        targets.append(target)
        sources.append(source)
    prepared = Copies(copies, targets, sources)
    for shift in (0, 5):  # prepared once, for whatever addresses
        into = [np.zeros(size + shift, dtype=np.uint8) for size in claimed]
        held = [np.random.default_rng(shift + i).integers(0, 256, 4000 + shift, dtype=np.uint8) for i in range(2)]
        wanted = [a.copy() for a in into]
        for copy, target, source in zip(copies, targets, sources, strict=True):
            for row in range(copy.rows):
                here = copy.source + row * (copy.source_pitch or copy.width) + shift
                there = copy.target + row * (copy.target_pitch or copy.width) + shift
                wanted[target][there : there + copy.width] = held[source][here : here + copy.width]
        prepared.enqueue(7, [a.ctypes.data + shift for a in into], [a.ctypes.data + shift for a in held])
        assert all(np.array_equal(a, b) for a, b in zip(into, wanted, strict=True))


def test_prepared_copies_say_their_bytes(driver):
    copies = [Copy(i, i, 1) for i in range(1000)]
    prepared = Copies(copies, [0] * 1000, [0] * 1000)
    assert sys.getsizeof(prepared) >= 1000 * (BATCHED_COPY.size + 4 * 8)  # a buffer and an offset on either side


def test_exchanges_that_are_seen_once_do_not_pile_up(driver, monkeypatch):
    monkeypatch.setattr(peer, "bounded_cache", partial(bounded_cache, nbytes=1 << 18))
    route = [Move(Block(i, 1), Block(i, 1)) for i in range(125)]

    def body(comm):
        moved, alive = PeerCommunicator(comm, CPU), []
        for _ in range(40):
            exchange = make_exchange(comm.rank, 2, 125, lambda *_: route)
            calls = moved._prepared(exchange, pulled=True)
            assert calls is moved._prepared(exchange, pulled=True)
            alive.append(weakref.ref(calls.kept))
            del calls
        return sum(reference() is not None for reference in alive)

    assert max(run_ranks(2, body)) < 10


def test_nothing_to_copy_calls_nothing(driver):
    Copies([], [], []).enqueue(7, [1], [2])
    Signals().enqueue(7, 1)
    assert not driver.calls


@pytest.mark.parametrize("value", [1, (1 << 31) + 3, (1 << 32) - 1, 1 << 32, (1 << 32) + 5])
def test_signals_write_all_then_wait_in_cyclic_order(driver, value):
    words = np.zeros(300, dtype=np.uint32)
    at = [words.ctypes.data + 4 * i for i in range(300)]
    words[200:] = np.uint32((value + 9) & 0xFFFFFFFF)  # others are ahead, perhaps past the end of the numbers
    Signals(at[:200], [*at[200:], at[3]]).enqueue(7, value)  # its own word: written before it waits
    assert (words[:200] == value & 0xFFFFFFFF).all()
    assert driver.waits == [*at[200:], at[3]]
    assert driver.calls["cuStreamBatchMemOp_v2"] == 3


def test_a_refusal_names_the_call(driver):
    driver.refuses = lambda name: name == "cuMemAlloc_v2"
    with pytest.raises(DriverError, match=r"cuMemAlloc_v2: operation not supported \(801\)"):
        shared_memory.allocate(10)
    assert driver.calls["cuMemAlloc_v2"] == 2  # once more after torch's cache has given way


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_verbs_of_every_communicator(driver, size):
    run_ranks(size, lambda comm: verbs(comm.over(PeerCommunicator(comm, CPU)), "cpu"))
    assert size == 1 or driver.calls["cuMemcpy3DBatchAsync_v2"] + driver.calls["cuMemcpy2DAsync_v2"] > 50


@on_ranks(2)
def test_memory_made_in_inference_serves_training_too(comm, driver):
    moved = comm.over(PeerCommunicator(comm, CPU))
    with torch.inference_mode():
        random_exchanges(moved, "cpu")
    random_exchanges(moved, "cpu")


@on_ranks(3)
def test_numbers_go_on_after_the_last(comm, driver):
    """Words are compared in cyclic order: 32 bits that overflow are numbers like others."""
    moved = PeerCommunicator(comm, CPU)
    for lane in moved._lanes:
        lane.number = (1 << 32) - 8
    words = moved._words.local.view(torch.int32)
    words.fill_(-8)
    gather_objects(comm, None)
    random_exchanges(comm.over(moved), "cpu")
    assert any(lane.number > 1 << 32 for lane in moved._lanes)


def test_nothing_is_overwritten_that_is_still_read(driver):
    """One rank only sends and runs ahead, the other takes its time, as the content of boxes goes by and they grow."""
    turns = 8

    def body(comm):
        moved = comm.over(PeerCommunicator(comm, CPU))
        moved.active = False  # comparing would hold them together
        for turn in range(2 * turns):
            nbytes = 1000 if turn % turns < 5 else GRANULE + 1000
            move = Move(Block(turn, 500), Block(turn + 100, 500))
            exchange = make_exchange(comm.rank, 2, nbytes, lambda a, b, move=move: [move] * (a < b))
            if turn < turns:
                box, found = moved.outbox(nbytes), torch.zeros(700, dtype=torch.uint8)
                box.fill_(turn + 1)
                time.sleep(0.02 * comm.rank)
                moved.pull(exchange, box, [found]).wait()
            else:
                box = found = moved.inbox(nbytes, 1)
                moved.push(exchange, [torch.full((600,), turn + 1, dtype=torch.uint8)], box, 1).wait()
                time.sleep(0.02 * comm.rank)
            assert box.numel() == nbytes
            assert comm.rank == 0 or found[turn + 100 : turn + 600].eq(turn + 1).all()

    run_ranks(2, body)


@pytest.mark.parametrize("strategy", ["heads", "gather", "ring", "burst", "heads+ring", "heads+gather"])
@pytest.mark.parametrize("strided", [False, True])
def test_attention(driver, monkeypatch, strategy, strided):
    move_heads(monkeypatch, "one unit")
    whole = draw(0, 2, 23, 8, 4, 5)
    exact = reference(*whole[:4], "causal")

    def body(comm):
        moved = comm.over(PeerCommunicator(comm, CPU))
        q, k, v, grad = (bmburst.shard(t, group=comm) for t in whole[:4])
        if strided:  # on one rank alone: who writes into others' memory needs to know only where its own lies
            q, k = (t.transpose(1, 2).contiguous().transpose(1, 2) if comm.rank == 1 else t for t in (q, k))
        inputs = [t.requires_grad_() for t in (q, k, v)]
        for _ in range(2):
            out = bmburst.burst_attention(*inputs, strategy=strategy, length=23, group=moved)
            results = [out, *torch.autograd.grad(out, inputs, grad)]
        return [bmburst.unshard(t, length=23, group=comm).detach() for t in results]

    torch.testing.assert_close(run_ranks(4, body)[2], (exact[0], *exact[2:]), rtol=0, atol=1e-12)


def test_where_torch_fills_new_memory_kernels_follow_each_other(driver, monkeypatch):
    """It does so on the stream that asks for it, and what comes home to it on another one would be in a race."""
    turns = []
    monkeypatch.setattr(heads, "UnitStreams", lambda device, count: turns.append(count) or UnitStreams(device, count))
    move_heads(monkeypatch, "several units")

    def body(comm):
        q = torch.ones(1, 8, 8, 4, requires_grad=True)
        out = bmburst.burst_attention(q, q, q, strategy="heads", group=comm.over(PeerCommunicator(comm, CPU)))
        out.sum().backward()

    run_ranks(2, body)
    torch.use_deterministic_algorithms(True)
    try:
        run_ranks(2, body)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(turns) == 8 and min(turns[:4]) > 2 and set(turns[4:]) == {1}


def test_shared_memory_grows_and_closes(driver):
    def body(comm):
        memory = SharedMemory(comm, 3, CPU)
        assert memory.nbytes == GRANULE
        for nbytes in (3, GRANULE + 1):
            memory.grow(nbytes)
            memory.local[:3] = comm.rank + 1
            gather_objects(comm, None)
            assert [as_tensor(address, 3).tolist() for address in memory.addresses] == [
                [r + 1] * 3 for r in range(comm.size)
            ]
        assert memory.nbytes == memory.local.numel() == 2 * GRANULE
        memory.close()
        assert not memory.addresses and memory.nbytes == 0

    run_ranks(3, body)
    assert not driver.memory and not +driver.opened


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("cuMemAlloc_v2", "rank 1 | 2 MiB | cuMemAlloc_v2 | operation not supported (801)"),
        ("cuIpcGetMemHandle", "rank 1 | 2 MiB | cuIpcGetMemHandle"),
        ("cuIpcOpenMemHandle_v2", "rank 1 | memory of rank 0 | cuIpcOpenMemHandle_v2"),
        ("cuStreamBatchMemOp_v2", "rank 1 | signal or copy | cuStreamBatchMemOp_v2"),
    ],
)
def test_what_one_rank_cannot_share_is_an_error_on_all(driver, call, words):
    refusing = []
    driver.refuses = lambda name: name == call and threading.get_ident() in refusing

    def body(comm):
        if comm.rank == 1:
            refusing.append(threading.get_ident())
        with refused(words, error=SharedMemoryError):
            PeerCommunicator(comm, CPU)

    run_ranks(3, body)
    assert not driver.memory and not +driver.opened  # nobody keeps what it could share


def test_ranks_of_two_hosts_share_nothing(driver):
    def body(comm):
        with refused("ranks 0 and 2", "hosts", error=SharedMemoryError):
            PeerCommunicator(comm, CPU, host="b" if comm.rank == 2 else "a")

    run_ranks(3, body)
    assert not driver.memory


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("sizes", [(), (0,), (1,), (512,), (513, 0, 7), (40_000, 2, 4, 1024)])
def test_the_exchange_of_a_hop(size, sizes):
    for shift in range(size):
        ranks = [ring_exchange(rank, size, shift, sizes) for rank in range(size)]
        starts, total = ranks[0][1], ranks[0][0].nbytes
        ends = [start + nbytes for start, nbytes in zip(starts, sizes, strict=True)]
        assert all(start % 512 == 0 for start in starts) and total >= max(ends, default=0)
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
        for rank, (exchange, again) in enumerate(ranks):
            assert (exchange.rank, exchange.nbytes, again) == (rank, total, starts)
            moving = [i for i, nbytes in enumerate(sizes) if nbytes]
            for other in range(size):
                assert exchange.receives[other] == ranks[other][0].sends[rank]
                sent = exchange.sends[other]
                assert len(sent) == (len(moving) if (rank + shift) % size == other else 0)
                for i, (source, target) in zip(moving, sent, strict=False):
                    assert (source.offset, source.nbytes, source.buffer) == (starts[i], sizes[i], 0)
                    assert (target.offset, target.nbytes, target.buffer) == (0, sizes[i], i)


@on_ranks(3)
def test_objects_between_ranks(comm):
    value = {"rank": comm.rank, "text": "\u00e9" * comm.rank, "many": [None, 1.5, True]}
    assert gather_objects(comm, value) == [{**value, "rank": r, "text": "\u00e9" * r} for r in range(comm.size)]
    assert gather_objects(comm, "x" * 1022) == ["x" * 1022] * comm.size  # with its quotes 1024 bytes
    with refused("1025 bytes", "1024", error=ValueError):
        gather_objects(comm, "x" * 1023)
