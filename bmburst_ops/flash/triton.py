"""bmburst's flash attention in Triton: any head dim up to 256, also fp32, and a backward that takes delta."""

import math
from functools import cache

import torch
from torch import Tensor

from bmburst_ops.flash.kernel import BackwardInputs, Gradients, Partial
from bmburst_ops.flash.limits import unless_ampere
from bmburst_ops.flash.triton_launch import (
    BlockSizes,
    FlashBlockSizes,
    Kernels,
    Table,
    block_sizes_for,
    blocks_of,
    is_interpreted,
    launch_grid,
    mask_arguments,
)
from bmburst_ops.fused import is_there
from bmburst_ops.pattern import Need, Pattern

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 256
_MAX_ROW_STRIDE = 2**31 // 256  # offsets inside a block of up to 256 rows are 32 bits wide

_HOPPER: Table[FlashBlockSizes] = (  # compiled for sm_90, each spills less than 100 bytes per thread
    (64, FlashBlockSizes(BlockSizes(128, 128, 8, 3), BlockSizes(64, 128, 8, 2), BlockSizes(128, 64, 8, 3))),
    (128, FlashBlockSizes(BlockSizes(128, 64, 8, 3), BlockSizes(32, 128, 8, 3), BlockSizes(128, 64, 8, 2))),
    (256, FlashBlockSizes(BlockSizes(128, 64, 8, 2), BlockSizes(32, 64, 8, 2), BlockSizes(64, 64, 8, 2))),
)
_SMALL: Table[FlashBlockSizes] = (
    (64, FlashBlockSizes(BlockSizes(128, 64, 4, 2), BlockSizes(64, 64, 4, 2), BlockSizes(128, 64, 8, 2))),
    (128, FlashBlockSizes(BlockSizes(128, 32, 8, 2), BlockSizes(32, 64, 8, 2), BlockSizes(64, 32, 4, 2))),
    (256, FlashBlockSizes(BlockSizes(64, 32, 8, 2), BlockSizes(16, 32, 4, 1), BlockSizes(32, 32, 4, 1))),
)
_FP32: Table[FlashBlockSizes] = (
    (64, FlashBlockSizes(*[BlockSizes(32, 32, 4, 1)] * 3)),
    (256, FlashBlockSizes(*[BlockSizes(16, 16, 4, 1)] * 3)),
)
# Small and uneven, so that small tensors in tests cover every path.
_INTERPRETED: Table[FlashBlockSizes] = (
    (256, FlashBlockSizes(BlockSizes(32, 16, 4, 1), BlockSizes(16, 32, 4, 1), BlockSizes(32, 16, 4, 1))),
)


class TritonKernel:
    """`Kernel` in Triton for Ampere or newer, and for CPUs in Triton's interpreter, which is for tests.

    Gradients are fp32, or in the dtype of `into`. Every call is deterministic.
    """

    name = "triton"
    recordable = False
    takes_delta = True

    def refusal(self, q: Tensor, k: Tensor, needs: frozenset[Need] = frozenset()) -> str | None:
        """See `Kernel.refusal`."""
        del k, needs
        if not is_there("triton"):
            return "needs Triton, which is not installed: pip install 'triton>=3.6'"
        if q.dtype not in _DTYPES:
            return f"takes float32, bfloat16 and float16 only, got {q.dtype}"
        if q.shape[-1] > _MAX_HEAD_DIM:
            return f"takes head dims up to {_MAX_HEAD_DIM}, got {q.shape[-1]}"
        if q.device.type == "cuda":
            return unless_ampere(q)
        if q.device.type == "cpu" and is_interpreted(_kernels().forward):
            return None
        return f"runs on NVIDIA GPUs, or with TRITON_INTERPRET=1 on CPUs, and the tensors are on {q.device}"

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
        """See `Kernel.forward`. The output is in q's dtype, the log-sum-exp in fp32, or both in `into`'s."""
        if scale < 0:  # the kernel takes the maximum of unscaled products
            q, scale = -q, -scale
        q, k, v = (near_rows(t) for t in (q, k, v))
        batch, queries, heads, _ = q.shape
        out, lse = into or (
            torch.empty(q.shape, dtype=q.dtype, device=q.device),
            torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device),
        )
        kernels, blocks = _kernels(), _block_sizes(q).forward
        mask = mask_arguments(pattern, q, k, *blocks.over_keys)
        numbers = (*_lengths(q, k), scale / math.log(2), cap_of(softcap, scale))
        strides = (*map(strides_of, (q, k, v, out)), *lse.stride()[:2])
        arguments = (q, k, v, out, lse, *strides, *numbers, *mask[1:])
        launch_grid(kernels.forward, q, blocks_of(q, blocks.queries), arguments, blocks, MASK=mask.kind)
        return Partial(out, lse)

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
        """See `Kernel.backward`. A query that saw no key (log-sum-exp `-inf`) contributes no gradient."""
        del deterministic  # always deterministic
        (grad_out, q, k, v), (lse, delta) = map(near_rows, given[:4]), given[4:]
        grads = into or Gradients(*(torch.empty(t.shape, dtype=torch.float32, device=t.device) for t in (q, k, v)))
        inputs = (grad_out, q, k, v, lse, delta)
        strides = tuple(map(strides_of, (grad_out, q, k, v, lse.transpose(1, 2), delta.transpose(1, 2))))
        numbers = (*_lengths(q, k), scale, scale / math.log(2), cap_of(softcap, scale))
        kernels, sizes = _kernels(), _block_sizes(q)
        blocks = sizes.keys
        mask = mask_arguments(pattern, q, k, *blocks.over_queries)
        arguments = (*inputs, *grads[1:], *strides, *map(strides_of, grads[1:]), *numbers, *mask[1:])
        launch_grid(kernels.keys, k, blocks_of(k, blocks.keys), arguments, blocks, MASK=mask.kind)
        blocks = sizes.queries
        mask = mask_arguments(pattern, q, k, *blocks.over_keys)
        arguments = (*inputs, grads.q, *strides, strides_of(grads.q), *numbers, *mask[1:])
        launch_grid(kernels.queries, q, blocks_of(q, blocks.queries), arguments, blocks, MASK=mask.kind)
        return grads


def _block_sizes(q: Tensor) -> FlashBlockSizes:
    """Return the block sizes of each kernel for these inputs on this device."""
    return block_sizes_for(q, _kernels().forward, hopper=_HOPPER, small=_SMALL, fp32=_FP32, interpreted=_INTERPRETED)


@cache
def _kernels() -> Kernels:
    """Import Triton and the kernels at first use. TRITON_INTERPRET is read at that time."""
    from bmburst_ops.flash.triton_backward import keys_kernel, queries_kernel
    from bmburst_ops.flash.triton_forward import forward_kernel

    return Kernels(forward_kernel, keys_kernel, queries_kernel)


def _lengths(q: Tensor, k: Tensor) -> tuple[int, int, int]:
    """Return the number of queries, of keys, and of query heads per KV head."""
    return q.shape[1], k.shape[1], q.shape[2] // k.shape[2]


def cap_of(softcap: float | None, scale: float) -> float | None:
    """Return the softcap divided by the scale: the kernels cap products before they scale them."""
    return None if softcap is None else softcap / scale


def strides_of(tensor: Tensor) -> tuple[int, ...]:
    """Strides of (batch, token, head)."""
    return tensor.stride()[:3]


def near_rows(tensor: Tensor) -> Tensor:
    """Return the tensor if its rows are dense and close enough for 32-bit offsets, else a copy."""
    return tensor if tensor.stride(-1) == 1 and tensor.stride(1) <= _MAX_ROW_STRIDE else tensor.contiguous()
