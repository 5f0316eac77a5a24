"""One attention over a group of ranks, decided: everything the executor needs, checked."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bmburst.comm.checks import Checked, describe
from bmburst.errors import UserError, unknown
from bmburst.layout import Layout, make_layout
from bmburst.schedule import MASKS, AttentionShape, Mask, Schedule, Travellers, choose_travellers, make_schedule
from bmburst_ops.errors import KernelError
from bmburst_ops.flash import Kernel, select_kernel
from bmburst_ops.merge import accumulation_dtype

STRATEGIES = ("auto", "kv", "burst")
TRANSPORTS = ("auto", "gloo", "nccl", "threads")


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionOptions:
    """What a user may set on an attention; see `burst_attention` for the meaning of each."""

    mask: str = "causal"
    layout: str = "zigzag"
    length: int | None = None
    scale: float | None = None
    kernel: str = "auto"
    strategy: str = "auto"
    transport: str = "auto"
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """A checked attention: the executor only obeys it."""

    comm: Checked
    kernel: Kernel
    layout: Layout
    length: int
    mask: Mask
    scale: float
    backward_travellers: Travellers
    deterministic: bool

    def schedule(self, travellers: Travellers) -> Schedule:
        """Return this rank's schedule."""
        return make_schedule(self.layout, self.length, self.mask, self.comm.rank, travellers)


def decide(comm: Checked, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> AttentionCall:
    """Check the inputs and choose kernel and strategy.

    Raises:
        UserError: Something cannot work; where the group compares its ranks, on all of them.
    """
    try:
        call = _decide(comm, q, k, v, options)
    except (UserError, KernelError) as error:
        comm.agree("burst_attention", "", problem=str(error))
        raise UserError(str(error)) from None  # not reached: agree raises it
    settings = (call.length, options.mask, options.layout, call.scale, call.kernel.name, call.backward_travellers)
    comm.agree("burst_attention", f"q {describe(q)} k {describe(k)} v {describe(v)} {settings}")
    return call


def _decide(comm: Checked, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> AttentionCall:
    _require_tensors(comm, q, k, v)
    if options.mask not in MASKS:
        raise unknown("mask", options.mask, MASKS)
    if options.strategy not in STRATEGIES:
        raise unknown("strategy", options.strategy, STRATEGIES)
    if options.transport not in TRANSPORTS:
        raise unknown("transport", options.transport, TRANSPORTS)
    if options.transport not in ("auto", comm.transport):
        raise UserError(
            f"transport '{options.transport}' was asked for, but the group's tensors move by {comm.transport}\n"
            f"use transport='auto', or a group made for {options.transport}"
        )
    batch, tokens, heads, head_dim = q.shape
    layout = make_layout(options.layout, comm.size, tokens)
    length = comm.size * tokens if options.length is None else options.length
    if not 1 <= length <= comm.size * tokens:
        raise UserError(
            f"length is {length}, but {comm.size} ranks x {tokens} local tokens hold 1 to {comm.size * tokens}\n"
            "length is the number of real tokens of the whole sequence, over all ranks"
        )
    scale = head_dim**-0.5 if options.scale is None else options.scale
    if not scale > 0:
        raise UserError(f"scale must be a positive number, got {scale}")
    shape = AttentionShape(
        batch=batch, tokens=tokens, heads=heads, kv_heads=k.shape[2], head_dim=head_dim, itemsize=q.element_size()
    )
    asked: dict[str, Travellers] = {"kv": "kv", "burst": "q"}
    travellers = asked.get(options.strategy) or choose_travellers(shape, comm.size)
    return AttentionCall(
        comm=comm,
        kernel=select_kernel(options.kernel, q, k),
        layout=layout,
        length=length,
        mask="causal" if options.mask == "causal" else "full",
        scale=scale,
        backward_travellers=travellers,
        deterministic=options.deterministic,
    )


def _require_tensors(comm: Checked, q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4 or 0 in tensor.shape:
            raise UserError(f"{name} must be [batch, local_tokens, heads, head_dim], got shape {list(tensor.shape)}")
        if not tensor.is_floating_point() or tensor.dtype != q.dtype:
            raise UserError(f"q, k and v must share one floating-point dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
        if tensor.device != q.device:
            raise UserError(f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}")
    if k.shape != v.shape:
        raise UserError(f"k and v must have the same shape, got {list(k.shape)} and {list(v.shape)}")
    batch, tokens, heads, head_dim = q.shape
    if (k.shape[0], k.shape[1], k.shape[3]) != (batch, tokens, head_dim):
        raise UserError(
            f"k is {list(k.shape)} but q is {list(q.shape)}: batch, local_tokens and head_dim must be equal\n"
            "every rank holds the same local tokens of q, k and v"
        )
    if heads % k.shape[2]:
        raise UserError(
            f"{heads} query heads cannot share {k.shape[2]} key/value heads\nthe first must be a multiple of the second"
        )
    if comm.size > 1 and comm.transport == "nccl" and q.device.type != "cuda":
        raise UserError(
            f"the group's tensors move by nccl between GPUs, but q is on {q.device}\nmove q, k and v to the GPU"
        )


def statistics_dtype(q: Tensor) -> torch.dtype:
    """Return the dtype of log-sum-exp, delta and accumulated gradients: fp32, or q's if wider."""
    return accumulation_dtype(q.dtype)
