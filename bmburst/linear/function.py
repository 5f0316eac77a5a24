"""A recurrence over a group of ranks as one autograd function, with activation checkpointing.

Forward: each rank summarizes its pieces, the summaries are folded over the ranks, and each rank scans its pieces from
the states that it got. Backward mirrors it: gradients of these states through the rank's own outputs, a fold from the
last link to the first, and the local backward with the gradients of the last states. All states are exact, so gradients
are. A checkpoint that keeps attention keeps the outputs, the states and M: its recompute exchanges nothing.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from bmburst.attention.options import require_no_transform
from bmburst.comm.checks import call_number, in_backward_of
from bmburst.comm.waits import traced
from bmburst.errors import UserError
from bmburst.linear.call import ScanCall, as_result
from bmburst.linear.fold import fold_backward, fold_forward
from bmburst.recompute import keep
from bmburst_ops.autocast import no_autocast
from bmburst_ops.errors import first_order


class SequenceScan(torch.autograd.Function):
    """`(call, initial or None, *inputs) -> (out, final or None)`.

    Inputs are `[batch, local_tokens, ...]`, states `[batch, *state]`.
    """

    @staticmethod
    def forward(ctx: Any, call: ScanCall, initial: Tensor | None, *inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scan; when a checkpoint recomputes, return the results that it kept."""
        with no_autocast(inputs[0].device.type), traced("recurrence forward"):
            out, starts, transitions, *others = keep(partial(_forward, call, initial, inputs))
        final, kept = (others[:1], others[1:]) if call.chain.has_final else ([], others)
        ctx.save_for_backward(*inputs, starts, transitions, *kept)
        ctx.call, ctx.inputs, ctx.initial_dtype = call, len(inputs), None if initial is None else initial.dtype
        ctx.number = call_number(call.comm)
        ctx.set_materialize_grads(False)
        return out, final[0] if final else None

    @staticmethod
    @first_order(UserError)
    def backward(ctx: Any, grad_out: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the initial state and of the inputs."""
        require_no_transform("the output's gradient", grad_out, grad_final)
        call: ScanCall = ctx.call
        saved = ctx.saved_tensors
        inputs, (starts, transitions, *kept) = saved[: ctx.inputs], saved[ctx.inputs :]
        with no_autocast(inputs[0].device.type), traced("recurrence backward"), in_backward_of(ctx.number):
            flat = _flat(inputs)
            scan = call.kernel.prepare(call.recurrence, flat, call.pieces, tuple(kept))
            grad = _values(call, inputs).new_zeros(1) if grad_out is None else grad_out
            grad = grad.expand(_values(call, inputs).shape).flatten(0, 1).contiguous()
            if grad_final is not None:
                grad_final = grad_final.to(starts.dtype)
            ends, initial = fold_backward(call, transitions, scan.start_gradients(grad, call.sent_back), grad_final)
            grads = scan.backward(starts, grad, ends)
        shaped = (each.view_as(x).to(x.dtype) for each, x in zip(grads, inputs, strict=True))
        return None, None if initial is None else initial.to(ctx.initial_dtype), *shaped


def _forward(call: ScanCall, initial: Tensor | None, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return outputs, states before the waiting pieces, M of the links, the final state if there is one, and `kept`."""
    flat = _flat(inputs)
    scan = call.kernel.prepare(call.recurrence, flat, call.pieces)
    folded = fold_forward(call, flat, scan.summary(call.sent), initial)
    out = as_result(scan.forward(folded.starts), _values(call, inputs).shape)
    final = () if folded.final is None else (as_result(folded.final, folded.final.shape),)
    return out, folded.starts, folded.transitions, *final, *scan.kept()


def _values(call: ScanCall, inputs: Any) -> Tensor:
    """Return the input that the output is shaped and typed like."""
    found: Tensor = inputs[1] if call.recurrence.kind == "scan" else inputs[2]
    return found


def _flat(inputs: Any) -> tuple[Tensor, ...]:
    """Return `[batch * local_tokens, ...]`, dense."""
    return tuple(tensor.flatten(0, 1).contiguous() for tensor in inputs)
