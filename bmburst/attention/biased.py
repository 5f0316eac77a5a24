"""Attention with a learned bias and a mask given by token tensors, over a sequence that is split over ranks.

It runs in a ring: keys and values go round, and in backward their gradients follow one step behind. Ranks exchange the
positions of their tokens and which tokens see each other once for each batch (`BiasedSequence`), so every layout works.
The gradient of the bias table is this rank's share, as for any replicated parameter: the sum over ranks is the gradient
of the sum of their losses.

Memory beside inputs and results, for B samples, S tokens over P ranks, H heads of dimension D: forward 4 * B * S/P * H
* D elements (current and next keys and values) and an output in fp32; backward the same, and 4 such gradients in fp32.
One rank alone needs none of this. Nothing grows with the square of the sequence.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field, fields, replace

from torch import Tensor

from bmburst.attention.call import DecidedCalls, Executor, SequenceCall, StrategyRequest, head_shapes
from bmburst.attention.function import SequenceAttention
from bmburst.attention.graphs import outside_of_graphs
from bmburst.attention.options import (
    gradient_signature,
    require_numbers,
    require_own_memory,
    require_scale,
    require_transport,
    scale_of,
)
from bmburst.attention.ring import Tensors, carry_home, visiting_kv
from bmburst.comm.checks import CheckedCommunicator, describe_tensors
from bmburst.errors import UserError, require_known
from bmburst.schedule.layout import Contiguous
from bmburst.schedule.mask import Full
from bmburst.schedule.parallelism import TRANSPORTS
from bmburst.schedule.ring_schedule import Step
from bmburst.schedule.units import HeadShapes
from bmburst_ops.biased import (
    BiasedGradients,
    BiasedKernel,
    Pairs,
    RelativeBias,
    Tokens,
    require_inputs,
    require_relations,
    select_biased_kernel,
)
from bmburst_ops.biased.kernel import DerivedTensors
from bmburst_ops.errors import KernelError
from bmburst_ops.flash import BackwardInputs, Partial
from bmburst_ops.merge import accumulation_dtype, add_, merge_partials_

__all__ = ["BiasedSequence", "biased_attention"]

_STRATEGY = "kv"  # keys and values travel: the bias of a tile needs the keys' tokens, which every rank has
_HOW_MADE = "fix: pass the result of a position bias of bmburst.integrations.cpm_live"


@dataclass(frozen=True, eq=False, kw_only=True)
class BiasedCall(SequenceCall):
    """A call of `biased_attention`. Its schedule uses a full mask, since the real mask is given by tensors.

    Attributes:
        kernel: The kernel that computes a block of queries and keys.
        pairs: This rank's queries with the keys of each rank.
    """

    kernel: BiasedKernel
    pairs: tuple[Pairs, ...] = ()


class _Shared:
    """State that the calls of one batch share; a copy of the batch starts without it."""

    def __init__(self) -> None:
        self.whole = DerivedTensors()
        self.versions: tuple[int, ...] | None = None
        self.pairs: tuple[Pairs, ...] | None = None
        self.calls: DecidedCalls[BiasedCall] = DecidedCalls()

    def __reduce__(self) -> tuple[type["_Shared"], tuple[()]]:
        return _Shared, ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BiasedSequence:
    """This rank's part of a batch of sequences: the inputs of attention beside q, k, v and the bias table.

    Make one for each batch and pass it to all layers. The first call exchanges the tokens of all ranks and keeps them
    here, about 120 bytes for each token of the whole sequence. The input tensors must therefore not be changed:
    attention refuses changed ones.

    Attributes:
        formula: Maps a query and a key to a row of the table.
        relations: int32 `[batch or 1, entries]`, the same on every rank of the group.
        tokens: Six integers for each of this rank's tokens, such as its position in the whole sequence.
        group: The ranks that share the sequences.
        kernel: "auto", "triton" or "reference".
        transport: As in `bmburst.burst_attention`.

    Raises:
        UserError: An attribute has the wrong type.
    """

    formula: RelativeBias
    relations: Tensor
    tokens: Tokens
    group: CheckedCommunicator
    kernel: str = "auto"
    transport: str = "auto"
    _shared: _Shared = field(default_factory=_Shared, init=False, repr=False)

    def __post_init__(self) -> None:
        kinds = {"formula": RelativeBias, "relations": Tensor, "tokens": Tokens, "group": CheckedCommunicator}
        for name, kind in kinds.items():
            if not isinstance(value := getattr(self, name), kind):
                raise UserError(f"{name} must be a {kind.__name__}, got {type(value).__name__}\n{_HOW_MADE}")
        self.require_unchanged()

    @property
    def is_new(self) -> bool:
        """Whether `pairs` has not been called yet; the first call is collective."""
        return self._shared.pairs is None

    def require_unchanged(self) -> None:
        """Raise UserError unless no tensor was changed in place since construction (for a copy: since its first use).

        Tensors made under `torch.inference_mode` have no version counter and are not checked.
        """
        vectors = (getattr(self.tokens, f.name) for f in fields(self.tokens))
        versions = tuple(0 if t.is_inference() else t._version for t in (self.relations, *vectors))
        if self._shared.versions is None:
            self._shared.versions = versions
        if versions != self._shared.versions:
            raise UserError(
                "relations or tokens of a BiasedSequence were changed in place, but layers share results made from them"
                "\nfix: make new ones for each batch"
            )

    def pairs(self) -> tuple[Pairs, ...]:
        """Return the pairs of this rank's queries and the keys of each rank, by rank.

        The first call is collective: it copies and exchanges the tensors.
        """
        shared = self._shared
        relations, whole = shared.whole.get("whole", self._whole)
        if shared.pairs is None:
            tokens = [Tokens.unpacked(packed) for packed in whole]
            shared.pairs = tuple(Pairs(self.formula, relations, tokens[self.group.rank], keys) for keys in tokens)
        return shared.pairs

    @property
    def calls(self) -> "DecidedCalls[BiasedCall]":
        """Cache of the calls of this batch."""
        return self._shared.calls

    def _whole(self) -> tuple[Tensor, Tensor]:
        """Return copies of the relations and of all ranks' tokens, `[ranks, 6, batch, local_tokens]`."""
        (whole,) = self.group.all_gather(self.tokens.packed()).wait()
        return self.relations.clone(), whole


@outside_of_graphs
def biased_attention(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, sequence: BiasedSequence, *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return exact attention of this rank's queries over the whole sequence: softmax(q k^T * scale + table[bucket]) v.

    Every rank of the group calls it with its own tokens, in any order. All ranks have the same number of tokens.
    Repeated calls give the same bits. torch.compile breaks its graph here.

    Args:
        q: `[batch, local_tokens, heads, head_dim]`, any float dtype, any strides.
        k: The same shape.
        v: The same shape.
        table: The learned bias, `[sequence.formula.rows, heads]`, any float dtype, the same on every rank.
        sequence: The tokens of this rank, and the group. All layers of a batch share it, on every rank: the first call
            does work that later calls reuse.
        scale: Factor on the scores, above 0; default `head_dim ** -0.5`.

    Returns:
        The output, shaped and typed as q, and the log-sum-exp `[batch, heads, local_tokens]` in fp32 or wider. Both are
        differentiable, also with respect to the table. Tokens that see no key, such as padding, give zero and -inf.

    Raises:
        UserError: Shapes, dtypes or devices are not supported, the sequence's tensors were changed in place, or the
            ranks of the group disagree.
    """
    if not isinstance(sequence, BiasedSequence):
        raise UserError(f"sequence must be a BiasedSequence, got {type(sequence).__name__}\n{_HOW_MADE}")
    call = _decide(q, k, v, table, sequence, scale)
    out, lse = SequenceAttention.apply(_RING, call, q, k, v, table)  # type: ignore[no-untyped-call]
    return out, lse


def _decide(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, sequence: BiasedSequence, scale: float | None
) -> BiasedCall:
    """Check the inputs and decide the call, together with the other ranks if the group compares its ranks.

    Otherwise a layer whose tensors are like those of an earlier layer of the batch reuses its decision.
    """
    tensors, comm = (q, k, v, table), sequence.group
    request = StrategyRequest.of(comm, _STRATEGY, sequence.transport, None)

    def check() -> tuple[tuple[BiasedCall, HeadShapes], str]:
        require_known("transport", sequence.transport, TRANSPORTS)
        sequence.require_unchanged()
        try:
            own = Pairs(sequence.formula, sequence.relations, sequence.tokens, sequence.tokens)
            require_inputs(q, k, v, table, own)
            for name, tensor in zip(("q", "k", "v", "table"), tensors, strict=True):
                require_own_memory(name, tensor)
            require_numbers("q", q)
            require_transport(comm, q, sequence.transport)
            if not q.is_cuda and sequence.is_new:  # on a GPU the host would wait; there such biases are NaN
                require_relations(own)
            kernel = select_biased_kernel(sequence.kernel, q)
        except KernelError as error:
            raise UserError(str(error)) from None
        require_scale(scale)
        layout = Contiguous(comm.size, q.shape[1])
        shapes, length = head_shapes(layout, q, k, v), layout.size * layout.tokens
        call = BiasedCall(
            comm=comm,
            layout=layout,
            length=length,
            mask=Full(),
            scale=scale_of(q, scale),
            strategy=request.choose(shapes, length, Full()),
            kernel=kernel,
        )
        return (call, shapes), _signature(q, k, v, table, sequence, kernel, scale) if comm.active else ""

    def decide() -> BiasedCall:
        call = request.place(*comm.decided(check))
        return replace(call, pairs=sequence.pairs())

    if comm.active or not all(isinstance(t, Tensor) for t in tensors) or not isinstance(scale, float | None):
        return decide()
    sequence.require_unchanged()
    kind: Hashable = (scale, *((t.shape, t.dtype, t.device, t.layout) for t in tensors))
    call = sequence.calls.get(kind, decide)
    sequence.pairs()  # for the current stream
    return call


def _signature(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, sequence: BiasedSequence, kernel: BiasedKernel, scale: float | None
) -> str:
    """Describe what must be equal on every rank."""
    return (
        f"biased attention\nq, k, v {describe_tensors(q, k, v)}\ntable {describe_tensors(table)}\nrelations "
        f"{describe_tensors(sequence.relations)}\n{sequence.formula}\nscale {scale}\nkernel {kernel.name}\n"
        f"transport {sequence.transport}\n{gradient_signature(q, k, v, table)}\n"
        f"a call with a {'new' if sequence.is_new else 'known'} sequence"
    )


def _forward(call: BiasedCall, q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Partial:
    """Return attention of this rank's queries to the keys and values that go round the ring."""
    merged: Partial | None = None
    for step, (keys, values) in visiting_kv(call, k, v):
        part = call.kernel.forward(q, keys, values, table, call.pairs[step.owner], scale=call.scale)
        if call.comm.size == 1:
            return part
        if merged is None:
            merged = Partial(part.out.to(accumulation_dtype(q.dtype)), part.lse)
        else:
            merge_partials_(*merged, *part)
    assert merged is not None  # our own keys and values come first
    return Partial(merged.out.to(q.dtype), merged.lse)


def _backward(call: BiasedCall, given: BackwardInputs, table: Tensor) -> BiasedGradients:
    """Return the gradients of q, k and v and this rank's share of the table's.

    They are in fp32 or wider; on one rank alone they are already rounded.
    """
    own: list[tuple[Tensor, Tensor]] = []
    is_alone = call.comm.size == 1

    def visit(step: Step, received: Tensors) -> Tensors:
        (keys, values), pairs = received, call.pairs[step.owner]
        block = given._replace(k=keys, v=values)
        grads = call.kernel.backward(block, table, pairs, scale=call.scale, rounded=is_alone)
        if own:
            grad_q, grad_table = own[0]
            add_(grad_q, grads.q)
            grad_table.add_(grads.table)
        else:
            own.append((grads.q, grads.table))
        return grads.k, grads.v

    grad_k, grad_v = carry_home(call, "kv", (given.k, given.v), visit)
    grad_q, grad_table = own[0]
    return BiasedGradients(grad_q, grad_k, grad_v, grad_table)


_RING = Executor(_forward, _backward)
