"""Triton's interpreter without what it does again and again.

At each call of a function inside a kernel it looks through all names of the language for those that it has to replace,
which it has done when the kernel began: 40 % of its time. A kernel's own beginning is left as it is. For each value it
makes a table of dtypes, and the shape, which is one of a few: a third of the rest. The type and the shape of the result
of two values, and whether whole numbers overflow, which it tells nobody without its debug mode, it finds by many small
operations of its own: most of the rest.

Where it broadcasts what a comparison of two scalars gives, that gets the dtype of the two, not that of truth values.
Triton 3.9 refuses masks of such a dtype, so it is put right here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def names_replaced_once() -> Iterator[None]:
    """Let a function's names be replaced at its first call of each run of a kernel only: they stay so to its end."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    replace, execute = interpreter._patch_lang, interpreter.GridExecutor.__call__
    find_dtype, begin_type, begin_tensor = interpreter._get_np_dtype, core.block_type.__init__, core.tensor.__init__
    dtypes: dict[str, Any] = {}
    types: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], dict[str, Any]] = {}
    done: dict[Callable[..., Any], Any] = {}
    of_scalar = interpreter.InterpreterBuilder.create_splat
    find_result, broadcast = TritonSemantic.computation_type_impl, TritonSemantic.broadcast_impl_value
    results: dict[tuple[Any, ...], Any] = {}

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

    def result_type(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
        if key not in results:
            results[key] = find_result(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return results[key]

    def splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        found = of_scalar(self, ret_ty, arg)
        found.data = found.data.astype(arg.data.dtype, copy=False)
        return found

    def tell_nobody(*_: Any) -> None:
        pass

    def of_one_shape(self: Any, lhs: Any, rhs: Any) -> Any:
        ours, theirs = lhs.handle.data.shape, rhs.handle.data.shape
        if not (lhs.type.is_block() and rhs.type.is_block()) or len(ours) != len(theirs):
            return broadcast(self, lhs, rhs)
        if ours == theirs:
            return lhs, rhs
        shape = [a if b == 1 else b for a, b in zip(ours, theirs, strict=True)]
        if any(a not in (1, size) for a, size in zip(ours, shape, strict=True)):
            return broadcast(self, lhs, rhs)  # which raises
        return tuple(
            each
            if each.handle.data.shape == tuple(shape)
            else self.tensor(
                self.builder.create_broadcast(each.handle, shape), core.block_type(each.type.scalar, shape)
            )
            for each in (lhs, rhs)
        )

    with (
        mock.patch.object(TritonSemantic, "computation_type_impl", result_type),
        mock.patch.object(TritonSemantic, "binary_op_sanitize_overflow_impl", tell_nobody),
        mock.patch.object(TritonSemantic, "broadcast_impl_value", of_one_shape),
        mock.patch.object(interpreter.InterpreterBuilder, "create_splat", splat),
        mock.patch.object(core.block_type, "__init__", block_type),
        mock.patch.object(core.tensor, "__init__", tensor),
        mock.patch.object(interpreter, "_get_np_dtype", np_dtype),
        mock.patch.object(interpreter, "_patch_lang", once),
        mock.patch.object(interpreter.GridExecutor, "__call__", run),
    ):
        yield
