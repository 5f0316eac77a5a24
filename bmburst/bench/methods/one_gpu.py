"""One GPU's own kernel on the FLOPs of a rank's share: what every ratio is taken against."""

import torch
from torch import Tensor

from bmburst.bench.cells import MASKS, ONE_GPU, Cell
from bmburst.bench.methods.local import ForBackward, LocalKernel, Shape
from bmburst.bench.methods.method import Attend, Method, Setting
from bmburst.bench.patterns import pattern_of
from bmburst.bench.work import Traffic, alone, one_gpu_memory


class OneGpu(Method):
    """What `work.alone` says on each rank, alone; for accuracy the whole sequence on one."""

    name = ONE_GPU
    masks = MASKS

    def traffic(self, cell: Cell) -> Traffic:
        """See `Method.traffic`: nothing moves."""
        del cell
        return Traffic(0, 0)

    def memory(self, cell: Cell) -> float:
        """See `Method.memory`."""
        return one_gpu_memory(cell)

    def bind(self, cell: Cell, setting: Setting) -> Attend:
        """See `Method.bind`."""
        pattern, scale = pattern_of(cell.mask, cell.tokens), cell.head_dim**-0.5

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = Local.apply(q, k, v, setting.kernel, pattern, scale)  # type: ignore[no-untyped-call]
            return out

        return attend

    def input_shape(self, cell: Cell, heads: int) -> tuple[int, ...]:
        """See `Method.input_shape`."""
        own = alone(cell)
        return cell.batch, own.tokens, own.heads if heads == cell.heads else own.kv_heads, cell.head_dim


class Local(torch.autograd.Function):
    """`(q, k, v, kernel, pattern, scale) -> out`: the kernel as one differentiable function, and nothing else."""

    @staticmethod
    def forward(
        ctx: "torch.autograd.function.FunctionCtx",
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kernel: LocalKernel,
        pattern: Shape,
        scale: float,
    ) -> Tensor:
        """Call the kernel."""
        out, lse = kernel.forward(q, k, v, pattern, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = kernel, pattern, scale  # type: ignore[attr-defined]
        return out

    @staticmethod
    def backward(ctx: "torch.autograd.function.FunctionCtx", grad: Tensor) -> tuple[Tensor | None, ...]:
        """Call the kernel's backward."""
        kernel, pattern, scale = ctx.call  # type: ignore[attr-defined]
        q, k, v, out, lse = ctx.saved_tensors  # type: ignore[attr-defined]
        return *kernel.backward(q, k, v, ForBackward(grad, out, lse), pattern, scale), None, None, None
