"""What tests share that compare many cases of training with a reference: ranks, results, and the optimizer."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from tests.distributed.programs import run_program


def run_cases(train: Callable[[Path, Any], None], folder: Path, cases: Iterable[Any], **options: Any) -> None:
    """Call `train(folder, case)` for each case, once for all cases of the same ranks: `case.group` has how many.

    They are the ranks in all, and in a tensor group. `train` leaves what came of a case in `<case>.pt`.
    """
    of_group: dict[tuple[int, int], list[Any]] = {}
    for case in cases:
        of_group.setdefault(case.group, []).append(case)
    for (size, tensor), alike in sorted(of_group.items()):
        run_program(size, _each, train, folder, alike, tensor=tensor, **options)


def _each(train: Callable[[Path, Any], None], folder: Path, cases: list[Any]) -> None:
    for case in cases:
        train(folder, case)


def result(folder: Path, name: object) -> dict[str, Any]:
    """Return what was left of a case or a run."""
    loaded: dict[str, Any] = torch.load(folder / f"{name}.pt", map_location="cpu", weights_only=True)
    return loaded


def adamw(model: torch.nn.Module, weight_decay: float, **options: Any) -> torch.optim.AdamW:
    """Return torch's AdamW for a model, with weight decay on matrices alone."""
    parameters = list(model.parameters())
    groups = [
        {"params": [each for each in parameters if (each.dim() > 1) is decays], "weight_decay": weight_decay * decays}
        for decays in (True, False)
    ]
    return torch.optim.AdamW(groups, **options)
