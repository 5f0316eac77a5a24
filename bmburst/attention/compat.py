"""The names and argument order of the Burst-Attention package: changing the import is all its users do."""

from collections.abc import Sequence

from torch import Tensor

from bmburst.attention.api import burst_attention, resolve_group
from bmburst.errors import unknown

_FLASH = ("cuda", "triton")


def burst_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    flash: str | None = "cuda",
    causal: bool = False,
    optimize_bwd_comm: bool = False,
    deterministic: bool = False,
    process_group: object = None,
    double_group: Sequence[object] = (None, None),
) -> Tensor:
    """Return attention as Burst-Attention's function of this name does; causal means zigzag order.

    Args:
        q: `[batch, local_tokens, heads, head_dim]`; with `flash=None` `[batch, heads, local_tokens, head_dim]`.
        k: In the same order of dimensions, with its own number of heads.
        v: Shaped as k.
        softmax_scale: Factor on the scores; default `head_dim ** -0.5`.
        flash: "cuda" or "triton": both take the best kernel of this device. None: plain torch.
        causal: Causal mask over a sequence in zigzag order, or no mask.
        optimize_bwd_comm: True makes the queries travel in backward (strategy "burst"); False takes the cheapest way.
        deterministic: Whether repeated calls must give the same bits.
        process_group: As `group` in `burst_attention`.
        double_group: Groups of the two levels of a double ring. Not used: which ranks share a node is found out.

    Raises:
        UserError: As `burst_attention`.
    """
    del double_group
    return _attention(q, k, v, softmax_scale, flash, causal, optimize_bwd_comm, deterministic, process_group, "zigzag")


def burst_attn_func_striped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    flash: str | None = "cuda",
    causal: bool = False,
    optimize_bwd_comm: bool = False,
    deterministic: bool = False,
    process_group: object = None,
    double_group: Sequence[object] = (None, None),
) -> Tensor:
    """Return attention as `burst_attn_func` does; causal means striped order."""
    del double_group
    return _attention(q, k, v, softmax_scale, flash, causal, optimize_bwd_comm, deterministic, process_group, "striped")


class OpBurstAttn:
    """Burst-Attention's autograd function: `OpBurstAttn.apply` takes what `burst_attn_func` takes, by position."""

    apply = staticmethod(burst_attn_func)


class OpBurstAttnStrip:
    """Burst-Attention's autograd function of striped order: `apply` takes what `burst_attn_func_striped` takes."""

    apply = staticmethod(burst_attn_func_striped)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    flash: str | None,
    causal: bool,
    optimize_bwd_comm: bool,
    deterministic: bool,
    process_group: object,
    order: str,
) -> Tensor:
    if flash is not None and flash not in _FLASH:
        resolve_group(process_group).refuse(str(unknown("flash", flash, _FLASH)))
    if flash is None:  # what has no heads to put first is refused behind this, on every rank
        q, k, v = (t.transpose(1, 2) if isinstance(t, Tensor) and t.dim() == 4 else t for t in (q, k, v))
    out = burst_attention(
        q,
        k,
        v,
        mask="causal" if causal else "full",
        layout=order if causal else "contiguous",
        group=process_group,
        scale=softmax_scale,
        kernel="reference" if flash is None else "auto",
        strategy="burst" if optimize_bwd_comm else "auto",
        deterministic=deterministic,
    )
    return out.transpose(1, 2) if flash is None else out
