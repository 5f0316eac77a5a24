"""The methods of the attention benchmark by name, and `burst_attention` with all strategies and transports."""

import functools
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention.cells import BALANCED, MASKS, TREE, Cell, Traffic, mask_of, sizes
from benchmarks.attention.method import Attend, Method, OneGpu, Setting
from benchmarks.attention.packages import BurstAttentionPackage, RingFlashAttention, RingFlashAttentionLlama3, Yunchang
from benchmarks.attention.peers import RingLi, Ulysses
from bmburst.attention.api import burst_attention, resolve_group
from bmburst.attention.call import AttentionCall, decide
from bmburst.attention.options import AttentionOptions
from bmburst.comm.waits import WaitMeter
from bmburst.schedule.gather_plan import Visibility, pulled
from bmburst.schedule.layout import Balanced
from bmburst.schedule.parallelism import STRATEGIES, TRANSPORTS
from bmburst.schedule.ring_schedule import distances

_LAYOUTS = {"causal": "zigzag", "documents": "zigzag", "full": "contiguous", "window": "contiguous", TREE: "balanced"}


class Ours(Method):
    """`burst_attention` with a strategy and a transport, in the best layout for the mask."""

    masks = (*MASKS, TREE)

    def __init__(self, strategy: str = "auto", transport: str = "auto", balanced: bool = False) -> None:
        plain = strategy == transport == "auto"
        self.name = ("ours" if plain else f"ours-{strategy}-{transport}") + (BALANCED if balanced else "")
        self.strategy, self.transport, self.balanced = strategy, transport, balanced

    def shape_refusal(self, cell: Cell) -> str | None:
        """See `Method.shape_refusal`."""
        if self.balanced and cell.tokens % (Balanced.chunks * cell.ranks):
            return f"layout 'balanced' takes multiples of {Balanced.chunks * cell.ranks} tokens"
        return None

    def layout(self, cell: Cell) -> str:
        """See `Method.layout`."""
        return Balanced.name if self.balanced else _LAYOUTS[cell.mask]

    def resolve(self, cell: Cell, setting: Setting) -> tuple[Traffic | None, dict[str, Any]]:
        """See `Method.resolve`: returns the library's choices for these shapes."""
        dtype: torch.dtype = getattr(torch, cell.dtype)
        shapes = [self.shape(cell, heads) for heads in (cell.heads, cell.kv_heads)]
        q, k = (torch.empty(s, dtype=dtype, device=setting.group.device) for s in shapes)
        options = AttentionOptions(**self._options(cell, setting))
        call = decide(resolve_group(self._group(setting)), q, k, k, None, options)
        chosen = call.strategy
        facts = {"heads": chosen.ulysses_degree, "outer": chosen.outer, "travellers": chosen.ring_tensors}
        return traffic(cell, call), {"strategy": facts, "transport": call.comm.transport}

    def bind(self, cell: Cell, setting: Setting) -> Attend:
        """See `Method.bind`."""
        call = functools.partial(burst_attention, group=self._group(setting), **self._options(cell, setting))

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = call(q, k, v)
            return out

        return attend

    def meter(self, setting: Setting) -> WaitMeter | None:
        """See `Method.meter`."""
        if setting.group.device.type == "cuda":
            return None
        comm = resolve_group(self._group(setting))
        comm.meter = comm.meter or WaitMeter(on_gpu=False)
        return comm.meter

    def _group(self, setting: Setting) -> object:
        # For None, the library chooses the communicator of all ranks: BMTrain's if BMTrain is initialized.
        return None if setting.group.is_world else setting.group.process_group

    def _options(self, cell: Cell, setting: Setting) -> dict[str, Any]:
        return {
            "mask": mask_of(cell.mask, cell.tokens),
            "layout": self.layout(cell),
            "kernel": setting.kernel_name,
            "strategy": self.strategy,
            "transport": self.transport,
            "deterministic": setting.deterministic,
        }


def ours_on(device: str) -> tuple[Ours, ...]:
    """Return `burst_attention` with every strategy and transport for a device, "cuda" or "cpu"."""
    transports = [t for t in TRANSPORTS if t != "auto" and (t == "gloo") == (device == "cpu")]
    plain = (Ours(strategy, transport) for strategy in STRATEGIES for transport in transports)
    balanced = (Ours(strategy, t, balanced=True) for strategy in ("gather", "ring") for t in transports)
    return Ours(), *plain, Ours(balanced=True), *balanced


def traffic(cell: Cell, call: AttentionCall) -> Traffic:
    """Return the bytes that `burst_attention` receives on the rank that receives most.

    Ranks that exchange heads receive q, k, v and the output in forward. In backward they receive q, k and v again, dO,
    log-sum-exp, delta and the gradients. Between groups of these ranks, a gather pulls the visible keys in forward and
    in backward, and gradients return from all ranks that pulled. A ring moves whole blocks until no rank needs them,
    and in backward also gradients.
    """
    own, heads = sizes(cell), call.strategy.ulysses_degree
    share = (heads - 1) / heads
    copies = max(1.0, heads / cell.kv_heads)  # every rank with query heads of a KV head gets it
    forward = (2 * own.q + 2 * own.k * copies + own.statistics) * share
    backward = (3 * own.q + 4 * own.k * copies + 2 * own.statistics) * share
    outer = call.outer.layout
    if outer.size == 1:
        return Traffic(forward, forward + backward)
    keys = 2 * own.k * copies  # of a group's tokens, for a rank's heads
    if call.strategy.outer == "gather":
        token = keys / outer.tokens
        pieces = [pulled(Visibility(outer, call.length, call.mask), rank) for rank in range(outer.size)]
        seen = [sum(len(piece.tokens) for piece in own_pieces) for own_pieces in pieces]
        given = [sum(len(p.tokens) for p in chain(*pieces) if p.owner == rank) for rank in range(outer.size)]
        both = max(2 * mine + others for mine, others in zip(seen, given, strict=True))
        return Traffic(forward + token * max(seen), forward + backward + token * both)
    there = {
        side: len(distances(outer, call.length, call.mask, side)) - 1 for side in ("kv", call.strategy.ring_tensors)
    }
    forward += keys * there["kv"]
    hops = there[call.strategy.ring_tensors]
    home = hops + 1 if hops else 0
    if call.strategy.ring_tensors == "kv":
        backward += keys * hops + keys * own.wide * home
    else:
        backward += 2 * (own.q + own.statistics) * hops + own.q * own.wide * home
    return Traffic(forward, forward + backward)


def all_methods(device: str) -> dict[str, Method]:
    """Return the methods for a device, "cuda" or "cpu", by name.

    They run in this order: one GPU, bmburst with automatic choices, close peers, all bmburst variants, other peers.
    """
    first, *others = ours_on(device)
    close = (Ulysses(), RingFlashAttention(), RingFlashAttentionLlama3())
    listed = (OneGpu(), first, *close, *others, Yunchang(), BurstAttentionPackage(), RingLi())
    return {method.name: method for method in listed}
