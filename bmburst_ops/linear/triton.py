"""Recurrences by Triton kernels, for NVIDIA GPUs.

`bmburst_ops.linear.scan` calls them, and cuts long runs into fragments that run at the same time.
"""

from functools import cache

import torch
from torch import Tensor

from bmburst_ops.fragments import PROGRAMS, fragment_tokens
from bmburst_ops.linear.kernel import Inputs, Pieces, PreparedScan, Recurrence
from bmburst_ops.machine import HERE, Machine

_MOST_KEY_DIM = 256
_AMPERE, _HOPPER = (8, 0), 9
_RIGHT, _TRIED = (3, 7, 1), (3, 6)  # on Hopper: from the first on, and the second with all its patches


def unusable(capability: tuple[int, int], machine: Machine = HERE) -> tuple[str, str] | None:
    """Return why Triton cannot compute recurrences on a GPU of a compute capability, and the fix; None: it can.

    On Hopper, Triton 3.4 to 3.7.0 compiles some kernels wrongly. These were compared with fp64 there, with 3.6 and
    3.7.1.
    """
    version = machine.version("triton")
    if version is None:
        return "the package triton is not installed", "pip install triton"
    if capability < _AMPERE:
        return "its kernels need a GPU of compute capability 8.0 or newer", "kernel='reference'"
    if capability[0] != _HOPPER or version >= _RIGHT or version[:2] == _TRIED:
        return None
    found = ".".join(map(str, version))
    return (
        f"Triton {found} may compile its kernels wrongly for Hopper; allowed: 3.6, and from 3.7.1 on",
        "torch 2.11, which has Triton 3.6, or torch 2.13, which has 3.7.1",
    )


class TritonKernel:
    """See `bmburst_ops.linear.kernel.LinearKernel`."""

    name = "triton"

    def refusal(self, recurrence: Recurrence, inputs: Inputs) -> str | None:
        """See `LinearKernel.refusal`."""
        if recurrence.kind not in PROGRAMS:
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

    def prepare(
        self, recurrence: Recurrence, inputs: Inputs, pieces: Pieces, kept: tuple[Tensor, ...] = ()
    ) -> PreparedScan:
        """See `LinearKernel.prepare`."""
        from bmburst_ops.linear.scan import FragmentScan

        heads, _, value_dim = recurrence.state_shape(inputs)
        processors = torch.cuda.get_device_properties(inputs[0].device).multi_processor_count
        tokens = fragment_tokens(recurrence.kind, pieces.edges[-1], heads, value_dim, processors)
        return FragmentScan(recurrence, inputs, pieces, tokens, kept)


@cache
def _unusable(device: torch.device) -> tuple[str, str] | None:
    return unusable(torch.cuda.get_device_capability(device))
