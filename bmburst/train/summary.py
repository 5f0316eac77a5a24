"""What a run says of itself at its end: typical speed, utilisation, waiting and the memory it took."""

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from bmburst.train.metrics import StepMetrics

SUMMARY_FILE = "summary.json"
_WARM_UP = 1  # steps in which kernels are compiled and memory is taken
_MEDIANS = (
    "seconds",
    "tokens_per_second",
    "tokens_per_second_per_gpu",
    "mfu",
    "mfu_kernel",
    "hardware_tflops",
    "exposed_seconds",
    "data_seconds",
)
_PEAKS = ("memory_gib", "reserved_gib")


class Summary:
    """Collects the steps of this process, a few numbers of each."""

    def __init__(self) -> None:
        self._steps: list[StepMetrics] = []

    def add(self, metrics: StepMetrics) -> None:
        """Take a step."""
        self._steps.append(metrics)

    def values(self) -> Mapping[str, float]:
        """Return medians of all but the first step, peaks of all, and counts; what is unknown is left out."""
        if not self._steps:
            return {}
        warm = self._steps[_WARM_UP:] or self._steps
        found: dict[str, float] = {"steps": len(self._steps), "skipped_steps": self._steps[-1].skipped_steps}
        for names, steps, of in ((_MEDIANS, warm, median), (_PEAKS, self._steps, max)):
            for name in names:
                known = [value for step in steps if (value := getattr(step, name)) is not None]
                if known:
                    found[name] = float(of(known))
        return found

    def write(self, folder: Path) -> str:
        """Write `summary.json` and return the same in words; nothing of a run without a step."""
        found = self.values()
        if not found:
            return ""
        (folder / SUMMARY_FILE).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        parts = [
            f"{found['seconds']:.3g} s a step",
            f"{found['tokens_per_second']:,.0f} tokens/s",
            *_said(found, "tokens_per_second_per_gpu", "{:,.0f} a rank"),
            *_said(found, "mfu", "MFU {:.1%}"),
            *_said(found, "mfu_kernel", "{:.1%} with attention's backward at 2.5"),
            *_said(found, "hardware_tflops", "{:.3g} TFLOP/s a rank"),
            *_said(found, "exposed_seconds", "{:.3g} s of communication exposed"),
            *_said(found, "data_seconds", "{:.3g} s for data"),
            *_said(found, "memory_gib", "peak {:.2f} GiB"),
            *_said(found, "reserved_gib", "{:.2f} GiB reserved"),
            f"{found['skipped_steps']:.0f} steps skipped",
        ]
        return f"{found['steps']:.0f} steps, medians: {', '.join(parts)}"


def _said(found: Mapping[str, float], name: str, words: str) -> list[str]:
    return [words.format(found[name])] if name in found else []
