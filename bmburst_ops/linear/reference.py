"""The definition of each recurrence in plain torch: a loop over tokens, in fp32 or in the inputs' dtype if it is wider.

It runs on any device and is the kernel of CPUs. Gradients come from autograd on 64 tokens at a time, so memory does not
hold the states of all tokens.
"""

import torch
from torch import Tensor

from bmburst_ops.linear.kernel import EPSILON, Inputs, Pieces, Recurrence, Slots

SEGMENT = 64
"""Tokens whose states autograd keeps at once."""


class ReferenceKernel:
    """See `bmburst_ops.linear.kernel.LinearKernel`."""

    name = "reference"

    def refusal(self, recurrence: Recurrence, inputs: Inputs) -> str | None:
        """See `LinearKernel.refusal`; it supports everything."""
        del recurrence, inputs
        return None

    def prepare(
        self, recurrence: Recurrence, inputs: Inputs, pieces: Pieces, kept: tuple[Tensor, ...] = ()
    ) -> "ReferenceScan":
        """See `LinearKernel.prepare`."""
        del kept
        return ReferenceScan(recurrence, inputs, pieces)


class ReferenceScan:
    """See `bmburst_ops.linear.kernel.PreparedScan`."""

    def __init__(self, recurrence: Recurrence, inputs: Inputs, pieces: Pieces) -> None:
        self._recurrence, self._inputs, self._pieces = recurrence, inputs, pieces
        self._dtype = recurrence.state_dtype(inputs)
        self._waiting = {number: i for i, number in enumerate(pieces.waiting)}
        self._exporting = {number: i for i, number in enumerate(pieces.exporting)}

    def summary(self, slots: Slots) -> Tensor:
        """See `PreparedScan.summary`."""
        found = self._recurrence.new_summaries(self._inputs, slots.size)
        transitions, ends = self._recurrence.summary_views(self._inputs, found)
        for number, place in zip(self._pieces.exporting, slots.places, strict=True):
            inputs = self._cut(number)
            transitions[place] = transition(self._recurrence, inputs)
            ends[place] = run(self._recurrence, inputs, self._zero())[1]
        return found

    def forward(self, starts: Tensor) -> Tensor:
        """See `PreparedScan.forward`."""
        values = self._inputs[1 if self._recurrence.kind == "scan" else 2]
        out = torch.zeros_like(values, memory_format=torch.contiguous_format)
        for number in self._real():
            out[self._pieces.span(number)] = run(self._recurrence, self._cut(number), self._start(starts, number))[0]
        return out

    def kept(self) -> tuple[Tensor, ...]:
        """See `PreparedScan.kept`: nothing, the states inside of pieces are not kept."""
        return ()

    def start_gradients(self, grad_out: Tensor, slots: Slots) -> Tensor:
        """See `PreparedScan.start_gradients`."""
        found = self._new(slots.size, *self._recurrence.state_shape(self._inputs))
        for number, place in zip(self._pieces.waiting, slots.places, strict=True):
            inputs, grad = self._cut(number), grad_out[self._pieces.span(number)].to(self._dtype)
            state_grad = self._zero()
            for part in reversed(_segments(len(grad))):
                start = self._zero().requires_grad_()  # outputs are affine in the state: any value gives the gradient
                with torch.enable_grad():
                    results = run(self._recurrence, tuple(t[part] for t in inputs), start)
                (state_grad,) = torch.autograd.grad(results, start, (grad[part], state_grad))
            found[place] = state_grad
        return found

    def backward(self, starts: Tensor, grad_out: Tensor, grad_ends: Tensor) -> Inputs:
        """See `PreparedScan.backward`."""
        grads = tuple(torch.zeros_like(t, memory_format=torch.contiguous_format) for t in self._inputs)
        for number in self._real():
            span = self._pieces.span(number)
            end = self._exporting.get(number)
            grad_end = self._zero() if end is None else grad_ends[end]
            found = _gradients(
                self._recurrence,
                self._cut(number),
                self._start(starts, number),
                grad_out[span].to(self._dtype),
                grad_end,
            )
            for grad, one in zip(grads, found, strict=True):
                grad[span] = one
        return grads

    def _real(self) -> list[int]:
        return [number for number in range(len(self._pieces.edges) - 1) if number not in self._pieces.padding]

    def _cut(self, number: int) -> Inputs:
        return tuple(tensor[self._pieces.span(number)].to(self._dtype) for tensor in self._inputs)

    def _start(self, starts: Tensor, number: int) -> Tensor:
        place = self._waiting.get(number)
        return self._zero() if place is None else starts[place]

    def _zero(self) -> Tensor:
        return self._new(*self._recurrence.state_shape(self._inputs))

    def _new(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self._dtype, device=self._inputs[0].device)


def run(recurrence: Recurrence, inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs `[tokens, ...]` and the last state.

    Args:
        recurrence: The recurrence.
        inputs: Tensors `[tokens, ...]` in the dtype of the state.
        state: The state before the first token.
    """
    if recurrence.kind == "scan":
        a, b = inputs
        return _scanned(a, b, state)
    q, k, v, g, *beta = inputs
    repeats = v.shape[1] // k.shape[1]
    if recurrence.normalize:
        q, k = _normalized(q), _normalized(k)
    q, k = (t.repeat_interleave(repeats, 1) for t in (q, k))
    decay = (g if g.dim() == 3 else g[..., None]).exp()[..., None]  # [tokens, heads, key_dim or 1, 1]
    outs: list[Tensor] = []
    for t in range(len(v)):
        state = decay[t] * state
        value = beta[0][t, :, None] * (v[t] - _read(state, k[t])) if beta else v[t]
        state = state + k[t][..., None] * value[:, None]
        outs.append(_read(state, q[t]))
    return recurrence.scale * torch.stack(outs), state


def transition(recurrence: Recurrence, inputs: Inputs) -> Tensor:
    """Return M of some tokens; the state after them is `M S + U`. Arguments as in `run`."""
    if recurrence.kind == "scan":
        return inputs[0].prod(0)
    q, k, v, g, *beta = inputs
    if not beta:
        return g.sum(0).exp()[:, None, None]
    key_dim = k.shape[2]
    unit = torch.eye(key_dim, dtype=v.dtype, device=v.device).expand(v.shape[1], key_dim, key_dim)
    return run(recurrence, (q, k, v.new_zeros(*v.shape[:2], key_dim), g, *beta), unit)[1]


def _scanned(a: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    outs: list[Tensor] = []
    for t in range(len(b)):
        state = a[t] * state + b[t]
        outs.append(state)
    return torch.stack(outs), state


def _read(state: Tensor, key: Tensor) -> Tensor:
    """Return `S^T k` of every head: state `[heads, key_dim, value_dim]`, key `[heads, key_dim]`."""
    return (state * key[..., None]).sum(1)


def _normalized(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt()


def _segments(tokens: int) -> list[slice]:
    return [slice(begin, min(begin + SEGMENT, tokens)) for begin in range(0, tokens, SEGMENT)]


def _gradients(recurrence: Recurrence, inputs: Inputs, start: Tensor, grad_out: Tensor, grad_end: Tensor) -> Inputs:
    """Return the gradients of the inputs of one piece."""
    segments = _segments(len(grad_out))
    states = [start]
    for part in segments[:-1]:
        states.append(run(recurrence, tuple(t[part] for t in inputs), states[-1])[1])
    found: list[Inputs] = []
    for part, state in zip(reversed(segments), reversed(states), strict=True):
        leaves = [t[part].detach().requires_grad_() for t in inputs] + [state.detach().requires_grad_()]
        with torch.enable_grad():
            results = run(recurrence, tuple(leaves[:-1]), leaves[-1])
        *grads, grad_end = torch.autograd.grad(results, leaves, (grad_out[part], grad_end))
        found.append(tuple(grads))
    return tuple(torch.cat(parts[::-1]) for parts in zip(*found, strict=True))
