"""Attention of one tile in plain torch, any float dtype: what every other kernel is compared with."""

from collections.abc import Iterator

import torch
from torch import Tensor

from bmburst_ops.flash.kernel import Gradients, Partial
from bmburst_ops.flash.memory import deliver, deliver_gradients
from bmburst_ops.merge import accumulation_dtype

_ROWS = 512  # queries scored at once: memory stays linear in the keys


class ReferenceKernel:
    """`Kernel` in plain torch, computed in fp32 or wider."""

    name = "reference"
    takes_delta = True

    def refusal(self, q: Tensor, k: Tensor) -> str | None:
        """See `Kernel.refusal`: it takes everything."""
        del q, k
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, out: Tensor | None = None
    ) -> Partial:
        """See `Kernel.forward`."""
        dtype = accumulation_dtype(q.dtype)
        values = v.to(dtype)
        outs, lses = [], []
        for _, scores in _scores(q, k, causal, scale):
            lse = scores.logsumexp(-1)
            outs.append(torch.einsum("bkgqn,bnkd->bqkgd", torch.exp(scores - lse[..., None]), values).flatten(2, 3))
            lses.append(lse.flatten(1, 2))
        return Partial(deliver(torch.cat(outs, 1), out), torch.cat(lses, 2))

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        *,
        causal: bool,
        scale: float,
        deterministic: bool,
        into: Gradients | None = None,
    ) -> Gradients:
        """See `Kernel.backward`. P = exp(S - lse), dS = P * (dO V^T - delta) * scale (arXiv:2307.08691, alg. 2)."""
        del deterministic  # always
        dtype, kv_heads = accumulation_dtype(q.dtype), k.shape[2]
        keys, values = k.to(dtype), v.to(dtype)
        grad_q = []
        grad_k, grad_v = torch.zeros_like(keys), torch.zeros_like(values)
        for rows, scores in _scores(q, k, causal, scale):
            queries, grads = (t[:, rows].to(dtype).unflatten(2, (kv_heads, -1)) for t in (q, grad_out))
            statistics = (t[:, :, rows].to(dtype).unflatten(1, (kv_heads, -1))[..., None] for t in (lse, delta))
            row_lse, row_delta = statistics
            weights = torch.exp(scores - row_lse)
            grad_v += torch.einsum("bkgqn,bqkgd->bnkd", weights, grads)
            inner = torch.einsum("bqkgd,bnkd->bkgqn", grads, values)
            grad_scores = weights * (inner - row_delta) * scale
            grad_q.append(torch.einsum("bkgqn,bnkd->bqkgd", grad_scores, keys).flatten(2, 3))
            grad_k += torch.einsum("bkgqn,bqkgd->bnkd", grad_scores, queries)
        return deliver_gradients(Gradients(torch.cat(grad_q, 1), grad_k, grad_v), into)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Iterator[tuple[slice, Tensor]]:
    """Yield `(rows, scores [batch, kv_heads, group, rows, keys])` for runs of queries."""
    dtype, kv_heads = accumulation_dtype(q.dtype), k.shape[2]
    keys = k.to(dtype)
    hidden = k.shape[1] - q.shape[1]  # bottom-right aligned: the first query sees this many keys and one more
    for start in range(0, q.shape[1], _ROWS):
        rows = slice(start, min(start + _ROWS, q.shape[1]))
        queries = q[:, rows].to(dtype).unflatten(2, (kv_heads, -1))
        scores = torch.einsum("bqkgd,bnkd->bkgqn", queries, keys) * scale
        if causal:
            visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(start + hidden)
            scores = scores.masked_fill(~visible, -torch.inf)
        yield rows, scores
