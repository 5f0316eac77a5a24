"""`functools.lru_cache` bounded by memory, for plans of masks that take from a few bytes to many megabytes."""

import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
T = TypeVar("T")

NBYTES = 64 << 20
"""Default limit of a cache in bytes, as far as sizes can be estimated."""

_LEAST = 4  # entries of the newest one's size that always fit: the masks of a batch, or of a model's layers
_HEAVY = 1 << 12  # bytes; objects from this size on are counted once if several entries share them
_RECORD = 32  # a longer sequence that starts with a number is assumed to hold only numbers
_NUMBER, _HEADER = 32, 64  # bytes of a Python number, and of an object


def bounded_cache(maxsize: int, nbytes: int = NBYTES) -> Callable[[Callable[P, T]], "BoundedCache[P, T]"]:
    """Return a decorator that caches at most `maxsize` results, and about `nbytes` of results and arguments.

    Sizes are computed for arrays, tensors, tuples, lists, mappings and dataclasses of these; other objects count with
    `__sizeof__`. If a new entry exceeds the limit, all older entries are dropped. The limit is at least four times the
    size of the newest entry.
    """
    return lambda function: BoundedCache(function, maxsize, nbytes)


class BoundedCache(Generic[P, T]):
    """A function that caches its results; see `bounded_cache`."""

    def __init__(self, function: Callable[P, T], maxsize: int, nbytes: int) -> None:
        update_wrapper(self, function)
        self._function, self._most = function, nbytes
        self._kept = lru_cache(maxsize=maxsize)(self._make)
        self._heavy: dict[int, object] = {}
        self._nbytes = 0
        self._lock = threading.Lock()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the function's result, from the cache if the arguments were seen before."""
        return self._kept(*args, **kwargs)  # type: ignore[arg-type]  # unhashable arguments raise, as in lru_cache

    def cache_clear(self) -> None:
        """Drop all results."""
        with self._lock:
            self._forget()

    def _make(self, *args: P.args, **kwargs: P.kwargs) -> T:
        result = self._function(*args, **kwargs)
        self._count((args, kwargs, result))
        return result

    def _count(self, entry: object) -> None:
        """Count the bytes of a new entry; drop all older entries if there is no room."""
        heavy, light = _weighed(entry)
        whole = light + sum(heavy[number][1] for number in heavy)
        with self._lock:
            added = light + sum(nbytes for number, (_, nbytes) in heavy.items() if number not in self._heavy)
            if self._nbytes + added > max(self._most, _LEAST * whole):
                self._forget()
                added = whole
            self._nbytes += added
            self._heavy |= {number: part for number, (part, _) in heavy.items()}  # alive, so ids stay unique

    def _forget(self) -> None:
        self._kept.cache_clear()
        self._heavy.clear()
        self._nbytes = 0


def _weighed(value: object) -> tuple[dict[int, tuple[object, int]], int]:
    """Return the large parts of a value by id, each with its bytes, and the bytes of all other parts together."""
    heavy: dict[int, tuple[object, int]] = {}
    light = 0
    for part, nbytes in _parts(value):
        if nbytes >= _HEAVY:
            heavy[id(part)] = part, nbytes
        else:
            light += nbytes
    return heavy, light


def _parts(value: object) -> Iterator[tuple[object, int]]:
    """Yield every part of a value, with its bytes without nested parts."""
    rest: list[Any] = [value]
    while rest:
        part = rest.pop()
        if isinstance(part, np.ndarray) or hasattr(part, "data_ptr"):  # data_ptr: a tensor, without importing torch
            yield part, _HEADER + int(part.nbytes)
        elif isinstance(part, Mapping):
            yield part, _HEADER + 2 * _HEADER * len(part)
            rest += [*part.keys(), *part.values()]
        elif isinstance(part, tuple | list):
            is_vector = len(part) > _RECORD and isinstance(part[0], int | float)
            yield part, _HEADER + (8 + _NUMBER * is_vector) * len(part)
            rest += () if is_vector else part
        elif isinstance(part, int | float):
            yield part, _NUMBER
        elif dataclasses.is_dataclass(part) and not isinstance(part, type):
            yield part, _HEADER
            rest += [getattr(part, field.name) for field in dataclasses.fields(part)]
        else:
            yield part, sys.getsizeof(part)
