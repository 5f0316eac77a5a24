"""What is made of some tensors once, for whoever asks again."""

from collections.abc import Callable, Hashable

from torch import Tensor

from bmburst_ops.flash.vectors import Sent, made


class Once:
    """Tensors by name, each made when it is first asked for. They go with this value; a copy of it has none.

    Another stream than the one that made them waits for them, and the host does not.
    """

    def __init__(self) -> None:
        self._made: dict[Hashable, Sent] = {}

    def __reduce__(self) -> tuple[type["Once"], tuple[()]]:
        """Copy, and pickle, as one that has made nothing: streams cannot be copied."""
        return Once, ()

    def get(self, name: Hashable, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return what `make()` gave the first time that the name was asked for, ready for the current stream."""
        found = self._made.get(name)
        if found is None:
            found = self._made[name] = made(make())
        return found.here()
