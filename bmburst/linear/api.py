"""Linear attention, state space models, scans and causal convolutions over a sequence that is split over ranks.

All functions take this rank's tokens in the order of the layout, `[batch, local_tokens, ...]`, as `burst_attention`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bmburst.amounts import require_flag, short_text
from bmburst.attention.api import resolve_group
from bmburst.attention.graphs import outside_of_graphs
from bmburst.attention.options import MaskOption, require_scale
from bmburst.comm.transports import device_name
from bmburst.errors import UserError, require_known
from bmburst.linear.call import zero_padding
from bmburst.linear.check import SequenceOptions, conv_call, require_device, require_shapes, scan_call, signature
from bmburst.linear.conv import SequenceConv
from bmburst.linear.function import SequenceScan
from bmburst.schedule.chain import Chain
from bmburst_ops.linear import Recurrence

KINDS = ("gated_delta", "kda", "decay")
ACTIVATIONS = ("silu",)


def burst_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    *,
    kind: str = "gated_delta",
    mask: MaskOption = "causal",
    layout: str = "zigzag",
    length: int | None = None,
    group: object = None,
    scale: float | None = None,
    normalize: bool | None = None,
    initial_state: Tensor | None = None,
    final_state: bool = False,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Return exact linear attention over the whole sequence for this rank's tokens.

    Each head has a state S, `[key_dim, value_dim]`, which every token reads and changes:

    - "gated_delta": `S = exp(g) S; S += beta k (v - S^T k)^T` (Gated DeltaNet, arXiv:2412.06464)
    - "kda": the same with a decay for each key channel (Kimi delta attention, arXiv:2510.26692)
    - "decay": `S = exp(g) S + k v^T` (Lightning Attention, RetNet, Mamba 2)

    and the output is `scale * S^T q`. A rank sends one summary of each run of its tokens and gets the state before it.
    Bytes do not depend on the number of tokens. Every rank of the group calls it, with equal shapes. Gradients are
    those of the sum of the ranks' losses, and only of first order.

    Args:
        q: `[batch, local_tokens, heads, key_dim]`, any float dtype, any strides.
        k: Shaped and typed as q.
        v: `[batch, local_tokens, value_heads, value_dim]`; value_heads is a multiple of heads. Typed as q.
        g: Logarithm of the decay, at most 0, `[batch, local_tokens, value_heads]`; with kind "kda"
            `[batch, local_tokens, value_heads, key_dim]`.
        beta: `[batch, local_tokens, value_heads]`; kind "decay" has none.
        kind: "gated_delta", "kda" or "decay".
        mask: "causal", `bmburst.Causal()`, or causal `bmburst.Documents`, whose states begin with zero. A tuple has
            one mask for each sample of the batch.
        layout: "zigzag", "contiguous" or "balanced"; see `burst_attention`. "striped" puts neighbouring tokens on
            different ranks and is refused.
        length: Real tokens of the whole sequence; see `burst_attention`.
        group: See `burst_attention`.
        scale: Factor on the output, above 0; default `key_dim ** -0.5`.
        normalize: Whether queries and keys are divided by `sqrt(sum(x * x) + 1e-6)`. Default: with the delta kinds.
        initial_state: `[batch, value_heads, key_dim, value_dim]`, the state before the first token, the same on every
            rank. The first document continues it. Its gradient is on the rank of the first token and zero on the
            others: the sum over the ranks is the gradient, as for weights.
        final_state: Whether to return the state after the last token too. Every rank gets it, and its gradient is the
            sum of the ranks' gradients.
        kernel: "auto", the first of these that supports the inputs on this machine: "triton" (GPUs) or
            "reference" (plain torch, a loop over tokens).

    Returns:
        The output, shaped and typed as v; with `final_state` also `[batch, value_heads, key_dim, value_dim]` in fp32 or
        wider. Padding gives zero.

    Raises:
        UserError: A value is unknown, shapes, dtypes or devices are not supported, or the ranks disagree.
    """
    options = SequenceOptions(
        length=length,
        mask=mask,
        layout=layout,
        kernel=kernel,
        has_initial=initial_state is not None,
        has_final=final_state,
    )
    named = {"q": q, "k": k, "v": v, "g": g} | ({} if beta is None else {"beta": beta})

    def recurrence() -> Recurrence:
        require_known("kind", kind, KINDS)
        require_scale(scale)
        if normalize is not None:
            require_flag("normalize", normalize)
        _require_attention(named, kind, initial_state)
        chosen = kind != "decay" if normalize is None else normalize
        return Recurrence(kind, k.shape[-1] ** -0.5 if scale is None else float(scale), chosen)

    return _scanned(named, initial_state, recurrence, options, group)


def burst_ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # the names of the paper and of mamba-ssm
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    mask: MaskOption = "causal",
    layout: str = "zigzag",
    length: int | None = None,
    group: object = None,
    initial_state: Tensor | None = None,
    final_state: bool = False,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the exact state space model of Mamba 2 over the whole sequence for this rank's tokens.

    `S = exp(A dt) S + dt x B^T; out = S C + D x`, with a state `[head_dim, state_size]` for each head. It is
    `burst_linear_attention` of kind "decay" with queries C, keys B, values `dt x` and decays `A dt`.

    Args:
        x: `[batch, local_tokens, heads, head_dim]`, any float dtype.
        dt: Step sizes, `[batch, local_tokens, heads]`.
        A: `[heads]`, below 0.
        B: `[batch, local_tokens, groups, state_size]`, typed as x; heads is a multiple of groups.
        C: Shaped and typed as B.
        D: `[heads]` or `[heads, head_dim]`, or None.
        dt_bias: `[heads]`, added to dt, or None.
        dt_softplus: Whether dt is `softplus(dt + dt_bias)`.
        dt_limit: Smallest and largest dt after that.
        mask: As in `burst_linear_attention`, and so are the arguments that follow.
        layout: See above.
        length: See above.
        group: See above.
        initial_state: `[batch, heads, head_dim, state_size]`.
        final_state: See above.
        kernel: See above.

    Returns:
        The output, shaped and typed as x; with `final_state` also the state, `[batch, heads, head_dim, state_size]`.
        Padding gives zero.

    Raises:
        UserError: As `burst_linear_attention`.

    Source: state space duality, arXiv:2405.21060.
    """
    comm = resolve_group(group)
    shared = {"A": A} | {name: t for name, t in (("D", D), ("dt_bias", dt_bias)) if t is not None}

    options = SequenceOptions(
        length=length, mask=mask, layout=layout, has_initial=initial_state is not None, has_final=final_state
    )

    def decide() -> tuple[Chain, str]:
        require_flag("dt_softplus", dt_softplus)
        state = {} if initial_state is None else {"initial_state": initial_state}
        _require_ssd({"x": x, "dt": dt, "B": B, "C": C}, shared | state, dt_limit)
        require_device(comm, "x", x)
        chain = options.chain(comm.size, *x.shape[:2])
        facts = f"dt_limit {dt_limit}\ndt_softplus {dt_softplus}\nof all tokens {', '.join(shared)}"
        return chain, signature("burst_ssd", comm, {"dt": dt} | shared, facts)

    with comm.first_calls("burst_ssd") as is_first:
        chain = comm.decided(decide)
        for name, tensor in shared.items() if is_first else ():
            comm.require_alike(f"{name} of burst_ssd", tensor)
    x, dt = zero_padding(chain, comm.rank, x, dt)
    wide = torch.promote_types(x.dtype, torch.float32)
    step = dt.to(wide) if dt_bias is None else dt.to(wide) + dt_bias.to(wide)
    step = functional.softplus(step) if dt_softplus else step
    step = step.clamp(*dt_limit)
    found = burst_linear_attention(
        C,
        B,
        (x.to(wide) * step[..., None]).to(x.dtype),
        A.to(wide) * step,
        kind="decay",
        mask=mask,
        layout=layout,
        length=length,
        group=comm,
        scale=1.0,
        initial_state=None if initial_state is None else initial_state.mT,
        final_state=final_state,
        kernel=kernel,
    )
    out, *state = found if isinstance(found, tuple) else (found,)
    if D is not None:
        out = out + (x.to(wide) * (D if D.dim() == 2 else D[:, None]).to(wide)).to(out.dtype)
    return (out, state[0].mT) if state else out


def burst_scan(
    a: Tensor,
    b: Tensor,
    *,
    mask: MaskOption = "causal",
    layout: str = "zigzag",
    length: int | None = None,
    group: object = None,
    initial_state: Tensor | None = None,
    final_state: bool = False,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the states `h = a h + b`, elementwise, of all of this rank's tokens: Mamba 1, RG-LRU.

    Args:
        a: `[batch, local_tokens, channels, ...]`, any float dtype.
        b: Shaped as a.
        mask: As in `burst_linear_attention`, and so are the arguments that follow.
        layout: See above.
        length: See above.
        group: See above.
        initial_state: `[batch, channels, ...]`.
        final_state: See above.
        kernel: See above.

    Returns:
        The states, shaped and typed as b; with `final_state` also the last one, `[batch, channels, ...]`.

    Raises:
        UserError: As `burst_linear_attention`.
    """
    options = SequenceOptions(
        length=length,
        mask=mask,
        layout=layout,
        kernel=kernel,
        has_initial=initial_state is not None,
        has_final=final_state,
    )
    named = {"a": a, "b": b}

    def recurrence() -> Recurrence:
        shape = _sizes(b, max(3, b.dim()) if isinstance(b, Tensor) else 3)
        words = "[batch, local_tokens, channels, ...]"
        tensors, shapes = {"b": b, "a": a}, {"b": shape, "a": shape}
        if initial_state is not None:
            tensors["initial_state"], shapes["initial_state"] = initial_state, (shape[0], *shape[2:])
        require_shapes(tensors, shapes, dict.fromkeys(shapes, words) | {"initial_state": "[batch, channels, ...]"})
        return Recurrence("scan")

    return _scanned(named, initial_state, recurrence, options, group)


@outside_of_graphs
def burst_causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    mask: MaskOption = "causal",
    layout: str = "zigzag",
    length: int | None = None,
    group: object = None,
    initial_state: Tensor | None = None,
    final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the causal depthwise convolution over the whole sequence for this rank's tokens.

    `out[t] = act(sum_j weight[:, j] x[t - width + 1 + j] + bias)`; tokens of other documents count as zero. The ranks
    gather the last `width - 1` tokens of each run.

    Args:
        x: `[batch, local_tokens, channels]`, any float dtype.
        weight: `[channels, width]`. Every rank passes the same; its gradient covers this rank's tokens, and the caller
            sums it over the group, as for other weights.
        bias: `[channels]`, or None.
        activation: "silu" or None.
        mask: As in `burst_linear_attention`, and so are the arguments that follow.
        layout: See above.
        length: See above.
        group: See above.
        initial_state: `[batch, width - 1, channels]`, the tokens before the first one.
        final_state: Whether to return the last `width - 1` tokens too, `[batch, width - 1, channels]`.

    Returns:
        The output, shaped and typed as x; with `final_state` also the last tokens.

    Raises:
        UserError: As `burst_linear_attention`.
    """
    comm = resolve_group(group)
    options = SequenceOptions(
        length=length, mask=mask, layout=layout, has_initial=initial_state is not None, has_final=final_state
    )

    given = {"bias": bias, "initial_state": initial_state}
    shared = {"weight": weight} | {name: t for name, t in given.items() if t is not None}

    def decide() -> tuple[Any, str]:
        if activation is not None:
            require_known("activation", activation, ACTIVATIONS)
        _require_conv({"x": x} | shared)
        return conv_call(comm, {"x": x} | shared, options, activation)

    with comm.first_calls("burst_causal_conv") as is_first:
        call = comm.decided(decide)
        for name, tensor in shared.items() if is_first else ():
            comm.require_alike(f"{name} of burst_causal_conv", tensor)
    out, final = SequenceConv.apply(call, x, weight, bias, initial_state)  # type: ignore[no-untyped-call]
    return (out, final) if final_state else out


@outside_of_graphs
def _scanned(
    named: dict[str, Tensor],
    initial_state: Tensor | None,
    recurrence: Callable[[], Recurrence],
    options: SequenceOptions,
    group: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the output of a recurrence, and the final state if it is wanted. `recurrence` checks the inputs."""
    comm = resolve_group(group)
    device_name(comm)  # collective the first time for a group: no rank may raise alone before it
    with comm.first_calls("burst_linear_attention") as is_first:
        call = comm.decided(lambda: scan_call(comm, recurrence(), named, initial_state, options))
        if is_first and initial_state is not None:
            comm.require_alike("initial_state of a recurrence", initial_state)
    out, final = SequenceScan.apply(call, initial_state, *named.values())  # type: ignore[no-untyped-call]
    return (out, final) if options.has_final else out


def _require_attention(named: dict[str, Tensor], kind: str, initial_state: Tensor | None) -> None:
    """Check the inputs of linear attention."""
    if (kind == "decay") == ("beta" in named):
        raise UserError(
            f"kind '{kind}' {'has no beta' if kind == 'decay' else 'needs beta'}\n"
            "allowed: beta with 'gated_delta' and 'kda'\nfix: another kind, or "
            f"{'leave beta out' if kind == 'decay' else 'pass beta, [batch, local_tokens, value_heads]'}"
        )
    words = {
        **dict.fromkeys("qk", "[batch, local_tokens, heads, key_dim]"),
        "v": "[batch, local_tokens, value_heads, value_dim]",
        "g": f"[batch, local_tokens, value_heads{', key_dim' if kind == 'kda' else ''}]",
        "beta": "[batch, local_tokens, value_heads]",
        "initial_state": "[batch, value_heads, key_dim, value_dim]",
    }
    batch, tokens, heads, key_dim = _sizes(named["q"], 4)
    *_, value_heads, value_dim = _sizes(named["v"], 4)
    shapes: dict[str, tuple[int | None, ...]] = {
        **dict.fromkeys("qk", (batch, tokens, heads, key_dim)),
        "v": (batch, tokens, None, None),
        "g": (batch, tokens, value_heads, *((key_dim,) if kind == "kda" else ())),
        "beta": (batch, tokens, value_heads),
        "initial_state": (batch, value_heads, key_dim, value_dim),
    }
    given = {} if initial_state is None else {"initial_state": initial_state}
    require_shapes({**named, **given}, shapes, words)
    _require_one_dtype({name: named[name] for name in "qkv"})
    q, v = named["q"], named["v"]
    if v.shape[2] % q.shape[2]:
        raise UserError(
            f"{v.shape[2]} value heads cannot share {q.shape[2]} heads of queries and keys\n"
            "fix: the first must be a multiple of the second"
        )


def _require_ssd(named: dict[str, Tensor], shared: dict[str, Tensor], dt_limit: tuple[float, float]) -> None:
    """Check the inputs of a state space model."""
    batch, tokens, heads, head_dim = _sizes(named["x"], 4)
    *_, groups, state = _sizes(named["B"], 4)
    shapes: dict[str, tuple[int | None, ...]] = {
        "x": (batch, tokens, None, None),
        "dt": (batch, tokens, heads),
        **dict.fromkeys("BC", (batch, tokens, groups, state)),
        **dict.fromkeys(("A", "dt_bias"), (heads,)),
        "D": (heads, head_dim) if isinstance(shared.get("D"), Tensor) and shared["D"].dim() == 2 else (heads,),
        "initial_state": (batch, heads, head_dim, state),
    }
    words = {
        "x": "[batch, local_tokens, heads, head_dim]",
        "dt": "[batch, local_tokens, heads]",
        **dict.fromkeys("BC", "[batch, local_tokens, groups, state_size]"),
        **dict.fromkeys(("A", "dt_bias"), "[heads]"),
        "D": "[heads] or [heads, head_dim]",
        "initial_state": "[batch, heads, head_dim, state_size]",
    }
    require_shapes({**named, **shared}, shapes, words)
    _require_one_dtype({name: named[name] for name in "xBC"})
    limits = dt_limit if isinstance(dt_limit, tuple | list) else ()
    are_numbers = len(limits) == 2 and all(isinstance(limit, int | float) for limit in limits)
    if not are_numbers or not 0 <= limits[0] <= limits[1]:
        raise UserError(
            f"dt_limit must be two ascending numbers from 0, got {short_text(dt_limit)}\nfix: (0.0, float('inf'))"
        )


def _require_conv(named: dict[str, Tensor]) -> None:
    """Check the inputs of a convolution."""
    words = {
        "x": "[batch, local_tokens, channels]",
        "weight": "[channels, width]",
        "bias": "[channels]",
        "initial_state": "[batch, width - 1, channels]",
    }
    batch, _, channels = _sizes(named["x"], 3)
    _, width = _sizes(named["weight"], 2)
    shapes: dict[str, tuple[int | None, ...]] = {
        "x": (None, None, None),
        "weight": (channels, None),
        "bias": (channels,),
        "initial_state": (batch, None if width is None else width - 1, channels),
    }
    require_shapes(named, shapes, words)
    _require_one_dtype({name: named[name] for name in ("weight", "bias") if name in named})


def _require_one_dtype(tensors: dict[str, Tensor]) -> None:
    """Check that tensors share one dtype."""
    dtypes = [str(tensor.dtype) for tensor in tensors.values()]
    if len({*dtypes}) > 1:
        names, got = (f"{', '.join(each[:-1])} and {each[-1]}" for each in ([*tensors], dtypes))
        raise UserError(f"{names} must share one dtype, got {got}\nfix: convert them before the call")


def _sizes(tensor: object, dims: int) -> tuple[int | None, ...]:
    """Return the shape of a tensor with that many dimensions; of anything else, and for sizes of 0, any numbers."""
    has_sizes = isinstance(tensor, Tensor) and not tensor.is_nested and tensor.dim() == dims
    sizes = tensor.shape if isinstance(tensor, Tensor) and has_sizes else (None,) * dims
    return tuple(size or None for size in sizes)
