"""Biased attention in Triton: head dims up to 256, fp32 and 16 bits; its twin in plain torch is `reference`."""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bmburst_ops.biased.extents import extents
from bmburst_ops.biased.fixed_point import as_numbers, units
from bmburst_ops.biased.kernel import Bias, BiasedGradients, require_inputs
from bmburst_ops.biased.tokens import Tokens
from bmburst_ops.flash.kernel import Partial
from bmburst_ops.flash.triton import TritonKernel, near_rows, strides_of
from bmburst_ops.flash.triton_launch import Blocks, Kernels, Plan, Table, plan_for
from bmburst_ops.flash.triton_masks import Side

# Bias and mask take registers beside the scores: blocks are smaller than those of plain attention, and more warps share
# them. Compiled for sm_90 no thread spills a byte.
_HALF: Table = (
    (64, Plan(*[Blocks(64, 64, 8, 1)] * 3)),
    (128, Plan(*[Blocks(64, 32, 8, 1)] * 3)),
    (256, Plan(*[Blocks(32, 32, 8, 1)] * 3)),
)
_FP32: Table = (
    (64, Plan(*[Blocks(64, 32, 8, 1)] * 3)),
    (128, Plan(*[Blocks(32, 32, 8, 1)] * 3)),
    (256, Plan(*[Blocks(16, 16, 8, 1)] * 3)),
)
_INTERPRETED: Table = ((256, Plan(*[Blocks(32, 16, 4, 1)] * 3)),)  # uneven, so that small tensors meet every path


class BiasedTritonKernel:
    """`BiasedKernel` in Triton for Ampere or newer, and for CPUs in Triton's interpreter, which is for tests."""

    name = "triton"

    def refusal(self, q: Tensor) -> str | None:
        """See `BiasedKernel.refusal`."""
        return TritonKernel().refusal(q, q)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Bias, queries: Tokens, keys: Tokens, *, scale: float
    ) -> Partial:
        """See `BiasedKernel.forward`. The output is in q's dtype."""
        require_inputs(q, k, v, bias, queries, keys)
        q, k, v = (near_rows(t) for t in (q, k, v))
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
        kernels, blocks = _kernels(), _plan(q).forward
        numbers = (q.shape[1], k.shape[1], scale / math.log(2))
        arguments = (
            q,
            k,
            v,
            out,
            lse,
            *map(strides_of, (q, k, v, out)),
            *numbers,
            *_lookup(bias, queries, keys, blocks.over_keys),
        )
        kernels.launch(kernels.forward, q, blocks.queries, arguments, blocks)
        return Partial(out, lse)

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        bias: Bias,
        queries: Tokens,
        keys: Tokens,
        *,
        scale: float,
    ) -> BiasedGradients:
        """See `BiasedKernel.backward`. Gradients are fp32."""
        require_inputs(q, k, v, bias, queries, keys)
        grad_out, q, k, v = (near_rows(t) for t in (grad_out, q, k, v))
        grad_q, grad_k, grad_v = (torch.empty(t.shape, dtype=torch.float32, device=t.device) for t in (q, k, v))
        inputs = (grad_out, q, k, v, lse, delta)
        read = tuple(map(strides_of, (grad_out, q, k, v, lse.transpose(1, 2), delta.transpose(1, 2))))
        numbers = (q.shape[1], k.shape[1], scale, scale / math.log(2))
        kernels, plan = _kernels(), _plan(q)
        lookup = _lookup(bias, queries, keys, plan.keys.over_queries)
        arguments = (*inputs, grad_k, grad_v, *read, strides_of(grad_k), strides_of(grad_v), *numbers, *lookup)
        kernels.launch(kernels.keys, k, plan.keys.keys, arguments, plan.keys)

        sums = torch.zeros(q.shape[2], bias.formula.rows, dtype=torch.int64, device=q.device)
        if not q.numel() or not k.numel():
            return BiasedGradients(grad_q.zero_(), grad_k.zero_(), grad_v.zero_(), sums.t().float())
        unit, lookup = units(grad_out, v, delta), _lookup(bias, queries, keys, plan.queries.over_keys)
        arguments = (*inputs, grad_q, sums, unit, *read, strides_of(grad_q), *numbers, *lookup)
        kernels.launch(kernels.queries, q, plan.queries.queries, arguments, plan.queries)
        return BiasedGradients(grad_q, grad_k, grad_v, as_numbers(sums, unit).t())


@cache
def _kernels() -> Kernels:
    """Import Triton, and the kernels, where they are first needed. TRITON_INTERPRET decides then."""
    from bmburst_ops.biased.triton_backward import keys_kernel, queries_kernel
    from bmburst_ops.biased.triton_forward import forward_kernel

    return Kernels.of(forward_kernel, keys_kernel, queries_kernel)


def _plan(q: Tensor) -> Plan:
    """Return how each kernel is cut."""
    table = _INTERPRETED if _kernels().interpreted else _FP32 if q.dtype == torch.float32 else _HALF
    return plan_for(q, table)


def _lookup(bias: Bias, queries: Tokens, keys: Tokens, side: tuple[Side, int, int]) -> tuple[Any, ...]:
    """Return what a kernel needs for bias and mask, in the order of its arguments.

    Args:
        bias: The bias.
        queries: What the queries are.
        keys: What the keys are.
        side: Of which side its programs hold blocks, of how many tokens, and how many of the other's they take at once.
    """
    if side[0] == "queries":
        of_queries, of_keys, ranges = extents(queries, keys, *side[1:])
    else:
        of_keys, of_queries, ranges = extents(keys, queries, *side[1:])
    formula, relations = bias.formula, bias.relations.contiguous()
    table = (bias.table.detach().float() / math.log(2)).t().contiguous()
    stride = relations.shape[1] if relations.shape[0] > 1 else 0
    numbers = (formula.max_distance, formula.num_buckets, formula.rows)
    distances = formula.distances(table.device)
    vectors = (queries.packed(), keys.packed(), of_queries, of_keys, ranges)
    return *vectors, table, relations, stride, relations.shape[1], distances, *numbers
