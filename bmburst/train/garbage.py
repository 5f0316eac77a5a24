"""Python's garbage collection during training, at the same steps on all ranks."""

import contextlib
import gc
from collections.abc import Iterator

EVERY = 50
"""Steps between two collections."""


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Collect garbage inside the block only in `collect_after`; afterwards, and after an error, as before.

    Python otherwise collects after it has made some hundreds of objects, at another moment on each rank, and the other
    ranks wait. Objects that exist before the block are not searched: modules, the model, kernels. Afterwards all are,
    also what the caller had frozen: a model in a cycle that stays frozen would keep its memory on the GPU.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def collect_after(step: int) -> None:
    """Collect garbage if it is time. Every rank calls it after each step, with the same number."""
    if step % EVERY == 0:
        gc.collect()
