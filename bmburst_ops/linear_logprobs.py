"""Log-probabilities of labels and entropies, from the head of a language model, a chunk of tokens at a time.

Policy-gradient methods need both of each token, with gradients that only their loss knows. So the backward pass
computes the logits of each chunk again: four products with the weight, and the logits of one chunk in memory.
"""

from typing import Any

import torch
from torch import Tensor

from bmburst_ops.errors import KernelError, first_order
from bmburst_ops.linear_cross_entropy import DEFAULT_CHUNK, token_cross_entropy
from bmburst_ops.linears import add_product, product


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, entropy: bool, chunk: int
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, labels)
        ctx.options = temperature, chunk
        parts = [
            logprobs(_logits(states, weight, temperature), targets, entropy=entropy)
            for states, targets in zip(hidden.split(chunk), labels.split(chunk), strict=True)
        ]
        logps, entropies = zip(*parts, strict=True)
        return torch.cat(logps), torch.cat(entropies) if entropy else None

    @staticmethod
    @first_order(KernelError)
    def backward(ctx: Any, of_logps: Tensor | None, of_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors
        temperature, chunk = ctx.options
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        narrow = hidden.dtype if hidden.is_cuda else wide  # for the tensor cores; a CPU multiplies in fp32
        if of_entropies is not None and not bool(of_entropies.any()):  # where entropies are only logged
            of_entropies = None
        given = [grad for grad in (of_logps, of_entropies) if grad is not None and len(labels)]
        # Factors of at most 1 keep fp16 in range.
        sizes = [grad.abs().max() for grad in given] or [hidden.new_ones((), dtype=wide)]
        largest = torch.stack(sizes).max().clamp(min=torch.finfo(wide).tiny)
        grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if wants_weight else None
        for start in range(0, len(labels) if given else 0, chunk):
            part = slice(start, start + chunk)
            factors = [
                None if grad is None else (grad[part] / largest).unsqueeze(-1) for grad in (of_logps, of_entropies)
            ]
            logits = _logits(hidden[part], weight, temperature)
            grad_logits = _gradient(logits, labels[part].unsqueeze(-1), *factors).to(narrow)
            if grad_hidden is not None:
                grad_hidden[part] = product(grad_logits, weight, wide).mul_(largest / temperature)
            if grad_weight is not None:
                add_product(grad_weight, grad_logits.t(), hidden[part].to(narrow))
        if grad_weight is not None:
            grad_weight.mul_(largest / temperature)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def _logits(states: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Return a chunk's logits in fp32 or wider, divided by the temperature."""
    logits = product(states, weight.t(), torch.promote_types(states.dtype, torch.float32))
    return logits if temperature == 1 else logits.div_(temperature)


def _gradient(logits: Tensor, target: Tensor, of_logp: Tensor | None, of_entropy: Tensor | None) -> Tensor:
    """Return the gradient of logits, from factors of the log-probability and of the entropy `[tokens, 1]`.

    With probabilities p and entropy H, d log p[t] / d logit[j] = (j == t) - p[j], and
    d H / d logit[j] = -p[j] (log p[j] + H).
    """
    p = logits.sub_(logits.logsumexp(-1, keepdim=True)).exp_()
    grad = torch.zeros_like(p) if of_logp is None else p * -of_logp
    if of_logp is not None:
        grad.scatter_add_(-1, target, of_logp)
    if of_entropy is not None:
        shares = torch.special.entr(p)  # -p log p, which is 0 where p is 0
        grad.add_((shares - p * shares.sum(-1, keepdim=True)).mul_(of_entropy))
    return grad


def logprobs(logits: Tensor, labels: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Return log softmax(logits)[label] and the entropy of the softmax, in nats, `[tokens]`; the latter if asked for.

    Args:
        logits: `[tokens, vocabulary]`.
        labels: `[tokens]` int64, in [0, vocabulary).
        entropy: Whether to compute entropies.
    """
    normalizer = logits.logsumexp(-1, keepdim=True)
    logps = (logits.gather(-1, labels.unsqueeze(-1)) - normalizer).squeeze(-1)
    return logps, torch.special.entr((logits - normalizer).exp()).sum(-1) if entropy else None


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk: int = DEFAULT_CHUNK,
) -> tuple[Tensor, Tensor | None]:
    """Return log p[label] and the entropy of p, where p = softmax(hidden @ weight.T / temperature), in nats.

    Args:
        hidden: `[tokens, features]`.
        weight: `[vocabulary, features]`, same dtype as `hidden`.
        labels: `[tokens]` int64, in [0, vocabulary). The range is not checked, because on a GPU that would synchronize.
        temperature: Divides the logits, in fp32 or wider.
        entropy: Whether to compute entropies.
        chunk: Number of tokens whose logits are computed at once.

    Returns:
        Log-probabilities and entropies `[tokens]`, in fp32 or the inputs' dtype if wider; None for entropies that are
        not computed. The weight gradient is summed over chunks in the same dtype and rounded once.

    Raises:
        ValueError: Shapes or dtypes do not fit, or `chunk` or `temperature` is not positive.
    """
    if hidden.dim() != 2 or labels.shape != hidden.shape[:1] or weight.shape[1:] != hidden.shape[1:]:
        raise ValueError(
            "linear_logprobs needs hidden [tokens, features], weight [vocabulary, features], labels [tokens]; "
            f"got {tuple(hidden.shape)}, {tuple(weight.shape)}, {tuple(labels.shape)}"
        )
    if hidden.dtype != weight.dtype or labels.dtype != torch.int64:
        raise ValueError(
            "linear_logprobs needs hidden and weight of one dtype and int64 labels; "
            f"got {hidden.dtype}, {weight.dtype}, {labels.dtype}"
        )
    if chunk < 1 or not temperature > 0:
        raise ValueError(f"a chunk has at least one token, and a temperature is above 0; got {chunk}, {temperature}")
    if temperature == 1 and not entropy:  # one kernel computes loss and gradient
        return 0 - token_cross_entropy(hidden, weight, labels, chunk=chunk), None
    found: tuple[Tensor, Tensor | None] = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, float(temperature), entropy, chunk
    )
    return found
