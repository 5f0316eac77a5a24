"""Imports public names on first use, and finds moved modules under their earlier names."""

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "bmburst.attention.strategy": "bmburst.schedule.strategy",
    "bmburst.comm.exchange": "bmburst.schedule.exchange",
    "bmburst.double_schedule": "bmburst.schedule.ring_schedule",
    "bmburst.layout": "bmburst.schedule.layout",
    "bmburst.mask": "bmburst.schedule",
    "bmburst.schedule.double_schedule": "bmburst.schedule.ring_schedule",
    "bmburst.tiles": "bmburst.schedule.tiles",
    "bmburst.units": "bmburst.schedule.units",
}
"""Import paths shown in earlier documentation, and the modules that replace them."""


def public_name(package: str, name: str, homes: Mapping[str, str], *, over_bmtrain: str | None = None) -> Any:
    """Return the object of a public name, for the package's `__getattr__`.

    Args:
        package: The package's name.
        name: The name.
        homes: The module of the package that defines each public name.
        over_bmtrain: The module that imports BMTrain at its top, if there is one.

    Raises:
        AttributeError: The package has no such name.
        UserError: `over_bmtrain` defines the name and cannot be imported.
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


def keep_moved_modules() -> None:
    """Let `import` find the modules of `MOVED` under their earlier names."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.append(_Moved())


class _Moved(MetaPathFinder, Loader):
    """Finds the modules of `MOVED`: the same module object under both names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        del path, target
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        """Replace the empty module that `import` created with the module of the new name."""
        sys.modules[module.__name__] = import_module(MOVED[module.__name__])
