"""A driver without a GPU: it reads what it gets as C would, and moves the CPU's memory."""

import ctypes
import struct
import threading
import time
from collections import Counter

import numpy as np
import torch

from bmburst.comm import peer, shared_memory

# cuda.h of CUDA 13: CUstreamBatchMemOpParams, CUDA_MEMCPY3D_BATCH_OP, CUDA_MEMCPY2D
MEMORY_OPERATION = struct.Struct("<I4xQQI4xQQ")
BATCHED_COPY = struct.Struct("<" + 2 * "i4xQQQii" + "QQQiI")
COPY_2D = struct.Struct("<" + 2 * "QQi4xQQQQ" + "QQ")


class Driver:
    """libcuda, on the memory of the CPU: what is enqueued is done at once, a wait holds up its thread."""

    def __init__(self):
        self.lock = threading.Lock()
        self.memory, self.opened, self.calls = {}, Counter(), Counter()
        self.waits, self.refuses = [], None

    def __getattr__(self, name):
        real = getattr(type(self), f"on_{name}", None)
        if real is None:
            raise AttributeError(name)

        def call(*arguments):
            with self.lock:
                self.calls[name] += 1
            return 801 if self.refuses and self.refuses(name) else real(self, *arguments) or 0

        return call

    def on_cuGetErrorString(self, _, text):
        text._obj.value = b"operation not supported"

    def on_cuMemAlloc_v2(self, address, size):
        memory = np.full(size.value, 0xAB, dtype=np.uint8)
        with self.lock:
            self.memory[memory.ctypes.data] = memory
        address._obj.value = memory.ctypes.data

    def on_cuMemFree_v2(self, address):
        with self.lock:
            assert not self.opened[address.value], "a rank still has it open"
            del self.memory[address.value]

    def on_cuIpcGetMemHandle(self, handle, address):
        ctypes.memmove(ctypes.addressof(handle._obj), address.value.to_bytes(64, "little"), 64)

    def on_cuIpcOpenMemHandle_v2(self, address, handle, flags):
        address._obj.value = int.from_bytes(ctypes.string_at(ctypes.addressof(handle), 64), "little")
        assert flags.value == 1
        with self.lock:
            self.opened[address._obj.value] += 1

    def on_cuIpcCloseMemHandle(self, address):
        with self.lock:
            self.opened[address.value] -= 1

    def on_cuStreamBatchMemOp_v2(self, _, count, batch, flags):
        assert count.value <= 256 and flags.value == 0
        for kind, address, value, how, *_ in MEMORY_OPERATION.iter_unpack(raw(batch, MEMORY_OPERATION, count)):
            assert value < 1 << 32 and how == 0
            word = ctypes.c_uint32.from_address(address)
            if kind == 2:
                word.value = value
                continue
            assert kind == 1
            self.waits.append(address)
            end = time.monotonic() + 30
            while ctypes.c_int32(word.value - value).value < 0:
                assert time.monotonic() < end, "a signal that never comes"
                time.sleep(0)

    def on_cuMemcpy3DBatchAsync_v2(self, count, batch, flags, stream):
        assert flags.value == 0 and stream.value
        for fields in BATCHED_COPY.iter_unpack(raw(batch, BATCHED_COPY, count)):
            source, target, (width, height, depth, order, _) = fields[:6], fields[6:12], fields[12:]
            assert (source[0], target[0], depth, order) == (1, 1, 1, 1)
            rectangle(target[1], target[2], source[1], source[2], width, height)

    def on_cuMemcpy2DAsync_v2(self, copy, _):
        fields = COPY_2D.unpack(ctypes.string_at(ctypes.addressof(copy._obj), COPY_2D.size))
        source, target, (width, height) = fields[:7], fields[7:14], fields[14:]
        assert source[:3] == target[:3] == (0, 0, 2)
        rectangle(target[4], target[6], source[4], source[6], width, height)


def raw(batch, layout, count):
    assert ctypes.sizeof(batch) == layout.size * count.value
    return ctypes.string_at(ctypes.addressof(batch), ctypes.sizeof(batch))


def rectangle(target, target_pitch, source, source_pitch, width, height):
    assert min(target_pitch, source_pitch) >= width, "the driver refuses a pitch below the width"
    for row in range(height):
        ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)


class Stream:
    """Of a stream its handle: nothing is ever pending."""

    cuda_stream = 4096
    device_index = 0

    def __init__(self, *_, **__):
        pass

    def record_event(self):
        return None

    def wait_event(self, event):
        pass

    def wait_stream(self, stream):
        pass


class Event:
    def record(self, stream):
        pass


class Unwatched:
    def __init__(self, inner, device):
        pass

    def expect(self, event):
        pass


def as_tensor(address, nbytes, _=None):
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def install(monkeypatch, *, batches):
    """Return the stand-in, in the driver's place for one test; of torch.cuda what the transport asks for is too."""
    found, threads = Driver(), threading.local()
    monkeypatch.setattr(shared_memory, "_driver", lambda: found)
    monkeypatch.setattr(peer.atexit, "register", lambda _: None)  # at exit the stand-in is gone
    monkeypatch.setattr(shared_memory, "_has_batches", lambda: batches)
    monkeypatch.setattr(shared_memory, "as_tensor", as_tensor)

    def current_stream(*_):
        if not hasattr(threads, "stream"):
            threads.stream = Stream()
        return threads.stream

    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "set_stream": lambda stream: setattr(threads, "stream", stream),
        "current_device": lambda: 0,
        "current_stream": current_stream,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "is_current_stream_capturing": lambda: False,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(peer, "PeerWatch", Unwatched)
    return found
