"""`bmburst.burst_attention`, by every strategy and transport that it knows."""

import functools
from typing import Any

import torch
from torch import Tensor

from bmburst.attention.api import burst_attention, resolve_group
from bmburst.attention.call import AttentionOptions, decide
from bmburst.attention.strategy import STRATEGIES
from bmburst.bench.cells import Cell
from bmburst.bench.methods.method import Attend, Method, Setting
from bmburst.bench.work import Traffic, sizes
from bmburst.comm.transports import TRANSPORTS


class Ours(Method):
    """One strategy over one transport.

    Args:
        strategy: As in `burst_attention`.
        transport: As in `burst_attention`.
    """

    def __init__(self, strategy: str = "auto", transport: str = "auto") -> None:
        plain = strategy == transport == "auto"
        self.name = "ours" if plain else f"ours-{strategy}-{transport}"
        self.about = "burst_attention" if plain else f"burst_attention, strategy {strategy}, transport {transport}"
        self.strategy, self.transport = strategy, transport

    def layout(self, cell: Cell) -> str:
        """See `Method.layout`."""
        return "zigzag" if cell.is_causal else "contiguous"

    def resolve(self, cell: Cell, setting: Setting) -> tuple[Traffic | None, dict[str, Any]]:
        """See `Method.resolve`: asks the library what it chooses for these shapes."""
        dtype: torch.dtype = getattr(torch, cell.dtype)
        shapes = [self.input_shape(cell, heads) for heads in (cell.heads, cell.kv_heads)]
        q, k = (torch.empty(s, dtype=dtype, device=setting.party.device) for s in shapes)
        options = AttentionOptions(**self._options(cell, setting))
        call = decide(resolve_group(self._group(setting)), q, k, k, None, options)
        chosen = call.strategy
        facts = {"heads": chosen.heads, "outer": chosen.outer, "travellers": chosen.travellers}
        moved = _traffic(cell, chosen.heads, chosen.outer, chosen.travellers)
        return moved, {"strategy": facts, "transport": call.comm.transport}

    def bind(self, cell: Cell, setting: Setting) -> Attend:
        """See `Method.bind`."""
        call = functools.partial(burst_attention, group=self._group(setting), **self._options(cell, setting))

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = call(q, k, v)
            return out

        return attend

    def _group(self, setting: Setting) -> object:
        # The world by the library's own choice: BMTrain's communicator where BMTrain runs.
        return None if setting.party.is_world else setting.party.group

    def _options(self, cell: Cell, setting: Setting) -> dict[str, Any]:
        return {
            "mask": cell.mask,
            "layout": self.layout(cell),
            "kernel": setting.kernel_name,
            "strategy": self.strategy,
            "transport": self.transport,
            "deterministic": setting.deterministic,
        }


def ours_on(device: str) -> tuple[Ours, ...]:
    """Return every strategy over every transport that there is on a kind of device.

    Args:
        device: "cuda" or "cpu".
    """
    transports = [t for t in TRANSPORTS if t != "auto" and (t == "gloo") == (device == "cpu")]
    return Ours(), *(Ours(strategy, transport) for strategy in STRATEGIES for transport in transports)


def _traffic(cell: Cell, heads: int, outer: str, travellers: str) -> Traffic:
    """Return the bytes that a rank receives.

    Args:
        cell: The shapes.
        heads: Ranks that exchange heads. Backward they exchange q, k and v again, dO, log-sum-exp, delta and gradients.
        outer: Between groups of so many ranks "ring" or "gather", which fetch the same blocks.
        travellers: What goes round backward: "kv", with its gradients behind it, or "q".
    """
    own = sizes(cell)
    share = (heads - 1) / heads
    copies = max(1.0, heads / cell.kv_heads)  # a KV head goes to every rank that has query heads of it
    forward = (2 * own.q + 2 * own.k * copies + own.statistics) * share
    backward = (3 * own.q + 4 * own.k * copies + 2 * own.statistics) * share
    groups = cell.ranks // heads
    if groups > 1:
        keys = 2 * own.k * copies * (groups - 1)
        forward += keys
        if outer == "gather" or travellers == "kv":
            backward += keys + 2 * own.k * copies * own.wide * groups
        else:
            backward += 2 * (own.q + own.statistics) * (groups - 1) + own.q * own.wide * groups
    return Traffic(forward, forward + backward)
