"""Recipes: YAML files for `bmburst train --config`, with the command and predictions as comments.

`bmburst plan --write` writes them without torch.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bmburst.amounts import gib
from bmburst.cli import training
from bmburst.cli.program import CommandParser
from bmburst.config import given_options, read_layer
from bmburst.errors import DoesNotFit, UserError
from bmburst.outputs import require_file, write_text
from bmburst.train.config import TrainConfig

if TYPE_CHECKING:
    from bmburst.plan.candidates import Candidate
    from bmburst.plan.search import Prediction

FIRST_LINE = "# A recipe of bmburst: "


def recipe(best: "Prediction", settings: Mapping[str, Any], path: str, title: str | None = None) -> str:
    """Return the text of a recipe.

    Args:
        best: The configuration and its prediction.
        settings: Its fields of `TrainConfig`, as nested dictionaries.
        path: Path of the recipe, for the command.
        title: Title of the recipe; by default model, length and GPUs.
    """
    import yaml  # here, because it is slow to import

    task = best.candidate.task
    title = title or f"{task.preset}, {task.sequence:,} tokens, {task.gpus} x {best.hardware.name}"
    lines = [f"{FIRST_LINE}{title}.", "#", f"#   {_command(best, settings, path)}", "#", *_expected(best)]
    values = yaml.safe_dump(_plain(settings), sort_keys=False, default_flow_style=False, width=100)
    return "\n".join(lines) + f"\n\n{values}"


def _expected(best: "Prediction") -> list[str]:
    """Return the planner's prediction as comment lines."""
    task, memory, hardware = best.candidate.task, best.memory, best.hardware
    nodes = f" on {task.nodes} nodes" if task.nodes > 1 else ""
    rate = best.tokens_per_second
    return [
        f"# Expected by bmburst plan on {task.gpus} x {hardware.name}{nodes}:",
        f"#   speed: {_digits(rate * task.gpus)} tokens/s, {_digits(rate)} a GPU, {_digits(best.seconds)} s a step",
        f"#   memory of a GPU: {gib(memory.total)} of {gib(memory.capacity)} GiB",
        f"#   memory of a host: {gib(memory.in_host)} GiB",
    ]


def _digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def require_recipe(path: Path) -> None:
    """Check that a recipe can be written to a file.

    Raises:
        UserError: The path does not end with .yaml, cannot be written, or is a file of another kind.
    """
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"--write {path}\nallowed: a .yaml file\nfix: --write recipe.yaml")
    require_file("--write", path, "a recipe of bmburst plan --write", _is_recipe)


def write_recipe(path: Path, best: "Prediction", needs: str) -> None:
    """Write the recipe of the best configuration. `needs` says what it needs if it does not fit.

    Raises:
        DoesNotFit: The configuration does not fit into memory.
        UserError: The file cannot be written.
    """
    if not best.memory.fits:
        raise DoesNotFit(f"--write {path}: no configuration fits into memory\nfix: {needs}")
    text = recipe(best, settings_of(best.candidate), str(path))
    write_text("--write", path, text)
    print(f"{path}: written for bmburst train --config {path}", file=sys.stderr)


def settings_of(candidate: "Candidate") -> dict[str, Any]:
    """Return the fields of `TrainConfig` that a planned command sets, as the parser of `bmburst train` reads them."""
    from bmburst.plan.presentation import options

    parser = CommandParser(prog="bmburst train", description="")
    training.configure(parser)
    settings = read_layer(TrainConfig, given_options(parser.read(options(candidate)), TrainConfig), "")
    return settings if candidate.task.nodes > 1 else {**settings, "nproc": candidate.task.gpus}


def _is_recipe(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(FIRST_LINE)) == FIRST_LINE.encode()


def _command(best: "Prediction", settings: Mapping[str, Any], path: str) -> str:
    from bmburst.plan.presentation import started
    from bmburst.train.sources import PLACEHOLDER

    words = ["train", "--config", path]
    if str(settings.get("init_from", "")).startswith(PLACEHOLDER):
        words += ["--init-from", "DIR"]
    data = settings.get("data") or {}
    for name, more in (("source", ["--data", "FILE"]), ("tokenizer", ["--data.tokenizer", "DIR"])):
        words += more if str(data.get(name, "")).startswith(PLACEHOLDER) else []
    return started(best.candidate.task, words)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings as YAML types; `checkpoint_every` None becomes its word."""
    plain: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            plain[name] = _plain(value)
        elif isinstance(value, tuple):
            plain[name] = ",".join(map(str, value)) if name == "targets" else list(value)
        elif value is None and name == "checkpoint_every":
            plain[name] = "never"
        else:
            plain[name] = str(value) if isinstance(value, Path) else value
    return plain
