"""What a model sees: the attention block of a LLaMA, QKV projection, rotary embedding, attention, output projection.

Projections and rotary embedding work on a rank's tokens whatever the method. One GPU's block on the same FLOPs is the
same projections on as many tokens, and the kernel on a sequence of S / sqrt(P) beside them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.attention.cells import Cell
from benchmarks.attention.methods.method import Attend, Calls, Method, OneGpu, Setting, prepare
from benchmarks.engine.results import ONE_GPU
from bmburst_ops.rotary import apply_rotary

_THETA = 500_000.0  # LLaMA 3's base of the rotary embedding
_STEPS = {"forward": 1, "forward_backward": 3}  # products with each weight: itself; and its gradient and its input's


def projection_flops(cell: Cell, direction: str) -> float:
    """Return the FLOPs of a rank's projections, "forward" or "forward_backward"."""
    tokens, width = cell.batch * cell.tokens // cell.ranks, cell.heads * cell.head_dim
    outputs = (cell.heads + 2 * cell.kv_heads) * cell.head_dim + width
    return 2.0 * tokens * width * outputs * _STEPS[direction]


def prepare_block(method: Method, cell: Cell, setting: Setting) -> Calls:
    """Return the block around a method, on this rank's random hidden states."""
    if cell.method == ONE_GPU:
        return prepare_block_alone(cell, setting)
    block = _Block.random(cell, setting, method.positions(cell, setting.group.rank))
    attend = method.bind(cell, setting)

    def forward() -> Tensor:
        with torch.no_grad():
            return block(attend)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(block(attend), (block.hidden, block.qkv, block.out), block.grad)

    return Calls(forward, both)


def prepare_block_alone(cell: Cell, setting: Setting) -> Calls:
    """Return one GPU's block on the same FLOPs."""
    block = _Block.random(cell, setting, torch.arange(cell.tokens // cell.ranks))
    kernel = prepare(OneGpu(), cell, setting)
    shape = (cell.batch, cell.tokens // cell.ranks, cell.heads, cell.head_dim)
    attended = torch.randn(shape, device=block.hidden.device, dtype=block.hidden.dtype).requires_grad_()
    given: list[Tensor] = []

    def forward() -> None:
        with torch.no_grad():
            block.heads()
            kernel.forward()
            block.project(attended)

    def both() -> None:
        heads = block.heads()
        if not given:
            given.extend(torch.randn_like(t) for t in heads)
        result = block.project(attended)
        torch.autograd.grad(result, (attended, block.out), block.grad)
        kernel.both()
        torch.autograd.grad(heads, (block.hidden, block.qkv), given)

    return Calls(forward, both)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    """Weights, hidden states and angles of a rank.

    Attributes:
        hidden: `[batch, local_tokens, width]`.
        grad: Of the result, as `hidden`.
        qkv: Weight `[(heads + 2 kv_heads) x dim, width]`.
        out: Weight `[width, heads x dim]`.
        angles: Cosine and sine, `[batch, local_tokens, dim / 2]` fp32.
        split: Heads of q, k and v.
    """

    hidden: Tensor
    grad: Tensor
    qkv: Tensor
    out: Tensor
    angles: tuple[Tensor, Tensor]
    split: tuple[int, int, int]

    @classmethod
    def random(cls, cell: Cell, setting: Setting, positions: Tensor) -> "_Block":
        """Return a block whose weights are equal on all ranks and whose hidden states are not."""
        device, width = setting.group.device, cell.heads * cell.head_dim
        dtype: torch.dtype = getattr(torch, cell.dtype)
        split = (cell.heads, cell.kv_heads, cell.kv_heads)

        def draw(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
            generator = torch.Generator(device).manual_seed(seed)
            return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

        shape = (cell.batch, cell.tokens // cell.ranks, width)
        pairs = torch.arange(0, cell.head_dim, 2, dtype=torch.float64) / cell.head_dim
        angles = (positions[None, :, None] / _THETA**pairs).expand(cell.batch, -1, -1)
        return cls(
            hidden=draw(10 + setting.group.rank, *shape).requires_grad_(),
            grad=draw(10_000 + setting.group.rank, *shape),
            qkv=draw(0, sum(split) * cell.head_dim, width, scale=width**-0.5).requires_grad_(),
            out=draw(1, width, width, scale=width**-0.5).requires_grad_(),
            angles=(angles.cos().float().to(device), angles.sin().float().to(device)),
            split=split,
        )

    def __call__(self, attend: Attend) -> Tensor:
        """Return the block's result, shaped as the hidden states."""
        return self.project(attend(*self.heads()))

    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q and k with their positions turned in, and v."""
        q, k, v = linear(self.hidden, self.qkv).unflatten(-1, (sum(self.split), -1)).split(self.split, 2)
        return apply_rotary(q, *self.angles), apply_rotary(k, *self.angles), v

    def project(self, attended: Tensor) -> Tensor:
        """Return the output projection of `[batch, local_tokens, heads, dim]`."""
        return linear(attended.flatten(2), self.out)
