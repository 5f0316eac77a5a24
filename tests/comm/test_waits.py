"""Exposed communication: what a meter counts, with events on streams whose time is set by hand."""

from types import SimpleNamespace

import pytest
import torch

from bmburst.comm.checks import CheckedCommunicator
from bmburst.comm.groups import single_rank_group
from bmburst.comm.waits import WaitMeter


class Stream:
    """A stream at a time of its own, in milliseconds."""

    def __init__(self, now=0.0, stream_id=7, device_index=0, device_type=1):
        self.now, self.stream_id, self.device_index, self.device_type = now, stream_id, device_index, device_type

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        event.wait(self)

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())


class Event:
    def __init__(self, **_):
        self.at = None

    def record(self, stream):
        self.at = stream.now

    def wait(self, stream):
        stream.now = max(stream.now, self.at)

    def query(self):
        return self.at is not None

    def elapsed_time(self, end):
        return end.at - self.at


class Cuda:
    """What a meter takes of torch.cuda; `current` is the current stream."""

    Stream, Event = Stream, Event

    def __init__(self):
        self.current = Stream()

    def current_stream(self):
        return self.current


def metered():
    """Return a meter of a GPU and its current stream."""
    cuda = Cuda()
    return WaitMeter(on_gpu=True, cuda=cuda), cuda.current


def test_only_what_a_stream_stands_still_for_counts():
    meter, current = metered()

    def wait_until(moment):
        with meter.waiting():
            current.now = max(current.now, moment)

    wait_until(50)
    meter.running = True
    current.now = 100
    wait_until(130)
    wait_until(20)  # over long ago
    with meter.waiting():
        wait_until(145)  # once, not twice
    assert meter.read() == pytest.approx(0.045)
    assert meter.read() == 0
    wait_until(150)
    assert meter.read() == pytest.approx(0.005)


def test_a_wait_beside_another_streams_work_is_hidden():
    cuda = Cuda()
    meter, current = WaitMeter(on_gpu=True, cuda=cuda), cuda.current
    meter.running, other = True, Stream()

    def on(stream, context, until):
        cuda.current = stream
        with context:
            stream.now = max(stream.now, until)

    on(current, meter.waiting(), 10)  # both wait for their first unit: once
    on(other, meter.waiting(), 25)  # hidden until 20, when the other stream's kernel ends
    on(current, meter.working(), 20)
    on(other, meter.working(), 50)
    on(current, meter.waiting(), 60)  # 50 to 60
    assert meter.read() == pytest.approx(0.025)
    on(current, meter.working(), 90)
    assert meter.read() == 0


def test_a_kernel_around_a_wait_of_its_own_stream_hides_nothing_of_it():
    """A ring inside an exchange of heads waits within its work."""
    meter, current = metered()
    meter.running = True
    with meter.working():
        current.now = 5
        with meter.waiting():
            current.now = 12
        current.now = 20
    assert meter.read() == pytest.approx(0.007)


def test_the_stream_that_computes_is_measured_where_it_waits_for_a_metered_one():
    meter, current = metered()
    loading = meter.of_stream(Stream(now=80, stream_id=3))
    assert isinstance(loading, Stream) and loading.stream_id == 3
    loading.now, meter.running = 80, True
    current.now = 50
    current.wait_stream(loading)
    assert current.now == 80 and meter.read() == pytest.approx(0.030)
    loading.wait_stream(current)  # the other way round nobody stands still for communication
    copies = Stream()
    copies.wait_stream(loading)  # nor behind a copy that waits: gradients on their way to host memory
    assert copies.now == 80
    given = Event()
    assert loading.record_event(given) is given and given.at == 80
    assert meter.read() == 0


def test_on_a_cpu_calls_and_waits_of_a_group_are_measured_over_every_transport_of_it():
    now = SimpleNamespace(seconds=0.0)

    def taking(seconds, result):
        now.seconds += seconds
        return result

    slow = SimpleNamespace(rank=0, size=2, transport="gloo")
    slow.all_reduce = lambda _: taking(2, SimpleNamespace(wait=lambda: taking(3, "sum")))
    slow.all_gather = lambda mine: SimpleNamespace(wait=lambda: (torch.stack([mine, mine]),))
    group = CheckedCommunicator(slow, torch.device("cpu"))
    meter = group.meter = WaitMeter(on_gpu=False, clock=lambda: now.seconds)
    other = group.over(slow)
    assert other.all_reduce(torch.ones(1)).wait() == "sum"
    assert meter.read() == 0
    meter.running = True
    transfer = other.all_reduce(torch.ones(1))
    now.seconds += 100  # our own work
    assert transfer.wait() == "sum"
    assert meter.read() == 5
    alone = single_rank_group()
    alone.meter = meter
    assert torch.equal(alone.all_reduce(torch.ones(1)).wait()[0], torch.ones(1))
