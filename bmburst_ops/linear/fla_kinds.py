"""The kinds of recurrences by functions inside of fla-core 0.6, for fragments of a flat batch that run at once.

A kind has five calls, which `bmburst_ops.linear.fla_scan` puts together: M and U of fragments, the outputs from the
states before fragments, the gradients of these states through the outputs, and the gradients of all inputs. Tensors are
`[1, tokens, heads, dim]`, as in fla.
"""

from abc import ABC, abstractmethod
from functools import cache, cached_property
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmburst_ops.fused import import_package
from bmburst_ops.linear.fla_tuning import restrict_tuning
from bmburst_ops.linear.kernel import Inputs

NAME = "fla"
CHUNK = 64
"""Tokens of a chunk of fla's kernels."""


class Cut(NamedTuple):
    """Some fragments of a flat batch.

    Attributes:
        spans: Their tokens: slices one behind another, with those between left out.
        edges: Edges of the fragments in these tokens.
        options: fla's arguments for the edges.
    """

    spans: tuple[slice, ...]
    edges: tuple[int, ...]
    options: dict[str, Tensor]

    def of(self, tensor: Tensor) -> Tensor:
        """Return the tokens of `[1, tokens, ...]`: a view if they are one run."""
        parts = [tensor[:, span] for span in self.spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


class Kind(ABC):
    """A recurrence over all fragments of a flat batch.

    Args:
        inputs: Its inputs, queries and keys normalized.
        scale: Factor on the output.
        options: fla's arguments for the edges of all fragments.
    """

    def __init__(self, inputs: Inputs, scale: float, options: dict[str, Tensor]) -> None:
        self.inputs, self.scale, self.options, self.fla = inputs, scale, options, fla_functions()

    @abstractmethod
    def summaries(self, cut: Cut) -> tuple[Tensor, Tensor]:
        """Return M, `[fragments, heads, key_dim, key_dim]`, and U, `[..., key_dim, value_dim]`, in fp32."""

    @abstractmethod
    def out(self, before: Tensor | None) -> Tensor:
        """Return the outputs, given the states before all fragments; None: zero."""

    @abstractmethod
    def state_gradients(self, cut: Cut, grad_out: Tensor) -> Tensor:
        """Return the gradients of the states before fragments through the outputs of each."""

    @abstractmethod
    def gradients(self, before: Tensor | None, grad_out: Tensor, after: Tensor | None) -> Inputs:
        """Return the gradients of the inputs, given those of the states after all fragments; None: zero."""

    @cached_property
    def sums(self) -> Tensor:
        """The sums of the decays from the beginning of each chunk, in units of log 2."""
        found: Tensor = self.fla.cumsum(self.inputs[3], chunk_size=CHUNK, scale=self.fla.RCP_LN2, **self.options)
        return found

    def states_like(self, cut: Cut, columns: int) -> Tensor:
        """Return zeros `[fragments, heads, key_dim, columns]`, fp32."""
        _, k, v, *_ = self.inputs
        return torch.zeros(len(cut.edges) - 1, v.shape[2], k.shape[3], columns, device=v.device)


class _Delta(Kind):
    """Kinds whose state loses what a key reads: M is a matrix.

    M and U of a fragment come from one scan: values `[u, 0]` of value_dim + key_dim columns from the state `[0, I]` end
    in `[U, M]`, because every column of a state evolves alone.
    """

    decays: str
    """fla's name of the decays in its scans."""

    def summaries(self, cut: Cut) -> tuple[Tensor, Tensor]:
        """See `Kind.summaries`."""
        keys, w, u = self.written
        key_dim, value_dim = keys.shape[-1], u.shape[-1]
        start = self.states_like(cut, value_dim + key_dim)
        start[..., value_dim:] = torch.eye(key_dim, device=start.device)
        u = cut.of(u)
        wider = torch.cat([u, u.new_zeros(*u.shape[:3], key_dim)], -1)
        options = {"initial_state": start, "output_final_state": True, "save_new_value": False}
        decay = {self.decays: cut.of(self.sums)}
        _, _, ends = self.fla.fwd_h(k=cut.of(keys), w=cut.of(w), u=wider, **decay, **options, **cut.options)
        return ends[..., value_dim:], ends[..., :value_dim]

    @property
    @abstractmethod
    def written(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys of the scan, w and u of each chunk."""

    def scanned(self, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the state before each chunk, and the values that the chunks add."""
        keys, w, u = self.written
        options = {"initial_state": before, "output_final_state": False, self.decays: self.sums}
        h, values, _ = self.fla.fwd_h(k=keys, w=w, u=u, **options, **self.options)
        return h, values

    def passed_back(self, cut: Cut, queries: Tensor, grad_out: Tensor, grad_values: Tensor) -> Tensor:
        """Return the gradients of the states before fragments, from those of the values inside of chunks."""
        keys, w, _ = (cut.of(t) for t in self.written)
        options = {"do": cut.of(grad_out), "dv": grad_values, "scale": self.scale, self.decays: cut.of(self.sums)}
        h0 = self.states_like(cut, grad_out.shape[-1])
        found: Tensor = self.fla.bwd_dhu(q=queries, k=keys, w=w, h0=h0, dht=None, **options, **cut.options)[1]
        return found


class GatedDelta(_Delta):
    """Gated delta rule: one decay a token and head."""

    decays = "g"

    @cached_property
    def _chunks(self) -> tuple[Tensor, Tensor, Tensor]:
        _, k, v, _, beta = self.inputs
        found: tuple[Tensor, Tensor, Tensor] = self.fla.delta_intra(
            k=k, v=v, g=self.sums, beta=beta, chunk_size=CHUNK, **self.options
        )
        return found

    @property
    def written(self) -> tuple[Tensor, Tensor, Tensor]:
        """See `_Delta.written`."""
        return self.inputs[1], *self._chunks[:2]

    def out(self, before: Tensor | None) -> Tensor:
        """See `Kind.out`."""
        h, values = self.scanned(before)
        q, k, *_ = self.inputs
        found: Tensor = self.fla.fwd_o(q=q, k=k, v=values, h=h, g=self.sums, scale=self.scale, **self.options)
        return found

    def state_gradients(self, cut: Cut, grad_out: Tensor) -> Tensor:
        """See `Kind.state_gradients`."""
        q, k = (cut.of(t) for t in self.inputs[:2])
        decay = cut.of(self.sums)
        local = self.fla.bwd_dv_local(q=q, k=k, g=decay, do=cut.of(grad_out), scale=self.scale, **cut.options)
        return self.passed_back(cut, q, grad_out, local)

    def gradients(self, before: Tensor | None, grad_out: Tensor, after: Tensor | None) -> Inputs:
        """See `Kind.gradients`."""
        q, k, v, _, beta = self.inputs
        given = {"g": self.sums, "beta": beta, "A": self._chunks[2], "scale": self.scale, **self.options}
        dq, dk, dv, dbeta, dg, *_ = self.fla.delta_bwd(
            q=q, k=k, v=v, initial_state=before, do=grad_out, dht=after, **given
        )
        return dq, dk, dv, dg, dbeta


class KDA(_Delta):
    """Kimi delta attention: one decay a token, head and element of the key."""

    decays = "gk"

    @cached_property
    def _chunks(self) -> tuple[Tensor, ...]:
        """`(w, u, queries and keys of the scans, weights of the output, inverse)`."""
        q, k, v, _, beta = self.inputs
        given = {"gk": self.sums, "beta": beta, "scale": self.scale, "chunk_size": CHUNK, **self.options}
        found: tuple[Tensor, ...] = self.fla.kda_intra(q=q, k=k, v=v, disable_recompute=True, **given)
        return found

    @property
    def written(self) -> tuple[Tensor, Tensor, Tensor]:
        """See `_Delta.written`."""
        w, u, _, keys, *_ = self._chunks
        return keys, w, u

    def out(self, before: Tensor | None) -> Tensor:
        """See `Kind.out`."""
        h, values = self.scanned(before)
        weights, scale = self._chunks[4], self.scale
        found: Tensor = self.fla.kda_fwd_o(
            q=self.inputs[0], v=values, g=self.sums, A=weights, h=h, scale=scale, chunk_size=CHUNK, **self.options
        )
        return found

    def state_gradients(self, cut: Cut, grad_out: Tensor) -> Tensor:
        """See `Kind.state_gradients`."""
        _, u, queries, _, weights, _ = self._chunks
        q, k = (cut.of(t) for t in self.inputs[:2])
        # Its first result, of the weights, would need the values that the chunks add; it is not used.
        _, local = self.fla.kda_bwd_dav(
            q=q, k=k, v=cut.of(u), do=cut.of(grad_out), A=cut.of(weights), scale=self.scale, **cut.options
        )
        return self.passed_back(cut, cut.of(queries), grad_out, local)

    def gradients(self, before: Tensor | None, grad_out: Tensor, after: Tensor | None) -> Inputs:
        """See `Kind.gradients`."""
        q, k, v, _, beta = self.inputs
        *_, weights, inverse = self._chunks
        given = {"g": self.sums, "beta": beta, "Aqk": weights, "Akk": inverse, "scale": self.scale, **self.options}
        dq, dk, dv, dbeta, dg, *_ = self.fla.kda_bwd(
            q=q, k=k, v=v, initial_state=before, do=grad_out, dht=after, **given
        )
        return dq, dk, dv, dg, dbeta


class Decay(Kind):
    """Scalar decay (Lightning, SSD of Mamba-2): M is a number a head, here times the unit matrix."""

    @cached_property
    def _repeated(self) -> tuple[Tensor, Tensor]:
        """Queries and keys for each head of the values: these functions share no heads."""
        q, k, v, *_ = self.inputs
        repeats = v.shape[2] // k.shape[2]
        return q.repeat_interleave(repeats, 2), k.repeat_interleave(repeats, 2)

    def summaries(self, cut: Cut) -> tuple[Tensor, Tensor]:
        """See `Kind.summaries`."""
        _, k, v, g = (cut.of(t) for t in (*self._repeated, *self.inputs[2:]))
        sums = cut.of(self.sums)
        _, ends = self.fla.decay_fwd_h(k=k, v=v, g=sums, output_final_state=True, **_edges(cut.options))
        decays = torch.stack([part.float().sum(1)[0] for part in g.split([b - a for a, b in pairwise(cut.edges)], 1)])
        return decays.exp()[..., None, None] * torch.eye(k.shape[-1], device=k.device), ends

    def out(self, before: Tensor | None) -> Tensor:
        """See `Kind.out`."""
        q, k = self._repeated
        given = {"initial_state": before, "scale": self.scale, "chunk_size": CHUNK, **self.options}
        found: Tensor = self.fla.decay_fwd(q=q, k=k, v=self.inputs[2], g=self.sums, **given)[0]
        return found

    def state_gradients(self, cut: Cut, grad_out: Tensor) -> Tensor:
        """See `Kind.state_gradients`."""
        q, k, v, sums, grad = (cut.of(t) for t in (*self._repeated, self.inputs[2], self.sums, grad_out))
        given = {"h0": self.states_like(cut, v.shape[-1]), "dht": None, "scale": self.scale}
        found: Tensor = self.fla.decay_bwd_dh(
            q=q, k=k, v=v, g=sums, do=grad, states_in_fp32=True, **given, **_edges(cut.options)
        )[1]
        return found

    def gradients(self, before: Tensor | None, grad_out: Tensor, after: Tensor | None) -> Inputs:
        """See `Kind.gradients`."""
        q, k = self._repeated
        given = {"g_gamma": None, "initial_state": before, "do": grad_out, "dht": after, "scale": self.scale}
        dq, dk, dv, dg, _ = self.fla.decay_bwd(q=q, k=k, v=self.inputs[2], g=self.sums, **given, **self.options)
        dg = self.fla.cumsum(dg, chunk_size=CHUNK, reverse=True, **self.options)
        heads = self.inputs[1].shape[2]
        dq, dk = (t.unflatten(2, (heads, -1)).sum(3, dtype=torch.float32) for t in (dq, dk))
        return dq, dk, dv, dg


def _edges(options: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the options of functions that find the chunks themselves."""
    return {"cu_seqlens": options["cu_seqlens"]}


KINDS: dict[str, type[Kind]] = {"gated_delta": GatedDelta, "kda": KDA, "decay": Decay}


@cache
def fla_functions() -> SimpleNamespace:
    """Return the functions inside of fla that are called here."""

    def module(name: str) -> Any:
        return import_package(f"fla.{name}", NAME)

    delta_h, chunk_h, outputs = (module(f"ops.common.{name}") for name in ("chunk_delta_h", "chunk_h", "chunk_o"))
    kda_bwd, norms, decay = module("ops.kda.chunk_bwd"), module("modules.norm.l2norm"), module("ops.simple_gla.chunk")
    found = SimpleNamespace(
        RCP_LN2=module("ops.utils.constant").RCP_LN2,
        bwd_dhu=delta_h.chunk_gated_delta_rule_bwd_dhu,
        bwd_dv_local=outputs.chunk_bwd_dv_local,
        cumsum=module("ops.utils").chunk_local_cumsum,
        decay_bwd=decay.chunk_simple_gla_bwd,
        decay_bwd_dh=chunk_h.chunk_bwd_dh,
        decay_fwd=decay.chunk_simple_gla_fwd,
        decay_fwd_h=chunk_h.chunk_fwd_h,
        delta_bwd=module("ops.gated_delta_rule.chunk").chunk_gated_delta_rule_bwd,
        delta_intra=module("ops.gated_delta_rule.chunk_fwd").chunk_gated_delta_rule_fwd_intra,
        fwd_h=delta_h.chunk_gated_delta_rule_fwd_h,
        fwd_o=outputs.chunk_fwd_o,
        kda_bwd=kda_bwd.chunk_kda_bwd,
        kda_bwd_dav=kda_bwd.chunk_kda_bwd_dAv,
        kda_fwd_o=module("ops.gla.chunk").chunk_gla_fwd_o_gk,
        kda_intra=module("ops.kda.chunk_intra").chunk_kda_fwd_intra,
        norm_bwd=norms.l2norm_bwd,
        norm_fwd=norms.l2norm_fwd,
        prepare_chunk_indices=module("ops.utils.index").prepare_chunk_indices,
    )
    restrict_tuning()
    return found
