"""Seconds of a call on a device, the best of a few, within a time."""

import time
from collections.abc import Callable

import torch

_LEAST, _MOST = 3, 20


def seconds_of(call: Callable[[], object], device: torch.device, *, budget: float = 1.0) -> float:
    """Return the median seconds of a call, after one that is not counted.

    Args:
        call: What to time.
        device: Where it runs.
        budget: Seconds after which no further call begins, once three are measured.
    """
    _once(call, device)
    begun, found = time.perf_counter(), list[float]()
    while len(found) < _LEAST or (len(found) < _MOST and time.perf_counter() - begun < budget):
        found.append(_once(call, device))
    return sorted(found)[len(found) // 2]


def _once(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        before.record()
        call()
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun
