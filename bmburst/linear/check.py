"""Checks of inputs and options of recurrent layers over ranks, and the calls that they make."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from bmburst.amounts import require_flag, short_text
from bmburst.attention.options import (
    MaskOption,
    gradient_signature,
    require_numbers,
    require_own_memory,
    require_tensor,
)
from bmburst.comm.checks import CheckedCommunicator, describe_tensors
from bmburst.comm.transports import device_name
from bmburst.errors import UserError, require_known
from bmburst.linear.call import ConvCall, ScanCall
from bmburst.schedule.chain import Chain, make_chain
from bmburst.schedule.cost import LinearCost
from bmburst.schedule.documents import Documents
from bmburst.schedule.hardware import hardware_like
from bmburst.schedule.layout import LAYOUTS, make_layout, real_length
from bmburst.schedule.mask import Causal, Mask, sample_masks
from bmburst_ops.bounded_cache import bounded_cache
from bmburst_ops.errors import KernelError
from bmburst_ops.linear import LinearKernel, Recurrence, select_kernel

Shapes = Mapping[str, tuple[int | None, ...]]
"""The shape of each tensor that a call must have; None: any number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceOptions:
    """How a sequence is split, and what comes before and after it.

    Attributes:
        length: Real tokens of the whole sequence; None: those that each mask is made for, else all.
        mask: "causal", `Causal` or `Documents`; or one for each sample.
        layout: Which global positions the local tokens have.
        kernel: The kernel's name; not used by convolutions.
        has_initial: Whether an initial state is given.
        has_final: Whether the final state is returned.
    """

    length: int | None
    mask: MaskOption
    layout: str
    has_initial: bool
    has_final: bool
    kernel: str = "auto"

    def chain(self, size: int, batch: int, tokens: int) -> Chain:
        """Return the chain of `batch` sequences of `tokens` local tokens over `size` ranks.

        Raises:
            UserError: An option is unknown, or a mask does not fit.
        """
        require_flag("final_state", self.has_final)
        require_known("layout", self.layout, LAYOUTS)
        masks = self._masks(batch, alike=self.layout == "balanced" and size > 1)
        lengths = tuple(
            real_length(size, tokens, mask.length if self.length is None else self.length) for mask in masks
        )
        for mask, length in zip(masks, lengths, strict=True):
            mask.require(length)
        layout = make_layout(self.layout, size, tokens, masks[0], lengths[0])
        starts = tuple(mask.starts for mask in masks)
        return make_chain(layout, lengths, starts, has_initial=self.has_initial, has_final=self.has_final)

    def _masks(self, batch: int, *, alike: bool) -> tuple[Mask, ...]:
        """Return the mask of each sample."""
        given = self.mask if isinstance(self.mask, tuple) else (self.mask,) * batch
        masks = sample_masks(given, batch, alike=alike)
        for mask in masks:
            is_documents = isinstance(mask, Documents) and mask.causal and mask.key_lengths is None
            if not isinstance(mask, Causal) and not is_documents:
                raise UserError(
                    f"a recurrent layer cannot have the mask {short_text(str(mask))}: "
                    "its state holds all earlier tokens\n"
                    "allowed: 'causal', or causal bmburst.Documents\nfix: mask='causal'"
                )
        return masks

    def __str__(self) -> str:
        masks = self.mask if isinstance(self.mask, tuple) else (self.mask,)
        return "\n".join(
            [
                f"length {self.length}",
                f"documents {'; '.join(map(str, masks))}",
                f"layout {self.layout}",
                f"kernel {self.kernel}",
                f"initial_state {self.has_initial}",
                f"final_state {self.has_final}",
            ]
        )


def require_shapes(tensors: Mapping[str, Tensor], shapes: Shapes, words: Mapping[str, str]) -> None:
    """Check types, shapes, dtypes and devices of one rank's inputs. The first one decides on the device.

    Args:
        tensors: The inputs by name.
        shapes: Their shapes by name.
        words: Their shapes in words, for messages.

    Raises:
        UserError: A tensor is not as its entry says.
    """
    device: torch.device | None = None
    for name, tensor in tensors.items():
        require_tensor(name, tensor, words[name])
        require_own_memory(name, tensor)
        require_numbers(name, tensor)
        wanted = shapes[name]
        fits = tensor.dim() == len(wanted) and all(w in (None, n) for w, n in zip(wanted, tensor.shape, strict=True))
        if not fits or any(n == 0 and w != 0 for w, n in zip(wanted, tensor.shape, strict=True)):
            numbers = ", ".join("any" if n is None else str(n) for n in wanted)
            raise UserError(
                f"{name} must be {words[name]}, got shape {list(tensor.shape)}\nallowed: [{numbers}], at least 1 each\n"
                "fix: the same batch and local tokens in all inputs"
            )
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise UserError(
                f"{name} must be a floating-point tensor of at least 16 bits, got {tensor.dtype}\n"
                "fix: convert it before the call"
            )
        device = device or tensor.device
        if tensor.device != device:
            raise UserError(f"{name} is on {tensor.device}, but {next(iter(tensors))} on {device}\nfix: move it there")


def require_device(comm: CheckedCommunicator, name: str, tensor: Tensor) -> None:
    """Raise UserError unless the group can move tensors like this one."""
    if comm.size > 1 and tensor.device.type != comm.device.type:
        raise UserError(
            f"the group moves {comm.device.type} tensors by {comm.transport}, but {name} is on {tensor.device}\n"
            f"fix: move the inputs to {comm.device.type}, or use a group made for {tensor.device.type}"
        )


def scan_call(
    comm: CheckedCommunicator,
    recurrence: Recurrence,
    inputs: Mapping[str, Tensor],
    initial: Tensor | None,
    options: SequenceOptions,
) -> tuple[ScanCall, str]:
    """Return the call of a recurrence, and its signature for `CheckedCommunicator.decided`.

    Args:
        comm: The group.
        recurrence: The recurrence.
        inputs: Its inputs by name, checked, `[batch, local_tokens, ...]`.
        initial: The state before the first token, checked, or None.
        options: The sequence.

    Raises:
        UserError: An option is not supported.
    """
    name, first = next(iter(inputs.items()))
    require_device(comm, name, first)
    tensors = tuple(inputs.values())
    chain = options.chain(comm.size, *first.shape[:2])
    try:
        kernel = select_kernel(options.kernel, recurrence, tensors)
    except KernelError as error:
        raise UserError(str(error)) from None
    hops = choose_hops(comm, chain, recurrence, tensors)
    call = _scan_call(comm, chain, recurrence, kernel, hops, options.has_initial)
    described = {**inputs, **({} if initial is None else {"initial_state": initial})}
    return call, signature(f"recurrence {recurrence.kind}", comm, described, f"{recurrence}\n{options}")


def conv_call(
    comm: CheckedCommunicator, inputs: Mapping[str, Tensor], options: SequenceOptions, activation: str | None
) -> tuple[ConvCall, str]:
    """Return the call of a convolution, and its signature, as `scan_call`; UserError for an unsupported option."""
    require_device(comm, "x", inputs["x"])
    chain = options.chain(comm.size, *inputs["x"].shape[:2])
    call = _conv_call(comm, chain, activation, options.has_initial)
    return call, signature("causal convolution", comm, inputs, f"activation {activation}\n{options}")


def choose_hops(comm: CheckedCommunicator, chain: Chain, recurrence: Recurrence, inputs: tuple[Tensor, ...]) -> int:
    """Return 1 or 2, whichever exchange of summaries is faster; see `bmburst.linear.fold`.

    Args:
        comm: The group.
        chain: The links.
        recurrence: The recurrence.
        inputs: Its inputs, `[batch, local_tokens, ...]`.
    """
    if not chain.exchanges:
        return 1
    flat, itemsize = tuple(t[0] for t in inputs), recurrence.state_dtype(inputs).itemsize
    cost = LinearCost(
        size=comm.size,
        links=chain.slots * len(chain.starts),
        transition=itemsize * prod(recurrence.transition_shape(flat)),
        state=itemsize * prod(recurrence.state_shape(flat)),
        samples=len(chain.starts) * chain.has_final,
    )
    return cost.hops(hardware_like(device_name(comm)))


@bounded_cache(maxsize=64)
def _scan_call(
    comm: CheckedCommunicator, chain: Chain, recurrence: Recurrence, kernel: LinearKernel, hops: int, has_initial: bool
) -> ScanCall:
    return ScanCall(comm=comm, chain=chain, recurrence=recurrence, kernel=kernel, hops=hops, has_initial=has_initial)


@bounded_cache(maxsize=64)
def _conv_call(comm: CheckedCommunicator, chain: Chain, activation: str | None, has_initial: bool) -> ConvCall:
    return ConvCall(comm=comm, chain=chain, activation=activation, has_initial=has_initial)


def signature(name: str, comm: CheckedCommunicator, inputs: Mapping[str, Tensor], facts: str) -> str:
    """Return the text of a call that must be equal on every rank; none where the ranks do not compare it.

    Args:
        name: The name of the call.
        comm: The group.
        inputs: Its inputs by name, checked.
        facts: A line for each other value.
    """
    if not comm.active:
        return ""
    described = [f"{key} {describe_tensors(tensor)}" for key, tensor in inputs.items()]
    return "\n".join([name, *described, facts, gradient_signature(*inputs.values())])
