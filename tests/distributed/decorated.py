"""Tests that every rank runs, each a process: what the decorators of `programs` and `processes` share."""

import importlib
from collections.abc import Callable, Mapping
from functools import wraps

Test = Callable[..., None]


class Body:
    """A decorated test, as its ranks run it. Pickle would find the decorator's function under the test's name."""

    def __init__(self, test: Test, arguments: Mapping[str, object]) -> None:
        self._file, self.__name__, self.arguments = test.__module__, test.__name__, arguments

    def __call__(self) -> None:
        decorated = getattr(importlib.import_module(self._file), self.__name__)
        decorated.__wrapped__(**self.arguments)


def on_each_rank(start: Callable[..., None], size: int | None, **options: object) -> Callable[[Test], Test]:
    """Return a decorator of tests: every rank calls the test with what pytest gives, which is to be picklable.

    Args:
        start: Calls a body on ranks: `run_program` or `run_processes`.
        size: Number of ranks; None: the test's argument `size`.
        options: Options of `start`.
    """

    def decorate(test: Test) -> Test:
        @wraps(test)
        def run(**arguments: object) -> None:
            ranks = arguments["size"] if size is None else size
            start(ranks, Body(test, arguments), **options)

        return run

    return decorate
