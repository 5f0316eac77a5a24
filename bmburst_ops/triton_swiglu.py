"""The Triton twin of `bmburst_ops.swiglu`: each pass reads and writes its tensors once. Importing it needs Triton."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_NUMBERS = 2048  # of each tensor, that a program holds


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, contiguous."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _launch(_forward_kernel, (gate, up, out))
    return out


def backward(grad: Tensor, gate: Tensor, up: Tensor, *, overwrite: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate, in the place of the result's if that may be overwritten, and of up; contiguous."""
    grad_gate = grad if overwrite else torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    grad_up = torch.empty(up.shape, dtype=up.dtype, device=up.device)
    _launch(_backward_kernel, (grad, gate, up, grad_gate, grad_up))
    return grad_gate, grad_up


def _launch(kernel: Any, tensors: tuple[Tensor, ...]) -> None:
    """Run a program for each block of numbers: of all of them where they are dense, else of each row."""
    if not tensors[0].numel():
        return
    is_dense = all(t.is_contiguous() for t in tensors)
    rows = [t.view(1, -1) if is_dense else t.reshape(-1, t.shape[-1]) for t in tensors]  # results are never copied
    count, columns = rows[0].shape
    strides = [stride for each in rows for stride in each.stride()]
    with torch.cuda.device_of(tensors[0]):  # Triton launches on the current device, wherever the tensors are
        kernel[(count * triton.cdiv(columns, _NUMBERS),)](*rows, *strides, columns, BLOCK=_NUMBERS, num_warps=4)


@triton.jit
def _forward_kernel(
    gate, up, out, gate_row, gate_column, up_row, up_column, out_row, out_column, width, BLOCK: tl.constexpr
):  # fmt: skip
    row, columns = _block(width, BLOCK)
    inside = columns < width
    gates = tl.load(gate + row * gate_row + columns * gate_column, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(up + row * up_row + columns * up_column, mask=inside, other=0.0).to(tl.float32)
    product = gates * tl.sigmoid(gates) * ups
    tl.store(out + row * out_row + columns * out_column, product.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    grad, gate, up, grad_gate, grad_up, grad_row, grad_column, gate_row, gate_column, up_row, up_column,
    grad_gate_row, grad_gate_column, grad_up_row, grad_up_column, width, BLOCK: tl.constexpr
):  # fmt: skip
    row, columns = _block(width, BLOCK)
    inside = columns < width
    grads = tl.load(grad + row * grad_row + columns * grad_column, mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(gate + row * gate_row + columns * gate_column, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(up + row * up_row + columns * up_column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gates)
    of_gate = grads * ups * sigmoid * (1.0 + gates * (1.0 - sigmoid))
    of_up = grads * gates * sigmoid
    tl.debug_barrier()  # grad_gate may be grad: no thread may find another's result there
    grad_gate_at = grad_gate + row * grad_gate_row + columns * grad_gate_column
    tl.store(grad_gate_at, of_gate.to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + row * grad_up_row + columns * grad_up_column, of_up.to(grad_up.dtype.element_ty), mask=inside)


@triton.jit
def _block(width, BLOCK: tl.constexpr):
    """Return row and columns `[BLOCK]`, in 64 bits."""
    program = tl.program_id(0)
    blocks = tl.cdiv(width, BLOCK)
    return (program // blocks).to(tl.int64), (program % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
