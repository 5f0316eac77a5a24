"""Weights in 4 bits (NF4, arXiv:2305.14314), with the codes and the double quantization of bitsandbytes.

A matrix is flattened and cut into blocks of 64 numbers. A block's largest magnitude is its scale, and each number over
the scale is rounded to the nearest of the 16 values `VALUES`. The scales are quantized, too: their mean is the offset,
and each 256 scales minus the offset are rounded to the nearest of the 256 `scale_values` times their largest
magnitude: bitsandbytes' dynamic map of 8 bits. A number needs 4.127 bits.

This is what `bitsandbytes.functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)`
stores, in its arithmetic: fp32, factors instead of quotients, the lower value in a tie. (On CPUs, bitsandbytes 0.50
rounds few scales to a neighbour of the nearest value.)

`quantize` packs all of it into one tensor of 32-bit words, so that one message moves a matrix. The words are of dtype
fp32, because BMTrain moves only floating-point parameters; nothing computes with them.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from bmburst_ops import NF4_BLOCK as BLOCK
from bmburst_ops import NF4_GROUP as GROUP
from bmburst_ops.errors import KernelError
from bmburst_ops.fused import triton_twin
from bmburst_ops.moments import table

VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The values of the 16 codes of a number (QLoRA, appendix E)."""
_WORD = 4  # bytes
_LEAST = 1e-38  # the smallest divisor


@cache
def number_values(device: torch.device) -> Tensor:
    """Return `VALUES`, fp32 `[16]`."""
    return torch.tensor(VALUES, dtype=torch.float32, device=device)


def scale_values(device: torch.device) -> Tensor:
    """Return the values of the codes of a scale, ascending, fp32 `[256]`."""
    return table(device, signed=True)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of a packed matrix are.

    Attributes:
        numbers: Elements of the matrix.
    """

    numbers: int

    @property
    def blocks(self) -> int:
        """Number of scales."""
        return -(-self.numbers // BLOCK)

    @property
    def groups(self) -> int:
        """Number of factors of scales."""
        return -(-self.blocks // GROUP)

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of numbers, two in a byte."""
        return -(-self.numbers // 2)

    @property
    def code_words(self) -> int:
        """Words of the codes of numbers, which come first: a kernel reads most from there, aligned as the words."""
        return -(-self.code_bytes // _WORD)

    @property
    def words(self) -> int:
        """All words: codes of numbers; then codes of scales, factors and the offset, which make the scales."""
        return self.code_words + -(-self.blocks // _WORD) + self.groups + 1

    def codes_in(self, begin: int, end: int) -> tuple[int, int]:
        """Return the range of bytes of codes of numbers in the words [begin, end)."""
        return min(begin * _WORD, self.code_bytes), min(end * _WORD, self.code_bytes)

    def codes(self, words: Tensor) -> Tensor:
        """Return the codes of numbers in packed words, uint8, a view."""
        return words[: self.code_words].view(torch.uint8)[: self.code_bytes]

    def of_scales(self, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the parts of the scales, views: codes, uint8; factors and offset, fp32.

        Args:
            words: Packed words, or the last of them from the scales on.
        """
        codes, factors = (
            words[-self.groups - 1 - -(-self.blocks // _WORD) : -self.groups - 1],
            words[-self.groups - 1 :],
        )
        return codes.view(torch.uint8)[: self.blocks], factors[:-1], factors[-1]


def bits(numbers: int) -> float:
    """Return the bits of one number of a matrix with so many."""
    return 8.0 * _WORD * Layout(numbers).words / numbers


def block_maxima(numbers: Tensor) -> Tensor:
    """Return the largest magnitude of each block of flat numbers, fp32; the last block may be shorter."""
    return _in_rows(numbers.float().abs(), BLOCK).amax(1)


def number_codes(numbers: Tensor, maxima: Tensor) -> Tensor:
    """Return the codes of flat numbers, two in a byte, the first in the upper half: uint8 `[ceil(numbers / 2)]`.

    Args:
        numbers: Whole blocks from the first number on; the last block may be shorter.
        maxima: `block_maxima` of the numbers.
    """
    codes = _nearest(_over(_in_rows(numbers.float(), BLOCK), maxima), number_values(numbers.device))
    codes = codes.view(-1)[: numbers.numel() + numbers.numel() % 2].view(-1, 2)
    return codes[:, 0] << 4 | codes[:, 1]


def packed_scales(maxima: Tensor) -> Tensor:
    """Return the words after the codes of numbers, given the maxima of all blocks of a matrix."""
    offset = maxima.mean()
    rows = _in_rows(maxima - offset, GROUP)
    factors = rows.abs().amax(1)
    codes = _nearest(_over(rows, factors), scale_values(maxima.device)).view(-1)[: len(maxima)]
    return torch.cat((in_words(codes), factors, offset[None]))


def quantize(matrix: Tensor) -> Tensor:
    """Return a matrix of a 16-bit dtype or fp32 in packed words, fp32 `[Layout.words]`. Wider numbers become fp32."""
    numbers = matrix.reshape(-1)
    maxima = block_maxima(numbers)
    return torch.cat((in_words(number_codes(numbers, maxima)), packed_scales(maxima)))


def dequantize(words: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the matrix of packed words: value * scale in fp32, rounded once to `dtype`.

    Args:
        words: Result of `quantize`.
        shape: Shape of the matrix.
        dtype: dtype of the result.
    """
    size = 1
    for each in shape:
        size *= each
    out = torch.empty(size, dtype=dtype, device=words.device)
    if fused := triton_twin("triton_nf4", out, words):
        fused.dequantize(words, out)
    else:
        out.copy_(numbers_of(Layout(size).codes(words), block_scales(words, size))[:size])
    return out.view(shape)


def require_device(like: Tensor) -> None:
    """Check that a block can be dequantized where a tensor is: on CPUs by plain torch, elsewhere by the kernel alone.

    Plain torch takes ten times the memory of the matrix.

    Raises:
        KernelError: The tensor is not on a CPU, and there is no kernel for its device and dtype.
    """
    if like.device.type != "cpu" and triton_twin("triton_nf4", like) is None:
        raise KernelError(
            f"weights in 4 bits on {like.device.type}, {like.dtype}: no kernel\n"
            "allowed: float32, bfloat16 or float16 on an NVIDIA GPU of compute capability 8.0 with Triton, or a CPU\n"
            "fix: pip install triton, or weights in a 16-bit dtype (--lora.base dtype)"
        )


def block_scales(words: Tensor, size: int) -> Tensor:
    """Return the scales of the blocks of a packed matrix of `size` numbers, fp32; `words` as in `Layout.of_scales`."""
    layout = Layout(size)
    codes, factors, offset = layout.of_scales(words)
    products = scale_values(words.device)[codes.int()] * factors.repeat_interleave(GROUP)[: layout.blocks]
    return products + offset


def numbers_of(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of packed codes, fp32, given the scales of their blocks: twice as many as bytes."""
    pairs = torch.stack((codes >> 4, codes & 15), 1).view(-1)
    return number_values(codes.device)[pairs.int()] * scales.repeat_interleave(BLOCK)[: len(pairs)]


def in_words(codes: Tensor) -> Tensor:
    """Return bytes as words of dtype fp32, with zeros at the end."""
    return torch.nn.functional.pad(codes, (0, -len(codes) % _WORD)).view(torch.float32)


def _in_rows(numbers: Tensor, size: int) -> Tensor:
    """Return flat numbers as rows, with zeros at the end of the last row."""
    return torch.nn.functional.pad(numbers, (0, -len(numbers) % size)).view(-1, size)


def _nearest(numbers: Tensor, values: Tensor) -> Tensor:
    """Return the index of the nearest of ascending values, uint8; the lower in a tie."""
    return torch.bucketize(numbers, (values[:-1] + values[1:]) / 2, out_int32=True).to(torch.uint8)


def _over(rows: Tensor, maxima: Tensor) -> Tensor:
    """Return rows over their maxima; rows of zeros stay so."""
    return rows * (1 / maxima.clamp(min=_LEAST))[:, None]
