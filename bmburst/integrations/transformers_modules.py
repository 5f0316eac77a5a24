"""Finds the modules of a model, and the models of transformers among them, in the time of a call."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel


class Modules:
    """The modules in a module, itself the first, found once for several checks. Those of another object are none.

    Every call of a model checks all its modules, so a look at them must be short: `torch.nn.Module.modules` takes four
    times as long, since each module comes through the generators of all that it is in.

    Attributes:
        every: All modules, each once, in the order of `torch.nn.Module.modules`.
        kinds: Their classes.
    """

    __slots__ = ("every", "kinds")

    def __init__(self, model: object) -> None:
        found: dict[torch.nn.Module | None, None] = {}
        waiting: list[torch.nn.Module | None] = [model] if isinstance(model, torch.nn.Module) else []
        while waiting:
            module = waiting.pop()
            if module not in found:
                found[module] = None
                if module is not None and (inner := module._modules):
                    waiting.extend(reversed(inner.values()))
        self.every: list[Any] = [module for module in found if module is not None]
        self.kinds: set[type] = set(map(type, self.every))

    def of(self, *kinds: type) -> list[Any]:
        """Return the modules of some classes, or of classes that derive from these."""
        return self.whose(lambda kind: issubclass(kind, kinds))

    def whose(self, is_wanted: Callable[[type], bool]) -> list[Any]:
        """Return the modules whose class is wanted."""
        wanted = {kind for kind in self.kinds if is_wanted(kind)}
        return [module for module in self.every if type(module) in wanted] if wanted else []

    def having(self, name: str) -> list[Any]:
        """Return the modules that have an attribute, of their own or of their class, which is no module or tensor."""
        kinds = {kind for kind in self.kinds if hasattr(kind, name)}
        return [module for module in self.every if name in module.__dict__ or type(module) in kinds]


def models_in(model: object) -> list[PreTrainedModel]:
    """Return the models of transformers in a module, wrapped or not, the outermost first."""
    return Modules(model).of(PreTrainedModel)


def outermost(model: object) -> PreTrainedModel | None:
    """Return the outermost model of transformers in a module; None if it has none."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    return next((module for module in modules if isinstance(module, PreTrainedModel)), None)
