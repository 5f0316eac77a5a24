"""Recurrences of linear attention and state space models on one device: kinds, and the interface of kernels.

Every kind is affine in its state: the state after some tokens is `M S + U`, where S is the state before them.

| kind | inputs | a token |
|---|---|---|
| gated_delta | q, k, v, g, beta | S = exp(g) S; S += beta k (v - S^T k)^T; out = scale S^T q |
| kda | the same, g for each key channel | S = diag(exp(g)) S; as above |
| decay | q, k, v, g | S = exp(g) S + k v^T; out = scale S^T q |
| scan | a, b | S = a S + b, elementwise; out = S |

Sources: gated delta rule, arXiv:2412.06464; Kimi delta attention, arXiv:2510.26692; scalar decay as in Mamba 2,
arXiv:2405.21060, and Lightning Attention, arXiv:2401.04658.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bmburst_ops.fragments import DELTA_KINDS
from bmburst_ops.merge import accumulation_dtype

EPSILON = 1e-6
"""Added to the squared norm of a query or key before its root is taken, as in flash-linear-attention."""

Inputs = tuple[Tensor, ...]


class Pieces(NamedTuple):
    """The pieces of a flat batch: tokens that share no state with their neighbours, unless `waiting` says so.

    Attributes:
        edges: First tokens of all pieces in order, and the number of tokens.
        padding: Numbers of the pieces that are padding: zero output, zero gradient.
        waiting: Numbers of the pieces that begin with a given state. The others begin with zero.
        exporting: Numbers of the pieces whose last state is used.
    """

    edges: tuple[int, ...]
    padding: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    exporting: tuple[int, ...] = ()

    def span(self, number: int) -> slice:
        """Return the tokens of a piece."""
        return slice(self.edges[number], self.edges[number + 1])


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A kind of recurrence and its constants.

    Attributes:
        kind: "gated_delta", "kda", "decay" or "scan".
        scale: Factor on the output of the kinds that have queries.
        normalize: Whether queries and keys are divided by their norms.
    """

    kind: str
    scale: float = 1.0
    normalize: bool = False

    @property
    def is_delta(self) -> bool:
        """Whether M is a matrix `[heads, key_dim, key_dim]`."""
        return self.kind in DELTA_KINDS

    def state_shape(self, inputs: Inputs) -> tuple[int, ...]:
        """Return the shape of a state. The first dimension is independent of the others: heads, or channels."""
        if self.kind == "scan":
            return tuple(inputs[1].shape[1:])
        _, k, v, *_ = inputs
        return v.shape[1], k.shape[2], v.shape[2]

    def transition_shape(self, inputs: Inputs) -> tuple[int, ...]:
        """Return the shape of M."""
        heads, *rest = self.state_shape(inputs)
        if self.kind == "scan":
            return heads, *rest
        return (heads, rest[0], rest[0]) if self.is_delta else (heads, 1, 1)

    def state_dtype(self, inputs: Inputs) -> torch.dtype:
        """Return the dtype of states and summaries: fp32, or that of the inputs if it is wider."""
        dtype = torch.float32
        for tensor in inputs:
            dtype = torch.promote_types(dtype, accumulation_dtype(tensor.dtype))
        return dtype

    def summary_views(self, inputs: Inputs, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return M and U of summaries, `[..., heads, numbers of M and of U]`, as views `[..., heads, ...]`."""
        transition, state = self.transition_shape(inputs)[1:], self.state_shape(inputs)[1:]
        m, u = slots.split([prod(transition), prod(state)], -1)
        return m.view(*m.shape[:-1], *transition), u.view(*u.shape[:-1], *state)

    def new_summaries(self, inputs: Inputs, count: int) -> Tensor:
        """Return summaries of zeros, `[count, heads, numbers of M and of U]`."""
        heads, *state = self.state_shape(inputs)
        numbers = prod(self.transition_shape(inputs)[1:]) + prod(state)
        return torch.zeros(count, heads, numbers, dtype=self.state_dtype(inputs), device=inputs[0].device)

    def act(self, transition: Tensor, state: Tensor) -> Tensor:
        """Return `M S`. Leading dimensions are a batch."""
        if not self.is_delta:
            return transition * state
        with _without_tf32(state):
            return transition @ state

    def advance(
        self, transition: Tensor, state: Tensor, added: Tensor, out: Tensor | None = None, *, backward: bool
    ) -> Tensor:
        """Return `M S + U`, in backward `M^T S + U`, by one operation, in `out` if it is given.

        Args:
            transition: M, `[heads, ...]`.
            state: S, or in backward the gradient of the state after the tokens.
            added: U.
            out: Memory of the result, which is no other argument's.
            backward: See above.
        """
        if not self.is_delta:
            return torch.addcmul(added, transition, state, out=out)
        with _without_tf32(state):
            return torch.baddbmm(added, transition.mT if backward else transition, state, out=out)


class Slots(NamedTuple):
    """Where results of some pieces lie in what ranks exchange.

    Attributes:
        places: The place of each piece.
        size: Number of places. Those of no piece are zero.
    """

    places: tuple[int, ...]
    size: int


class PreparedScan(Protocol):
    """A recurrence over the pieces of a flat batch. States and M are in `Recurrence.state_dtype`."""

    def summary(self, slots: Slots) -> Tensor:
        """Return M and U of the exporting pieces in slots, `[size, heads, numbers of M and of U]`."""
        ...

    def forward(self, starts: Tensor) -> Tensor:
        """Return the outputs of all tokens, given the states before the waiting pieces, `[waiting, *state]`."""
        ...

    def kept(self) -> tuple[Tensor, ...]:
        """Return what `forward` computed and `backward` would compute again, for `LinearKernel.prepare`; or nothing."""
        ...

    def start_gradients(self, grad_out: Tensor, slots: Slots) -> Tensor:
        """Return the gradients of the waiting pieces' states through these pieces' outputs, `[size, *state]`."""
        ...

    def backward(self, starts: Tensor, grad_out: Tensor, grad_ends: Tensor) -> Inputs:
        """Return the gradients of all inputs, given also those of the exporting pieces' last states."""
        ...


class LinearKernel(Protocol):
    """An implementation of recurrences."""

    name: str

    def refusal(self, recurrence: Recurrence, inputs: Inputs) -> str | None:
        """Return why the kernel cannot compute this on this machine; None: it can.

        Args:
            recurrence: The recurrence.
            inputs: Tensors `[batch, tokens, ...]`; only shapes, dtypes and devices are read.
        """
        ...

    def prepare(
        self, recurrence: Recurrence, inputs: Inputs, pieces: Pieces, kept: tuple[Tensor, ...] = ()
    ) -> PreparedScan:
        """Return the recurrence over inputs `[tokens, ...]` of a flat batch.

        Args:
            recurrence: The recurrence.
            inputs: Its inputs.
            pieces: The pieces of the flat batch.
            kept: In backward, what `PreparedScan.kept` returned after the forward pass.
        """
        ...


@contextmanager
def _without_tf32(tensor: Tensor) -> Iterator[None]:
    """Return a context in which matrix products are not in TF32: an error of a state reaches all later tokens."""
    if not tensor.is_cuda:
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
