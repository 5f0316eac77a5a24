"""Language model head and cross entropy, a chunk of tokens at a time.

The logits of a long sequence do not fit: 131,072 tokens of a 128,256-word vocabulary are 63 GiB in fp32. So the
projection to the vocabulary and the loss are one operation that only ever holds the logits of one chunk.

The gradients are formed in the forward pass, while a chunk's logits exist, and only scaled in the backward pass (as
Liger-Kernel does, arXiv:2410.10989). Forming them in the backward pass would need the logits again: four products with
the weight instead of three. The price is that both gradients are held between the passes, which for the last operation
of a model is no time at all: its backward runs first.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bmburst_ops.constants import IGNORE_INDEX
from bmburst_ops.cross_entropy import cross_entropy_
from bmburst_ops.products import add_product, product

DEFAULT_CHUNK = 1024  # tokens; the chunk's fp32 logits for 128,256 words are 501 MiB


def num_chunks(tokens: int, chunk: int = DEFAULT_CHUNK) -> int:
    """Return how many chunks this many tokens are cut into; it depends on nothing else."""
    return -(-tokens // chunk)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, chunk: int, with_grad: bool
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        grad_hidden = torch.empty_like(hidden) if with_grad and ctx.needs_input_grad[0] else None
        grad_weight = (
            torch.zeros(weight.shape, dtype=wide, device=weight.device)
            if with_grad and ctx.needs_input_grad[1]
            else None
        )
        is_needed = grad_hidden is not None or grad_weight is not None
        narrow = hidden.dtype if hidden.is_cuda else wide  # for the tensor cores; a CPU multiplies in fp32
        grad_dtype = narrow if is_needed else None
        total = torch.zeros((), dtype=wide, device=hidden.device)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            # What an ignored token holds must not matter, not even if it is NaN: 0 x NaN would spoil the weight.
            states = hidden[rows].masked_fill((labels[rows] == ignore_index).unsqueeze(-1), 0)
            logits = product(states, weight.t(), wide)
            losses, grad_logits = cross_entropy_(logits, labels[rows], ignore_index, grad_dtype)
            total += losses.sum()
            if grad_logits is None:
                continue
            if grad_hidden is not None:
                grad_hidden[rows] = product(grad_logits, weight, wide)
            if grad_weight is not None:
                add_product(grad_weight, grad_logits.t(), states)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        grads = [
            None if grad is None else torch.mul(grad, grad_output, out=torch.empty_like(grad, dtype=dtype))
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return grads[0], grads[1], None, None, None, None


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, ignore_index: int = IGNORE_INDEX, chunk: int = DEFAULT_CHUNK
) -> Tensor:
    """Return the sum over tokens of -log softmax(hidden @ weight.T)[label], in nats.

    Args:
        hidden: `[..., features]`, one row a token.
        weight: `[vocabulary, features]`, same dtype as `hidden`.
        labels: `[...]` int64; `ignore_index` or in [0, vocabulary), which is not checked here: on a GPU looking at
            them would make the host wait.
        ignore_index: Label of a token without a loss.
        chunk: Tokens whose logits exist at one time.

    Returns:
        A scalar in fp32, or the inputs' dtype if wider; exactly 0, with zero gradients, where every label is ignored.
        The weight's gradient is summed over chunks in that same dtype and rounded once.

    Raises:
        ValueError: Shapes or dtypes do not fit, or `chunk` is not positive.
    """
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
    if chunk < 1:
        raise ValueError(f"a chunk has at least one token, got {chunk}")
    total: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden.flatten(0, -2), weight, labels.flatten(), ignore_index, chunk, torch.is_grad_enabled()
    )
    return total
