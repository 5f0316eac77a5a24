"""The causal convolution over a group of ranks: each link gets the last tokens before it, its halo.

A halo may come from several links, where links are shorter than the convolution. All ranks gather the tails of all
links, and in backward the gradients of all halos: a few tokens, whatever the length of the sequence. A checkpoint that
keeps attention keeps the halos, and its recompute exchanges nothing.
"""

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from bmburst.attention.options import require_no_transform
from bmburst.comm.checks import call_number, in_backward_of
from bmburst.comm.waits import traced
from bmburst.errors import UserError
from bmburst.linear.call import ConvCall, as_result
from bmburst.recompute import keep
from bmburst_ops.autocast import no_autocast
from bmburst_ops.errors import first_order
from bmburst_ops.flash.inputs import DeviceVectors, copy_to_device
from bmburst_ops.linear.conv import causal_conv, causal_conv_gradients
from bmburst_ops.merge import accumulation_dtype


class SequenceConv(torch.autograd.Function):
    """`(call, x, weight, bias or None, initial or None) -> (out, final or None)`.

    x and out are `[batch, local_tokens, channels]`, the weight `[channels, width]`, the bias `[channels]`, and the
    initial and final tokens `[batch, width - 1, channels]`.
    """

    @staticmethod
    def forward(
        ctx: Any, call: ConvCall, x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Convolve; when a checkpoint recomputes, take the halos that it kept."""
        with no_autocast(x.device.type), traced("convolution forward"):
            halos, *final = keep(partial(_halos, call, x, weight.shape[1] - 1, initial))
            out = causal_conv(x.flatten(0, 1), halos, weight, bias, call.pieces, call.activation)
        ctx.save_for_backward(x, weight, bias, halos)
        ctx.call, ctx.initial_dtype = call, None if initial is None else initial.dtype
        ctx.number = call_number(call.comm)
        ctx.set_materialize_grads(False)
        return as_result(out, x.shape), final[0] if final else None

    @staticmethod
    @first_order(UserError)
    def backward(ctx: Any, grad_out: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight, bias and the initial tokens."""
        require_no_transform("the output's gradient", grad_out, grad_final)
        x, weight, bias, halos = ctx.saved_tensors
        call: ConvCall = ctx.call
        with no_autocast(x.device.type), traced("convolution backward"), in_backward_of(ctx.number):
            grad = x.new_zeros(1).expand_as(x) if grad_out is None else grad_out
            of_x, of_halos, of_weight, of_bias = causal_conv_gradients(
                grad.flatten(0, 1), x.flatten(0, 1), halos, weight, bias, call.pieces, call.activation
            )
            of_x = of_x.view_as(x)
            of_initial = _return_halos(call, of_x, of_halos, grad_final)
        given_initial = None if ctx.initial_dtype is None else of_initial.to(ctx.initial_dtype)
        return None, of_x, of_weight, of_bias, given_initial


def _halos(call: ConvCall, x: Tensor, width: int, initial: Tensor | None) -> tuple[Tensor, ...]:
    """Return the halos of this rank's waiting pieces, `[waiting, width, channels]`, and the final tokens if used."""
    chain = call.chain
    tails = x.new_zeros((chain.slots, len(x), width, x.shape[2]))
    for link in _own_tails(call, width):
        tails[link.slot, :, width - link.tokens :] = x[:, link.offset : link.offset + link.tokens]
    rows = [call.gathered(tails).flatten(0, 3), *(() if initial is None else (initial.to(x.dtype).flatten(0, 1),))]
    all_rows = torch.cat([*rows, x.new_zeros((1, x.shape[2]))])  # the last row is of a token of no document
    _, *found = _halo_places(call, width, len(all_rows), x.device)
    sizes = len(call.pieces.waiting), len(x)
    return tuple(
        as_result(all_rows.index_select(0, places), (size, width, x.shape[2]))
        for places, size in zip(found, sizes, strict=False)  # without final tokens there is one
    )


def _return_halos(call: ConvCall, of_x: Tensor, of_halos: Tensor, grad_final: Tensor | None) -> Tensor:
    """Add the gradients of halos to those of their tokens, in place, and return those of the initial tokens."""
    chain, width, channels = call.chain, of_halos.shape[1], of_x.shape[2]
    slots = call.in_slots(call.places(of_halos.device).waiting, of_halos, extra=chain.has_final)
    if grad_final is not None:
        slots[-1] = grad_final.to(slots.dtype)
    arrived = call.gathered(slots).to(accumulation_dtype(of_x.dtype))
    tails = (chain.size, chain.slots, len(of_x), width)
    rows = arrived.new_zeros((chain.size * chain.slots * len(of_x) * width + len(of_x) * width + 1, channels))
    of_links, _, *final = _halo_places(call, width, len(rows), rows.device)
    rows.index_add_(0, of_links, torch.stack(call.of_links(arrived)).flatten(0, -2))
    for places in final:
        rows.index_add_(0, places, arrived[:, -1].sum(0).flatten(0, -2))
    own = rows[: -len(of_x) * width - 1].view(*tails, channels)[call.comm.rank]
    for link in _own_tails(call, width):
        of_x[:, link.offset : link.offset + link.tokens] += own[link.slot, :, width - link.tokens :].to(of_x.dtype)
    return rows[-len(of_x) * width - 1 : -1].view(len(of_x), width, channels) * call.is_first


def _halo_places(call: ConvCall, width: int, rows: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return the rows of the halos of all links, and of this rank's waiting pieces, and of the final tokens if used.

    Args:
        call: The call.
        width: Tokens of a halo.
        rows: Number of rows: tails, initial tokens if given, and one for tokens of no document.
        device: Device of the result.
    """
    return _sent_halo_places(call, width, rows, device).here()


@lru_cache(maxsize=64)
def _sent_halo_places(call: ConvCall, width: int, rows: int, device: torch.device) -> DeviceVectors:
    chain = call.chain
    halos, pieces = chain.halos(width), [call.own[number] for number in call.pieces.waiting]
    own = halos[[piece.link for piece in pieces], [piece.sample for piece in pieces]]
    final = (chain.final_halo(width),) if chain.has_final else ()
    return copy_to_device([each % rows for each in (halos, own, *final)], device, torch.int64)


def _own_tails(call: ConvCall, width: int) -> list[Any]:
    """Return this rank's links, cut to their last `width` tokens."""
    links = [call.chain.links[number] for number in call.chain.own_links(call.comm.rank)]
    return [
        link._replace(offset=link.offset + max(0, link.tokens - width), tokens=min(link.tokens, width))
        for link in links
    ]
