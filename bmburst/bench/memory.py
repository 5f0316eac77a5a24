"""Memory of a device: how much a cell took at its peak, and whether the next can fit at all."""

import gc
import os
from dataclasses import dataclass

import torch

_USABLE = 0.92  # of a device: context, communicators and fragments take the rest


@dataclass(frozen=True, slots=True)
class Gauge:
    """Reads how much memory a cell takes on this rank's GPU.

    What lies beside the peak of torch's allocator (`beside_peak`) is added to it, less what that was when a run began.

    Attributes:
        device: This rank's device. On a CPU nothing is read.
        beside: Bytes beside it when the run began.
    """

    device: torch.device
    beside: int = 0

    @classmethod
    def begin(cls, device: torch.device) -> "Gauge":
        """Return a gauge for a run that has made its communicators but no buffers."""
        return cls(device, beside_peak(device) if device.type == "cuda" else 0)

    def clear(self) -> None:
        """Give back what nothing holds any more, and begin a new peak."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self, allocated: float | None = None) -> float | None:
        """Return the bytes at the peak since `clear`; None on a CPU.

        Args:
            allocated: The peak of torch's allocator, where what was measured began a new one now and then itself.
        """
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize(self.device)
        if allocated is None:
            allocated = torch.cuda.max_memory_allocated(self.device)
        return allocated + max(0, beside_peak(self.device) - self.beside)

    def capacity(self, ranks_here: int) -> float:
        """Return the bytes that a cell may take on a rank.

        Args:
            ranks_here: Ranks that share this machine's memory, where there is no GPU.
        """
        if self.device.type == "cuda":
            return _USABLE * torch.cuda.get_device_properties(self.device).total_memory
        return _USABLE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / ranks_here


def beside_peak(device: torch.device) -> int:
    """Return the bytes of a GPU that no peak of torch's allocator counts.

    What the driver has given out and the allocator does not hold, as buffers that other ranks read and NCCL's, and what
    the allocator keeps for CUDA graphs.
    """
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device) + kept_by_graphs(device)


def kept_by_graphs(device: torch.device) -> int:
    """Return the bytes that torch's allocator keeps for CUDA graphs: nobody else gets them."""
    segments = (s for s in torch.cuda.memory_snapshot() if s["device"] == device.index)
    return sum(s["total_size"] - s["allocated_size"] for s in segments if s["segment_pool_id"] != (0, 0))
