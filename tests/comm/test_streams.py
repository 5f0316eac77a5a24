"""A transfer on a side stream keeps its memory as long as anybody may use it, without a GPU."""

import gc
import weakref

import torch

from bmburst.comm.streams import SideStreamTransfer


def test_memory_in_flight(monkeypatch):
    """Of a transfer on a side stream: kept until the wait, and marked only where the wait cannot order its reuse."""

    waited = []

    class Stream:
        device_index = 0
        wait_stream = staticmethod(waited.append)

        def wait_event(self, event):
            pass

    maker, other, side, marks = Stream(), Stream(), Stream(), []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: marks.append((tensor.shape[0], stream)))
    current = [maker]

    def transfer():
        current[0] = maker
        sent = torch.zeros(2)
        return SideStreamTransfer(side, (torch.zeros(1),), (sent,), lambda _: current[0]), weakref.ref(sent)

    pending, sent = transfer()
    assert sent() is not None  # another stream still reads it
    assert [t.shape[0] for t in pending.wait()] == [1]
    assert sent() is None
    del pending
    gc.collect()
    assert not marks

    pending, _ = transfer()
    current[0] = other
    assert not waited
    pending.wait()
    assert waited == [maker]  # which may have copied what a rank keeps
    assert marks == [(1, other), (2, other)]
    marks.clear()
    del pending
    assert not marks

    pending, _ = transfer()
    del pending  # an exception came before the wait
    assert marks == [(1, side), (2, side)]
