"""The reference of preference training stays what it was when a run is resumed."""

from pathlib import Path

from bmburst.checkpoint.base_model import Base
from bmburst.checkpoint.files import read_progress
from bmburst.errors import UserError
from bmburst.train.config import TrainConfig


def reference_text(config: TrainConfig, folder: Path) -> str:
    """Return some numbers of a reference's weights, as `Base.text`; UserError unless they fit the run's model."""
    return Base.open(folder, config.model).text(config.dtype)


def require_reference(config: TrainConfig, checkpoint: Path) -> None:
    """Raise UserError unless a resumed run has the reference of its checkpoint, which earlier versions do not name.

    Another directory with the same weights is accepted. The run holds a reference in its own dtype, so weights in a
    wider dtype pass if they round to the same numbers.
    """
    wanted, folder = read_progress(checkpoint).reference, config.reference
    if wanted is None or (folder is not None and reference_text(config, folder) == wanted):
        return
    option = "dpo.reference" if config.dpo.reference else "init_from"
    now = "the resumed run has none" if folder is None else f"{option} {folder} has other weights"
    raise UserError(
        f"the run of {checkpoint} has another reference model: {now}\n"
        "fix: --dpo.reference with a directory of the reference that the run began with, or a new run without --resume"
    )
