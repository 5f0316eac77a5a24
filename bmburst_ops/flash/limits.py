"""What several GPU kernels refuse, in one wording: phrases as `Kernel.refusal` returns them, or None."""

import torch
from torch import Tensor


def unless_half_on_gpu(q: Tensor) -> str | None:
    """Refuse other devices than NVIDIA GPUs, and other dtypes than fp16 and bf16."""
    if q.device.type != "cuda":
        return f"runs on NVIDIA GPUs only, and the tensors are on {q.device}"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 and bfloat16 only, got {q.dtype}"
    return None


def unless_head_dim(q: Tensor, widest: int, where: str = "") -> str | None:
    """Refuse head dims that are no multiple of 8, or wider; `where` says what the limit depends on."""
    if q.shape[-1] % 8 or q.shape[-1] > widest:
        return f"takes head dims that are multiples of 8 up to {widest}{where}, got {q.shape[-1]}"
    return None


def unless_ampere(q: Tensor) -> str | None:
    """Refuse GPUs before Ampere."""
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return f"needs Ampere or newer, got {torch.cuda.get_device_name(q.device)}"
    return None
