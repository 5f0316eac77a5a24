"""The code of transformers that is read and changed here: Python modules, and the parameters of their functions."""

import inspect
import sys
from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import Any

CACHES = ("cache", "cache_params", "past_key_values")
"""Names of a cache among the arguments of models and layers. Since transformers 5.24, all have the first one."""


def module_of(family: str) -> str:
    """Return the name of the module of transformers that has a family's models."""
    return f"transformers.models.{family}.modeling_{family}"


def modules_of(cls: type) -> set[str]:
    """Return the names of the modules of a class and its bases. FSDP2 replaces a class by a subclass of its own."""
    return {base.__module__ for base in cls.__mro__}


def unchanged_modules(model_class: type, paths: Collection[str], mark: str) -> Iterator[tuple[str, Any]]:
    """Yield those of some modules that a model class is from, with their names, each in the first call only.

    `mark` is the name of an attribute that says that a module was changed.
    """
    for path in modules_of(model_class).intersection(paths):
        module = sys.modules[path]
        if not getattr(module, mark, False):
            setattr(module, mark, True)
            yield path, module


@lru_cache(maxsize=256)  # they are read in each call of a model; a function that replaces another is read anew
def parameters(function: Any) -> tuple[str, ...]:
    """Return the names of the parameters of a function, or of the one that it wraps; none of None."""
    return () if function is None else tuple(inspect.signature(inspect.unwrap(function)).parameters)


def one_cache_name(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return parameters of a function with the cache among them named "cache", as in the newest transformers."""
    return tuple("cache" if name in CACHES else name for name in names)
