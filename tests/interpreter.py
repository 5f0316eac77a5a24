"""Triton's interpreter without what it does again and again.

At each call of a function inside a kernel it looks through all names of the language for those that it has to replace,
which it has done when the kernel began: 40 % of its time. A kernel's own beginning is left as it is. For each value it
makes a table of NumPy's dtypes, and the shape, which is one of a few: a third of the rest.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def names_replaced_once() -> Iterator[None]:
    """Let a function's names be replaced at its first call of each run of a kernel only: they stay so to its end."""
    from triton.language import core
    from triton.runtime import interpreter

    replace, execute = interpreter._patch_lang, interpreter.GridExecutor.__call__
    find_dtype, begin_type, begin_tensor = interpreter._get_np_dtype, core.block_type.__init__, core.tensor.__init__
    dtypes: dict[str, Any] = {}
    types: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], dict[str, Any]] = {}
    done: dict[Callable[..., Any], Any] = {}

    def once(function: Callable[..., Any]) -> Any:
        if function not in done:
            done[function] = replace(function)
        return done[function]

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        done.clear()
        execute(self, *args, **kwargs)

    def np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = find_dtype(dtype)
        return dtypes[name]

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple(getattr(size, "value", size) for size in shape)
        if key not in types:
            begin_type(self, element_ty, shape)
            types[key] = {name: getattr(self, name) for name in ("shape", "numel", "name")}
        vars(self).update(types[key], element_ty=element_ty)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in shapes:
            begin_tensor(self, handle, type)
            shapes[key] = {name: getattr(self, name) for name in ("shape", "numel")}
        vars(self).update(shapes[key], handle=handle, type=type, dtype=type.scalar)

    with (
        mock.patch.object(core.block_type, "__init__", block_type),
        mock.patch.object(core.tensor, "__init__", tensor),
        mock.patch.object(interpreter, "_get_np_dtype", np_dtype),
        mock.patch.object(interpreter, "_patch_lang", once),
        mock.patch.object(interpreter.GridExecutor, "__call__", run),
    ):
        yield
