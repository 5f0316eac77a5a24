"""The Triton twin of `bmburst_ops.rotary`: reads and writes each number once. Importing it needs Triton.

A program turns a tile of tokens and heads, so that the angles of a token are read once for all of its heads.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 4096
"""Head dimension that a program holds."""
_PAIRS = 2048  # that a program holds


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    """Return x turned, contiguous.

    Args:
        x: `[batch, tokens, heads, head_dim]`, any strides.
        cos: fp32 `[batch, tokens, head_dim / 2]`, any strides.
        sin: As `cos`.
        back: By the negative angles.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    batch, tokens, heads, head_dim = x.shape
    pairs = triton.next_power_of_2(head_dim // 2)
    tile_heads = min(triton.next_power_of_2(heads), max(1, _PAIRS // pairs))
    tile_tokens = max(1, _PAIRS // (pairs * tile_heads))
    programs = batch * triton.cdiv(tokens, tile_tokens) * triton.cdiv(heads, tile_heads)
    with torch.cuda.device_of(x):  # Triton launches on the current device, wherever the tensors are
        _rotate_kernel[(programs,)](
            x, cos, sin, out, x.stride(), cos.stride(), sin.stride(), out.stride(), tokens, heads,
            BACK=back, PAIRS=head_dim // 2, TOKENS=tile_tokens, HEADS=tile_heads, BLOCK=pairs, num_warps=8,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["tokens"])
def _rotate_kernel(
    x, cos, sin, out, x_strides, cos_strides, sin_strides, out_strides, tokens, heads,
    BACK: tl.constexpr, PAIRS: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    head_blocks, token_blocks = tl.cdiv(heads, HEADS), tl.cdiv(tokens, TOKENS)
    head = (program % head_blocks * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    token = (program // head_blocks % token_blocks * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    batch = (program // head_blocks // token_blocks).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    has_angle = (token < tokens)[:, None] & (pair < PAIRS)[None, :]
    inside = has_angle[:, None, :] & (head < heads)[None, :, None]
    cosines = tl.load(_angles(cos, cos_strides, batch, token, pair), mask=has_angle, other=0.0)[:, None, :]
    sines = tl.load(_angles(sin, sin_strides, batch, token, pair), mask=has_angle, other=0.0)[:, None, :]
    if BACK:
        sines = -sines
    first_at = _halves(x, x_strides, batch, token, head, pair)
    first = tl.load(first_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(first_at + PAIRS * x_strides[3], mask=inside, other=0.0).to(tl.float32)
    out_at = _halves(out, out_strides, batch, token, head, pair)
    tl.store(out_at, (first * cosines - second * sines).to(out.dtype.element_ty), mask=inside)
    turned = (second * cosines + first * sines).to(out.dtype.element_ty)
    tl.store(out_at + PAIRS * out_strides[3], turned, mask=inside)


@triton.jit
def _angles(table, strides, batch, token, pair):
    return table + batch * strides[0] + token[:, None] * strides[1] + pair[None, :] * strides[2]


@triton.jit
def _halves(x, strides, batch, token, head, pair):
    """Return pointers to the first numbers of pairs, `[tokens, heads, pairs]`."""
    rows = x + batch * strides[0] + token[:, None, None] * strides[1] + head[None, :, None] * strides[2]
    return rows + pair[None, None, :] * strides[3]
