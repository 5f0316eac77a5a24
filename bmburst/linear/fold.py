"""Exchange and fold of summaries: which state each link of a chain begins with, and the gradient that it ends with.

Forward, a rank sends M and U of its links, and gets the state before each of them. Backward, it sends the gradient of
each of these states through the link's own outputs, and gets the gradient of the state after each link. M stays where
it was folded. Bytes depend on heads and links, not on tokens. There are two ways:

- one hop: every rank gets all summaries and folds them for itself;
- two hops: rank r gets the summaries of its share of the heads, folds these, and sends the states to the ranks of the
  links. Heads are independent of each other. It receives about 1/ranks of the bytes, and keeps as much less of M.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from bmburst.linear.call import ScanCall


@dataclass(frozen=True, slots=True)
class Folded:
    """What the fold of a forward pass gives a rank.

    Attributes:
        starts: States before its waiting pieces, `[waiting, *state]`.
        transitions: M of all slots, or of this rank's share of their heads: `[ranks, slots, samples, heads, ...]`. For
            backward.
        final: The state after the last token, `[samples, *state]`; None unless the chain has it.
    """

    starts: Tensor
    transitions: Tensor
    final: Tensor | None


def fold_forward(call: ScanCall, transitions: Tensor, ends: Tensor, initial: Tensor | None) -> Folded:
    """Return the states before this rank's waiting pieces.

    Args:
        call: The call.
        transitions: M of this rank's exporting pieces, `[exporting, heads, ...]`.
        ends: U of these pieces, `[exporting, heads, ...]`.
        initial: States before the first token, `[samples, heads, ...]`, or None.
    """
    if not call.has_states:
        return Folded(ends, transitions, None)
    chain, hops, places = call.chain, _Hops(call, ends.shape[1]), call.places(ends.device)
    summaries = hops.out(call.in_slots(places.exporting, _joined(transitions, ends)))
    flat_m, flat_u = summaries.split([prod(transitions.shape[2:]), prod(ends.shape[2:])], -1)
    # M is a copy: it is kept for backward, without U.
    kept = flat_m.contiguous().view(*flat_m.shape[:-1], *transitions.shape[2:])
    m, u = call.of_links(kept), call.of_links(flat_u.view(*flat_u.shape[:-1], *ends.shape[2:]))
    state = None if initial is None else hops.own_heads(initial)  # None is zero
    before: list[Tensor | None] = []
    for k, link in enumerate(u):
        held = _where(chain.continues[k], places.continues, k, state)
        before.append(held)
        passing = chain.passing(k)
        passed = call.recurrence.act(m[k], held) if held is not None and any(passing) else None
        passed = _where(passing, places.passing, k, passed)
        state = link if passed is None else link + passed
    states = hops.back(before, [state] if chain.has_final else [], like=u[0])
    final = states[-1] if chain.has_final else None
    return Folded(states.flatten(0, 1).index_select(0, places.waiting), kept, final)


def fold_backward(
    call: ScanCall, transitions: Tensor, start_grads: Tensor, final_grad: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the states after this rank's exporting pieces, and of the initial state.

    Args:
        call: The call.
        transitions: `Folded.transitions`.
        start_grads: Gradients of the states before this rank's waiting pieces through these pieces' own outputs,
            `[waiting, heads, ...]`.
        final_grad: This rank's gradient of the final state, `[samples, heads, ...]`; None if the chain has none.

    Returns:
        The first `[exporting, heads, ...]`, the second `[samples, heads, ...]`: on the rank of the first link, zero on
        the others, None without an initial state.
    """
    if not call.has_states:
        return start_grads, None
    chain, hops, places = call.chain, _Hops(call, start_grads.shape[1]), call.places(start_grads.device)
    slots = call.in_slots(places.waiting, start_grads, extra=chain.has_final)
    if final_grad is not None:
        slots[-1] = final_grad
    arrived = hops.out(slots)
    grad = arrived[:, -1].sum(0) if chain.has_final else None  # None is zero
    own, m = call.of_links(arrived), call.of_links(transitions)
    after: list[Tensor | None] = []
    for k in reversed(range(len(chain.links))):
        after.append(grad)
        passing = chain.passing(k)
        passed = call.recurrence.act_transposed(m[k], grad) if grad is not None and any(passing) else None
        passed = _where(passing, places.passing, k, passed)
        grad = _where(chain.continues[k], places.continues, k, own[k] if passed is None else own[k] + passed)
    states = hops.back(after[::-1], [grad] if call.has_initial else [], like=own[0])
    initial_grad = states[-1] * call.is_first if call.has_initial else None
    return states.flatten(0, 1).index_select(0, places.exporting), initial_grad


class _Hops:
    """The exchange of a call: to where states are folded, and back.

    Args:
        call: The call.
        heads: Independent parts of a state.
    """

    def __init__(self, call: ScanCall, heads: int) -> None:
        self._call, self._heads = call, heads
        self._comm, self._chain = call.comm, call.chain
        self._share = -(-heads // self._comm.size) if call.hops == 2 else heads

    def out(self, slots: Tensor) -> Tensor:
        """Return all ranks' tensors, `[ranks, slots, samples, own heads, ...]`, given this rank's without `ranks`."""
        if self._call.hops == 1:
            return self._call.gathered(slots)
        (arrived,) = self._comm.all_to_all(self._by_share(slots, 2).movedim(2, 0)).wait()
        return arrived

    def back(self, links: Sequence[Tensor | None], extra: Sequence[Tensor | None], like: Tensor) -> Tensor:
        """Return this rank's slots, `[slots, samples, heads, ...]`.

        Args:
            links: A tensor for each link, `[samples, own heads, ...]`; None: zeros.
            extra: Tensors for every rank; they follow as further slots.
            like: A tensor shaped and typed as they are.
        """
        places = [(link.rank, link.slot) for link in self._chain.links]
        found = dict(zip(places, links, strict=True))
        ranks = range(self._comm.size) if self._call.hops == 2 else (self._comm.rank,)
        given = [t for rank in ranks for t in (*(found.get((rank, i)) for i in range(self._chain.slots)), *extra)]
        zero = torch.zeros_like(like) if any(t is None for t in given) else like
        slots = torch.stack([zero if t is None else t for t in given])
        if self._call.hops == 1:
            return slots
        (arrived,) = self._comm.all_to_all(slots.unflatten(0, (len(ranks), -1))).wait()
        return arrived.movedim(0, 2).flatten(2, 3)[:, :, : self._heads]  # of [ranks of heads, slots, samples, share]

    def own_heads(self, state: Tensor) -> Tensor:
        """Return the heads of `[samples, heads, ...]` that this rank folds."""
        return state if self._call.hops == 1 else self._by_share(state, 1)[:, self._comm.rank]

    def _by_share(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the tensor with heads, in dimension `dim`, as `[ranks, share]`; missing heads are zero."""
        missing = self._share * self._comm.size - self._heads
        if missing:
            shape = (*tensor.shape[:dim], missing, *tensor.shape[dim + 1 :])
            tensor = torch.cat([tensor, tensor.new_zeros(shape)], dim)
        split: Tensor = tensor.unflatten(dim, (self._comm.size, self._share))
        return split


def _joined(transitions: Tensor, ends: Tensor) -> Tensor:
    """Return M and U side by side, `[pieces, heads, numbers]`."""
    flat = [part.reshape(*part.shape[:2], prod(part.shape[2:])) for part in (transitions, ends)]
    return torch.cat(flat, 2)


def _where(flags: Sequence[bool], on_device: Tensor, link: int, tensor: Tensor | None) -> Tensor | None:
    """Return `[samples, ...]` with zeros for samples without a flag, whatever numbers they had; None if all are zero.

    Args:
        flags: A flag of each sample.
        on_device: The flags of all links and samples.
        link: Number of the link.
        tensor: The numbers; None: zeros.
    """
    if tensor is None or not any(flags):
        return None
    if all(flags):
        return tensor
    hidden = on_device[link * len(flags) : (link + 1) * len(flags)] == 0
    return tensor.masked_fill(hidden.view(-1, *[1] * (tensor.dim() - 1)), 0)
