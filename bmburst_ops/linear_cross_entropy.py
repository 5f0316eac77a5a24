"""Language model head and cross entropy, a chunk of tokens at a time.

The logits of a long sequence do not fit in memory: for 131,072 tokens and a vocabulary of 128,256 they take 63 GiB in
fp32. So the projection to the vocabulary and the loss are one operation, which holds the logits of one chunk at a time.

Gradients are computed in the forward pass, while a chunk's logits exist, and only scaled in the backward pass (as in
Liger-Kernel, arXiv:2410.10989). Computing them in the backward pass would need the logits again: four products with the
weight instead of three. The cost is that both gradients are held between the passes. For the last operation of a model
this time is short, because its backward runs first.

The weight gradient is an fp32 sum over all tokens. Adding the product of `n` tokens to it reads and writes
`8 * vocabulary * features` bytes for `2 * n * vocabulary * features` FLOPs: `n / 4` FLOPs per byte. On an H200 at 660
TFLOP/s and 4.2 TB/s, both take the same time at n = 630. If each chunk of 1,024 tokens were added separately, the sum
would take 0.6 of the product's time, less the part that overlaps with it (455 TFLOP/s were measured, and 663 for the
logits). So the logit gradients of several chunks are collected in 16 bits and multiplied at once. With 4 chunks the sum
takes 0.15 of the product's time and `8 * chunk * vocabulary` bytes, in addition to `4 * chunk * vocabulary` for the
logits (1.0 and 0.5 GiB for LLaMA-3-8B). With 8 chunks it would take 0.08, and twice the memory.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bmburst_ops import GATHERED_CHUNKS, IGNORE_INDEX
from bmburst_ops.errors import KernelError, first_order
from bmburst_ops.fused import triton_twin
from bmburst_ops.linears import add_product, product


def cross_entropy_(logits: Tensor, labels: Tensor, ignore_index: int, gradient: Tensor | None) -> Tensor:
    """Return -log softmax(logits)[label] of each row, in nats, and write the gradient of their sum.

    Args:
        logits: `[tokens, vocabulary]`, fp32 or wider, contiguous, finite; overwritten.
        labels: `[tokens]` int64; `ignore_index` or in [0, vocabulary).
        ignore_index: Label of a token without a loss; its loss and gradient are 0.
        gradient: Output `[tokens, vocabulary]`, contiguous: the gradient of the logits, rounded to its dtype. It may be
            `logits`. None: no gradient is computed.

    Returns:
        `[tokens]` in the dtype of logits.
    """
    fused = triton_twin("triton_reductions", logits)
    return (fused.cross_entropy_ if fused else _cross_entropy_)(logits, labels, ignore_index, gradient)


def _cross_entropy_(logits: Tensor, labels: Tensor, ignore_index: int, gradient: Tensor | None) -> Tensor:
    ignored = labels == ignore_index
    target = labels.masked_fill(ignored, 0).unsqueeze(-1)
    log_normalizer = logits.logsumexp(dim=-1, keepdim=True)
    losses = (log_normalizer - logits.gather(-1, target)).squeeze(-1).masked_fill(ignored, 0)
    if gradient is not None:
        logits.sub_(log_normalizer).exp_()
        logits.scatter_add_(-1, target, torch.full_like(target, -1, dtype=logits.dtype))
        gradient.copy_(logits.masked_fill_(ignored.unsqueeze(-1), 0))
    return losses


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x times a scalar tensor, multiplied in the wider of their dtypes and rounded once, to `dtype`.

    Args:
        x: Contiguous.
        factor: 0-dim, on the same device.
        dtype: Of the result.
    """
    fused = triton_twin("triton_reductions", x, factor)
    if fused:
        found: Tensor = fused.scaled(x, factor, dtype)
        return found
    # A GPU would round a 0-dim tensor to the 16-bit dtype of the other operand.
    return torch.mul(x, factor.view(1) if factor.is_cuda else factor, out=torch.empty_like(x, dtype=dtype))


DEFAULT_CHUNK = 1024  # tokens; the chunk's fp32 logits for 128,256 words are 501 MiB


def num_chunks(tokens: int, chunk: int = DEFAULT_CHUNK) -> int:
    """Return the number of chunks for this many tokens; it depends on nothing else."""
    return -(-tokens // chunk)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        ignore_index: int,
        chunk: int,
        gathered: int | None,
        with_grad: bool,
    ) -> Tensor:
        wants_hidden, wants_weight = (with_grad and wanted for wanted in ctx.needs_input_grad[:2])
        losses, *grads = _in_chunks(
            hidden, weight, labels, ignore_index, chunk, gathered, of_hidden=wants_hidden, of_weight=wants_weight
        )
        ctx.save_for_backward(*grads)
        ctx.dtypes = hidden.dtype, weight.dtype
        return losses.sum()

    @staticmethod
    @first_order(KernelError)
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grads = [
            None if grad is None else scaled(grad, grad_output, dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *grads, None, None, None, None, None


class _TokenCrossEntropy(torch.autograd.Function):
    """Per-token losses. The gradients of the losses are known only in the backward pass, which recomputes the logits.

    Computing gradients in the forward pass, as for the sum, would need memory for the gradients of all logits.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, chunk: int, gathered: int | None
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, labels)
        ctx.options = ignore_index, chunk, gathered
        losses, _, _ = _in_chunks(hidden, weight, labels, *ctx.options)
        return losses

    @staticmethod
    @first_order(KernelError)
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        factors = grad_output.masked_fill(labels == ctx.options[0], 0)
        _, grad_hidden, grad_weight = _in_chunks(
            hidden, weight, labels, *ctx.options, of_hidden=wants_hidden, of_weight=wants_weight, factors=factors
        )
        narrow = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, narrow, None, None, None, None


def _in_chunks(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore_index: int,
    chunk: int,
    gathered: int | None,
    *,
    of_hidden: bool = False,
    of_weight: bool = False,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the loss of each token, and the gradients of the sum of the losses times their factors.

    Args:
        hidden: `[tokens, features]`.
        weight: See `linear_cross_entropy`.
        labels: `[tokens]`.
        ignore_index: See `linear_cross_entropy`.
        chunk: See `linear_cross_entropy`.
        gathered: See `linear_cross_entropy`.
        of_hidden: Whether to compute the gradient of `hidden`.
        of_weight: Whether to compute the gradient of `weight`.
        factors: `[tokens]`, 0 for ignored tokens. Default: 1.

    Returns:
        `[tokens]` in fp32 or wider, the gradient of hidden in its dtype, and that of the weight in fp32 or wider.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    narrow = hidden.dtype if hidden.is_cuda else wide  # for the tensor cores; a CPU multiplies in fp32
    if gathered is None:
        gathered = 1 if narrow == wide else GATHERED_CHUNKS
    grad_hidden = torch.empty_like(hidden) if of_hidden else None
    grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if of_weight else None
    rows = min(chunk * gathered, len(hidden))
    place = hidden.new_empty((rows, len(weight)), dtype=narrow) if of_hidden or of_weight else None
    losses = torch.empty(len(hidden), dtype=wide, device=hidden.device)
    # On a GPU, hidden states times factors are in 16 bits. Factors of at most 1 keep fp16 in range.
    largest = factors.abs().max().clamp(min=torch.finfo(wide).tiny) if factors is not None and len(hidden) else None
    for start in range(0, len(hidden), max(1, rows)):
        group = slice(start, start + rows)
        # An ignored token must have no effect, even if it is NaN: 0 * NaN would make the weight gradient NaN.
        states = hidden[group].masked_fill((labels[group] == ignore_index).unsqueeze(-1), 0)
        grad_logits = None if place is None else place[: len(states)]
        for part in _slices(len(states), chunk):
            gradient = None if grad_logits is None else grad_logits[part]
            own = losses[group][part]
            own.copy_(_chunk_losses(states[part], weight, labels[group][part], ignore_index, gradient))
        if grad_logits is not None and grad_hidden is not None:
            of_states = product(grad_logits, weight, wide)
            grad_hidden[group] = of_states if factors is None else of_states.mul_(factors[group].unsqueeze(-1))
        if grad_logits is not None and grad_weight is not None:
            if factors is not None and largest is not None:
                states = states.to(narrow).mul((factors[group] / largest).unsqueeze(-1).to(narrow))
            add_product(grad_weight, grad_logits.t(), states)
    if grad_weight is not None and largest is not None:
        grad_weight.mul_(largest)
    return losses, grad_hidden, grad_weight


def _chunk_losses(states: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, gradient: Tensor | None) -> Tensor:
    """Return the losses of a chunk's tokens, and write the gradient of its logits.

    A separate function, so that the logits of a chunk are freed before those of the next chunk are computed.
    """
    wide = torch.promote_types(states.dtype, torch.float32)
    place = gradient if gradient is not None and gradient.dtype == wide else None
    logits = product(states, weight.t(), wide, out=place)
    return cross_entropy_(logits, labels, ignore_index, gradient)


def _slices(rows: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, rows)) for start in range(0, rows, chunk))


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = IGNORE_INDEX,
    chunk: int = DEFAULT_CHUNK,
    gathered: int | None = None,
) -> Tensor:
    """Return the sum over tokens of -log softmax(hidden @ weight.T)[label], in nats.

    Args:
        hidden: `[..., features]`, one row per token.
        weight: `[vocabulary, features]`, same dtype as `hidden`.
        labels: `[...]` int64; `ignore_index` or in [0, vocabulary). The range is not checked here, because on a GPU
            that would synchronize.
        ignore_index: Label of a token without a loss.
        chunk: Number of tokens whose logits are computed at once.
        gathered: Number of chunks whose logit gradients are collected for one product. Default: `GATHERED_CHUNKS` if
            the inputs are narrower than the logits, else 1.

    Returns:
        A scalar in fp32, or the inputs' dtype if wider; exactly 0, with zero gradients, if every label is ignored. The
        weight gradient is summed over chunks in the same dtype and rounded once.

    Raises:
        ValueError: Shapes or dtypes do not fit, or `chunk` is not positive.
    """
    _require_fitting(hidden, weight, labels, chunk, gathered)
    total: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden.flatten(0, -2), weight, labels.flatten(), ignore_index, chunk, gathered, torch.is_grad_enabled()
    )
    return total


def token_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = IGNORE_INDEX,
    chunk: int = DEFAULT_CHUNK,
    gathered: int | None = None,
) -> Tensor:
    """Return -log softmax(hidden @ weight.T)[label] of each token, in nats.

    Unlike `linear_cross_entropy`, it recomputes the logits of each chunk in the backward pass, because only there the
    gradients of the losses are known: four products with the weight instead of three.

    Args:
        hidden: See `linear_cross_entropy`.
        weight: See `linear_cross_entropy`.
        labels: See `linear_cross_entropy`.
        ignore_index: See `linear_cross_entropy`.
        chunk: See `linear_cross_entropy`.
        gathered: See `linear_cross_entropy`.

    Returns:
        The losses in the shape of `labels`, in fp32 or the inputs' dtype if wider; 0 where the label is ignored.

    Raises:
        ValueError: Shapes or dtypes do not fit, or `chunk` is not positive.
    """
    _require_fitting(hidden, weight, labels, chunk, gathered)
    losses: Tensor = _TokenCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden.flatten(0, -2), weight, labels.flatten(), ignore_index, chunk, gathered
    )
    return losses.view(labels.shape)


def _require_fitting(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, gathered: int | None = None) -> None:
    if hidden.shape[:-1] != labels.shape or weight.dim() != 2 or weight.shape[-1] != hidden.shape[-1]:
        raise ValueError(
            "linear_cross_entropy needs hidden [..., features], weight [vocabulary, features], labels [...]; "
            f"got {tuple(hidden.shape)}, {tuple(weight.shape)}, {tuple(labels.shape)}"
        )
    if hidden.dtype != weight.dtype or labels.dtype != torch.int64:
        raise ValueError(
            "linear_cross_entropy needs hidden and weight of one dtype and int64 labels; "
            f"got {hidden.dtype}, {weight.dtype}, {labels.dtype}"
        )
    if chunk < 1 or (gathered is not None and gathered < 1):
        raise ValueError(f"a chunk has at least one token, and at least one is gathered; got {chunk}, {gathered}")
