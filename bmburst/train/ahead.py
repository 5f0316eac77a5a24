"""One thing made ahead of time: while a caller works with one, a thread makes the next."""

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Generic, TypeVar

_Key = TypeVar("_Key")
_Made = TypeVar("_Made")
_LAST_SECONDS = 5.0


class Ahead(Generic[_Key, _Made]):
    """Calls a function in a thread for the key that will be asked for next.

    Each call has a thread of its own, which ends with it: nothing is left to close. It never keeps the process alive:
    at exit it is given a few seconds, since a thread inside torch must not outlive the interpreter, and then dropped.

    Args:
        make: What to call with a key. It runs in another thread than its caller's.
    """

    def __init__(self, make: Callable[[_Key], _Made]) -> None:
        self._make = make
        self._coming: tuple[_Key, Future[_Made]] | None = None
        self._threads: list[Thread] = []  # at most one
        weakref.finalize(self, _wait, self._threads)

    def take(self, key: _Key, following: _Key | None = None) -> _Made:
        """Return what is made of `key`, and begin with `following`, where there is one.

        Where `key` is not what was announced as following, it is made now and what was announced is dropped.

        Raises:
            Exception: What the function raised for `key`. Asked again, it is called again.
        """
        coming, self._coming = self._coming, None
        made = coming[1] if coming is not None and coming[0] == key else self._begin(key)
        result = made.result()
        if following is not None:
            self._coming = following, self._begin(following)
        return result

    def _begin(self, key: _Key) -> Future[_Made]:
        future: Future[_Made] = Future()

        def work() -> None:
            try:
                future.set_result(self._make(key))
            except BaseException as error:  # whatever it is, the one who waits must get it
                future.set_exception(error)

        thread = Thread(target=work, name="bmburst-ahead", daemon=True)
        self._threads[:] = [thread]
        thread.start()
        return future


def _wait(threads: list[Thread]) -> None:
    for thread in threads:
        thread.join(_LAST_SECONDS)
