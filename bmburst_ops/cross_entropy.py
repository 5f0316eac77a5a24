"""Cross entropy of given logits, and its gradient in their place: plain torch, and Triton where `fused` says so."""

import torch
from torch import Tensor

from bmburst_ops.fused import triton_twin


def cross_entropy_(
    logits: Tensor, labels: Tensor, ignore_index: int, grad_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """Return -log softmax(logits)[label] of each row in nats, and the gradient of their sum.

    Args:
        logits: `[tokens, vocabulary]`, fp32 or wider, contiguous, finite; overwritten.
        labels: `[tokens]` int64; `ignore_index` or in [0, vocabulary).
        ignore_index: Label of a token without a loss, which has loss and gradient 0.
        grad_dtype: Of the gradient; None: there is none.

    Returns:
        `[tokens]` in the dtype of logits, and `[tokens, vocabulary]`, which may be the memory of logits.
    """
    fused = triton_twin("triton_cross_entropy", logits)
    return (fused.cross_entropy_ if fused else _cross_entropy_)(logits, labels, ignore_index, grad_dtype)


def _cross_entropy_(
    logits: Tensor, labels: Tensor, ignore_index: int, grad_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    ignored = labels == ignore_index
    target = labels.masked_fill(ignored, 0).unsqueeze(-1)
    log_normalizer = logits.logsumexp(dim=-1, keepdim=True)
    losses = (log_normalizer - logits.gather(-1, target)).squeeze(-1).masked_fill(ignored, 0)
    if grad_dtype is None:
        return losses, None
    gradient = logits.sub_(log_normalizer).exp_()
    gradient.scatter_add_(-1, target, torch.full_like(target, -1, dtype=logits.dtype))
    return losses, gradient.masked_fill_(ignored.unsqueeze(-1), 0).to(grad_dtype)
