"""How much of the hardware a step uses: the planner's FLOPs over measured seconds."""

from dataclasses import dataclass

from bmburst.blocks.config import LlamaConfig
from bmburst.plan.counts import hardware_flops, step_flops
from bmburst.schedule.hardware import hardware_of
from bmburst_ops.constants import ATTENTION_BACKWARD


@dataclass(frozen=True, kw_only=True, slots=True)
class Utilisation:
    """What a step makes of its GPUs.

    Attributes:
        mfu: Model FLOPs over the peak: causal attention halved, backward twice the forward, recomputation not counted;
            None where no peak is known.
        mfu_kernel: The same with attention's backward 2.5 times its forward.
        tflops: TFLOP/s of a rank that were computed, recomputation counted.
    """

    mfu: float | None
    mfu_kernel: float | None
    tflops: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FlopsMeter:
    """What does not change over a run.

    Attributes:
        model: The shape.
        recompute: Policy of `bmburst.recompute`.
        ranks: In all.
        peak: FLOP/s of a rank; None where it is not known.
    """

    model: LlamaConfig
    recompute: str
    ranks: int
    peak: float | None

    def of(self, tokens: float, pairs: float, seconds: float) -> Utilisation:
        """Return what a step of so many tokens and scores (`bmburst.plan.counts.causal_pairs`) uses."""
        usual = step_flops(self.model, tokens, pairs)
        kernel = step_flops(self.model, tokens, pairs, attention_backward=ATTENTION_BACKWARD)
        done = hardware_flops(self.model, tokens, pairs, self.recompute)
        rank_seconds = seconds * self.ranks
        return Utilisation(
            mfu=None if self.peak is None else usual / rank_seconds / self.peak,
            mfu_kernel=None if self.peak is None else kernel / rank_seconds / self.peak,
            tflops=done / rank_seconds / 1e12,
        )


def known_peak(device: str | None, dtype: str) -> tuple[float | None, str]:
    """Return the FLOP/s that a GPU's utilisation is taken of, or None and the reason why there are none.

    Args:
        device: The GPU's name; None on a CPU.
        dtype: Of weights and activations.
    """
    if device is None:
        return None, "MFU is left out: there is no GPU"
    if dtype != "bfloat16":
        return None, f"MFU is left out: the planner knows peaks of 16-bit products, not of {dtype}"
    hardware = hardware_of(device)
    if hardware is None:
        return None, f"MFU is left out: the planner has no file of {device} (bmburst/schedule/machines)"
    return hardware.peak, ""
