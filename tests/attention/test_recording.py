"""When work is called, when it is recorded, and when what was recorded is started instead; GPUs are in tests/gpu."""

import numpy as np
import pytest
import torch

from bmburst.attention import recording as module
from bmburst.attention.recording import Recording, recording
from bmburst_ops.flash import vectors
from bmburst_ops.flash.vectors import Sent, held, send

CPU = torch.device("cpu")


class Graph:
    """Of a CUDA graph that it can be started."""

    def __init__(self):
        self.starts = 0

    def replay(self):
        self.starts += 1


@pytest.fixture
def graphs(monkeypatch):
    made = []

    def record(work):
        work()
        made.append(Graph())
        return made[-1], None

    monkeypatch.setattr(module, "_record", record)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 40, 1 << 40))
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    return made


def test_work_is_recorded_behind_its_second_run_and_then_started(graphs):
    calls, one = [], Recording()
    for _ in range(6):
        one.run(lambda: calls.append(len(graphs)))
    assert calls == [0, 0, 0] and [graph.starts for graph in graphs] == [4]


@pytest.mark.parametrize("why", ["little memory", "another allocator", "no cache"])
def test_without_room_for_a_graph_work_goes_on_being_called(graphs, monkeypatch, why):
    if why == "little memory":
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 1 << 40))
    elif why == "another allocator":
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    else:
        monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    calls, one = [], Recording()
    for _ in range(6):
        one.run(lambda: calls.append(None))
    assert len(calls) == 6 and not graphs


def test_the_same_work_in_the_same_place_has_one_recording():
    token = object()
    assert recording(token, "fa4", 0, 4096) is recording(token, "fa4", 0, 4096)
    others = [recording(object(), "fa4", 0, 4096), recording(token, "fa4", 1, 4096), recording(token, "fa4", 0, 8192)]
    assert recording(token, "fa4", 0, 4096) not in others and len(set(map(id, others))) == 3


def test_what_a_graph_reads_is_kept_and_not_waited_for(monkeypatch):
    """A capture may not wait for an event outside it, and what it was given must live as long as its graph."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: pytest.fail("waits"))
    sent = Sent((torch.arange(3),), stream=object(), arrived=object())
    with held() as kept:
        assert sent.here() is sent.vectors
    assert kept == [sent]
    with pytest.raises(pytest.fail.Exception):
        sent.here()


def test_nothing_is_sent_into_a_graph():
    with held(), pytest.raises(AssertionError):
        send([np.arange(3)], CPU)
    assert vectors._holder.get() is None
    send([np.arange(3)], CPU)
