"""What every attention kernel is to the rest of the package: one tile on one device."""

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
    """What backward is given of a tile, or of more.

    Attributes:
        grad_out: dO of the whole attention, shaped as q.
        q: Queries.
        k: Keys.
        v: Values, shaped as k.
        lse: Global log-sum-exp `[batch, heads, queries]`, over all keys and not only the tile's.
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
    kv_heads (query head h reads KV head `h // (heads / kv_heads)`); any strides. A pattern says which keys a query
    sees, in all heads and batches alike. A query that sees none has an output of zero, a log-sum-exp of `-inf` and
    gradients of zero; so has a key that no query sees.
    """

    name: str
    recordable: bool
    """Whether its calls can be captured in a CUDA graph, and take the host so long that it pays."""
    takes_delta: bool
    """Whether backward uses delta as given. If not, it goes through `surrogate_out`, which cannot express a non-zero
    delta in a row whose dO is zero."""

    def refusal(self, q: Tensor, k: Tensor, needs: frozenset[Need] = frozenset()) -> str | None:
        """Return why the kernel cannot take these inputs, or do what a call needs, on this machine; None if it can.

        It is asked at every call and must be cheap: it looks for a package and imports none.
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
            softcap: Scores that are scaled become `softcap * tanh(score / softcap)`; None: they stay as they are. Above
                0, and only for kernels that can: `refusal` says so of the need "softcap".
            into: Where to write the results: the output shaped as q, and the log-sum-exp `[batch, heads, queries]`,
                each of any strides with a dense last dimension; a kernel that cannot write there itself copies.
                Default: memory of its own.
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
            given: The tile's inputs, and what the whole attention gave for its queries.
            pattern: Which keys each query sees.
            scale: Factor on the scores.
            deterministic: Whether repeated calls must give the same bits.
            softcap: That of forward.
            into: Where to write the gradients, shaped as q, k and v, with strides as forward's results may have them.
                Default: memory of its own.
        """
        ...


@runtime_checkable
class NotAlwaysDeterministic(Protocol):
    """What a kernel also is if it cannot be deterministic everywhere. All others are, wherever that is asked for.

    Its backward raises `KernelError` where it is asked for what it cannot do.
    """

    def nondeterminism(self, q: Tensor, needs: frozenset[Need] = frozenset()) -> str | None:
        """Return why backward cannot give the same bits each time on q's device, as a phrase, or None if it can."""
        ...
