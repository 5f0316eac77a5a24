"""The options that `bmburst train` and `bmburst check` share, and the configuration that they give."""

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from bmburst.checkpoint.files import FOLDER, newest_complete
from bmburst.cli.program import ranks_to_start
from bmburst.cli.run_folder import explaining_write_errors, require_no_file
from bmburst.config import add_options, given_options, leaves
from bmburst.errors import UserError
from bmburst.launch.devices import gpus
from bmburst.train.config import TrainConfig
from bmburst.train.defaults import MESH, SPREAD, choices_text, defaults_of, spread
from bmburst.train.resolve import CONFIG_FILE, check_resumable, given_names
from bmburst.train.resolve import resolve as _resolve

SHORT = {"data.source": "--data"} | {
    f"parallel.{name}": f"--{name.replace('_', '-')}"
    for name in (
        "data_parallel",
        "sequence_parallel",
        "tensor_parallel",
        "pipeline_parallel",
        "head_parallel",
        "layout",
        "strategy",
        "kernel",
        "transport",
    )
}
COMMON: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("preset", "init_from", "data.source", "data.tokenizer", "sequence_length", "batch_size"), ""),
        "steps": "",
        "epochs": "as many as the steps are",
        "dtype": "bfloat16 on GPUs",
        "optimizer.lr": "by model; lower with init_from",
        "schedule.warmup_steps": "by model",
        **dict.fromkeys(("lora.rank", "dpo.beta", "optimizer.offload"), ""),
        "nproc": "all GPUs, else 2",
        "parallel.sequence_parallel": "all",
        **dict.fromkeys(("output", "checkpoint_every", "eval_every", "resume"), ""),
    }
)
"""The twenty settings that `--help` shows, in this order, with defaults that are short; `--help all` shows all."""
TITLES = {
    "": "run",
    "model": "model (defaults: the preset's; llama-tiny's are shown)",
    "data": "data",
    "optimizer": "optimizer",
    "schedule": "learning rate",
    "lora": "adapters instead of all weights",
    "dpo": "training on pairs of a chosen and a rejected answer",
    "parallel": "ranks",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add --config and an option for every field of TrainConfig."""
    parser.usage = "bmburst train [--config FILE] [--FIELD VALUE ...]\n       bmburst train --help all"
    parser.add_argument(
        "--config", metavar="FILE", help="configuration file, JSON or YAML, for example the config.json of a run"
    )
    add_options(parser, TrainConfig(), short=SHORT, titles=TITLES, common=COMMON)


def resolve_options(args: argparse.Namespace, steps: int | None = None, world_size: int | None = None) -> TrainConfig:
    """Build the configuration from the options. With --resume they override the run folder's, which becomes `output`.

    `resume` of the result is True if the run continues. It stays "auto" if the folder has no complete checkpoint.

    Args:
        args: The options.
        steps: Number of steps of the configured epochs, once it is known.
        world_size: Number of ranks, if another launcher has started them.

    Raises:
        UserError: A value is wrong, the folder of a new run is a file, or there is no run to resume.
    """
    options = given_options(args, TrainConfig)
    _require_no_folder(options)
    resolve = partial(_resolve, steps=steps)
    given = Path(args.config) if args.config is not None else None
    files: tuple[Path, ...] = () if given is None else (given,)
    # The options of a resumed run are complete only together with the configuration in its folder.
    which: dict[str, str] = {name: options[name] for name in ("resume", "output") if name in options}
    config = resolve(files, which if "resume" in which else options)
    resume: bool | Literal["auto"] = config.resume
    if resume:
        folder = _folder_to_resume(config, given)
        if resume == "auto" and newest_complete(folder) is not None:
            resume = True
    if resume is not True:
        before = resolve((folder / CONFIG_FILE,)) if resume and (folder / CONFIG_FILE).is_file() else None
        config = _new_run(files, options, before, steps, world_size)
        if resume:
            config = config.replace(output=folder)
            if before is not None:
                check_resumable(before, config, folder)
        if config.output is not None:
            with explaining_write_errors(config.output):
                require_no_file(config.output)
        return config
    own = folder / CONFIG_FILE
    if not own.is_file():
        raise UserError(
            f"--resume: {folder} is not a run folder: it has no {CONFIG_FILE}\n"
            "fix: give --output with the folder of an earlier run, or leave --resume out to begin a new one"
        )
    files = (own,) if given is None or given.resolve() == own.resolve() else (own, given)
    config = resolve(files, options | {"resume": "true", "output": str(folder)})
    check_resumable(resolve((own,)), config, folder)
    return config


def _require_no_folder(options: dict[str, str]) -> None:
    """Refuse the folder of a run or of a checkpoint as the value of --resume, which other trainers take."""
    given = Path(options.get("resume", ""))
    if options.get("resume") in (None, "true", "false", "auto") or not given.is_dir():
        return
    run = given.parent.parent if given.parent.name == FOLDER else given.parent if given.name == FOLDER else given
    raise UserError(
        f"--resume {given}: --resume takes no folder\n"
        "allowed: --resume beside --output RUN; the run continues from its newest complete checkpoint\n"
        f"fix: --output {run} --resume"
    )


def _new_run(
    files: tuple[Path, ...],
    options: dict[str, str],
    before: TrainConfig | None,
    steps: int | None,
    world_size: int | None,
) -> TrainConfig:
    """Return the configuration of a run that begins, with the defaults for this machine's GPUs.

    `before` is the run that has begun in the folder and has no checkpoint: its values are the defaults then.
    """
    here, given = gpus(), given_names(files, options)
    if before is None:
        config = _resolve(files, options, steps=steps, defaults=defaults_of(here))
        return spread(config, given, world_size or ranks_of(config), here) if here else config
    kept = ["dtype", "recompute", "batch_size", *SPREAD]
    kept += MESH if not given.intersection(MESH) else ()
    values = {leaf.name: leaf.default for leaf in leaves(before)}
    return _resolve(files, options, steps=steps, defaults={name: values[name] for name in kept})


def explain_choices(args: argparse.Namespace, config: TrainConfig, ranks: int) -> str:
    """Return the line about what was chosen for this machine's GPUs for a new run; empty if nothing was."""
    files = () if args.config is None else (Path(args.config),)
    given = given_names(files, given_options(args, TrainConfig)) if gpus() else set()
    return choices_text(config, given, ranks, gpus())


def ranks_of(config: TrainConfig) -> int:
    """Return the ranks of this machine: as configured, else one per GPU, else 2 or more; UserError with fewer GPUs."""
    parallel, nproc = config.parallel, config.nproc
    least = parallel.pipeline_parallel * parallel.data_parallel * parallel.tensor_parallel
    if nproc is None and parallel.sequence_parallel is not None:
        nproc = least * parallel.sequence_parallel
    return ranks_to_start(nproc, max(2, least))


def _folder_to_resume(config: TrainConfig, given: Path | None) -> Path:
    if config.output is not None:
        return config.output
    if given is not None and given.name == CONFIG_FILE:
        return given.parent
    raise UserError(
        "--resume does not say which run to resume\n"
        "fix: give --output RUN_FOLDER, for example one under runs/, or --config "
        f"RUN_FOLDER/{CONFIG_FILE}"
    )
