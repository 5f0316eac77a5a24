"""Memory that attention keeps for the next call is given back when it is asked to."""

import weakref

import pytest
import torch
import torch.distributed as dist

import bmburst
from bmburst.comm import transports
from bmburst.comm.groups import communicator
from bmburst.comm.peer import PeerCommunicator
from bmburst.comm.streams import RECORDINGS
from tests.attention.oracle import draw, reference
from tests.attention.test_burst_attention import split_attention
from tests.distributed.threads import run_ranks
from tests.stand_in_driver import install


@pytest.fixture
def fresh():
    transports.PEER_GROUPS.clear()
    yield
    transports.PEER_GROUPS.clear()


def test_buffers_and_graphs_are_freed_before_torch_gives_back(monkeypatch, fresh):
    log, graph = [], weakref.ref(RECORDINGS.get("work"))

    class Peers:
        def release(self):
            log.append("buffers")

    for _ in range(2):
        transports.PEER_GROUPS.add(Peers())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: log.append(graph() is None))
    bmburst.empty_cache()
    assert log == ["buffers", "buffers", True]


def test_attention_goes_on_with_new_memory(monkeypatch, fresh):
    driver = install(monkeypatch, batches=True)
    whole = draw(0, 1, 16, 4, 2, 8)
    exact = reference(*whole[:4], "causal")

    def body(comm):
        peers = PeerCommunicator(comm, torch.device("cpu"))
        moved = comm.over(peers)
        held = []
        for strategy in ("heads", "gather", "heads", "ring"):
            results = split_attention(moved, whole, "zigzag", "causal", with_lse=False, strategy=strategy)
            peers.release()
            held.append([lane.inbox.memory for lane in peers._lanes])
            torch.testing.assert_close(results, exact, rtol=0, atol=1e-12)
        return held

    assert run_ranks(2, body)[0] == [[None] * 4] * 4
    assert driver.calls["cuMemFree_v2"] > 8


@pytest.mark.parametrize("held", [False, True])
def test_groups_that_were_destroyed_are_passed_over(monkeypatch, fresh, tmp_path, held):
    install(monkeypatch, batches=True)

    def begin(name):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path / name}", rank=0, world_size=1)
        peers = PeerCommunicator(communicator(None).inner, torch.device("cpu"))
        transports.PEER_GROUPS.add(peers)
        peers.inbox(100)
        return peers, dist.group.WORLD if held else None

    def has_inbox(peers):
        return peers._lanes[0].inbox.memory is not None

    before, _group = begin("before")
    dist.destroy_process_group()
    after, _ = begin("after")
    try:
        bmburst.empty_cache()
        assert (has_inbox(before), has_inbox(after)) == (True, False)
    finally:
        dist.destroy_process_group()
