"""When work is called, when it is recorded, and when what was recorded is started instead; GPUs are in tests/gpu."""

import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bmburst.comm import streams as module
from bmburst.comm.streams import Recording, Recordings
from bmburst_ops.flash.inputs import DeviceVectors, collect_vectors, copy_to_device

CPU = torch.device("cpu")


class Stream:
    """Of a CUDA stream where and how soon its work runs."""

    def __init__(self, device=CPU, priority=0):
        self.device, self.priority = device, priority


class Graph:
    """Of a CUDA graph that work is recorded into it, and that it can be started. It is listed once it is whole."""

    def __init__(self, made):
        self.made, self.starts = made, 0

    def capture_begin(self, *, pool, **_):
        self.pool = pool

    def capture_end(self):
        self.made.append(self)

    def replay(self):
        self.starts += 1


@pytest.fixture
def graphs(monkeypatch):
    made, here = [], Stream()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(made))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: here)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda: SimpleNamespace(id=(0, 1)))
    monkeypatch.setattr(module, "CurrentStream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 40, 1 << 40))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: 1.0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    return made


def test_work_is_recorded_behind_its_fourth_call_and_then_started(graphs):
    calls, one = [], Recording()
    for _ in range(6):
        one.run(lambda: calls.append(len(graphs)))
    assert calls == [0, 0, 0, 0, 0] and [graph.starts for graph in graphs] == [2]  # the fifth while it is recorded


@pytest.mark.parametrize("why", ["little memory", "little of its share", "another allocator", "no cache"])
def test_without_room_for_a_graph_work_goes_on_being_called(graphs, monkeypatch, why):
    if why == "little memory":
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: ((3 << 30) - 1, 1 << 40))
    elif why == "little of its share":
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: 0.5)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: (1 << 39) - (3 << 30) + 1)
    elif why == "another allocator":
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    else:
        monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    calls, one = [], Recording()
    for _ in range(6):
        one.run(lambda: calls.append(None))
    assert len(calls) == 6 and not graphs


def test_the_same_work_in_the_same_place_has_one_recording():
    recordings, token = Recordings(most=4), object()
    first = recordings.get(token, 0, 4096)
    others = [recordings.get(*work) for work in ((object(), 0, 4096), (token, 1, 4096), (token, 0, 8192))]
    assert recordings.get(token, 0, 4096) is first and first not in others and len(set(map(id, others))) == 3


def test_the_recordings_used_least_recently_are_dropped():
    recordings = Recordings(most=2)
    first, second = recordings.get("first"), weakref.ref(recordings.get("second"))
    assert recordings.get("first") is first
    recordings.get("third")
    assert second() is None and recordings.get("first") is first
    recordings.clear()
    assert recordings.get("first") is not first


def test_what_a_graph_reads_is_kept_and_not_waited_for(monkeypatch):
    """A capture may not wait for an event outside it, and what it was given must live as long as its graph."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: pytest.fail("waits"))
    sent = DeviceVectors((torch.arange(3),), stream=object(), arrived=object())
    with collect_vectors() as kept:
        assert sent.here() is sent.vectors
    assert kept == [sent]
    with pytest.raises(pytest.fail.Exception):
        sent.here()


@pytest.mark.parametrize(("varying", "first"), [(0, []), (800, ["1000 bytes"])])
def test_work_that_varies_is_recorded_in_memory_of_one_piece(graphs, monkeypatch, varying, first):
    """Or each step with more documents than all before it would add to what graphs keep all that it takes."""
    log, empty, begin, end = [], torch.empty, Graph.capture_begin, Graph.capture_end
    monkeypatch.setattr(Graph, "capture_begin", lambda *args, **options: log.append("begin") or begin(*args, **options))
    monkeypatch.setattr(Graph, "capture_end", lambda graph: log.append("end") or end(graph))
    monkeypatch.setattr(torch, "empty", lambda n, **options: log.append(f"{n} bytes") or empty(n, **options))
    one = Recording()
    for _ in range(module.CALLS):
        one.run(lambda: log.append("work"), varying)
    assert log == ["work"] * module.CALLS + ["begin", *first, "work", "end"]
    assert graphs[0].pool == (0, 1)


def test_nothing_is_sent_into_a_graph():
    with collect_vectors(), pytest.raises(AssertionError):
        copy_to_device([np.arange(3)], CPU)
    copy_to_device([np.arange(3)], CPU)
