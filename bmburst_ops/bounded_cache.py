"""`functools.lru_cache` for plans made of masks, of which some are a few bytes and some many megabytes."""

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
"""What a cache may hold, as far as that is seen."""

_LEAST = 4  # entries like the newest that are kept, however large: the masks of a batch, or of a model's layers
_HEAVY = 1 << 12  # bytes from which on what several entries share is counted once
_RECORD = 32  # values that may be of different kinds; more, the first of which is a number, are all numbers
_NUMBER, _HEADER = 32, 64  # bytes of a Python number, and of an object


def bounded_cache(maxsize: int, nbytes: int = NBYTES) -> Callable[[Callable[P, T]], "BoundedCache[P, T]"]:
    """Return a decorator: results are kept by arguments, at most `maxsize` and about `nbytes` with their arguments.

    Arrays, tensors, tuples, lists, mappings and dataclasses of them are weighed, others have the bytes that they say
    (`__sizeof__`). When there are too many bytes all are let go, the newest aside; four entries like the newest may be
    kept in any case.
    """
    return lambda function: BoundedCache(function, maxsize, nbytes)


class BoundedCache(Generic[P, T]):
    """A function that keeps its results; see `bounded_cache`."""

    def __init__(self, function: Callable[P, T], maxsize: int, nbytes: int) -> None:
        update_wrapper(self, function)
        self._function, self._most = function, nbytes
        self._kept = lru_cache(maxsize=maxsize)(self._make)
        self._heavy: dict[int, object] = {}
        self._nbytes = 0
        self._lock = threading.Lock()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the function's result, an earlier one where the arguments are equal."""
        return self._kept(*args, **kwargs)  # type: ignore[arg-type]  # what cannot be hashed raises, as in lru_cache

    def cache_clear(self) -> None:
        """Forget all results."""
        with self._lock:
            self._forget()

    def _make(self, *args: P.args, **kwargs: P.kwargs) -> T:
        result = self._function(*args, **kwargs)
        self._count((args, kwargs, result))
        return result

    def _count(self, entry: object) -> None:
        """Add an entry that is about to be kept, and make room for it."""
        heavy, light = _weighed(entry)
        whole = light + sum(heavy[number][1] for number in heavy)
        with self._lock:
            added = light + sum(nbytes for number, (_, nbytes) in heavy.items() if number not in self._heavy)
            if self._nbytes + added > max(self._most, _LEAST * whole):
                self._forget()
                added = whole
            self._nbytes += added
            self._heavy |= {number: part for number, (part, _) in heavy.items()}  # alive, so that no other has its id

    def _forget(self) -> None:
        self._kept.cache_clear()
        self._heavy.clear()
        self._nbytes = 0


def _weighed(value: object) -> tuple[dict[int, tuple[object, int]], int]:
    """Return the heavy parts of a value by id, each with its bytes, and the bytes of all others."""
    heavy: dict[int, tuple[object, int]] = {}
    light = 0
    for part, nbytes in _parts(value):
        if nbytes >= _HEAVY:
            heavy[id(part)] = part, nbytes
        else:
            light += nbytes
    return heavy, light


def _parts(value: object) -> Iterator[tuple[object, int]]:
    """Yield every part of a value, and the bytes that it has of its own."""
    rest: list[Any] = [value]
    while rest:
        part = rest.pop()
        if isinstance(part, np.ndarray) or hasattr(part, "data_ptr"):  # the latter a tensor: torch is not imported here
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
