"""Sums of squares of many tensors in Triton, the twin of `bmburst_ops.square_sums`. Importing it needs Triton."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 1 << 17  # elements that a program sums
_BLOCK = 4096  # elements of a chunk that a program holds at once
_ALIGNMENT = 16  # bytes of the widest memory access
_PARTIALS = 1024  # sums of chunks that a program of the second kernel holds at once


def square_sums(tensors: Sequence[Tensor]) -> Tensor:
    """See `bmburst_ops.square_sums.square_sums`; all tensors have one dtype.

    A program of the first kernel sums one chunk of a tensor in fp32. The second kernel adds the chunks of each tensor
    in fp64. The order depends only on addresses modulo 16 and on sizes, so results are bitwise reproducible.
    """
    first, count = tensors[0], len(tensors)
    size = first.element_size()
    addresses = [each.data_ptr() for each in tensors]
    # Chunks begin where memory is aligned, up to 15 bytes before the tensor.
    ends = [at % _ALIGNMENT // size + each.numel() for at, each in zip(addresses, tensors, strict=True)]
    chunks = [0, *accumulate(triton.cdiv(end, _CHUNK) for end in ends)]
    table = torch.tensor([*addresses, *ends, *chunks], dtype=torch.int64, pin_memory=first.is_cuda)
    places = table.to(first.device, non_blocking=True).split((count, count, count + 1))
    partials = torch.empty(chunks[-1], dtype=torch.float32, device=first.device)
    sums = torch.empty(count, dtype=torch.float64, device=first.device)
    with torch.cuda.device_of(first):  # Triton launches on the current device, wherever the tensors are
        if chunks[-1]:
            options = {"SIZE": size, "CHUNK": _CHUNK, "BLOCK": _BLOCK, "ALIGNMENT": _ALIGNMENT, "num_warps": 4}
            _chunks_kernel[(chunks[-1],)](first, *places, partials, count, **options)
        _tensors_kernel[(count,)](partials, places[2], sums, BLOCK=_PARTIALS, num_warps=4)
    return sums


@triton.jit(do_not_specialize=["tensors"])
def _chunks_kernel(
    like, addresses, ends, chunks, partials, tensors,
    SIZE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tensor = 0
    above = tensors
    while above - tensor > 1:  # find the last tensor whose first chunk is not behind this one
        middle = (tensor + above) // 2
        is_behind = tl.load(chunks + middle) > program
        above = tl.where(is_behind, middle, above)
        tensor = tl.where(is_behind, tensor, middle)
    address = tl.load(addresses + tensor)
    begin = (address % ALIGNMENT) // SIZE
    end = tl.load(ends + tensor)
    base = tl.multiple_of((address - address % ALIGNMENT).to(tl.pointer_type(like.dtype.element_ty)), ALIGNMENT)
    start = (program - tl.load(chunks + tensor)) * CHUNK
    total = tl.zeros([BLOCK], tl.float32)
    if (start >= begin) & (start + CHUNK <= end):  # without a mask, which would make accesses narrow
        for step in range(0, CHUNK, BLOCK):
            numbers = tl.load(base + start + step + tl.arange(0, BLOCK)).to(tl.float32)
            total += numbers * numbers
    else:
        for step in range(0, CHUNK, BLOCK):
            at = start + step + tl.arange(0, BLOCK)
            numbers = tl.load(base + at, mask=(at >= begin) & (at < end), other=0.0).to(tl.float32)
            total += numbers * numbers
    tl.store(partials + program, tl.sum(total, 0))


@triton.jit
def _tensors_kernel(partials, chunks, sums, BLOCK: tl.constexpr):
    tensor = tl.program_id(0)
    begin = tl.load(chunks + tensor)
    end = tl.load(chunks + tensor + 1)
    total = tl.zeros([BLOCK], tl.float64)
    for step in range(begin, end, BLOCK):
        at = step + tl.arange(0, BLOCK)
        total += tl.load(partials + at, mask=at < end, other=0.0).to(tl.float64)
    tl.store(sums + tensor, tl.sum(total, 0))
