"""A package's public names, each imported from its module when it is first used."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any


def public_name(package: str, name: str, homes: Mapping[str, str], *, over_bmtrain: str | None = None) -> Any:
    """Return a public name of a package: what its module `__getattr__` returns.

    Args:
        package: The package's name.
        name: What is asked for.
        homes: The module of the package in which each public name lives.
        over_bmtrain: The module that imports BMTrain at its top, if one does.

    Raises:
        AttributeError: The package has no such name.
        UserError: It lives in `over_bmtrain`, which could not be imported.
    """
    home = homes.get(name)
    if home is None:
        raise AttributeError(f"module '{package}' has no attribute {name!r}")
    try:
        module = import_module(f"{package}.{home}")
    except ImportError as error:
        if home != over_bmtrain:
            raise
        from bmburst.errors import needs_bmtrain

        raise needs_bmtrain(f"{package}.{name}") from error
    return getattr(module, name)
