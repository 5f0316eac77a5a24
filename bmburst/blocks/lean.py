"""Memory-efficient forward and backward of a recomputed transformer block, by chunks of tokens and groups of heads.

The only tensors of full sequence length are the residual stream, attention's output and its statistics, and the
queries, keys and values of one group of heads. Token-wise operations (norms, projections, rotary embedding, MLP) run on
one chunk of tokens at a time. Backward has four steps:

1. Take attention's output from the tensors kept by the recompute policy, or recompute it.
2. For each chunk: recompute and differentiate output projection and MLP. The gradient of the stream between attention
   and MLP overwrites the gradient of the block's output.
3. For each group of KV heads and their query heads: recompute queries, keys and values, and differentiate attention.
   With sequence parallelism, each group is one attention call, which communicates only these heads.
4. For each chunk: differentiate the projections and the first norm.

Weight gradients are accumulated over chunks in fp32 and rounded once. Results equal those of
`bmburst.blocks.transformer` up to the order of summation.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bmburst.attention.api import resolve_group
from bmburst.attention.module import BurstAttention
from bmburst.blocks.config import kv_heads_at_once
from bmburst.blocks.layers import Linear, RMSNorm
from bmburst.recompute.checkpointing import Tape, is_keeping, recording
from bmburst.recompute.host_store import MLP_OUTPUTS
from bmburst.recompute.policy import Policy
from bmburst.schedule.tiles import Span
from bmburst_ops.gated_mlp import chunk_backward, gate_and_up
from bmburst_ops.linears import Adapter, GradientSum, low_rank_backward, sum_of_products
from bmburst_ops.merge import accumulation_dtype
from bmburst_ops.rms_norm import rms_norm, stream_norm
from bmburst_ops.rotary import rotate
from bmburst_ops.swiglu import swiglu

if TYPE_CHECKING:
    from bmburst.blocks.transformer import Batch, TransformerBlock

_EVERYTHING = Policy(attention=1.0)
MLPOutputs = tuple[Tensor, Tensor]
"""The outputs of gate and up for a chunk of tokens, `[rows, intermediate_size]` each."""
KeepOutput = Callable[[Tensor], None]


class GradientSums:
    """The gradients of a block's parameters, accumulated over chunks of tokens.

    Args:
        parameters: Parameters of the block. Those that do not require a gradient are skipped.
        is_wide: Whether 16-bit gradients are accumulated in fp32; not needed for a single chunk.
    """

    def __init__(self, parameters: Sequence[Tensor], *, is_wide: bool) -> None:
        self._sums = {
            id(each): GradientSum(accumulation_dtype(each.dtype)) if is_wide else GradientSum(each.dtype, each)
            for each in parameters
            if each.requires_grad
        }

    def of(self, parameter: Tensor) -> GradientSum | None:
        """Return the accumulator of a parameter's gradient; None if it requires no gradient."""
        return self._sums.get(id(parameter))

    def of_adapter(self, linear: Linear, keys: Tensor | None) -> Adapter | None:
        """Return a matrix's low-rank term with the accumulators of its gradients; None if it has no adapter.

        Args:
            linear: The matrix.
            keys: See `Linear.adapter`.
        """
        term = linear.adapter(keys)
        return None if term is None else (term, (self.of(term.a), self.of(term.b)))

    def result(self, parameter: Tensor) -> Tensor | None:
        """Return a parameter's gradient in its dtype; None if it has none."""
        found = self.of(parameter)
        return None if found is None else found.gradient(parameter.dtype)


class BlockWork:
    """The computation of one block on one batch. Rows are the tokens of all sequences of the batch.

    Args:
        block: The block.
        hidden: The residual stream before the block, `[batch, tokens, hidden_size]`.
        batch: Rotary tables, length and mask.
    """

    def __init__(self, block: "TransformerBlock", hidden: Tensor, batch: "Batch") -> None:
        self._block, self._attention, self._batch, self._shape = block, block.self_attn, batch, hidden.shape
        self._stream = hidden.reshape(-1, hidden.shape[-1])
        count = len(self._stream)
        self._cos, self._sin = (table.reshape(count, -1) for table in (batch.cos, batch.sin))
        self._keys = None if batch.keys is None else batch.keys.reshape(-1)
        size = block.mlp.rows_at_once(count)
        self._chunks = [slice(at, min(at + size, count)) for at in range(0, count, size)]
        head_dim, q, k = self._attention.head_dim, self._attention.q_proj, self._attention.k_proj
        self._heads, self._kv_heads = (len(each.weight) // head_dim for each in (q, k))
        # Exact type: a subclass may read its inputs where BurstAttention does not.
        self._is_ours = type(self._attention.attention) is BurstAttention
        self._groups = self._split_heads(count)

    def forward(self, *, is_kept: bool = False, keep_output: KeepOutput | None = None) -> Tensor:
        """Return the stream after the block. If attention's output is not kept for backward, it is overwritten.

        Args:
            is_kept: Whether a tape replays all of attention's results, which needs no queries, keys and values.
            keep_output: Receives the outputs of gate and up of each chunk of tokens, in order, each of them as soon as
                its kernels are launched.
        """
        block = self._block
        is_new = self._is_ours and not is_keeping()  # another module may keep a reference to its output
        overwrites = is_new and self._stream.shape[1] == self._heads * self._attention.head_dim
        if overwrites and len(self._groups) > 1:
            whole = torch.empty_like(self._stream)
            for group in self._groups:
                whole[:, self._columns(group)] = self._attended(group)
            outputs = [whole]
        else:
            outputs = [self._attended(group, is_kept=is_kept and self._is_ours) for group in self._groups]
        result = outputs[0] if overwrites else torch.empty_like(self._stream)
        for at in self._chunks:
            added = self._attention.o_proj(_columns_of(outputs, at), keys=self._keys_at(at))
            stream, normed = block.post_attention_layernorm.of_stream(self._stream[at], added, block.factor)
            if at.start == 0:
                block.store.settle(MLP_OUTPUTS)  # those of the block before, copied until here
            added = self._fed_forward(normed, at, keep_output)
            torch.add(stream, added, alpha=block.factor, out=result[at])
        return result.view(self._shape)

    def backward(
        self,
        grad: Tensor,
        parameters: Sequence[Tensor],
        tape: Tape | None = None,
        mlp_outputs: Iterator[MLPOutputs] | None = None,
    ) -> tuple[Tensor, GradientSums]:
        """Return the gradient of the stream before the block, which overwrites `grad`, and those of the parameters.

        Args:
            grad: The gradient of the stream after the block.
            parameters: Those of the block.
            tape: All of attention's results, rewound, if the block's forward was just recomputed.
            mlp_outputs: What `keep_output` received in forward. They are overwritten. None: they are computed again.
        """
        sums = GradientSums(parameters, is_wide=len(self._chunks) > 1)
        grads = grad.view(self._stream.shape)
        is_kept, ready = self._is_ours and (tape is not None or self._block.recompute.attention == 1), None
        if len(self._groups) == 1 and not is_kept:
            ready = self._graph(self._groups[0])
            outputs = [ready[1].detach().reshape(len(grads), -1)]
        else:
            with recording(tape) if tape else nullcontext():
                again = whole_tape()
                with recording(again):
                    outputs = [self._attended(group, is_kept=is_kept) for group in self._groups]
            again.rewind()
        for at in self._chunks:
            of_chunk = next(mlp_outputs) if mlp_outputs else None
            self._feed_forward_backward(at, grads[at], _columns_of(outputs, at), sums, of_chunk)
            del of_chunk
        of_heads = []
        for group in self._groups:
            outputs.pop(0)
            if ready is None:
                with recording(again):
                    ready = self._graph(group)
            of_heads.append(self._attention_backward(group, grads, *ready))
            ready = None
        for at in self._chunks:
            gradients = [_columns_of([each[i] for each in of_heads], at) for i in range(3)]
            self._projections_backward(at, grads[at], gradients, sums)
        return grad, sums

    def _split_heads(self, count: int) -> tuple[Span, ...]:
        """Return the groups of KV heads, one per attention call; one group of all if it is not BurstAttention."""
        every = size = self._kv_heads
        if self._is_ours:
            ranks = resolve_group(self._attention.attention.group).size
            size = kv_heads_at_once(every, count * self._heads, ranks)
        return tuple(Span(at, min(at + size, every)) for at in range(0, every, size))

    def _keys_at(self, at: slice) -> Tensor | None:
        """Return the keys of a chunk of tokens, for dropout."""
        return None if self._keys is None else self._keys[at]

    def _columns(self, group: Span, *, kv: bool = False) -> slice:
        """Return the columns of a group's KV heads in the keys (`kv`), or of its query heads in the queries."""
        width = self._attention.head_dim * (1 if kv else self._heads // self._kv_heads)
        return slice(group.start * width, group.stop * width)

    def _attended(self, group: Span, *, is_kept: bool = False) -> Tensor:
        """Return attention's output for a group of heads, `[rows, heads * head_dim]`.

        `is_kept`: whether a tape replays it, which needs only the shapes of the inputs.
        """
        inputs = self._empty_heads(group) if is_kept else self._projected(group)
        return self._attend(inputs).reshape(len(self._stream), -1)

    def _attend(self, inputs: Sequence[Tensor]) -> Tensor:
        out: Tensor = self._attention.attention(
            *(each.view(*self._shape[:2], -1, self._attention.head_dim) for each in inputs),
            *(self._batch.length, self._batch.mask),
        )
        return out

    def _empty_heads(self, group: Span) -> list[Tensor]:
        columns = self._columns(group), self._columns(group, kv=True), self._columns(group, kv=True)
        return [self._stream.new_empty((len(self._stream), each.stop - each.start)) for each in columns]

    def _projected(self, group: Span) -> list[Tensor]:
        """Return queries, keys and values of a group of heads, `[rows, heads * head_dim]` each."""
        whole = self._empty_heads(group)
        for at in self._chunks:
            self._project_chunk(group, at, [each[at] for each in whole])
        return whole

    def _project_chunk(self, group: Span, at: slice, outputs: Sequence[Tensor]) -> None:
        """Write a chunk's rows of queries, keys and values of a group of heads."""
        normed = self._block.input_layernorm(self._stream[at])
        *rotated, value = self._linears()
        self._product(normed, value, at, self._columns(group, kv=True), out=outputs[2])
        norms = (self._attention.q_norm, self._attention.k_norm) if self._attention.has_norms else (None, None)
        for i, (linear, norm) in enumerate(zip(rotated, norms, strict=True)):
            heads = self._product(normed, linear, at, self._columns(group, kv=i == 1))
            if norm is not None:
                heads = norm(heads.unflatten(1, (-1, self._attention.head_dim)))
            self._rotated(heads, at, out=outputs[i])

    def _product(self, normed: Tensor, linear: Linear, at: slice, rows: slice, out: Tensor | None = None) -> Tensor:
        """Return some outputs of a linear layer for the tokens `at`."""
        product = torch.mm(normed, linear.weight[rows].t(), out=out)
        if term := linear.adapter(self._keys_at(at)):
            term.add_output(product, term.inner(normed), rows)
        if linear.has_bias:
            product += linear.bias[rows]
        return product

    def _linears(self) -> tuple[Linear, Linear, Linear]:
        return self._attention.q_proj, self._attention.k_proj, self._attention.v_proj

    def _rotated(self, x: Tensor, at: slice, *, back: bool = False, out: Tensor | None = None) -> Tensor:
        """Return heads of a chunk after rotary embedding, or its inverse (`back`): `[rows, heads * head_dim]`."""
        cos, sin = self._cos[None, at], self._sin[None, at]
        shape = 1, len(x), -1, self._attention.head_dim
        turned = rotate(x.reshape(shape), cos, sin, back=back, out=None if out is None else out.view(shape))
        return turned.view(len(x), -1)

    def _fed_forward(self, normed: Tensor, at: slice, keep_output: KeepOutput | None) -> Tensor:
        """Return the MLP's result for the chunk of tokens `at`, `[rows, hidden_size]`."""
        mlp, keys = self._block.mlp, self._keys_at(at)
        if keep_output is None:
            result: Tensor = mlp(normed[None], len(normed), keys)[0]
            return result
        gate, up = mlp.gate_proj, mlp.up_proj
        terms = gate.adapter(keys), up.adapter(keys)
        outputs = gate_and_up(normed, gate.weight, up.weight, terms, keep_output)
        projected: Tensor = mlp.down_proj(swiglu(*outputs), keys=keys)
        return projected

    def _feed_forward_backward(
        self, at: slice, grads: Tensor, attended: Tensor, sums: GradientSums, outputs: MLPOutputs | None
    ) -> None:
        """Overwrite a chunk's gradient of the block's output with that of the stream between attention and MLP."""
        block, norm, mlp = self._block, self._block.post_attention_layernorm, self._block.mlp
        projection, stream, keys = self._attention.o_proj, self._stream[at], self._keys_at(at)
        added, scale = projection(attended, keys=keys), _leaf(norm, sums)
        with torch.enable_grad():
            before = stream.detach().requires_grad_()  # has the same gradient as the sum stream + factor * added
            pair = stream_norm(before, added, scale, norm.eps, factor=block.factor, kernel=norm.kernel)
        del added
        gate, up, down = (each.weight for each in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        of_mlp, of_normed = _scaled(grads, block.factor), torch.empty_like(stream)
        wanted = [sums.of(each) for each in (gate, up, down)]
        adapters = [sums.of_adapter(each, keys) for each in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
        chunk_backward(pair[1].detach(), of_mlp, of_normed, gate, up, down, wanted, adapters, outputs)
        of_stream = _norm_backward(norm, scale, before, pair, (grads, of_normed), sums)
        grads.copy_(of_stream)
        if total := sums.of(projection.weight):
            total.add_product(_scaled(of_stream, block.factor).t(), attended)
        adapter = sums.of_adapter(projection, keys)
        low_rank_backward(attended, (_scaled(of_stream, block.factor),), (adapter,), None)

    def _graph(self, group: Span) -> tuple[list[Tensor], Tensor]:
        """Return queries, keys and values of a group of heads, and attention's output with its autograd graph."""
        inputs = self._projected(group)
        with torch.enable_grad():
            for each in inputs:
                each.requires_grad_()
            return inputs, self._attend(inputs)

    def _attention_backward(self, group: Span, grads: Tensor, inputs: Sequence[Tensor], out: Tensor) -> list[Tensor]:
        """Return the gradients of queries, keys and values of a group, `[rows, heads * head_dim]` each."""
        projection = self._attention.o_proj
        columns, term = projection.weight[:, self._columns(group)], projection.adapter(self._keys)
        of_output = grads.new_empty((len(grads), columns.shape[1]))
        for at in self._chunks:
            of_result = _scaled(grads[at], self._block.factor)
            torch.mm(of_result, columns, out=of_output[at])
            if term is not None:
                term.at(at).add_input_gradient(of_output[at], term.of_inner(of_result), self._columns(group))
        del of_result  # with a factor it is a separate tensor, and memory may peak in the next line
        return list(torch.autograd.grad(out, inputs, of_output.view(out.shape)))

    def _projections_backward(self, at: slice, grads: Tensor, of_heads: Sequence[Tensor], sums: GradientSums) -> None:
        """Overwrite a chunk's gradient of the stream after attention with that of the stream before the block."""
        norm, linears = self._block.input_layernorm, self._linears()
        scale = _leaf(norm, sums)
        with torch.enable_grad():
            stream = self._stream[at].detach().requires_grad_()
            pair = stream_norm(stream, None, scale, norm.eps, kernel=norm.kernel)
        normed = pair[1].detach()
        *turned, of_values = of_heads
        of_products = [*self._before_rotary(at, normed, turned, sums), of_values]
        for linear, of_product in zip(linears, of_products, strict=True):
            if total := sums.of(linear.weight):
                total.add_product(of_product.t(), normed)
            if linear.has_bias and (total := sums.of(linear.bias)):
                total.add(of_product.sum(0, dtype=accumulation_dtype(of_product.dtype)))
        of_normed = sum_of_products(of_products, [each.weight for each in linears])
        adapters = [sums.of_adapter(linear, self._keys_at(at)) for linear in linears]
        low_rank_backward(normed, of_products, adapters, of_normed)
        grads.copy_(_norm_backward(norm, scale, stream, pair, (grads, of_normed), sums))

    def _before_rotary(self, at: slice, normed: Tensor, of_heads: Sequence[Tensor], sums: GradientSums) -> list[Tensor]:
        """Return the gradients of the query and key projections' outputs, given those of attention's inputs."""
        turned = [self._rotated(each, at, back=True) for each in of_heads]
        if not self._attention.has_norms:
            return turned
        norms = self._attention.q_norm, self._attention.k_norm
        given = zip(norms, self._linears()[:2], turned, strict=True)
        return [self._before_norm(at, normed, *each, sums) for each in given]

    def _before_norm(
        self, at: slice, normed: Tensor, norm: RMSNorm, linear: Linear, grads: Tensor, sums: GradientSums
    ) -> Tensor:
        """Return the gradient of a projection's output, which is the input of a per-head norm.

        A separate function, so that the recomputed output for one norm is freed before the other norm runs.
        """
        product, scale = self._product(normed, linear, at, slice(None)), _leaf(norm, sums)
        with torch.enable_grad():
            heads = product.unflatten(1, (-1, self._attention.head_dim)).requires_grad_()
            result = rms_norm(heads, scale, norm.eps, norm.kernel)
        return _norm_backward(norm, scale, heads, (result,), (grads.view(result.shape),), sums).flatten(1)


def whole_tape() -> Tape:
    """Return a tape that keeps all of attention's results and frees each one when it is replayed."""
    return Tape(_EVERYTHING, None, replays_once=True)


def _columns_of(outputs: Sequence[Tensor], at: slice) -> Tensor:
    """Return a chunk's rows of a tensor for all heads, given the parts for each group of heads."""
    return outputs[0][at] if len(outputs) == 1 else torch.cat([each[at] for each in outputs], 1)


def _scaled(grads: Tensor, factor: float) -> Tensor:
    return grads if factor == 1 else grads * factor


def _leaf(norm: RMSNorm, sums: GradientSums) -> Tensor:
    """Return a leaf copy of a norm's weight in the dtype of its accumulator; without gradient if it is frozen."""
    total = sums.of(norm.weight)
    weight: Tensor = norm.weight.detach()
    return weight if total is None else weight.to(total.dtype).requires_grad_()


def _norm_backward(
    norm: RMSNorm, scale: Tensor, x: Tensor, results: Sequence[Tensor], grads: Sequence[Tensor], sums: GradientSums
) -> Tensor:
    """Return the gradient of a norm's input, and accumulate that of its weight unless it is frozen.

    Args:
        norm: The norm.
        scale: `_leaf` of its weight.
        x: The input.
        results: Tensors computed from `x` and `scale`.
        grads: Gradients of the results.
        sums: Accumulators of the block's parameters.
    """
    of_x, *of_scale = torch.autograd.grad(results, (x, scale) if scale.requires_grad else (x,), grads)
    if total := sums.of(norm.weight):
        total.add(*of_scale)
    return of_x
