"""Attention in a given way, whatever the cost model would choose, and launches that serve later calls."""

from dataclasses import replace
from types import SimpleNamespace

from bmburst.attention import at_once, heads
from bmburst.attention import call as decided
from bmburst.schedule.units import unit_plans

WAYS = ["one unit", "several units", "at once"]


def move_heads(monkeypatch, way):
    """Make head exchanges of all later calls run in one of `WAYS`; "at once" only where all ranks exchange heads.

    Or in the way "latents": at once, and of latents where a call has them.
    """

    def moved(strategy, shapes):
        """Return the strategy; for several units, those with the most units, in which transfers overlap."""
        strategy = replace(strategy, forward_units=(), backward_units=(), at_once=False, latents=False)
        if (degree := strategy.ulysses_degree) == 1:
            return strategy
        if way == "several units":
            own = replace(shapes, degree=degree)
            heads = own.own_heads, own.own_kv_heads
            units = [
                max(unit_plans(*heads, most=1, pace=0.0, backward=backward, overlaps=True), key=len)
                for backward in (False, True)
            ]
            return replace(strategy, forward_units=units[0], backward_units=units[1])
        at_once = way in ("at once", "latents") and replace(shapes, degree=degree).can_exchange_at_once
        return replace(strategy, at_once=at_once, latents=at_once and way == "latents" and shapes.latent_dim > 0)

    change_strategy(monkeypatch, moved)


def change_strategy(monkeypatch, change):
    """Make all later calls take `change(strategy, shapes)` in place of a chosen strategy."""
    real = decided.choose_strategy
    monkeypatch.setattr(
        decided, "choose_strategy", lambda name, shapes, *rest: change(real(name, shapes, *rest), shapes)
    )


def take_recordings(monkeypatch, kernel, get):
    """Let later calls of a kernel run as if a GPU had CUDA graphs: `get(*where).run(work, varying)` runs its work."""
    for module in (heads, at_once):
        monkeypatch.setattr(module, "RECORDINGS", SimpleNamespace(get=get))
        monkeypatch.setattr(module, "records_kernels", lambda *_: True)
        monkeypatch.setattr(module, "current_stream", lambda _: "stream")
    monkeypatch.setattr(kernel, "recordable", True)


def record_first_calls(monkeypatch, kernel):
    """Let the work of the first call in a place run again in later calls there, as a CUDA graph does; return it."""
    first = {}
    take_recordings(
        monkeypatch, kernel, lambda *where: SimpleNamespace(run=lambda work, _varying: first.setdefault(where, work)())
    )
    return first
