"""Weights in 4 bits from files of wider weights: for the ranks of a run, and as an adapter was trained on them.

The scales of a matrix share an offset, so they depend on the whole matrix. In a run each rank reads only the numbers
whose codes it holds, and the ranks exchange the maxima of blocks, 1/64 of the numbers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bmburst_ops import NF4_BLOCK, nf4

if TYPE_CHECKING:
    from bmburst.zero import NamedShard

Read = Callable[[int, int], Tensor]
"""Returns the elements [begin, end) of a flattened matrix."""
_PIECE = NF4_BLOCK << 18  # numbers that are read at once for their maxima


def quantized_piece(shard: "NamedShard", read: Read, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return this rank's words of a matrix. Every rank that holds the matrix must call it: in a pipeline, a stage's.

    Args:
        shard: The shard of the matrix's words.
        read: Reads the matrix.
        shape: Shape of the matrix.
        dtype: dtype that the numbers are rounded to before they are quantized.
    """
    import bmtrain as bmt

    layout = nf4.Layout(prod(shape))
    first, last = layout.codes_in(shard.begin, shard.end)
    blocks = slice(2 * first // NF4_BLOCK, -(-min(2 * last, layout.numbers) // NF4_BLOCK))
    maxima = torch.zeros(layout.blocks, dtype=torch.float32, device=shard.device)
    codes = torch.empty(0, dtype=torch.uint8, device=shard.device)
    if first < last:
        begin, end = blocks.start * NF4_BLOCK, min(blocks.stop * NF4_BLOCK, layout.numbers)
        numbers = read(begin, end).to(device=shard.device, dtype=dtype)
        maxima[blocks] = nf4.block_maxima(numbers)
        codes = nf4.number_codes(numbers, maxima[blocks])[first - begin // 2 : last - begin // 2]
    holders = bmt.config["comm" if bmt.config["pipe_size"] == 1 else "pp_zero_comm"]
    maxima = bmt.distributed.all_reduce(maxima, "max", holders)
    begin, end = (max(at - layout.code_words, 0) for at in (shard.begin, shard.end))
    return torch.cat((nf4.in_words(codes), nf4.packed_scales(maxima)[begin:end]))


@dataclass
class Dequantized:
    """A model's matrices as an adapter on 4 bits was trained on them, read piece by piece.

    The scales of the last matrix are kept, because a matrix is read in many pieces.

    Attributes:
        dtype: dtype that the numbers are rounded to before they are quantized, and of the dequantized numbers.
    """

    dtype: torch.dtype
    _name: str = ""
    _scales: Tensor = field(default_factory=lambda: torch.empty(0), repr=False)
    _maxima: Tensor = field(default_factory=lambda: torch.empty(0), repr=False)

    def read(self, name: str, size: int, read: Read, begin: int, end: int) -> Tensor:
        """Return the elements [begin, end) of a dequantized matrix, in `dtype`.

        Args:
            name: Name of the matrix.
            size: Number of its elements.
            read: Reads the matrix before quantization.
            begin: First element.
            end: End of the elements.
        """
        if name != self._name:
            self._maxima = torch.cat([nf4.block_maxima(read(*piece).to(self.dtype)) for piece in _pieces(size)])
            self._scales, self._name = nf4.block_scales(nf4.packed_scales(self._maxima), size), name
        first, last = begin // NF4_BLOCK, -(-end // NF4_BLOCK)
        start = first * NF4_BLOCK
        codes = nf4.number_codes(read(start, min(last * NF4_BLOCK, size)).to(self.dtype), self._maxima[first:last])
        numbers = nf4.numbers_of(codes, self._scales[first:last])
        return numbers[begin - start : end - start].to(self.dtype)


def _pieces(size: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + _PIECE, size)) for begin in range(0, size, _PIECE))
