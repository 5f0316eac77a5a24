"""How Triton's attention kernels are cut into programs, and launched. Importing this file needs no Triton."""

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from bmburst_ops.flash.triton_masks import Side


class Blocks(NamedTuple):
    """How a program is cut: rows of queries and of keys it holds at once, warps, and loads under way."""

    queries: int
    keys: int
    warps: int
    stages: int

    @property
    def over_keys(self) -> tuple[Side, int, int]:
        """Of programs that hold queries: their side, and rows of it and of the other."""
        return "queries", self.queries, self.keys

    @property
    def over_queries(self) -> tuple[Side, int, int]:
        """Of programs that hold keys."""
        return "keys", self.keys, self.queries


class Plan(NamedTuple):
    """How each kernel is cut; `keys` and `queries` are the two of backward."""

    forward: Blocks
    keys: Blocks
    queries: Blocks


P = TypeVar("P")
Table = tuple[tuple[int, P], ...]
"""Plans by the largest padded head dim that each is for."""


def plan_for(q: Tensor, kernel: Any, *, hopper: Table[P], small: Table[P], fp32: Table[P], interpreted: Table[P]) -> P:
    """Return how kernels are cut for queries `[batch, queries, heads, head_dim]` on their device.

    Args:
        q: The queries.
        kernel: One of the kernels, as Triton made it.
        hopper: For 16 bits, up to 192 KiB of shared memory.
        small: Likewise, up to 72 KiB: any card from Ampere on.
        fp32: Without tensor cores: what a product takes is in registers.
        interpreted: For Triton's interpreter.
    """
    table = interpreted
    if not is_interpreted(kernel):
        has_much = torch.cuda.get_device_capability(q.device)[0] in (9, 10)  # and 12 has little again
        table = fp32 if q.dtype == torch.float32 else hopper if has_much else small
    return next(plan for largest, plan in table if padded(q.shape[-1]) <= largest)


class Kernels(NamedTuple):
    """What a plan cuts, as Triton made it: compiled, or interpreted."""

    forward: Any
    keys: Any
    queries: Any


def launch(
    kernel: Any, side: Tensor, programs: int, arguments: tuple[Any, ...], blocks: Blocks, **constants: Any
) -> None:
    """Run so many programs for each head and batch of a side, the queries or the keys.

    Args:
        kernel: As Triton made it.
        side: `[batch, tokens, heads, head_dim]`.
        programs: How many; none where there is nothing of the side.
        arguments: What the kernel takes by position.
        blocks: How it is cut.
        constants: What is compiled in beside head dim, blocks and precision.
    """
    batch, _, heads, head_dim = side.shape
    if not batch * heads * programs:
        return
    precision = "interpreter" if is_interpreted(kernel) else "ieee" if side.dtype == torch.float32 else "tf32"
    with torch.cuda.device_of(side):  # Triton launches on the current device, wherever the tensors are
        kernel[(programs, heads, batch)](
            *arguments,
            HEAD_DIM=head_dim,
            DIM=padded(head_dim),
            QUERIES=blocks.queries,
            KEYS=blocks.keys,
            PRECISION=precision,
            **constants,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )


def is_interpreted(kernel: Any) -> bool:
    """Whether a kernel runs in Triton's interpreter: TRITON_INTERPRET decided when it was imported."""
    import triton

    return not isinstance(kernel, triton.JITFunction)


def blocks_of(side: Tensor, rows: int) -> int:
    """How many blocks of so many tokens a side has."""
    return -(-side.shape[1] // rows)


def padded(head_dim: int) -> int:
    """The power of two that a head dim is padded to; Triton's products take no fewer than 16."""
    return max(16, 1 << (head_dim - 1).bit_length())
