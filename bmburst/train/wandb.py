"""`--wandb PROJECT`: the same numbers for Weights & Biases, on rank 0. The package is optional."""

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bmburst.errors import UserError


def require_wandb() -> None:
    """Check that the package is there; before ranks start.

    Raises:
        UserError: It is not installed.
    """
    if "wandb" not in sys.modules and importlib.util.find_spec("wandb") is None:
        raise UserError(
            "wandb needs the package wandb, which is not installed: pip install wandb, or leave --wandb out"
        )


class Wandb:
    """One run of a project; a resumed run goes on in it.

    Args:
        project: Its name.
        folder: The run folder, whose name the run bears; the package keeps its own files there.
        config: Every field, for the run's page.
    """

    def __init__(self, project: str, folder: Path, config: Mapping[str, Any]) -> None:
        wandb: Any = importlib.import_module("wandb")
        name = folder.resolve().name
        self._run = wandb.init(
            project=project, name=name, id=name, dir=str(folder), config=dict(config), resume="allow"
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """See `Online.log`."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """See `Online.close`."""
        self._run.finish()
