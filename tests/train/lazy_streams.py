"""Streams at their latest: a copy happens only when somebody waits for it; who forgets to wait reads old data."""

from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode


class Stream:
    """Work in order, done when `run_to` forces it. The stream None is the host's: it does everything at once."""

    def __init__(self, **_):
        self.work, self.done = [], 0

    def add(self, action):
        self.work.append(action)

    def run_to(self, count):
        while self.done < count:
            self.done += 1
            self.work[self.done - 1]()

    def wait_event(self, event):
        stream, count = event.mark
        self.add(lambda: stream.run_to(count))

    def wait_stream(self, stream):
        count = len(stream.work)
        self.add(lambda: stream.run_to(count))


class Host(Stream):
    """The current stream of the program: its own operations do not wait for anybody to ask."""

    def add(self, action):
        super().add(action)
        self.run_to(len(self.work))


class Event:
    def __init__(self, **_):
        self.mark = (Stream(), 0)

    def record(self, stream):
        self.mark = (stream, len(stream.work))

    def synchronize(self):
        stream, count = self.mark
        stream.run_to(count)


class LateCopies(TorchFunctionMode):
    """Puts copies on the stream that is current where they are launched."""

    def __init__(self):
        super().__init__()
        self.current = Host()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_ and (kwargs or {}).get("non_blocking"):
            self.current.add(lambda: args[0].copy_(args[1]))
            return args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def late_copies():
    """Let `torch.cuda` have such streams, in a process without CUDA."""
    mode, names = LateCopies(), ("Stream", "Event", "stream", "current_stream")
    before = {name: getattr(torch.cuda, name) for name in names}

    @contextmanager
    def use(stream):
        mode.current, outer = stream, mode.current
        try:
            yield
        finally:
            mode.current = outer

    for name, stand_in in zip(names, (Stream, Event, use, lambda: mode.current), strict=True):
        setattr(torch.cuda, name, stand_in)
    try:
        with mode:
            yield
    finally:
        for name, original in before.items():
            setattr(torch.cuda, name, original)
