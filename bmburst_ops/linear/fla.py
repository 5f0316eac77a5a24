"""Recurrences by the Triton kernels of flash-linear-attention (package fla-core), for NVIDIA GPUs.

Its functions take flat batches of pieces with a state each (`cu_seqlens`, `initial_state`). M and U of a piece come
from one call: values `[v, 0]` of value_dim + key_dim columns from the state `[0, I]` end in `[U, M]`, because every
column of a state evolves alone.

fla tunes its kernels when they first run. With all its choices this takes minutes, so each kernel gets the choice that
is nearest to what is usual (`few_choices`); on GPUs with less shared memory, where one may not fit, two.
FLA_CACHE_MODE, fla's own setting, or BMBURST_FLA_TUNING=all leaves them as they are.
"""

import importlib
import math
import os
import sys
from collections.abc import Callable
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bmburst_ops.fused import import_package
from bmburst_ops.linear.kernel import EPSILON, Inputs, Pieces, Recurrence
from bmburst_ops.machine import HERE, Machine

TUNING = "BMBURST_FLA_TUNING"
"""The environment variable that, set to "all", lets fla try all choices of each kernel."""

VERSIONS = ((0, 6), (0, 7))
"""From the first on, below the second: fla 0.5.1 and older compute wrong gradients of KDA."""

_FUNCTIONS = {
    "gated_delta": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    "kda": ("fla.ops.kda", "chunk_kda"),
    "decay": ("fla.ops.simple_gla", "chunk_simple_gla"),
}
_HOPPER, _WRONG = 9, ((3, 4), (3, 7, 1))
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
    if capability[0] == _HOPPER and _WRONG[0] <= triton < _WRONG[1] and not machine.has("tilelang"):
        found = ".".join(map(str, triton))
        return (
            f"Triton {found} computes wrong gradients on Hopper; allowed: from 3.7.1 on, or the package tilelang",
            "torch 2.13, which has Triton 3.7.1, or pip install tilelang",
        )
    return None


class FlaKernel:
    """See `bmburst_ops.linear.kernel.LinearKernel`."""

    name = "fla"

    def refusal(self, recurrence: Recurrence, inputs: Inputs) -> str | None:
        """See `LinearKernel.refusal`."""
        if recurrence.kind not in _FUNCTIONS:
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

    def prepare(self, recurrence: Recurrence, inputs: Inputs, pieces: Pieces) -> "FlaScan":
        """See `LinearKernel.prepare`."""
        return FlaScan(recurrence, inputs, pieces)


@cache
def _unusable(device: torch.device) -> tuple[str, str] | None:
    return unusable(torch.cuda.get_device_capability(device))


class FlaScan:
    """See `bmburst_ops.linear.kernel.PreparedScan`."""

    def __init__(self, recurrence: Recurrence, inputs: Inputs, pieces: Pieces) -> None:
        self._recurrence, self._inputs, self._pieces = recurrence, inputs, pieces
        self._function = _function(recurrence.kind)

    def summary(self) -> tuple[Tensor, Tensor]:
        """See `PreparedScan.summary`."""
        state = self._recurrence.state_shape(self._inputs)
        exporting = self._pieces.exporting
        if not exporting:
            return tuple(  # type: ignore[return-value]
                self._states(0, *shape) for shape in (self._recurrence.transition_shape(self._inputs), state)
            )
        spans = [self._pieces.span(number) for number in exporting]
        inputs = tuple(_joined([tensor[span] for span in spans]) for tensor in self._inputs)
        edges = [0]
        for span in spans:
            edges.append(edges[-1] + span.stop - span.start)
        q, k, v, g, *beta = inputs
        if not self._recurrence.is_delta:
            _, ends = self._run(inputs, tuple(edges), None)
            sums = [part.to(ends.dtype).sum(0) for part in g.split([end - begin for begin, end in pairwise(edges)])]
            return torch.stack(sums).exp()[..., None, None], ends
        key_dim = state[1]
        start = self._states(len(spans), state[0], key_dim, state[2] + key_dim)
        start[..., state[2] :] = torch.eye(key_dim, device=start.device)
        wider = torch.cat([v, v.new_zeros(*v.shape[:2], key_dim)], -1)
        _, ends = self._run((q, k, wider, g, *beta), tuple(edges), start)
        return ends[..., state[2] :], ends[..., : state[2]]

    def forward(self, starts: Tensor) -> Tensor:
        """See `PreparedScan.forward`."""
        out, _ = self._run(self._inputs, self._pieces.edges, self._all_starts(starts))
        return self._without_padding(out)

    def start_gradients(self, grad_out: Tensor) -> Tensor:
        """See `PreparedScan.start_gradients`."""
        waiting = list(self._pieces.waiting)
        if not waiting:
            return self._states(0, *self._recurrence.state_shape(self._inputs))
        # Outputs are affine in the state: any value gives the gradient.
        start = self._states(len(self._pieces.edges) - 1, *self._recurrence.state_shape(self._inputs)).requires_grad_()
        with torch.enable_grad():
            out, _ = self._run(self._inputs, self._pieces.edges, start)
        (found,) = torch.autograd.grad(out, start, self._without_padding(grad_out.clone()))
        return found[waiting]

    def backward(self, starts: Tensor, grad_out: Tensor, grad_ends: Tensor) -> Inputs:
        """See `PreparedScan.backward`."""
        leaves = tuple(tensor.detach().requires_grad_() for tensor in self._inputs)
        with torch.enable_grad():
            out, ends = self._run(leaves, self._pieces.edges, self._all_starts(starts))
        grads = torch.zeros_like(ends)
        if self._pieces.exporting:
            grads[list(self._pieces.exporting)] = grad_ends.to(grads.dtype)
        found = torch.autograd.grad((out, ends), leaves, (self._without_padding(grad_out.clone()), grads))
        return tuple(self._without_padding(grad) for grad in found)

    def _run(self, inputs: Inputs, edges: tuple[int, ...], starts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the outputs and the last state of each piece."""
        q, k, v, g, *beta = inputs
        options: dict[str, Any] = {"scale": self._recurrence.scale, "initial_state": starts, "output_final_state": True}
        if self._recurrence.is_delta:
            options |= {"beta": beta[0][None], "use_qk_l2norm_in_kernel": self._recurrence.normalize}
        else:  # this function neither normalizes nor shares heads
            repeats = v.shape[1] // k.shape[1]
            q, k = (_normalized(t) if self._recurrence.normalize else t for t in (q, k))
            q, k = (t.repeat_interleave(repeats, 1) for t in (q, k))
        options |= _cumulative(edges, v.device)
        out, ends = self._function(q[None], k[None], v[None], g=g[None], **options)
        return out[0], ends

    def _all_starts(self, starts: Tensor) -> Tensor | None:
        """Return a state for each piece, zero where none waits; None if none does."""
        if not self._pieces.waiting:
            return None
        found = self._states(len(self._pieces.edges) - 1, *starts.shape[1:])
        found[list(self._pieces.waiting)] = starts
        return found

    def _states(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=self._inputs[0].device)

    def _without_padding(self, tensor: Tensor) -> Tensor:
        """Set the rows of padding to zero, in place."""
        for number in self._pieces.padding:
            tensor[self._pieces.span(number)] = 0
        return tensor


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _normalized(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * (wide.square().sum(-1, keepdim=True) + EPSILON).rsqrt()).to(x.dtype)


@lru_cache(maxsize=64)
def _cumulative(edges: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
    """Return the arguments for the edges of pieces. With those on the host, fla does not wait for the device."""
    on_host = torch.tensor(edges, dtype=torch.int64)
    return {"cu_seqlens": on_host.to(device), "cu_seqlens_cpu": on_host}


@cache
def _function(kind: str) -> Callable[..., Any]:
    """Return the function of a kind, whose kernels have few choices."""
    module, name = _FUNCTIONS[kind]
    function: Callable[..., Any] = getattr(import_package(module, FlaKernel.name), name)
    restrict_tuning()
    return function


def restrict_tuning() -> None:
    """Leave each kernel of fla few choices, unless the environment says otherwise; see the module."""
    if os.environ.get(TUNING) != "all" and "FLA_CACHE_MODE" not in os.environ:
        few_choices()


def few_choices() -> None:
    """Leave each kernel of fla that is imported one or two choices, nearest to 4 warps, 3 stages and blocks of 64."""
    is_small = torch.cuda.is_available() and torch.cuda.get_device_capability() < (_HOPPER, 0)
    tuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    for name, module in list(sys.modules.items()):
        if name.startswith("fla."):
            for value in list(vars(module).values()):
                while value is not None and not isinstance(value, tuner):  # heuristics wrap the tuner
                    value = getattr(value, "fn", None)
                if isinstance(value, tuner):
                    value.configs = sorted(value.configs, key=_distance)[: 1 + is_small]


def _distance(config: Any) -> float:
    blocks = [size for size in config.kwargs.values() if isinstance(size, int) and not isinstance(size, bool)]
    near = sum(abs(math.log2(max(size, 1) / 64)) for size in blocks)
    return abs(math.log2(config.num_warps / 4)) + abs(float(config.num_stages) - 3) + near
