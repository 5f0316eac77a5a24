"""Biased attention in Triton: head dims up to 256, fp32 and 16 bits; its twin in plain torch is `reference`."""

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmburst_ops.biased.fixed_point import as_numbers, units
from bmburst_ops.biased.kernel import Bias, BiasedGradients, require_inputs
from bmburst_ops.biased.runs import diagonal_runs, line_runs
from bmburst_ops.biased.tokens import Tokens
from bmburst_ops.flash.kernel import Partial
from bmburst_ops.flash.triton import TritonKernel, near_rows, strides_of
from bmburst_ops.flash.triton_launch import Blocks, padded


class Plan(NamedTuple):
    """How each kernel is cut. `queries` and `table` share their blocks, of queries one or more whole ones of keys: what
    one adds to the table the other leaves out.
    """

    forward: Blocks
    keys: Blocks
    queries: Blocks
    table: Blocks


_Table = tuple[tuple[int, Plan], ...]  # by the largest padded head dim that a plan is for

# Of head dim 128 the fastest on an H200; of the others compiled only, for sm_90 and sm_80, where no thread of the first
# three spills a byte, and the table's do where a run ends.
_HOPPER: _Table = (  # up to 192 KiB of shared memory
    (64, Plan(Blocks(128, 64, 8, 3), Blocks(64, 128, 8, 2), Blocks(128, 64, 8, 2), Blocks(128, 64, 8, 2))),
    (128, Plan(Blocks(128, 64, 8, 3), Blocks(64, 128, 8, 2), Blocks(64, 64, 4, 2), Blocks(64, 64, 8, 2))),
    (256, Plan(Blocks(128, 32, 8, 2), Blocks(32, 32, 8, 2), Blocks(32, 32, 8, 2), Blocks(32, 32, 8, 1))),
)
_SMALL: _Table = (  # up to 72 KiB: any card from Ampere on
    (64, Plan(Blocks(128, 64, 8, 2), Blocks(64, 64, 8, 2), Blocks(64, 64, 8, 2), Blocks(64, 64, 8, 1))),
    (128, Plan(Blocks(128, 32, 8, 2), Blocks(32, 64, 8, 2), Blocks(64, 32, 8, 2), Blocks(64, 32, 8, 1))),
    (256, Plan(Blocks(32, 32, 8, 2), Blocks(32, 32, 8, 2), Blocks(32, 32, 8, 2), Blocks(32, 32, 8, 1))),
)
_FP32: _Table = (
    (64, Plan(*[Blocks(32, 32, 8, 1)] * 4)),
    (128, Plan(*[Blocks(32, 16, 8, 1)] * 4)),
    (256, Plan(*[Blocks(16, 16, 8, 1)] * 4)),
)
_INTERPRETED: _Table = ((256, Plan(*[Blocks(32, 16, 4, 1)] * 4)),)  # uneven, so that small tensors meet every path


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
        numbers, plan, words = (q.shape[1], k.shape[1], scale / math.log(2)), _plan(q).forward, _words(bias)
        runs = line_runs(queries, keys, plan.over_keys, words[2:]).runs
        strides = map(strides_of, (q, k, v, out))
        arguments = (q, k, v, out, lse, *strides, *numbers, queries.packed(), keys.packed(), *runs, *words)
        _launch(_kernels().forward, q, -(-q.shape[1] // plan.queries), runs.most, arguments, plan)
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
        sums = torch.zeros(q.shape[2], bias.formula.rows, dtype=torch.int64, device=q.device)
        if not q.numel() or not k.numel():
            return BiasedGradients(grad_q.zero_(), grad_k.zero_(), grad_v.zero_(), sums.t().float())
        plan, words, packed, unit = _plan(q), _words(bias), (queries.packed(), keys.packed()), units(grad_out, v, delta)
        runs = line_runs(queries, keys, plan.keys.over_queries, words[2:]).runs
        arguments = (*inputs, grad_k, grad_v, *read, strides_of(grad_k), strides_of(grad_v), *numbers)
        blocks = -(-k.shape[1] // plan.keys.keys)
        _launch(_kernels().keys, q, blocks, runs.most, (*arguments, *packed, *runs, *words), plan.keys)

        lines = line_runs(queries, keys, plan.queries.over_keys, words[2:])
        runs = lines.runs
        arguments = (*inputs, grad_q, sums, unit, *read, strides_of(grad_q), *numbers, *packed, *runs, *words)
        _launch(_kernels().queries, q, -(-q.shape[1] // plan.queries.queries), runs.most, arguments, plan.queries)

        runs = diagonal_runs(queries, keys, plan.queries.over_keys, lines, words[2:])
        found = (*packed, *runs, *lines[1:], *lines.runs, *words)
        arguments = (*inputs, sums, unit, *read, *numbers[:2], numbers[3], *found)
        _launch(_kernels().table, q, runs.counts.shape[1], runs.most, arguments, plan.table)
        return BiasedGradients(grad_q, grad_k, grad_v, as_numbers(sums, unit).t())


class _Kernels(NamedTuple):
    forward: Any
    keys: Any
    queries: Any
    table: Any
    interpreted: bool


@cache
def _kernels() -> _Kernels:
    """Import Triton, and the kernels, where they are first needed. TRITON_INTERPRET decides then."""
    import triton

    from bmburst_ops.biased.triton_backward import keys_kernel, queries_kernel
    from bmburst_ops.biased.triton_forward import forward_kernel
    from bmburst_ops.biased.triton_table import table_kernel

    is_interpreted = not isinstance(forward_kernel, triton.JITFunction)
    return _Kernels(forward_kernel, keys_kernel, queries_kernel, table_kernel, is_interpreted)


def _plan(q: Tensor) -> Plan:
    """Return how each kernel is cut for these queries on this device."""
    table = _INTERPRETED
    if not _kernels().interpreted:
        has_much = torch.cuda.get_device_capability(q.device)[0] in (9, 10)
        table = _FP32 if q.dtype == torch.float32 else _HOPPER if has_much else _SMALL
    return next(plan for largest, plan in table if padded(q.shape[-1]) <= largest)


def _words(bias: Bias) -> tuple[Any, ...]:
    """Return what a kernel needs for a bias, in the order of its arguments; from the third on not the table itself."""
    formula, relations = bias.formula, bias.relations.contiguous()
    table = (bias.table.detach().float() / math.log(2)).t().contiguous()
    stride = relations.shape[1] if relations.shape[0] > 1 else 0
    distances = formula.distances(table.device)
    numbers = (formula.max_distance, formula.num_buckets, formula.rows)
    return table[:, distances], table, relations, stride, relations.shape[1], distances, *numbers


def _launch(kernel: Any, q: Tensor, programs: int, most: int, arguments: tuple[Any, ...], blocks: Blocks) -> None:
    """Run so many programs for each head and batch; `most` runs have room."""
    batch, _, heads, head_dim = q.shape
    if not batch * heads * programs:
        return
    with torch.cuda.device_of(q):  # Triton launches on the current device, wherever the tensors are
        kernel[(programs, heads, batch)](
            *arguments,
            HEAD_DIM=head_dim,
            DIM=padded(head_dim),
            QUERIES=blocks.queries,
            KEYS=blocks.keys,
            RUNS=most,
            PRECISION="interpreter" if _kernels().interpreted else "ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
