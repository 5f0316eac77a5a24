"""What a biased attention kernel is to the rest of the package: one block of queries and keys on one device."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bmburst_ops.biased.pairs import Pairs
from bmburst_ops.errors import KernelError
from bmburst_ops.flash.kernel import Partial


class BiasedGradients(NamedTuple):
    """Gradients of one block, shaped as q, k, v and the table."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor

    def rounded(self, *like: Tensor) -> "BiasedGradients":
        """Return them in the dtypes of q, k, v and the table."""
        return BiasedGradients(*(grad.to(x.dtype) for grad, x in zip(self, like, strict=True)))


class BiasedKernel(Protocol):
    """Attention of a block of queries to a block of keys with its log-sum-exp, forward and backward.

    Scores are `q k^T * scale + table[bucket]`, of pairs that see each other; see `formula`. A query that sees none has
    an output of zero, a log-sum-exp of `-inf` and gradients of zero; so has a key that no query sees. The same call
    gives the same bits each time.
    """

    name: str

    def refusal(self, q: Tensor) -> str | None:
        """Return why the kernel cannot take such inputs on this machine, as a phrase; None if it can."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, pairs: Pairs, *, scale: float) -> Partial:
        """Return the block's output, in q's dtype or wider, and its log-sum-exp, in fp32 or wider.

        Args:
            q: Queries, `[batch, queries, heads, head_dim]`, any strides.
            k: Keys, `[batch, keys, heads, head_dim]`.
            v: Values, shaped as k.
            table: The bias table, `[pairs.formula.rows, heads]`, any float dtype.
            pairs: What queries and keys are, and how the table is looked up.
            scale: Factor on the products, above 0.
        """
        ...

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        table: Tensor,
        pairs: Pairs,
        *,
        scale: float,
        rounded: bool = False,
    ) -> BiasedGradients:
        """Return the block's gradients, in fp32 or wider.

        Args:
            grad_out: dO of the whole attention, shaped as q.
            q: Queries.
            k: Keys.
            v: Values.
            lse: Global log-sum-exp `[batch, heads, queries]`, over all keys and not only the block's.
            delta: Global rowsum(dO * O), shaped as lse.
            table: As in forward.
            pairs: As in forward.
            scale: Factor on the products, above 0.
            rounded: Whether gradients have the dtypes of what they are of: where the block is the whole attention.
        """
        ...


def require_inputs(q: Tensor, k: Tensor, v: Tensor, table: Tensor, pairs: Pairs) -> None:
    """Check shapes, dtypes and devices.

    Raises:
        KernelError: They do not fit each other.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v), ("the bias table", table)):
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            got = f"one of layout {tensor.layout}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise KernelError(
                f"{name} must be a dense tensor, got {got}\nallowed: torch tensors of torch.strided\nfix: pass one"
            )
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]):
        raise KernelError(
            f"q, k and v must be [batch, tokens, heads, head_dim] with as many heads each, got {list(q.shape)}, "
            f"{list(k.shape)} and {list(v.shape)}\nfix: unflatten heads; repeat shared keys and values for each head"
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point() or q.element_size() < 2:
        raise KernelError(
            f"q, k and v must share one floating-point dtype, got {q.dtype}, {k.dtype} and {v.dtype}\n"
            "allowed: float16, bfloat16, float32 and float64\nfix: convert them to one of these"
        )
    for name, tokens, matrix in (("queries", pairs.queries, q), ("keys", pairs.keys, k)):
        if tokens.shape != matrix.shape[:2]:
            raise KernelError(
                f"vectors of {list(tokens.shape)} {name} for {list(matrix.shape[:2])}, [batch, tokens]\n"
                "fix: the vectors of the same tokens, as many to each sample"
            )
    rows = pairs.formula.rows
    if table.shape != (rows, q.shape[2]) or not table.is_floating_point() or table.element_size() < 2:
        got = f"{str(table.dtype).removeprefix('torch.')} {list(table.shape)}"
        raise KernelError(
            f"the bias table must be float {[rows, q.shape[2]]}, [rows, heads], got {got}\n"
            "fix: the table of the module whose formula it is, with as many heads as q"
        )
    devices = {t.device for t in (q, k, v, table, pairs)}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise KernelError(f"everything must be on one device, got {names}\nfix: move all to that of q")
