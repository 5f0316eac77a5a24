"""Options of attention, and checks of its input tensors and groups."""

from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from bmburst.amounts import require_flag, short_text
from bmburst.comm.checks import CheckedCommunicator
from bmburst.errors import UserError, require_known
from bmburst.schedule.layout import LAYOUTS
from bmburst.schedule.mask import Mask, make_mask
from bmburst.schedule.parallelism import STRATEGIES, TRANSPORTS
from bmburst_ops.errors import KernelError
from bmburst_ops.flash import NAMES, Kernel, Need, select_kernel

_FLOAT32 = torch.finfo(torch.float32)

MaskOption = Mask | str | tuple[Mask | str, ...]
"""A mask or its name, or one for each sample of a batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionOptions:
    """The options of an attention call; `burst_attention` explains each."""

    mask: MaskOption = "causal"
    layout: str = "zigzag"
    key_layout: str | None = None
    scale: float | None = None
    softcap: float | None = None
    kernel: str = "auto"
    strategy: str = "auto"
    transport: str = "auto"
    deterministic: bool = False

    def is_cross(self, key_length: int | None) -> bool:
        """Return whether a call with this `key_length` (None: not given) is cross-attention."""
        return key_length is not None or self.key_layout is not None

    def kernel_for(self, needs: frozenset[Need], q: Tensor, k: Tensor, v: Tensor) -> Kernel:
        """Return the kernel for these inputs and needs of a mask; UserError if none of that name supports them."""
        capped: frozenset[Need] = frozenset() if self.softcap is None else frozenset({"softcap"})
        try:
            return select_kernel(self.kernel, q, k, self.deterministic, needs | capped, v.shape[-1])
        except KernelError as error:
            raise UserError(str(error)) from None

    def validate(self) -> None:
        """Check the options that do not depend on tensors or ranks.

        Raises:
            UserError: A name is unknown, scale or softcap is not a positive number, or deterministic is not a bool.
        """
        if isinstance(self.mask, list):
            raise UserError(
                f"mask must be one mask or a tuple of masks, got a list of {len(self.mask)}\n"
                "allowed: a tuple with one mask for each sample\nfix: mask=tuple(masks)"
            )
        for mask in self.mask if isinstance(self.mask, tuple) else (self.mask,):
            make_mask(mask)
        require_known("layout", self.layout, LAYOUTS)
        if self.key_layout is not None:
            require_known("key_layout", self.key_layout, LAYOUTS)
        require_known("kernel", self.kernel, NAMES)
        require_known("strategy", self.strategy, STRATEGIES)
        require_known("transport", self.transport, TRANSPORTS)
        require_scale(self.scale)
        require_softcap(self.softcap)
        require_flag("deterministic", self.deterministic)


def require_scale(scale: float | None) -> None:
    """Raise UserError unless a factor on the scores is None or a positive number that float32 holds."""
    _require_positive("scale", scale, "None means 1 / sqrt(head_dim)")


def require_softcap(softcap: float | None) -> None:
    """Raise UserError unless a bound of the scores is None or a positive number that float32 holds."""
    _require_positive("softcap", softcap, "None, which leaves scores as they are")


def _require_positive(name: str, value: object, fix: str) -> None:
    """Check that a value is None or above 0 in the range of float32, in which kernels take it."""
    try:
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        fits = value is None or (is_number and _FLOAT32.tiny <= float(value) <= _FLOAT32.max)  # type: ignore[arg-type]
    except OverflowError:  # an int may be larger than any float
        fits = False
    if not fits:
        raise UserError(f"{name} must be a positive number that float32 holds, got {short_text(value)}\nfix: {fix}")


def scale_of(q: Tensor, scale: float | None) -> float:
    """Return the factor on the scores of queries `[..., head_dim]`: `scale`, or the default for None."""
    return q.shape[-1] ** -0.5 if scale is None else float(scale)


def require_tensor(name: str, value: object, shape: str) -> None:
    """Raise UserError unless an input of this shape, in words, is a dense tensor."""
    if not isinstance(value, Tensor):
        raise UserError(
            f"{name} must be a torch tensor, got {type(value).__name__}\n"
            f"allowed: {shape}\nfix: {name} = torch.as_tensor({name})"
        )
    require_dense(name, value)


def require_dense(name: str, tensor: Tensor) -> None:
    """Raise UserError for a nested or sparse tensor."""
    if tensor.layout != torch.strided or tensor.is_nested:
        raise UserError(f"{name} must be a dense tensor, got a nested or sparse one\nfix: a padded, dense tensor")


def require_own_memory(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that wraps other tensors, such as torch's DTensor or one in `torch.vmap`: it owns no memory.

    Raises:
        UserError: The tensor wraps other tensors, a transform of torch.func runs, or forward-mode AD.
    """
    require_no_transform(name, tensor)
    if type(tensor) is not Tensor and hasattr(tensor, "__tensor_flatten__"):
        raise UserError(
            f"{name} must be a plain tensor, got a {type(tensor).__name__}\n"
            "fix: pass the tensor that this rank holds; of a DTensor, its to_local()"
        )


def require_no_transform(name: str, *tensors: Tensor | None) -> None:
    """Refuse to run inside a transform of torch.func: its tensors hold one entry of a batch, or one level of gradients.

    Tangents of forward-mode AD are refused too: exchanges between ranks would drop them.

    Args:
        name: What is refused.
        tensors: The input, or in backward the incoming gradients: `is_grads_batched=True` of `torch.autograd.grad`
            batches them.

    Raises:
        UserError: A transform runs, or a tensor has a tangent.
    """
    given = [t for t in tensors if t is not None]
    if any(map(torch._C._functorch.is_legacy_batchedtensor, given)) or torch._C._are_functorch_transforms_active():
        raise UserError(
            f"{name} is inside vmap, grad, jvp or another transform of torch.func, which ranks cannot take part in\n"
            "fix: a batch dimension or a loop for vmap and is_grads_batched, torch.autograd.grad for the others"
        )
    if any(unpack_dual(t).tangent is not None for t in given):
        raise UserError(
            f"{name} has a tangent of forward-mode AD (make_dual), which ranks do not exchange\n"
            "fix: torch.autograd.grad for derivatives; unpack_dual(x).primal for the values alone"
        )


def require_numbers(name: str, tensor: Tensor) -> None:
    """Raise UserError for a tensor on torch's meta device, which has a shape and no data."""
    if tensor.is_meta:
        raise UserError(
            f"{name} must hold numbers, got a meta tensor {list(tensor.shape)}\n"
            "fix: make it on this rank's device; of a model, model.to_empty(device=...) and load its weights"
        )


def require_tensors(q: Tensor, k: Tensor, v: Tensor, *, is_cross: bool) -> None:
    """Check types, shapes, dtypes and devices of one rank's inputs.

    Args:
        q: This rank's queries.
        k: Its keys.
        v: Its values.
        is_cross: Whether the keys are another sequence, with its own number of tokens.

    Raises:
        UserError: Attention does not support them.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        require_tensor(name, tensor, "[batch, local_tokens, heads, head_dim]")
        require_own_memory(name, tensor)
        if tensor.dim() != 4 or 0 in tensor.shape:
            raise UserError(
                f"{name} must be [batch, local_tokens, heads, head_dim], got shape {list(tensor.shape)}\n"
                "fix: at least 1 of each; x.unflatten(-1, (heads, head_dim)) for flat heads, x[None] for one sample"
            )
    if not q.is_floating_point() or q.element_size() < 2 or not q.dtype == k.dtype == v.dtype:
        raise UserError(
            "q, k and v must share one floating-point dtype of at least 16 bits, "
            f"got {q.dtype}, {k.dtype} and {v.dtype}\n"
            "fix: convert them before the call; autocast does not"
        )
    if not q.device == k.device == v.device:
        raise UserError(
            f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}\nfix: move all to this rank's"
        )
    require_numbers("q", q)
    if k.shape[:3] != v.shape[:3]:
        raise UserError(
            f"k and v must have the same batch, tokens and heads, got {list(k.shape)} and {list(v.shape)}\n"
            "fix: equal shapes; only the last dimension of v, its head_dim, may be another"
        )
    batch, tokens, heads, head_dim = q.shape
    if (k.shape[0], k.shape[3]) != (batch, head_dim) or (k.shape[1] != tokens and not is_cross):
        raise UserError(
            f"k is {list(k.shape)} but q is {list(q.shape)}: batch, local_tokens and head_dim must be equal\n"
            "fix: give each rank the same local tokens of q, k and v, or key_length= for keys of another sequence"
        )
    if heads % k.shape[2]:
        raise UserError(
            f"{heads} query heads cannot share {k.shape[2]} key/value heads\n"
            "fix: the first must be a multiple of the second"
        )


def require_transport(comm: CheckedCommunicator, q: Tensor, transport: str) -> None:
    """Raise UserError unless the group can move tensors like q, and by the requested transport."""
    if comm.size == 1:
        return  # nothing moves
    if transport == "peer" and comm.transport != "nccl":
        raise UserError(
            f"transport 'peer' reads the memory of other GPUs, but the group's tensors move by {comm.transport}\n"
            "fix: use transport='auto', or a group over nccl"
        )
    if transport not in ("auto", "peer", comm.transport):
        raise UserError(
            f"transport '{transport}' was asked for, but the group's tensors move by {comm.transport}\n"
            f"fix: use transport='auto', or a group made for {transport}"
        )
    if q.device.type != comm.device.type:
        raise UserError(
            f"the group moves {comm.device.type} tensors by {comm.transport}, but q is on {q.device}\n"
            f"fix: move q, k and v to {comm.device.type}, or use a group made for {q.device.type}"
        )
    if q.is_cuda and q.device != comm.device:
        raise UserError(
            f"q is on {q.device}, but this rank's group was made on {comm.device}\n"
            "fix: call torch.cuda.set_device(local_rank) before the first use of the group"
        )


def gradient_signature(*inputs: Tensor) -> str:
    """Describe whether there will be a backward. Ranks must agree: a backward on only some ranks would hang."""
    differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    return f"{'with' if differentiable else 'without'} gradient"
