"""Pictures of where the bytes of a long training step lie, on a GPU and in host memory, by the planner."""

from functools import cache
from typing import NamedTuple

from bmburst.amounts import GIB
from bmburst.blocks.presets import PRESETS
from bmburst.plan.candidates import Candidate, Offload, Task
from bmburst.plan.longest import where_bytes_lie
from bmburst.plan.search import Prediction, predict
from bmburst.schedule.hardware import load_hardware
from docs.tools.svg import Drawing

MODEL = "llama-3-8b"
_LEFT, _WIDTH, _TOP, _STEP, _BAR = 92.0, 250.0, 44.0, 44.0, 26.0
_KINDS = {
    "kept for backward": "r0",
    "what blocks keep": "r0",
    "optimizer": "r1",
    "weights": "r2",
    "gradients": "r2",
    "weights and gradients": "r2",
    "block in work": "r3",
}
"""Classes of a use's shape; others are `_REST`."""
_REST = "edge"
_LEGENDS = {
    "gpu": (("kept for backward", "r0"), ("weights, gradients", "r2"), ("block at work", "r3"), ("other", _REST)),
    "host": (("kept for backward", "r0"), ("AdamW", "r1"), ("weights, gradients", "r2")),
}


class Case(NamedTuple):
    """A training step: all weights of `MODEL`, with optimizer, weights and gradients in host memory."""

    machine: str
    gpus: int
    tokens: int
    says: str
    recompute: str


# What `bmburst plan --optimizer.offload` takes with 128 GiB of host memory a GPU; 500,000 tokens were measured.
CASES = (
    Case("h100", 1, 262144, "256K", "block+every-4+keep-attention-last-25+offload-first-21"),
    Case("h100", 1, 500000, "500,000", "block+every-6+keep-attention-last-8+offload-first-13"),
    Case("h200", 1, 524288, "512K", "block+every-6+keep-attention-last-21+offload-first-13"),
    Case("h200", 2, 1048576, "1M", "block+every-4+keep-attention-last-30+offload-first-32+offload-attention-first-9"),
)


def bytes_of(place: str) -> Drawing:
    """Draw a bar for each case, in parts by use.

    Args:
        place: "gpu", the peak of one, or "host", all of its memory.
    """
    most = max(sum(where_bytes_lie(_predicted(case))[place].values()) for case in CASES)
    where = "a GPU" if place == "gpu" else "a host"
    drawing = Drawing(_LEFT + _WIDTH + 4, _TOP + _STEP * len(CASES) + 46, f"Where the bytes of {where} lie")
    drawing.text(0, 16, f"{MODEL}: GiB of {where}", "strong")
    for number, case in enumerate(CASES):
        uses = where_bytes_lie(_predicted(case))[place]
        y, x = _TOP + number * _STEP, _LEFT
        drawing.text(0, y + 12, case.says, "strong")
        drawing.text(0, y + 26, f"{case.gpus} x {case.machine.upper()}", "soft", size=11)
        parts: dict[str, float] = {}
        for use, nbytes in uses.items():
            kind = _KINDS.get(use, _REST)
            parts[kind] = parts.get(kind, 0.0) + nbytes
        for kind, nbytes in sorted(parts.items(), key=lambda part: (part[0] == _REST, part[0])):
            long = nbytes / most * _WIDTH
            drawing.rect(x, y, max(long - 1, 0.5), _BAR, kind, radius=1.5)
            if long > 24:
                drawing.text(x + long / 2, y + 18, f"{nbytes / GIB:.0f}", "on", anchor="middle")
            x += long
    for number, (says, kind) in enumerate(_LEGENDS[place]):
        x, y = number % 2 * 170.0, _TOP + _STEP * len(CASES) + 6 + number // 2 * 20
        drawing.rect(x + 0.5, y, 10, 10, kind, radius=1.5)
        drawing.text(x + 16, y + 10, says, size=11)
    return drawing


@cache
def _predicted(case: Case) -> Prediction:
    task = Task(model=PRESETS[MODEL], sequence=case.tokens, gpus=case.gpus)
    way = Candidate(
        task=task, data=1, tensor=1, ulysses_degree=case.gpus, recompute=case.recompute, offload=Offload.WEIGHTS
    )
    return predict(way, load_hardware(case.machine))
