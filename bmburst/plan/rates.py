"""Measures a machine and writes its hardware file: rates of matrix products, attention, memory, copies and links.

`calibrate` implements `bmburst plan --calibrate`; each number of its file has a source. One process measures a device
(`measure_device`). As a program, `python -m bmburst.plan.rates FILE`, this module is one rank of a job that measures
the links between ranks, with NCCL on GPUs, else with gloo. Rank 0 writes the result as JSON.
"""

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bmburst.launch.launcher import LaunchSpec, launch
from bmburst.schedule.hardware import DEFAULT, NUMBERS, Hardware, hardware_from, load_hardware, read_facts
from bmburst_ops import ATTENTION_BACKWARD
from bmburst_ops.host_adamw import Rates, adamw_

PrintLine = Callable[[str], None]
_LEAST, _MOST = 3, 20  # number of timed calls
_SUSTAINED, _AT_ONCE = 3.0, 20  # seconds of products until power limits their rate; products between two readings
_HEAD_DIM = 128
_GPU_BYTES, _CPU_BYTES = 1 << 27, 1 << 22  # bytes per transfer
_LINKS_TIMEOUT = 60.0  # seconds without progress after which ranks are terminated


class Fact(NamedTuple):
    """A number of a hardware file. `kind` is "measured" or "assumed"; `source` is the method or the other machine."""

    value: float
    unit: str
    kind: str
    source: str


def measured(value: float, unit: str, source: str) -> Fact:
    """Return a number that was measured on this machine."""
    return Fact(value, unit, "measured", source)


def calibrate(base: str, ranks: int, say: PrintLine) -> str:
    """Measure this machine and return its hardware file.

    Args:
        base: Name or file of the hardware that provides the numbers that cannot be measured here.
        ranks: Number of ranks between which links are measured; 1: links are not measured.
        say: Prints a line of progress.

    Raises:
        UserError: `base` is unknown, or the ranks cannot start.
    """
    known = load_hardware(base)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    name = torch.cuda.get_device_name(0) if on_gpu else f"{platform.machine()} CPU"
    found = measure_device(device, say)
    if not on_gpu:
        found |= _of_a_cpu(found)
    if ranks > 1:
        say(f"links between {ranks} ranks")
        found |= _links(ranks)
    facts = complete(found, known, base)
    left = sum(fact.kind != "measured" for fact in facts.values())
    head = f"Measured {time.strftime('%Y-%m-%d')} by bmburst plan --calibrate; {left} numbers are not, see their kind."
    say(f"{len(facts) - left} numbers measured, {left} as on {base}")
    return render(name, facts, head)


def _of_a_cpu(found: dict[str, Fact]) -> dict[str, Fact]:
    """Return the numbers of a CPU: the peak is the measured rate of matrix products, and no memory is reserved."""
    peak = measured(found["matmul"].value, "FLOP/s", "the rate of its products")
    none = measured(0.0, "bytes", "a CPU")
    return {"peak": peak, "reserved": none, "nccl_memory": none, "workspace": none}


def _links(ranks: int) -> dict[str, Fact]:
    with tempfile.TemporaryDirectory(prefix="bmburst-plan-") as folder:
        file = Path(folder) / "links.json"
        spec = LaunchSpec(nproc=ranks, hang_timeout=_LINKS_TIMEOUT, start_timeout=_LINKS_TIMEOUT, host_runtime=False)
        status = launch(spec, ["-m", "bmburst.plan.rates", str(file)])
        if status or not file.is_file():
            return {}
        return {key: Fact(*values) for key, values in json.loads(file.read_text(encoding="utf-8")).items()}


def complete(found: Mapping[str, Fact], base: Hardware, name: str) -> dict[str, Fact]:
    """Return every number of a hardware file: the measured ones, and for the others those of a known machine.

    Args:
        found: The measured numbers.
        base: The known machine.
        name: Its name, or its file.
    """
    units = {key: fact["unit"] for key, fact in read_facts(DEFAULT).items() if key in NUMBERS}
    taken = {
        key: Fact(getattr(base, key), units[key], "assumed", f"not measured here: as on {name}") for key in NUMBERS
    }
    return taken | dict(found)


def render(name: str, facts: Mapping[str, Fact], head: str) -> str:
    """Return the text of a hardware file."""
    lines = [f"# {head}", f"name = {_text(name)}"]
    for key in NUMBERS:
        fact = facts[key]
        lines += ["", f"[{key}]", f"value = {float(fact.value)!r}", f"unit = {_text(fact.unit)}"]
        lines += [f"kind = {_text(fact.kind)}", f"source = {_text(fact.source)}"]
    text = "\n".join(lines) + "\n"
    hardware_from({"name": name} | {key: {"value": fact.value} for key, fact in facts.items()}, "what was measured")
    return text


def _text(value: str) -> str:
    plain = "".join(character if character.isprintable() else " " for character in value)
    return '"' + plain.replace("\\", "\\\\").replace('"', "'") + '"'


def call_seconds(call: Callable[[], object], device: torch.device, *, budget: float = 1.0) -> float:
    """Return the median seconds of a call, after one warm-up call.

    Args:
        call: The function to time.
        device: Device that it runs on.
        budget: Seconds after which no further call starts, once three are measured.
    """
    _once(call, device)
    begun, found = time.perf_counter(), list[float]()
    while len(found) < _LEAST or (len(found) < _MOST and time.perf_counter() - begun < budget):
        found.append(_once(call, device))
    return sorted(found)[len(found) // 2]


def _once(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        before.record()
        call()
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of the measured operations. Each measurement takes seconds.

    Attributes:
        matrix: Rows and columns of a large product.
        rows: Rows of a small product.
        tokens: Tokens of a long and of a short sequence, for attention.
        heads: Number of query heads.
        nbytes: Bytes per copy.
        dtype: dtype of all tensors.
    """

    matrix: int
    rows: int
    tokens: tuple[int, int]
    heads: int
    nbytes: int
    dtype: torch.dtype


GPU = Scale(8192, 256, (16384, 1024), 32, 1 << 29, torch.bfloat16)
CPU = Scale(768, 32, (512, 128), 4, 1 << 25, torch.float32)


def measure_device(device: torch.device, say: PrintLine) -> dict[str, Fact]:
    """Return the numbers of a hardware file that one process can measure on a device."""
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
        seconds = call_seconds(partial(torch.mm, left, right), device)
        rates.append(2.0 * count * size * size / seconds)
    half = max(0.0, rows * (rates[0] / rates[1] - 1))
    name = f"{size} x {size} by {size} x {size}, {scale.dtype}"
    found: dict[str, Fact] = {}
    if device.type == "cuda":
        share = min(1.0, _sustained_rate(right, device) / rates[0])
        found["matmul_sustained"] = measured(share, "of the rate", f"the same after {_SUSTAINED:g} s without a pause")
    return found | {
        "matmul": measured(rates[0], "FLOP/s", name),
        "matmul_half_rows": measured(half, "tokens", f"the same with {rows} rows: {rates[1]:.3g} FLOP/s"),
    }


def _sustained_rate(matrix: Tensor, device: torch.device) -> float:
    """Return the FLOP/s of a square matrix's product with itself, after `_SUSTAINED` seconds of such products."""

    def some() -> None:
        for _ in range(_AT_ONCE):
            torch.mm(matrix, matrix)

    begun, seconds = time.perf_counter(), 0.0
    while time.perf_counter() - begun < _SUSTAINED:
        seconds = _once(some, device)
    return _AT_ONCE * 2.0 * len(matrix) ** 3 / seconds


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
    from bmburst_ops.flash import CAUSAL, BackwardInputs, Scoring, select_kernel
    from bmburst_ops.merge import row_dots

    shape, scoring = (1, tokens, scale.heads, _HEAD_DIM), Scoring(CAUSAL, _HEAD_DIM**-0.5)
    q, k, v, grad = (torch.randn(shape, device=device, dtype=scale.dtype) for _ in range(4))
    kernel = select_kernel("auto", q, k)
    part = kernel.forward(q, k, v, scoring)
    delta = row_dots(grad, part.out)

    def forward() -> Tensor:
        return kernel.forward(q, k, v, scoring).out

    def backward() -> object:
        given = BackwardInputs(grad, q, k, v, part.lse, delta)
        return kernel.backward(given, scoring, deterministic=False)

    flops = 2.0 * tokens**2 * scale.heads * _HEAD_DIM
    rate = flops / call_seconds(forward, device)
    return rate, ATTENTION_BACKWARD * flops / call_seconds(backward, device), kernel.name


def _memory(device: torch.device, scale: Scale) -> dict[str, Fact]:
    here = torch.zeros(scale.nbytes, dtype=torch.uint8, device=device)
    there = torch.zeros_like(here)
    moved = 2.0 * scale.nbytes / call_seconds(lambda: there.copy_(here), device)
    found = {"memory_bandwidth": measured(moved, "bytes/s", f"a copy of {scale.nbytes >> 20} MiB, read and written")}
    found["host_adam"] = _host_adam(scale)
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
    offload = scale.nbytes / call_seconds(lambda: here.copy_(pinned, non_blocking=True), device)
    return found | {
        "memory": measured(float(properties.total_memory), "bytes", properties.name),
        "multiprocessors": measured(float(properties.multi_processor_count), "multiprocessors", properties.name),
        "host_memory": measured(host, "bytes a node", "the host's"),
        "host_bandwidth": measured(offload, "bytes/s a GPU", "from pinned memory of the host"),
    }


def _host_adam(scale: Scale) -> Fact:
    numbers = scale.nbytes // 16
    weights, gradient = (torch.zeros(numbers, dtype=torch.bfloat16) for _ in range(2))
    moments, remainder = (torch.zeros(numbers), torch.zeros(numbers)), torch.zeros(numbers, dtype=torch.int16)
    step = partial(adamw_, weights, gradient, moments, Rates(1e-3, (0.9, 0.95), 1e-8, 0.1), step=1, remainder=remainder)
    gpus = max(1, torch.cuda.device_count() if torch.cuda.is_available() else 1)
    rate = numbers / call_seconds(step, torch.device("cpu")) / gpus
    return measured(rate, "weights/s a GPU", f"AdamW of bf16 weights on {torch.get_num_threads()} threads, over {gpus}")


def _neighbour(device: torch.device, scale: Scale) -> dict[str, Fact]:
    here = torch.zeros(scale.nbytes, dtype=torch.uint8, device=device)
    there = torch.zeros(scale.nbytes, dtype=torch.uint8, device=torch.device("cuda", 1))
    if not torch.cuda.can_device_access_peer(here.device.index, there.device.index):
        return {}
    rate = scale.nbytes / call_seconds(lambda: here.copy_(there), device)
    return {"peer_bandwidth": measured(rate, "bytes/s", f"a copy of {scale.nbytes >> 20} MiB from the next GPU")}


def measure_links(device: torch.device) -> dict[str, Fact]:
    """Return the bandwidths and latency between the ranks of the default group; every rank calls it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    nbytes = _GPU_BYTES if device.type == "cuda" else _CPU_BYTES
    sent = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    received = torch.zeros_like(sent)
    small = (sent[:8], received[:8])

    def ring(source: torch.Tensor, target: torch.Tensor) -> None:
        sends = dist.P2POp(dist.isend, source, (rank + 1) % size)
        receives = dist.P2POp(dist.irecv, target, (rank - 1) % size)
        for work in dist.batch_isend_irecv([sends, receives]):
            work.wait()

    whole = torch.zeros(nbytes * size, dtype=torch.uint8, device=device)
    parts = list(whole.chunk(size))
    latency = _slowest(call_seconds(lambda: ring(*small), device), device)
    hop = _slowest(call_seconds(lambda: ring(sent, received), device), device)
    gather = _slowest(call_seconds(lambda: dist.all_gather(parts, sent), device), device)
    rate, backend = nbytes / max(hop - latency, 1e-9), dist.get_backend()
    joined = nbytes * (size - 1) / max(gather - latency, 1e-9)
    name = f"{backend}, {size} ranks, {nbytes >> 20} MiB"
    return {
        "nccl_bandwidth": measured(rate, "bytes/s", f"{name}, to the next rank"),
        "nccl_latency": measured(latency, "seconds", f"{backend}, {size} ranks, 8 bytes to the next rank"),
        "all_to_all_bandwidth": measured(joined, "bytes/s", f"{name}, from all ranks"),
        "collective_bandwidth": measured(joined, "bytes/s", f"{name}, all-gather"),
    }


def _slowest(seconds: float, device: torch.device) -> float:
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value.item())


def main(file: str) -> None:
    """Measure as one rank; the rank comes from torchrun's environment variables."""
    on_gpu = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        found = measure_links(device)
        if dist.get_rank() == 0:
            Path(file).write_text(json.dumps(found), encoding="utf-8")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
