"""The kinds of recurrences by functions inside of fla-core 0.6, for fragments of a flat batch that run at once.

A kind has the steps that `bmburst_ops.linear.fla_scan` puts together: M and U of fragments, the outputs from the states
before fragments, the gradients of these states through the outputs, and the gradients of all inputs. Tensors are
`[1, tokens, heads, dim]`, as in fla.
"""

from abc import ABC, abstractmethod
from functools import cache, cached_property
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from bmburst_ops.fragments import CHUNK
from bmburst_ops.fused import import_package
from bmburst_ops.linear.fla_tuning import restrict_tuning
from bmburst_ops.linear.kernel import Inputs, Recurrence
from bmburst_ops.linear.spans import Fragments, Spans

NAME = "fla"


class Kind(ABC):
    """A recurrence over all fragments of a flat batch.

    Args:
        recurrence: The recurrence.
        inputs: Its inputs.
        fragments: All fragments.
        factors: In backward, what `factors` was in forward.
    """

    def __init__(self, recurrence: Recurrence, inputs: Inputs, fragments: Fragments, factors: Inputs = ()) -> None:
        self.recurrence, self.inputs, self.fragments = recurrence, inputs, fragments
        self.scale = recurrence.scale
        self.fla, self._given = fla_functions(), factors
        self.options = {"cu_seqlens": fragments.edges, "chunk_indices": fragments.chunks}

    @property
    def factors(self) -> Inputs:
        """What backward needs of the chunks and would compute again."""
        return ()

    @abstractmethod
    def summaries(self, spans: Spans, of_matrices: Spans) -> tuple[Tensor, Tensor]:
        """Return M and U of some fragments.

        Args:
            spans: The fragments. U is zero where they have no tokens.
            of_matrices: Likewise. M is the identity where they have no tokens.
        """

    @abstractmethod
    def out(self, before: Tensor | None) -> Tensor:
        """Return the outputs, given the states before all fragments; None: zero."""

    def scanned_again(self, before: Tensor | None, grad_out: Tensor) -> Inputs:
        """Return what both steps of the backward pass need, their last argument; or nothing."""
        del before, grad_out
        return ()

    @abstractmethod
    def state_gradients(self, spans: Spans, grad_out: Tensor, scanned: Inputs) -> Tensor:
        """Return the gradients of the states before some fragments through the outputs of each."""

    @abstractmethod
    def gradients(self, before: Tensor | None, grad_out: Tensor, after: Tensor | None, scanned: Inputs) -> Inputs:
        """Return the gradients of the inputs, given those of the states after all fragments; None: zero."""


class GatedDelta(Kind):
    """Gated delta rule: one decay a token and head. Its kernels are ours."""

    @property
    def factors(self) -> Inputs:
        """See `Kind.factors`: the numbers of the tokens of each chunk, its inverse, and the norms."""
        chunks, norms = self._made
        return chunks.numbers, chunks.inverse, *(() if norms is None else (norms,))

    @cached_property
    def _made(self) -> tuple[Any, Tensor | None]:
        """The chunks of the forward pass, and the norms."""
        q, k, _, decays, beta = self.inputs
        found: tuple[Any, Tensor | None] = self.fla.delta.make_chunks(
            q, k, decays, beta, self.recurrence.normalize, self.fragments
        )
        return found

    @property
    def _chunks(self) -> Any:
        """The chunks of this pass."""
        if not self._given:
            return self._made[0]
        numbers, inverse, *norms = self._given
        return self.fla.delta.Chunks(*self.inputs[:2], norms[0] if norms else None, numbers, inverse)

    def summaries(self, spans: Spans, of_matrices: Spans) -> tuple[Tensor, Tensor]:
        """See `Kind.summaries`."""
        found: tuple[Tensor, Tensor] = self.fla.delta.summarize(self._chunks, self.inputs[2], spans, of_matrices)
        return found

    def out(self, before: Tensor | None) -> Tensor:
        """See `Kind.out`."""
        found: Tensor = self.fla.delta.outputs(self._chunks, self.inputs[2], before, self.scale, self.fragments.spans)
        return found

    def state_gradients(self, spans: Spans, grad_out: Tensor, scanned: Inputs) -> Tensor:
        """See `Kind.state_gradients`."""
        del scanned
        found: Tensor = self.fla.delta.start_gradients(self._chunks, grad_out, self.scale, spans)
        return found

    def gradients(self, before: Tensor | None, grad_out: Tensor, after: Tensor | None, scanned: Inputs) -> Inputs:
        """See `Kind.gradients`."""
        del scanned
        delta, chunks, scale, fragments = self.fla.delta, self._chunks, self.scale, self.fragments
        _, _, values, _, beta = self.inputs
        states = delta.states_of_chunks(chunks, values, before, fragments)
        of_chunks = *states, *delta.gradients_of_chunks(chunks, grad_out, after, scale, fragments)
        found: Inputs = delta.input_gradients(chunks, values, beta, grad_out, of_chunks, scale, fragments)
        return found


class _Normalized(Kind):
    """Kinds whose queries and keys fla's own kernels divide by their norms."""

    def __init__(self, recurrence: Recurrence, inputs: Inputs, fragments: Fragments, factors: Inputs = ()) -> None:
        super().__init__(recurrence, inputs, fragments, factors)
        self._normalized = tuple(self.fla.norm_fwd(t) if recurrence.normalize else (t, None) for t in inputs[:2])
        self.inputs = *(t for t, _ in self._normalized), *inputs[2:]

    def before_norms(self, *grads: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of queries and keys before they were divided by their norms, given those after it."""
        return tuple(
            grad if norm is None else self.fla.norm_bwd(t, norm, grad)
            for (t, norm), grad in zip(self._normalized, grads, strict=True)
        )


class KDA(_Normalized):
    """Kimi delta attention: one decay a token, head and element of the key. Most of its kernels are fla's."""

    @cached_property
    def sums(self) -> Tensor:
        """The sums of the decays from the beginning of each chunk, in units of log 2."""
        found: Tensor = self.fla.cumsum(self.inputs[3], chunk_size=CHUNK, scale=self.fla.RCP_LN2, **self.options)
        return found

    @property
    def factors(self) -> Inputs:
        """See `Kind.factors`: the weights of the output inside of each chunk, and its inverse."""
        return self._chunks[4:]

    @cached_property
    def _chunks(self) -> Inputs:
        """`(w, u, queries and keys of the scans, weights of the output, inverse)`."""
        q, k, v, _, beta = self.inputs
        given = {"q": q, "k": k, "v": v, "gk": self.sums, "beta": beta, **self.options}
        if self._given:
            return *self.fla.kda_written(A=self._given[1], **given), *self._given
        found: Inputs = self.fla.kda_intra(disable_recompute=True, scale=self.scale, chunk_size=CHUNK, **given)
        return found

    def summaries(self, spans: Spans, of_matrices: Spans) -> tuple[Tensor, Tensor]:
        """See `Kind.summaries`."""
        w, u, _, keys, *_ = self._chunks
        found: tuple[Tensor, Tensor] = self.fla.summaries.summarize(keys, w, u, self.sums, spans, of_matrices)
        return found

    def state_gradients(self, spans: Spans, grad_out: Tensor, scanned: Inputs) -> Tensor:
        """See `Kind.state_gradients`. The last of `scanned` are gradients of values in their chunk."""
        w, _, queries, keys, *_ = self._chunks
        found: Tensor = self.fla.summaries.start_gradients(
            queries, keys, w, grad_out, scanned[-1], self.sums, self.scale, spans
        )
        return found

    def scanned(self, before: Tensor | None) -> Inputs:
        """Return the state before each chunk, and the values that the chunks add."""
        w, u, _, keys, *_ = self._chunks
        given = {"initial_state": before, "output_final_state": False, "gk": self.sums, **self.options}
        h, values, _ = self.fla.fwd_h(k=keys, w=w, u=u, **given)
        return h, values

    def out(self, before: Tensor | None) -> Tensor:
        """See `Kind.out`."""
        h, values = self.scanned(before)
        given = {"g": self.sums, "A": self._chunks[4], "scale": self.scale, "chunk_size": CHUNK, **self.options}
        found: Tensor = self.fla.kda_fwd_o(q=self.inputs[0], v=values, h=h, **given)
        return found

    def scanned_again(self, before: Tensor | None, grad_out: Tensor) -> Inputs:
        """See `Kind.scanned_again`: the scan, and the gradients of the weights and values inside of each chunk."""
        h, values = self.scanned(before)
        q, k, *_ = self.inputs
        given = {"v": values, "do": grad_out, "A": self._chunks[4], "scale": self.scale, **self.options}
        return h, values, *self.fla.kda_bwd_dav(q=q, k=k, **given)

    def gradients(self, before: Tensor | None, grad_out: Tensor, after: Tensor | None, scanned: Inputs) -> Inputs:
        """See `Kind.gradients`."""
        q, k, v, _, beta = self.inputs
        w, _, queries, keys, _, inverse = self._chunks
        h, values, of_weights, local = scanned
        passed = {"do": grad_out, "scale": self.scale, **self.options}
        dh, _, dv = self.fla.bwd_dhu(
            q=queries, k=keys, w=w, gk=self.sums, h0=before, dht=after, dv=local, chunk_size=CHUNK, **passed
        )
        both = {"q": q, "k": k, "g": self.sums, "beta": beta, **self.options}
        dq, dk, dv, dbeta, dg, of_inverse = self.fla.kda_bwd_dqkg(
            v=v, v_new=values, A=inverse, h=h, dh=dh, dv=dv, **passed | both
        )
        found = {"dq": dq, "dk": dk, "db": dbeta, "dg": dg}
        dq, dk, dbeta, dg = self.fla.kda_bwd_intra(dAqk=of_weights, dAkk=of_inverse, chunk_size=CHUNK, **found, **both)
        heads = k.shape[2]
        if v.shape[2] > heads:
            dq, dk = (t.unflatten(2, (heads, -1)).sum(3) for t in (dq, dk))
        dg = self.fla.cumsum(dg, chunk_size=CHUNK, reverse=True, **self.options)
        return *self.before_norms(dq, dk), dv, dg, dbeta


class Decay(_Normalized):
    """Scalar decay (Lightning, SSD of Mamba-2): M is a number a head. Its kernels are ours."""

    @cached_property
    def _read(self) -> Any:
        q, k, _, decays = self.inputs
        return self.fla.decay.DecayInputs(q, k, decays)

    def summaries(self, spans: Spans, of_matrices: Spans) -> tuple[Tensor, Tensor]:
        """See `Kind.summaries`. A scan that computes U has M too."""
        del of_matrices
        found: tuple[Tensor, Tensor] = self.fla.decay.summarize(self._read, self.inputs[2], spans)
        return found

    def out(self, before: Tensor | None) -> Tensor:
        """See `Kind.out`."""
        found: Tensor = self.fla.decay.outputs(self._read, self.inputs[2], before, self.scale, self.fragments.spans)
        return found

    def state_gradients(self, spans: Spans, grad_out: Tensor, scanned: Inputs) -> Tensor:
        """See `Kind.state_gradients`."""
        del scanned
        found: Tensor = self.fla.decay.start_gradients(self._read, grad_out, self.scale, spans)
        return found

    def gradients(self, before: Tensor | None, grad_out: Tensor, after: Tensor | None, scanned: Inputs) -> Inputs:
        """See `Kind.gradients`."""
        del scanned
        decay, values, scale = self.fla.decay, self.inputs[2], self.scale
        states = decay.states_of_chunks(self._read, values, before, self.fragments)
        grad_states, dv = decay.gradients_of_chunks(self._read, grad_out, after, scale, self.fragments)
        dq, dk, dg = decay.input_gradients(self._read, values, grad_out, states, grad_states, scale, self.fragments)
        return *self.before_norms(dq, dk), dv, dg


KINDS: dict[str, type[Kind]] = {"gated_delta": GatedDelta, "kda": KDA, "decay": Decay}


@cache
def fla_functions() -> SimpleNamespace:
    """Return the functions inside of fla that are called here, and our own modules."""

    def module(name: str) -> Any:
        return import_package(f"fla.{name}", NAME)

    delta_h = module("ops.common.chunk_delta_h")
    intra, kda_bwd = module("ops.kda.chunk_intra"), module("ops.kda.chunk_bwd")
    norms = module("modules.norm.l2norm")
    found = SimpleNamespace(
        RCP_LN2=module("ops.utils.constant").RCP_LN2,
        bwd_dhu=delta_h.chunk_gated_delta_rule_bwd_dhu,
        cumsum=module("ops.utils").chunk_local_cumsum,
        decay=import_package("bmburst_ops.linear.triton_decay", NAME),
        delta=import_package("bmburst_ops.linear.triton_gated_delta", NAME),
        fwd_h=delta_h.chunk_gated_delta_rule_fwd_h,
        kda_bwd_dav=kda_bwd.chunk_kda_bwd_dAv,
        kda_bwd_dqkg=kda_bwd.chunk_kda_bwd_wy_dqkg_fused,
        kda_bwd_intra=intra.chunk_kda_bwd_intra,
        kda_fwd_o=module("ops.gla.chunk").chunk_gla_fwd_o_gk,
        kda_intra=intra.chunk_kda_fwd_intra,
        kda_written=module("ops.kda.wy_fast").recompute_w_u_fwd,
        norm_bwd=norms.l2norm_bwd,
        norm_fwd=norms.l2norm_fwd,
        summaries=import_package("bmburst_ops.linear.triton_summaries", NAME),
    )
    restrict_tuning()
    return found
