"""When work is called, when it is recorded, and when what was recorded is started instead; GPUs are in tests/gpu."""

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bmburst.comm import streams as module
from bmburst.comm.streams import FixedBuffers, Recording, Recordings
from bmburst_ops.flash.inputs import DeviceVectors, collect_vectors, copy_to_device

CPU = torch.device("cpu")


class Stream:
    """Of a CUDA stream where and how soon its work runs."""

    def __init__(self, device=CPU, priority=0):
        self.device, self.priority = device, priority


class Graph:
    """Of a CUDA graph that work is recorded into it, and that it can be started. It is listed once it is whole."""

    def __init__(self, cuda):
        self.cuda, self.starts = cuda, 0

    def capture_begin(self, *, pool, **_):
        assert not gc.isenabled()  # another graph that is freed now would end the capture
        self.pool = pool
        self.cuda.log.append("begin")

    def capture_end(self):
        assert not gc.isenabled()
        self.cuda.graphs.append(self)
        self.cuda.log.append("end")

    def replay(self):
        self.starts += 1


class Cuda:
    """Of `torch.cuda` what a recording asks for, on a GPU with much memory that nobody uses."""

    Stream = Stream

    def __init__(self, *, free=1 << 40, share=1.0, reserved=0, backend="native"):
        self.graphs, self.log, self.here = [], [], Stream()
        self.mem_get_info = lambda: (free, 1 << 40)
        self.get_per_process_memory_fraction = lambda: share
        self.memory_reserved = lambda: reserved
        self.get_allocator_backend = lambda: backend

    def CUDAGraph(self):
        return Graph(self)

    def MemPool(self):
        return SimpleNamespace(id=(0, 1))

    def current_stream(self):
        return self.here

    def stream(self, _):
        return nullcontext()


def test_work_is_recorded_behind_its_fourth_call_and_then_started():
    cuda = Cuda()
    calls, one = [], Recording(cuda)
    for _ in range(6):
        one.run(lambda: calls.append(len(cuda.graphs)))
    assert calls == [0, 0, 0, 0, 0]  # the fifth while it is recorded
    assert [graph.starts for graph in cuda.graphs] == [2]


@pytest.mark.parametrize(
    "cuda",
    [
        pytest.param(Cuda(free=(3 << 30) - 1), id="little memory"),
        pytest.param(Cuda(share=0.5, reserved=(1 << 39) - (3 << 30) + 1), id="little of its share"),
        pytest.param(Cuda(backend="cudaMallocAsync"), id="another allocator"),
        pytest.param(None, id="no cache"),
    ],
)
def test_without_room_for_a_graph_work_goes_on_being_called(cuda, monkeypatch):
    if cuda is None:
        cuda = Cuda()
        monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    calls, one = [], Recording(cuda)
    for _ in range(6):
        one.run(lambda: calls.append(None))
    assert len(calls) == 6 and not cuda.graphs


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
def test_work_that_varies_is_recorded_in_memory_of_one_piece(monkeypatch, varying, first):
    """Or each step with more documents than all before it would add to what graphs keep all that it takes."""
    cuda, empty = Cuda(), torch.empty
    monkeypatch.setattr(torch, "empty", lambda n, **how: cuda.log.append(f"{n} bytes") or empty(n, **how))
    one = Recording(cuda)
    for _ in range(module.CALLS):
        one.run(lambda: cuda.log.append("work"), varying)
    assert cuda.log == ["work"] * module.CALLS + ["begin", *first, "work", "end"]
    assert cuda.graphs[0].pool == (0, 1)


def test_tensors_stay_in_place_until_more_is_requested():
    buffers = FixedBuffers()
    few, more = (((2, 3), torch.float32), ((5,), torch.float64)), (((2, 300), torch.float32),)
    with torch.inference_mode():
        first = buffers.get(CPU, "in", *few)
    assert [(tuple(t.shape), t.dtype) for t in first] == [*few] and not first[0].is_inference()
    assert buffers.get(CPU, "in", *few) is first
    first[0].fill_(1), first[1].fill_(2)
    assert (first[0] == 1).all()  # they do not overlap
    begin = lambda *kinds: buffers.get(CPU, "in", *kinds)[0].data_ptr()  # noqa: E731
    assert begin(few[1]) == begin(*few) == first[0].data_ptr() != buffers.get(CPU, "out", *few)[0].data_ptr()
    assert begin(*more) == begin(*few) != first[0].data_ptr()  # also the old request is in the new memory


def test_nothing_is_sent_into_a_graph():
    with collect_vectors(), pytest.raises(AssertionError):
        copy_to_device([np.arange(3)], CPU)
    copy_to_device([np.arange(3)], CPU)
