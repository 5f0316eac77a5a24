"""Heads exchanged in a given way, whatever the cost model would choose."""

from dataclasses import replace

from bmburst.attention import call as decided
from bmburst.schedule.units import unit_plans

WAYS = ["one unit", "several units", "at once"]


def move_heads(monkeypatch, way):
    """Make head exchanges of all later calls run in one of `WAYS`; "at once" only where all ranks exchange heads.

    Or in the way "latents": at once, and of latents where a call has them.
    """
    real = decided.choose_strategy

    def choose(name, shapes, *rest):
        """Return the strategy; for several units, those with the most units, in which transfers overlap."""
        strategy = replace(real(name, shapes, *rest), forward_units=(), backward_units=(), at_once=False, latents=False)
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

    monkeypatch.setattr(decided, "choose_strategy", choose)
