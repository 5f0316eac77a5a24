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

    @abstractmethod
    def state_gradients(self, spans: Spans, grad_out: Tensor) -> Tensor:
        """Return the gradients of the states before some fragments through the outputs of each."""

    @abstractmethod
    def gradients(self, before: Tensor | None, grad_out: Tensor, after: Tensor | None) -> Inputs:
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

    def state_gradients(self, spans: Spans, grad_out: Tensor) -> Tensor:
        """See `Kind.state_gradients`."""
        found: Tensor = self.fla.delta.start_gradients(self._chunks, grad_out, self.scale, spans)
        return found

    def gradients(self, before: Tensor | None, grad_out: Tensor, after: Tensor | None) -> Inputs:
        """See `Kind.gradients`."""
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


class KDA(Kind):
    """Kimi delta attention: one decay a token, head and element of the key. Its kernels are ours."""

    @property
    def factors(self) -> Inputs:
        """See `Kind.factors`: the weights of the output inside of each chunk, and its inverse."""
        chunks = self._chunks
        return chunks.weights, chunks.inverse

    @cached_property
    def _chunks(self) -> Any:
        q, k, _, decays, beta = self.inputs
        return self.fla.kda.make_chunks(
            q, k, decays, beta, self.recurrence.normalize, self.scale, self.fragments, self._given
        )

    def summaries(self, spans: Spans, of_matrices: Spans) -> tuple[Tensor, Tensor]:
        """See `Kind.summaries`."""
        found: tuple[Tensor, Tensor] = self.fla.kda.summarize(self._chunks, self.inputs[2], spans, of_matrices)
        return found

    def out(self, before: Tensor | None) -> Tensor:
        """See `Kind.out`."""
        found: Tensor = self.fla.kda.outputs(self._chunks, self.inputs[2], before, self.scale, self.fragments.spans)
        return found

    def state_gradients(self, spans: Spans, grad_out: Tensor) -> Tensor:
        """See `Kind.state_gradients`."""
        found: Tensor = self.fla.kda.start_gradients(self._chunks, grad_out, self.scale, spans)
        return found

    def gradients(self, before: Tensor | None, grad_out: Tensor, after: Tensor | None) -> Inputs:
        """See `Kind.gradients`."""
        kda, chunks, scale, fragments = self.fla.kda, self._chunks, self.scale, self.fragments
        q, k, values, _, beta = self.inputs
        states = kda.states_of_chunks(chunks, values, before, fragments)
        of_chunks = *states, *kda.gradients_of_chunks(chunks, grad_out, after, scale, fragments)
        given = q, k, values, beta, grad_out, of_chunks, scale, fragments
        found: Inputs = self.fla.kda_gradients.input_gradients(chunks, *given)
        return found


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

    def state_gradients(self, spans: Spans, grad_out: Tensor) -> Tensor:
        """See `Kind.state_gradients`."""
        found: Tensor = self.fla.decay.start_gradients(self._read, grad_out, self.scale, spans)
        return found

    def gradients(self, before: Tensor | None, grad_out: Tensor, after: Tensor | None) -> Inputs:
        """See `Kind.gradients`."""
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

    norms = module("modules.norm.l2norm")
    found = SimpleNamespace(
        decay=import_package("bmburst_ops.linear.triton_decay", NAME),
        delta=import_package("bmburst_ops.linear.triton_gated_delta", NAME),
        kda=import_package("bmburst_ops.linear.triton_kda", NAME),
        kda_gradients=import_package("bmburst_ops.linear.triton_kda_gradients", NAME),
        norm_bwd=norms.l2norm_bwd,
        norm_fwd=norms.l2norm_fwd,
    )
    restrict_tuning()
    return found
