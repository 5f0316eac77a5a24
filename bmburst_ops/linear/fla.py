"""Recurrences by the Triton kernels of flash-linear-attention (package fla-core), for NVIDIA GPUs.

`bmburst_ops.linear.fla_scan` calls them, and cuts long runs into fragments that run at the same time.
"""

from functools import cache

import torch
from torch import Tensor

from bmburst_ops.fragments import fragment_tokens
from bmburst_ops.linear.fla_kinds import KINDS, NAME
from bmburst_ops.linear.fla_scan import FlaScan
from bmburst_ops.linear.fla_tuning import HOPPER
from bmburst_ops.linear.kernel import Inputs, Pieces, Recurrence
from bmburst_ops.machine import HERE, Machine

VERSIONS = ((0, 6), (0, 7))
"""From the first on, below the second: fla 0.5.1 and older compute wrong gradients of KDA."""

_WRONG = ((3, 4), (3, 7, 1))
_MOST_KEY_DIM = 256


def unusable(capability: tuple[int, int], machine: Machine = HERE) -> tuple[str, str] | None:
    """Return why fla cannot be used on a GPU of a compute capability, and the fix; None: it can.

    On Hopper, Triton 3.4 to 3.7.0 computes wrong gradients of gated kernels; fla would refuse in backward.
    """
    version, triton = machine.version("fla-core"), machine.version("triton")
    if version is None:
        return "the package fla-core is not installed", "pip install 'fla-core>=0.6,<0.7'"
    if not VERSIONS[0] <= version < VERSIONS[1]:
        found = ".".join(map(str, version))
        return f"fla-core {found} is installed; allowed: 0.6 to below 0.7", "pip install 'fla-core>=0.6,<0.7'"
    if triton is None:
        return "the package triton is not installed", "pip install triton"
    if capability[0] == HOPPER and _WRONG[0] <= triton < _WRONG[1] and not machine.has("tilelang"):
        found = ".".join(map(str, triton))
        return (
            f"Triton {found} computes wrong gradients on Hopper; allowed: from 3.7.1 on, or the package tilelang",
            "torch 2.13, which has Triton 3.7.1, or pip install tilelang",
        )
    return None


class FlaKernel:
    """See `bmburst_ops.linear.kernel.LinearKernel`."""

    name = NAME

    def refusal(self, recurrence: Recurrence, inputs: Inputs) -> str | None:
        """See `LinearKernel.refusal`."""
        if recurrence.kind not in KINDS:
            return f"it has no kind '{recurrence.kind}'"
        q, _, v, *_ = inputs
        if not q.is_cuda:
            return "it needs a GPU"
        if v.dtype not in (torch.bfloat16, torch.float16):
            return f"it takes q, k and v in bfloat16 or float16, not {v.dtype}"
        if q.shape[-1] > _MOST_KEY_DIM:
            return f"it has a key_dim of at most {_MOST_KEY_DIM}, not {q.shape[-1]}"
        found = _unusable(q.device)
        return None if found is None else f"{found[0]}\nfix: {found[1]}"

    def prepare(self, recurrence: Recurrence, inputs: Inputs, pieces: Pieces, kept: tuple[Tensor, ...] = ()) -> FlaScan:
        """See `LinearKernel.prepare`."""
        heads, _, value_dim = recurrence.state_shape(inputs)
        processors = torch.cuda.get_device_properties(inputs[0].device).multi_processor_count
        tokens = fragment_tokens(recurrence.kind, pieces.edges[-1], heads, value_dim, processors)
        return FlaScan(recurrence, inputs, pieces, tokens, kept)


@cache
def _unusable(device: torch.device) -> tuple[str, str] | None:
    return unusable(torch.cuda.get_device_capability(device))
