"""One-shot all-reduce in one Triton kernel, over peer memory of the GPUs of a host. Importing it needs Triton.

Each program of a rank writes its elements to a buffer that all ranks can read, and sends the number of the call to its
counterpart on each rank. It waits until all counterparts have sent theirs, and sums the parts in rank order, so results
are bitwise equal on all ranks. Each rank has two buffers and alternates between them. When a rank reuses a buffer, all
counterparts have signaled the call in between, so they have finished reading that buffer.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Elements per program."""


def programs_for(numbers: int) -> int:
    """Return the number of programs for an all-reduce of this many elements."""
    return int(triton.cdiv(numbers, BLOCK))


def add_up(x: Tensor, boxes: Tensor, flags: Tensor, calls: Tensor, rank: int, most: int) -> Tensor:
    """Return the sum of a tensor over ranks, computed in fp32 and rounded once. Every rank calls it, in the same order.

    Args:
        x: Contiguous, fp32 or 16 bits, at most `most` elements.
        boxes: `[ranks]` int64: the address of each rank's two adjacent buffers of `most` elements each.
        flags: `[ranks]` int64: the address of each rank's int32 flags `[programs_for(most), ranks]`, initially zero.
        calls: `[programs_for(most)]` int32 on this GPU, initially zero: the number of calls of each program so far.
        rank: This rank.
        most: See `boxes`.
    """
    out = torch.empty_like(x)
    with torch.cuda.device_of(x):  # Triton launches on the current device, wherever the tensors are
        _sum_kernel[(programs_for(x.numel()),)](
            x, out, boxes, flags, calls, rank, x.numel(), most, RANKS=len(boxes), BLOCK=BLOCK, num_warps=4
        )
    return out


@triton.jit
def _sum_kernel(x, out, boxes, flags, calls, rank, numbers, most, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    call = tl.load(calls + program) + 1
    at = program * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    place = (call % 2).to(tl.int64) * most + at
    kind = tl.pointer_type(x.dtype.element_ty)
    tl.store(tl.load(boxes + rank).to(kind) + place, tl.load(x + at, mask=inside, other=0.0), mask=inside)
    tl.debug_barrier()  # all elements must be written before the flags
    for peer in tl.static_range(RANKS):
        if peer != rank:
            word = tl.load(flags + peer).to(tl.pointer_type(tl.int32)) + program * RANKS + rank
            tl.atomic_xchg(word, call, sem="release", scope="sys")
    for peer in tl.static_range(RANKS):
        if peer != rank:
            word = tl.load(flags + rank).to(tl.pointer_type(tl.int32)) + program * RANKS + peer
            while tl.atomic_add(word, 0, sem="acquire", scope="sys") < call:
                pass
    tl.debug_barrier()
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for peer in tl.static_range(RANKS):
        part = tl.load(tl.load(boxes + peer).to(kind) + place, mask=inside, other=0.0, volatile=True)
        total += part.to(tl.float32)
    tl.store(out + at, total.to(x.dtype.element_ty), mask=inside)
    tl.store(calls + program, call)
