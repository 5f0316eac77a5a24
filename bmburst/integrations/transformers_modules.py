"""Finds the modules of a model, and the models of transformers among them, in the time of a call."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import module as of_all
from transformers import PreTrainedModel

_OF_ALL = (
    of_all._global_forward_pre_hooks,
    of_all._global_forward_hooks,
    of_all._global_backward_pre_hooks,
    of_all._global_backward_hooks,
)
"""Hooks that torch calls for all modules."""
_OF_ONE = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Modules:
    """The modules in a module, itself the first, found once for several checks. Those of another object are none.

    Every call of a model checks all its modules, so a look at them must be short: `torch.nn.Module.modules` takes four
    times as long, since each module comes through the generators of all that it is in.

    Attributes:
        model: The module.
        every: All modules, each once, in the order of `torch.nn.Module.modules`.
        kinds: Their classes.
    """

    __slots__ = ("_own", "every", "kinds", "model")

    def __init__(self, model: object) -> None:
        self.model = model
        self._own: dict[Any, dict[str, Any]] = {}
        """The attributes that each module has of its own."""
        waiting: list[torch.nn.Module | None] = [model] if isinstance(model, torch.nn.Module) else []
        while waiting:
            module = waiting.pop()
            if module not in self._own and module is not None:
                own = module.__dict__
                if "_modules" not in own:  # of torch.jit.trace
                    own = own | {"_modules": module._modules, "_parameters": module._parameters}
                self._own[module] = own
                if inner := own["_modules"]:
                    waiting.extend(reversed(inner.values()))
        self.every: list[Any] = list(self._own)
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
        if not kinds:
            return self.with_own(name)
        return [module for module, own in self._own.items() if name in own or type(module) in kinds]

    def with_own(self, name: str) -> list[Any]:
        """Return the modules that have an attribute of their own, whatever their class has."""
        return [module for module, own in self._own.items() if name in own]

    def hooks(self) -> list[Callable[..., Any]]:
        """Return what is called before and after the modules, forward and backward, also what torch calls for all."""
        held = [own[name] for own in self._own.values() for name in _OF_ONE if own[name]]
        return [hook for hooks in (*_OF_ALL, *held) for hook in hooks.values()]

    def weights(self) -> list[Any]:
        """Return the parameters of all modules; None where a module has none of a name."""
        return [weight for own in self._own.values() if (held := own["_parameters"]) for weight in held.values()]

    def inside(self, part: object) -> Callable[[list[Any]], list[Any]]:
        """Return a function that chooses those of some modules that are in a part of the model."""
        if part is self.model:
            return list
        within: list[set[Any]] = []

        def chosen(found: list[Any]) -> list[Any]:
            if not found:  # most often: then the part is not looked at
                return found
            if not within:
                within.append(set(Modules(part).every))
            return [module for module in found if module in within[0]]

        return chosen


def models_in(model: object) -> list[PreTrainedModel]:
    """Return the models of transformers in a module, wrapped or not, the outermost first."""
    return Modules(model).of(PreTrainedModel)


def outermost(model: object) -> PreTrainedModel | None:
    """Return the outermost model of transformers in a module; None if it has none."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    return next((module for module in modules if isinstance(module, PreTrainedModel)), None)
