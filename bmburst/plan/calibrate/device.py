"""What one device gives: products, attention, memory, copies to and from the host and a neighbour."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bmburst.plan.calibrate.clock import seconds_of
from bmburst.plan.calibrate.facts import Fact, measured
from bmburst_ops.constants import ATTENTION_BACKWARD

Say = Callable[[str], None]
_HEAD_DIM = 128


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the measured things are: seconds on a GPU, seconds on a CPU.

    Attributes:
        matrix: Rows and columns of a large product.
        rows: Rows of a small one.
        tokens: Of attention's long sequence, and of its short one.
        heads: Query heads.
        nbytes: Of what is copied.
        dtype: Of all of it.
    """

    matrix: int
    rows: int
    tokens: tuple[int, int]
    heads: int
    nbytes: int
    dtype: torch.dtype


GPU = Scale(8192, 256, (16384, 1024), 32, 1 << 29, torch.bfloat16)
CPU = Scale(768, 32, (512, 128), 4, 1 << 25, torch.float32)


def measure_device(device: torch.device, say: Say) -> dict[str, Fact]:
    """Return the numbers of a hardware file that one process can measure on a device.

    Args:
        device: A GPU, or the CPU.
        say: Told what is being measured.
    """
    scale = GPU if device.type == "cuda" else CPU
    found: dict[str, Fact] = {}
    say(f"products of {scale.matrix} x {scale.matrix} matrices")
    found |= _products(device, scale)
    say(f"attention over {scale.tokens[0]} and {scale.tokens[1]} tokens, forward and backward")
    found |= _attention(device, scale)
    say("memory")
    found |= _memory(device, scale)
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        say("copies from a neighbour GPU")
        found |= _neighbour(device, scale)
    return found


def _products(device: torch.device, scale: Scale) -> dict[str, Fact]:
    size, rows = scale.matrix, scale.rows
    right = torch.randn(size, size, device=device, dtype=scale.dtype)
    rates = []
    for count in (size, rows):
        left = torch.randn(count, size, device=device, dtype=scale.dtype)
        seconds = seconds_of(partial(torch.mm, left, right), device)
        rates.append(2.0 * count * size * size / seconds)
    half = max(0.0, rows * (rates[0] / rates[1] - 1))
    name = f"{size} x {size} by {size} x {size}, {scale.dtype}"
    return {
        "matmul": measured(rates[0], "FLOP/s", name),
        "matmul_half_rows": measured(half, "tokens", f"the same with {rows} rows: {rates[1]:.3g} FLOP/s"),
    }


def _attention(device: torch.device, scale: Scale) -> dict[str, Fact]:
    rates = [_attention_rates(device, scale, tokens) for tokens in scale.tokens]
    (forward, backward, kernel), (short, _, _) = rates
    few = scale.tokens[1]
    half = max(0.0, few * (forward / short - 1))
    name = f"kernel {kernel}, causal, {scale.heads} heads of {_HEAD_DIM}, {scale.tokens[0]} tokens, {scale.dtype}"
    return {
        "attention_forward": measured(forward, "FLOP/s", name),
        "attention_backward": measured(backward, "FLOP/s", name),
        "attention_half_rows": measured(half, "tokens", f"the same at {few} tokens: {short:.3g} FLOP/s forward"),
    }


def _attention_rates(device: torch.device, scale: Scale, tokens: int) -> tuple[float, float, str]:
    from bmburst_ops.flash import CAUSAL, Given, select_kernel
    from bmburst_ops.merge import row_dots

    shape = (1, tokens, scale.heads, _HEAD_DIM)
    q, k, v, grad = (torch.randn(shape, device=device, dtype=scale.dtype) for _ in range(4))
    kernel = select_kernel("auto", q, k)
    part = kernel.forward(q, k, v, pattern=CAUSAL, scale=_HEAD_DIM**-0.5)
    delta = row_dots(grad, part.out)

    def forward() -> Tensor:
        return kernel.forward(q, k, v, pattern=CAUSAL, scale=_HEAD_DIM**-0.5).out

    def backward() -> object:
        given = Given(grad, q, k, v, part.lse, delta)
        return kernel.backward(given, pattern=CAUSAL, scale=_HEAD_DIM**-0.5, deterministic=False)

    flops = 2.0 * tokens**2 * scale.heads * _HEAD_DIM
    return flops / seconds_of(forward, device), ATTENTION_BACKWARD * flops / seconds_of(backward, device), kernel.name


def _memory(device: torch.device, scale: Scale) -> dict[str, Fact]:
    here = torch.zeros(scale.nbytes, dtype=torch.uint8, device=device)
    there = torch.zeros_like(here)
    moved = 2.0 * scale.nbytes / seconds_of(lambda: there.copy_(here), device)
    found = {"memory_bandwidth": measured(moved, "bytes/s", f"a copy of {scale.nbytes >> 20} MiB, read and written")}
    host = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if device.type != "cuda":
        cores = float(os.cpu_count() or 1)
        return found | {
            "memory": measured(host, "bytes", "the host's"),
            "multiprocessors": measured(cores, "multiprocessors", "cores"),
            "host_memory": measured(host, "bytes a node", "the host's"),
            "host_bandwidth": measured(moved / 2, "bytes/s a GPU", "a copy in the host's memory"),
        }
    properties = torch.cuda.get_device_properties(device)
    pinned = torch.zeros(scale.nbytes, dtype=torch.uint8, pin_memory=True)
    offload = scale.nbytes / seconds_of(lambda: here.copy_(pinned, non_blocking=True), device)
    return found | {
        "memory": measured(float(properties.total_memory), "bytes", properties.name),
        "multiprocessors": measured(float(properties.multi_processor_count), "multiprocessors", properties.name),
        "host_memory": measured(host, "bytes a node", "the host's"),
        "host_bandwidth": measured(offload, "bytes/s a GPU", "from pinned memory of the host"),
    }


def _neighbour(device: torch.device, scale: Scale) -> dict[str, Fact]:
    here = torch.zeros(scale.nbytes, dtype=torch.uint8, device=device)
    there = torch.zeros(scale.nbytes, dtype=torch.uint8, device=torch.device("cuda", 1))
    if not torch.cuda.can_device_access_peer(here.device.index, there.device.index):
        return {}
    rate = scale.nbytes / seconds_of(lambda: here.copy_(there), device)
    return {"peer_bandwidth": measured(rate, "bytes/s", f"a copy of {scale.nbytes >> 20} MiB from the next GPU")}
