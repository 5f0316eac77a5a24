"""The interface of all attention kernels, `Kernel`: attention of one tile on one device."""

from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from bmburst_ops.pattern import Need, Pattern


class Partial(NamedTuple):
    """Attention of one tile: `out` `[batch, queries, heads, head_dim]`, `lse` `[batch, heads, queries]` in nats."""

    out: Tensor
    lse: Tensor


class Gradients(NamedTuple):
    """Gradients of one tile, shaped as q, k and v."""

    q: Tensor
    k: Tensor
    v: Tensor


class BackwardInputs(NamedTuple):
    """Inputs of backward for one tile, or for several.

    Attributes:
        grad_out: dO of the whole attention, shaped as q.
        q: Queries.
        k: Keys.
        v: Values, shaped as k.
        lse: Global log-sum-exp `[batch, heads, queries]`, over all keys, not only the tile's.
        delta: Global rowsum(dO * O), shaped as lse.
    """

    grad_out: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    delta: Tensor


class Kernel(Protocol):
    """Attention of one tile with its log-sum-exp, forward and backward.

    Shapes: q `[batch, queries, heads, head_dim]`; k, v `[batch, keys, kv_heads, head_dim]` with heads a multiple of
    kv_heads (query head h reads KV head `h // (heads / kv_heads)`); any strides. A pattern defines which keys each
    query sees; it is the same for all heads and batches. A query that sees no key has an output of zero, a log-sum-exp
    of `-inf` and a gradient of zero. A key that no query sees has a gradient of zero.
    """

    name: str
    recordable: bool
    """Whether calls can be captured in a CUDA graph, and have enough host overhead for that to pay off."""
    takes_delta: bool
    """Whether backward uses delta as given. If not, it goes through `surrogate_out`, which cannot express a non-zero
    delta in a row whose dO is zero."""

    def refusal(self, q: Tensor, k: Tensor, needs: frozenset[Need] = frozenset()) -> str | None:
        """Return why the kernel does not support these inputs or `needs` on this machine, as a phrase; None if it does.

        It runs at every call of attention and must be cheap: it may look for a package, but not import it.
        """
        ...

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        pattern: Pattern,
        scale: float,
        softcap: float | None = None,
        into: Partial | None = None,
    ) -> Partial:
        """Return the tile's output, in q's dtype or wider, and its log-sum-exp, in fp32 or wider.

        Args:
            q: Queries.
            k: Keys.
            v: Values.
            pattern: Which keys each query sees.
            scale: Factor on the scores.
            softcap: Above 0: scaled scores become `softcap * tanh(score / softcap)`. None: no softcap. Some kernels do
                not support it: see `refusal` with the need "softcap".
            into: Where to write the results: the output shaped as q, and the log-sum-exp `[batch, heads, queries]`,
                with any strides and a dense last dimension. A kernel that cannot write there copies its results.
                Default: new memory.
        """
        ...

    def backward(
        self,
        given: BackwardInputs,
        *,
        pattern: Pattern,
        scale: float,
        deterministic: bool,
        softcap: float | None = None,
        into: Gradients | None = None,
    ) -> Gradients:
        """Return the tile's gradients.

        Args:
            given: The tile's inputs, and the statistics of the whole attention for its queries.
            pattern: Which keys each query sees.
            scale: Factor on the scores.
            deterministic: Whether repeated calls must give bitwise equal gradients.
            softcap: As in forward.
            into: Where to write the gradients, shaped as q, k and v, with strides as in forward. Default: new memory.
        """
        ...


@runtime_checkable
class NotAlwaysDeterministic(Protocol):
    """A kernel whose backward is not deterministic everywhere. All other kernels are deterministic on request.

    Its backward raises `KernelError` if `deterministic` is requested where it is not supported.
    """

    def nondeterminism(self, q: Tensor, needs: frozenset[Need] = frozenset()) -> str | None:
        """Return why backward cannot be deterministic on q's device, as a phrase; None if it can."""
        ...
