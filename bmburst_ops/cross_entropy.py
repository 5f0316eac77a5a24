"""Cross entropy of given logits, and their gradient: plain torch, and Triton where `fused` says so."""

import torch
from torch import Tensor

from bmburst_ops.fused import triton_twin


def cross_entropy_(logits: Tensor, labels: Tensor, ignore_index: int, gradient: Tensor | None) -> Tensor:
    """Return -log softmax(logits)[label] of each row, in nats, and write the gradient of their sum.

    Args:
        logits: `[tokens, vocabulary]`, fp32 or wider, contiguous, finite; overwritten.
        labels: `[tokens]` int64; `ignore_index` or in [0, vocabulary).
        ignore_index: Label of a token without a loss, which has loss and gradient 0.
        gradient: `[tokens, vocabulary]`, contiguous, which takes the gradient of the logits, rounded to its dtype; it
            may be `logits`. None: it is not formed.

    Returns:
        `[tokens]` in the dtype of logits.
    """
    fused = triton_twin("triton_cross_entropy", logits)
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
