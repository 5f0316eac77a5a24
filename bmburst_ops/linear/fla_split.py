"""The gated delta rule by kernels of fla-core, with long pieces cut into fragments that run at the same time.

fla's training kernels pass a state from chunk to chunk of a piece in one program for some columns of a head. With few
heads, most of a GPU then waits. Here each piece is cut at multiples of 64 tokens into fragments. First all fragments
compute their M and U, then `fold_fragments` gives the state before each, then all compute their outputs from these. In
backward the same is done for gradients, from the last fragment to the first. The results are exact.

It calls functions inside of fla 0.6, so the rules of versions of `bmburst_ops.linear.fla` hold.
"""

import math
from functools import cache, cached_property, lru_cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bmburst_ops.fused import import_package
from bmburst_ops.linear.fla import FlaKernel, restrict_tuning
from bmburst_ops.linear.fold import fold_fragments
from bmburst_ops.linear.kernel import Inputs, Pieces, Recurrence

CHUNK = 64
"""Tokens of a chunk of fla's kernels."""

_LEAST = 16 * CHUNK  # tokens of a fragment: shorter ones compute more summaries than they save
_PROGRAMS, _COLUMNS = 4, 64  # wanted programs for each multiprocessor; columns of a state in one program


class FlaSplitKernel:
    """See `bmburst_ops.linear.kernel.LinearKernel`. It is taken by name only."""

    name = "fla-split"

    def refusal(self, recurrence: Recurrence, inputs: Inputs) -> str | None:
        """See `LinearKernel.refusal`."""
        if recurrence.kind != "gated_delta":
            return f"it has no kind '{recurrence.kind}'"
        if inputs[1].shape[-1] + inputs[2].shape[-1] > 512:
            return f"key_dim and value_dim together are at most 512, not {inputs[1].shape[-1] + inputs[2].shape[-1]}"
        return FlaKernel().refusal(recurrence, inputs)

    def prepare(self, recurrence: Recurrence, inputs: Inputs, pieces: Pieces) -> "FlaSplitScan":
        """See `LinearKernel.prepare`."""
        heads, _, value_dim = recurrence.state_shape(inputs)
        processors = torch.cuda.get_device_properties(inputs[0].device).multi_processor_count
        return FlaSplitScan(recurrence, inputs, pieces, fragment_tokens(pieces.edges[-1], heads, value_dim, processors))


def fragment_tokens(tokens: int, heads: int, value_dim: int, processors: int) -> int:
    """Return the tokens of a fragment: a multiple of 64, so few that all multiprocessors have work, at least 1,024."""
    fragments = _PROGRAMS * processors / (heads * math.ceil(value_dim / _COLUMNS))
    return max(_LEAST, CHUNK * math.ceil(tokens / max(1.0, fragments) / CHUNK))


class FlaSplitScan:
    """See `bmburst_ops.linear.kernel.PreparedScan`.

    Args:
        recurrence: The recurrence.
        inputs: Its inputs.
        pieces: The pieces.
        tokens: Tokens of a fragment, a multiple of 64.
    """

    def __init__(self, recurrence: Recurrence, inputs: Inputs, pieces: Pieces, tokens: int) -> None:
        assert tokens % CHUNK == 0
        self._recurrence, self._inputs, self._pieces, self._fla = recurrence, inputs, pieces, _functions()
        self._edges, self._by_piece = fragments(pieces.edges, tokens)
        self._cut = _cumulative(self._edges, inputs[0].device)

    def summary(self) -> tuple[Tensor, Tensor]:
        """See `PreparedScan.summary`."""
        heads, key_dim, value_dim = self._recurrence.state_shape(self._inputs)
        numbers = list(self._pieces.exporting)
        if not numbers:
            return self._zeros(0, heads, key_dim, key_dim), self._zeros(0, heads, key_dim, value_dim)
        firsts = self._zeros(len(self._pieces.edges) - 1, heads, key_dim, value_dim + key_dim)
        firsts[..., value_dim:] = torch.eye(key_dim, device=firsts.device)
        _, lasts = fold_fragments(*self._summaries, firsts, self._by_piece)
        return lasts[numbers][..., value_dim:], lasts[numbers][..., :value_dim]

    def forward(self, starts: Tensor) -> Tensor:
        """See `PreparedScan.forward`."""
        q, k, _, _, _ = self._normal
        g, w, u, _ = self._chunks
        before = self._states(self._pieces.waiting, starts)
        h, values, _ = self._fla.fwd_h(k=k, w=w, u=u, g=g, initial_state=before, output_final_state=False, **self._cut)
        scale = self._recurrence.scale
        return self._without_padding(self._fla.fwd_o(q=q, k=k, v=values, h=h, g=g, scale=scale, **self._cut)[0])

    def start_gradients(self, grad_out: Tensor) -> Tensor:
        """See `PreparedScan.start_gradients`."""
        self._grad_out = self._without_padding(grad_out.clone())[None]
        numbers = list(self._pieces.waiting)
        shape = self._recurrence.state_shape(self._inputs)
        if not numbers:
            return self._zeros(0, *shape)
        firsts = self._zeros(len(self._pieces.edges) - 1, *shape)
        _, lasts = fold_fragments(self._summaries[0], self._own_gradients, firsts, self._by_piece, backward=True)
        return lasts[numbers]

    def backward(self, starts: Tensor, grad_out: Tensor, grad_ends: Tensor) -> Inputs:
        """See `PreparedScan.backward`."""
        del grad_out  # `start_gradients` was called with it
        transitions = self._summaries[0]
        firsts = self._zeros(len(self._pieces.edges) - 1, *self._recurrence.state_shape(self._inputs))
        firsts[list(self._pieces.exporting)] = grad_ends.float()
        after, _ = fold_fragments(transitions, self._own_gradients, firsts, self._by_piece, backward=True)
        q, k, v, _, beta = self._normal
        g, _, _, inverse = self._chunks
        dq, dk, dv, dbeta, dg, *_ = self._fla.bwd(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            A=inverse,
            scale=self._recurrence.scale,
            initial_state=self._states(self._pieces.waiting, starts),
            do=self._grad_out,
            dht=after,
            **self._cut,
        )
        if self._recurrence.normalize:
            dq, dk = (self._fla.norm_bwd(y, r, d) for y, r, d in zip((q, k), self._norms, (dq, dk), strict=True))
        return tuple(self._without_padding(grad[0]) for grad in (dq, dk, dv, dg, dbeta))

    @cached_property
    def _normed(self) -> tuple[tuple[Tensor, Any], ...]:
        both = (t[None] for t in self._inputs[:2])
        return tuple(self._fla.norm_fwd(t) if self._recurrence.normalize else (t, None) for t in both)

    @property
    def _norms(self) -> tuple[Any, ...]:
        """The reciprocal norms of queries and keys."""
        return tuple(norm for _, norm in self._normed)

    @property
    def _normal(self) -> Inputs:
        """The inputs `[1, tokens, ...]`, queries and keys normalized."""
        return *(x for x, _ in self._normed), *(t[None] for t in self._inputs[2:])

    @cached_property
    def _chunks(self) -> Inputs:
        """Sums of the decays, w and u of each chunk, and the inverse that they come from."""
        _, k, v, g, beta = self._normal
        sums = self._fla.cumsum(g, chunk_size=CHUNK, scale=self._fla.RCP_LN2, **self._cut)
        return sums, *self._fla.fwd_intra(k=k, v=v, g=sums, beta=beta, chunk_size=CHUNK, **self._cut)

    @cached_property
    def _summaries(self) -> tuple[Tensor, Tensor]:
        """M and U of all fragments: values `[u, 0]` from the state `[0, I]` end in `[U, M]`."""
        g, w, u, _ = self._chunks
        heads, key_dim, value_dim = self._recurrence.state_shape(self._inputs)
        start = self._zeros(len(self._edges) - 1, heads, key_dim, value_dim + key_dim)
        start[..., value_dim:] = torch.eye(key_dim, device=start.device)
        wider = torch.cat([u, u.new_zeros(*u.shape[:3], key_dim)], -1)
        options = {"initial_state": start, "output_final_state": True, "save_new_value": False}
        _, _, ends = self._fla.fwd_h(k=self._normal[1], w=w, u=wider, g=g, **options, **self._cut)
        return ends[..., value_dim:], ends[..., :value_dim]

    @cached_property
    def _own_gradients(self) -> Tensor:
        """The gradients of the states before all fragments through their own outputs."""
        q, k, *_ = self._normal
        g, w, _, _ = self._chunks
        scale, none = (
            self._recurrence.scale,
            self._zeros(len(self._edges) - 1, *self._recurrence.state_shape(self._inputs)),
        )
        local = self._fla.bwd_dv_local(q=q, k=k, g=g, do=self._grad_out, scale=scale, **self._cut)
        options = {"h0": none, "dht": None, "do": self._grad_out, "dv": local, "scale": scale}
        found: Tensor = self._fla.bwd_dhu(q=q, k=k, w=w, g=g, **options, **self._cut)[1]
        return found

    def _states(self, numbers: tuple[int, ...], given: Tensor) -> Tensor:
        """Return the state before each fragment, from those before some pieces; the other pieces begin with zero."""
        firsts = self._zeros(len(self._pieces.edges) - 1, *self._recurrence.state_shape(self._inputs))
        firsts[list(numbers)] = given.float()
        return fold_fragments(*self._summaries, firsts, self._by_piece)[0]

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=self._inputs[0].device)

    def _without_padding(self, tensor: Tensor) -> Tensor:
        """Set the rows of padding to zero, in place."""
        for number in self._pieces.padding:
            tensor[self._pieces.span(number)] = 0
        return tensor


def fragments(edges: tuple[int, ...], tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the edges of all fragments in tokens, and the edges of the pieces in fragments."""
    found, by_piece = [0], [0]
    for begin, end in pairwise(edges):
        found += [*range(begin + tokens, end, tokens), end]
        by_piece.append(len(found) - 1)
    return tuple(found), tuple(by_piece)


@lru_cache(maxsize=64)
def _cumulative(edges: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
    """Return the arguments of fla's inner functions for the edges of fragments, without waiting for the device."""
    on_host = torch.tensor(edges, dtype=torch.int64)
    on_device = on_host.to(device)
    chunks = import_package("fla.ops.utils.index", FlaSplitKernel.name).prepare_chunk_indices
    return {"cu_seqlens": on_device, "chunk_indices": chunks(on_device, CHUNK, cu_seqlens_cpu=on_host)}


@cache
def _functions() -> SimpleNamespace:
    """Return the functions inside of fla that are called here."""

    def module(name: str) -> Any:
        return import_package(f"fla.{name}", FlaSplitKernel.name)

    states, outputs, norms = (
        module("ops.common.chunk_delta_h"),
        module("ops.common.chunk_o"),
        module("modules.norm.l2norm"),
    )
    found = SimpleNamespace(
        RCP_LN2=module("ops.utils.constant").RCP_LN2,
        bwd=module("ops.gated_delta_rule.chunk").chunk_gated_delta_rule_bwd,
        bwd_dhu=states.chunk_gated_delta_rule_bwd_dhu,
        bwd_dv_local=outputs.chunk_bwd_dv_local,
        cumsum=module("ops.utils").chunk_local_cumsum,
        fwd_h=states.chunk_gated_delta_rule_fwd_h,
        fwd_intra=module("ops.gated_delta_rule.chunk_fwd").chunk_gated_delta_rule_fwd_intra,
        fwd_o=outputs.chunk_fwd_o,
        norm_bwd=norms.l2norm_bwd,
        norm_fwd=norms.l2norm_fwd,
    )
    restrict_tuning()
    return found
