"""What links between ranks give: run on every rank, `python -m bmburst.plan.calibrate.links FILE`.

Rank 0 writes the numbers into the file as JSON. On GPUs over NCCL, else over gloo.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from bmburst.plan.calibrate.clock import seconds_of
from bmburst.plan.calibrate.facts import Fact, measured

_GPU_BYTES, _CPU_BYTES = 1 << 27, 1 << 22


def measure_links(device: torch.device) -> dict[str, Fact]:
    """Return what transfers between the ranks of the default group reach; every rank calls it."""
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
    latency = _slowest(seconds_of(lambda: ring(*small), device), device)
    hop = _slowest(seconds_of(lambda: ring(sent, received), device), device)
    gather = _slowest(seconds_of(lambda: dist.all_gather(parts, sent), device), device)
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
    """Run on this rank, as torchrun's environment names it."""
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
