"""Weights in 4 bits are those of bitsandbytes, bit by bit, and Triton's kernel dequantizes them as plain torch.

`nf4_of_bitsandbytes.safetensors` holds what bitsandbytes 0.50.2 made of some matrices on a CPU, without its compiled
library, in whose place its definition in torch runs: codes, codes of scales, their factors and the offset of
`functional.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")`, and `dequantize_4bit` of
it. One matrix has a row of zeros, and more than one group of scales; the others end within a block, one within a byte.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bmburst_ops import nf4, triton_nf4
from bmburst_ops.errors import KernelError
from tests.ops.test_fused_elementwise import DEVICE
from tests.refusals import refused

THEIRS = load_file(Path(__file__).with_name("nf4_of_bitsandbytes.safetensors"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def test_values_are_those_of_bitsandbytes():
    assert torch.equal(nf4.number_values(torch.device("cpu")), THEIRS["values"])
    assert torch.equal(nf4.scale_values(torch.device("cpu")), THEIRS["scale_values"])


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_codes_and_numbers_are_those_of_bitsandbytes(name):
    weight = THEIRS[f"{name}.weight"]
    words = nf4.quantize(weight)
    layout = nf4.Layout(weight.numel())
    parts = dict(zip(("scales", "factors", "offset"), layout.of_scales(words), strict=True))
    parts["codes"] = layout.codes(words)
    for part, found in parts.items():
        assert torch.equal(found.reshape(-1), THEIRS[f"{name}.{part}"]), part
    assert len(words) == layout.words
    assert torch.equal(nf4.dequantize(words, tuple(weight.shape), weight.dtype), THEIRS[f"{name}.dequantized"])
    assert nf4.dequantize(words, tuple(weight.shape), torch.float64).dtype == torch.float64


def test_the_matrices_are_hard_enough():
    zeros = THEIRS["bf16.dequantized"][3]
    assert not zeros.any() and len(THEIRS["bf16.factors"]) == 2
    assert THEIRS["fp32.weight"].numel() % nf4.BLOCK and THEIRS["fp16.weight"].numel() % 2


def test_zeros_stay_zeros():
    assert not nf4.dequantize(nf4.quantize(torch.zeros(3, 50)), (3, 50), torch.float32).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_tritons_numbers_are_torchs(name, dtype):
    words = nf4.quantize(THEIRS[f"{name}.weight"]).to(DEVICE)
    size = THEIRS[f"{name}.weight"].numel()
    around = torch.full((size + 2,), 7.0, dtype=dtype, device=DEVICE)
    triton_nf4.dequantize(words, around[:size])
    wanted = nf4.dequantize(words.cpu(), (size,), torch.float32)
    if dtype == torch.bfloat16 and DEVICE == "cpu":  # the interpreter cuts bf16 off instead of rounding it
        assert torch.equal(around[:size].float(), (wanted.view(torch.int32) & -65536).view(torch.float32))
    else:
        assert torch.equal(around[:size].cpu(), wanted.to(dtype))
    assert (around[size:] == 7).all()


def test_a_device_without_the_kernel_is_refused():
    nf4.require_device(torch.empty(1))
    with refused("4 bits", "meta", "Triton", "fix: ", error=KernelError):
        nf4.require_device(torch.empty(1, device="meta"))


def test_a_weight_takes_four_bits_and_its_share_of_scales():
    assert nf4.bits(8192 * 28672) == pytest.approx(4 + 8 / 64 + 32 / (64 * 256), rel=1e-6)
