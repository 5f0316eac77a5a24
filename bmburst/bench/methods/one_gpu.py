"""One GPU's own kernel on the FLOPs of a rank's share: what every ratio is taken against."""

import torch
from torch import Tensor

from bmburst.bench.cells import ONE_GPU, Cell
from bmburst.bench.methods.local import LocalKernel
from bmburst.bench.methods.method import Attend, Method, Setting
from bmburst.bench.work import Traffic, one_gpu_memory, one_gpu_tokens


class OneGpu(Method):
    """A sequence of S / sqrt(P) on each rank, alone; for accuracy the whole sequence on one."""

    name, about = ONE_GPU, "one GPU's kernel on the same FLOPs: a sequence of S / sqrt(P)"

    def traffic(self, cell: Cell) -> Traffic:
        """See `Method.traffic`: nothing moves."""
        del cell
        return Traffic(0, 0)

    def memory(self, cell: Cell) -> float:
        """See `Method.memory`."""
        return one_gpu_memory(cell)

    def bind(self, cell: Cell, setting: Setting) -> Attend:
        """See `Method.bind`."""
        scale = cell.head_dim**-0.5

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = Local.apply(q, k, v, setting.kernel, cell.is_causal, scale)  # type: ignore[no-untyped-call]
            return out

        return attend

    def input_shape(self, cell: Cell, heads: int) -> tuple[int, ...]:
        """See `Method.input_shape`."""
        return cell.batch, one_gpu_tokens(cell), heads, cell.head_dim


class Local(torch.autograd.Function):
    """`(q, k, v, kernel, causal, scale) -> out`: the kernel as one differentiable function, and nothing else."""

    @staticmethod
    def forward(
        ctx: "torch.autograd.function.FunctionCtx",
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kernel: LocalKernel,
        causal: bool,
        scale: float,
    ) -> Tensor:
        """Call the kernel."""
        out, lse = kernel.forward(q, k, v, causal, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = kernel, causal, scale  # type: ignore[attr-defined]
        return out

    @staticmethod
    def backward(ctx: "torch.autograd.function.FunctionCtx", grad: Tensor) -> tuple[Tensor | None, ...]:
        """Call the kernel's backward."""
        kernel, causal, scale = ctx.call  # type: ignore[attr-defined]
        q, k, v, out, lse = ctx.saved_tensors  # type: ignore[attr-defined]
        return *kernel.backward(grad, q, k, v, out, lse, causal, scale), None, None, None
