"""The kinds of recurrences by Triton kernels, for fragments of a flat batch that run at once.

A kind has the steps that `bmburst_ops.linear.scan` puts together: M and U of fragments, the outputs from the states
before fragments, the gradients of these states through the outputs, and the gradients of all inputs. Tensors are
`[1, tokens, heads, dim]`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType

from torch import Tensor

from bmburst_ops.linear import triton_decay as decay
from bmburst_ops.linear import triton_gated_delta as delta
from bmburst_ops.linear import triton_kda as kda
from bmburst_ops.linear import triton_kda_gradients as kda_gradients
from bmburst_ops.linear.kernel import Inputs, Recurrence
from bmburst_ops.linear.spans import Fragments, Spans
from bmburst_ops.linear.triton_norms import before_norms, divide_by_norms


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
        self.scale, self._given = recurrence.scale, factors

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
    """Gated delta rule: one decay a token and head."""

    @property
    def factors(self) -> Inputs:
        """See `Kind.factors`: the numbers of the tokens of each chunk, its inverse, and the norms."""
        chunks, norms = self._made
        return chunks.numbers, chunks.inverse, *(() if norms is None else (norms,))

    @cached_property
    def _made(self) -> tuple[delta.Chunks, Tensor | None]:
        """The chunks of the forward pass, and the norms."""
        q, k, _, decays, beta = self.inputs
        return delta.make_chunks(q, k, decays, beta, self.recurrence.normalize, self.fragments)

    @property
    def _chunks(self) -> delta.Chunks:
        """The chunks of this pass."""
        if not self._given:
            return self._made[0]
        (q, k, *_), (numbers, inverse, *norms) = self.inputs, self._given
        return delta.Chunks(q, k, norms[0] if norms else None, numbers, inverse)

    def summaries(self, spans: Spans, of_matrices: Spans) -> tuple[Tensor, Tensor]:
        """See `Kind.summaries`."""
        return delta.summarize(self._chunks, self.inputs[2], spans, of_matrices)

    def out(self, before: Tensor | None) -> Tensor:
        """See `Kind.out`."""
        return delta.outputs(self._chunks, self.inputs[2], before, self.scale, self.fragments.spans)

    def state_gradients(self, spans: Spans, grad_out: Tensor) -> Tensor:
        """See `Kind.state_gradients`."""
        return delta.start_gradients(self._chunks, grad_out, self.scale, spans)

    def gradients(self, before: Tensor | None, grad_out: Tensor, after: Tensor | None) -> Inputs:
        """See `Kind.gradients`."""
        chunks, scale, fragments = self._chunks, self.scale, self.fragments
        _, _, values, _, beta = self.inputs
        states = delta.states_of_chunks(chunks, values, before, fragments)
        of_chunks = *states, *delta.gradients_of_chunks(chunks, grad_out, after, scale, fragments)
        return delta.input_gradients(chunks, values, beta, grad_out, of_chunks, scale, fragments)


class KDA(Kind):
    """Kimi delta attention: one decay a token, head and element of the key."""

    @property
    def factors(self) -> Inputs:
        """See `Kind.factors`: the weights of the output inside of each chunk, and its inverse."""
        chunks = self._chunks
        return chunks.weights, chunks.inverse

    @cached_property
    def _chunks(self) -> kda.Chunks:
        q, k, _, decays, beta = self.inputs
        return kda.make_chunks(q, k, decays, beta, self.recurrence.normalize, self.scale, self.fragments, self._given)

    def summaries(self, spans: Spans, of_matrices: Spans) -> tuple[Tensor, Tensor]:
        """See `Kind.summaries`."""
        return kda.summarize(self._chunks, self.inputs[2], spans, of_matrices)

    def out(self, before: Tensor | None) -> Tensor:
        """See `Kind.out`."""
        return kda.outputs(self._chunks, self.inputs[2], before, self.scale, self.fragments.spans)

    def state_gradients(self, spans: Spans, grad_out: Tensor) -> Tensor:
        """See `Kind.state_gradients`."""
        return kda.start_gradients(self._chunks, grad_out, self.scale, spans)

    def gradients(self, before: Tensor | None, grad_out: Tensor, after: Tensor | None) -> Inputs:
        """See `Kind.gradients`."""
        chunks, scale, fragments = self._chunks, self.scale, self.fragments
        q, k, values, _, beta = self.inputs
        states = kda.states_of_chunks(chunks, values, before, fragments)
        of_chunks = *states, *kda.gradients_of_chunks(chunks, grad_out, after, scale, fragments)
        given = q, k, values, beta, grad_out, of_chunks, scale, fragments
        return kda_gradients.input_gradients(chunks, *given)


class Decay(Kind):
    """Scalar decay (Lightning, SSD of Mamba-2): M is a number a head."""

    @cached_property
    def _read(self) -> decay.DecayInputs:
        q, k, _, decays = self.inputs
        if self.recurrence.normalize:
            q, k = divide_by_norms(q), divide_by_norms(k)
        return decay.DecayInputs(q, k, decays)

    def summaries(self, spans: Spans, of_matrices: Spans) -> tuple[Tensor, Tensor]:
        """See `Kind.summaries`. A scan that computes U has M too."""
        del of_matrices
        return decay.summarize(self._read, self.inputs[2], spans)

    def out(self, before: Tensor | None) -> Tensor:
        """See `Kind.out`."""
        return decay.outputs(self._read, self.inputs[2], before, self.scale, self.fragments.spans)

    def state_gradients(self, spans: Spans, grad_out: Tensor) -> Tensor:
        """See `Kind.state_gradients`."""
        return decay.start_gradients(self._read, grad_out, self.scale, spans)

    def gradients(self, before: Tensor | None, grad_out: Tensor, after: Tensor | None) -> Inputs:
        """See `Kind.gradients`."""
        values, scale = self.inputs[2], self.scale
        states = decay.states_of_chunks(self._read, values, before, self.fragments)
        grad_states, dv = decay.gradients_of_chunks(self._read, grad_out, after, scale, self.fragments)
        dq, dk, dg = decay.input_gradients(self._read, values, grad_out, states, grad_states, scale, self.fragments)
        if self.recurrence.normalize:
            dq, dk = (before_norms(t, grad) for t, grad in zip(self.inputs, (dq, dk), strict=False))
        return dq, dk, dv, dg


KINDS: Mapping[str, type[Kind]] = MappingProxyType({"gated_delta": GatedDelta, "kda": KDA, "decay": Decay})
