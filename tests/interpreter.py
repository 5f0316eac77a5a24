"""Triton's interpreter without what it does again and again.

At each call of a function inside a kernel it looks through all names of the language for those that it has to replace,
which it has done when the kernel began: 40 % of its time. A kernel's own beginning is left as it is.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def names_replaced_once() -> Iterator[None]:
    """Let a function's names be replaced at its first call of each run of a kernel only: they stay so to its end."""
    from triton.runtime import interpreter

    replace, execute = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: dict[Callable[..., Any], Any] = {}

    def once(function: Callable[..., Any]) -> Any:
        if function not in done:
            done[function] = replace(function)
        return done[function]

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        done.clear()
        execute(self, *args, **kwargs)

    with (
        mock.patch.object(interpreter, "_patch_lang", once),
        mock.patch.object(interpreter.GridExecutor, "__call__", run),
    ):
        yield
