"""A sum over ranks in one Triton kernel, by memory that all GPUs of a host can read. Importing it needs Triton.

Each program of a rank writes its numbers where the others can read them, tells its counterpart on each rank the number
of the call, waits until all of them have told it theirs, and adds up all parts in the order of the ranks: equal bits
everywhere. There are two places to write, used in turns. A rank that writes to one again has heard of the call between,
so every counterpart has read what was there.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Numbers of a program."""


def programs_for(numbers: int) -> int:
    """Return the programs that a sum of so many numbers has."""
    return int(triton.cdiv(numbers, BLOCK))


def add_up(x: Tensor, boxes: Tensor, flags: Tensor, calls: Tensor, rank: int, most: int) -> Tensor:
    """Return the sum over ranks of a tensor, in fp32 and rounded once. Every rank calls it, in the same order.

    Args:
        x: Contiguous, fp32 or 16 bits, at most `most` numbers.
        boxes: `[ranks]` int64: the address of each rank's two places of `most` numbers, one after the other.
        flags: `[ranks]` int64: the address of each rank's int32 words `[programs_for(most), ranks]`, zero at first.
        calls: `[programs_for(most)]` int32 on this GPU, zero at first: calls of each program so far.
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
    tl.debug_barrier()  # all of it is written before anyone is told
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
