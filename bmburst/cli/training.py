"""The options that `bmburst train` and `bmburst check` share, and the configuration that they give."""

import argparse
import dataclasses
from collections.abc import Mapping
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
from bmburst.train.resolve import CONFIG_FILE, check_resumable, given_names, given_values, resolve

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


def resolve_options(args: argparse.Namespace, world_size: int | None = None) -> TrainConfig:
    """Build the configuration from the options. With --resume they override the run folder's, which becomes `output`.

    `resume` of the result is True if the run continues. It stays "auto" if the folder has no complete checkpoint.

    Args:
        args: The options.
        world_size: Number of ranks, if another launcher has started them.

    Raises:
        UserError: A value is wrong, the folder of a new run is a file, or there is no run to resume.
    """
    files, options = _given(args)
    resume, folder = asked_folder(args)
    before = None
    if resume:
        assert folder is not None  # else `asked_folder` refuses
        own = folder / CONFIG_FILE
        if resume == "auto" and newest_complete(folder) is not None:
            resume = True
        if own.is_file():
            before = resolve((own,))
        elif resume is True:
            raise UserError(
                f"--resume: {folder} is not a run folder: it has no {CONFIG_FILE}\n"
                "fix: give --output with the folder of an earlier run, or leave --resume out to begin a new one"
            )
        options |= {"output": str(folder)}
        if resume is True:
            # The options of a resumed run are complete only together with the configuration in its folder.
            files = own, *(file for file in files if file.resolve() != own.resolve())
            options |= {"resume": "true"}
    config = resolve(files, options) if resume is True else _new_run(files, options, before, world_size)
    if config.output is not None:
        if before is not None:
            check_resumable(before, config, config.output)
        with explaining_write_errors(config.output):
            require_no_file(config.output)
    return config


def asked_folder(args: argparse.Namespace) -> tuple[bool | Literal["auto"], Path | None]:
    """Return `resume` and the run folder that the options, or else the file of --config, name; None: a new name.

    Raises:
        UserError: A value is wrong, or it is not said which run to resume.
    """
    files, options = _given(args)
    _require_no_folder(options)
    given = given_values(files, options)
    resume, folder = given.get("resume", False), given.get("output")
    if resume and folder is None:
        if not files or files[0].name != CONFIG_FILE:
            raise UserError(
                "--resume does not say which run to resume\n"
                "fix: give --output RUN_FOLDER, for example one under runs/, or --config "
                f"RUN_FOLDER/{CONFIG_FILE}"
            )
        folder = files[0].parent
    return resume, folder


def with_steps(args: argparse.Namespace, config: TrainConfig, steps: int) -> TrainConfig:
    """Return a resolved configuration with the steps of its epochs, on which the default warm-up depends."""
    schedule = config.schedule
    if config.resume is not True and "schedule.warmup_steps" not in given_names(*_given(args)):
        schedule = dataclasses.replace(schedule, warmup_steps=None)
    return config.replace(steps=max(steps, 1), schedule=schedule)


def _given(args: argparse.Namespace) -> tuple[tuple[Path, ...], dict[str, str]]:
    """Return the file of --config, if there is one, and the values of the options, as `resolve` takes them."""
    return () if args.config is None else (Path(args.config),), given_options(args, TrainConfig)


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
    files: tuple[Path, ...], options: dict[str, str], before: TrainConfig | None, world_size: int | None
) -> TrainConfig:
    """Return the configuration of a run that begins, with the defaults for this machine's GPUs.

    `before` is the run that has begun in the folder and has no checkpoint: its values are the defaults then.
    """
    here, given = gpus(), given_names(files, options)
    if before is None:
        config = resolve(files, options, defaults=defaults_of(here))
        return spread(config, given, world_size or ranks_of(config), here) if here else config
    kept = ["dtype", "recompute", "batch_size", *SPREAD]
    kept += MESH if not given.intersection(MESH) else ()
    values = {leaf.name: leaf.default for leaf in leaves(before)}
    return resolve(files, options, defaults={name: values[name] for name in kept})


def explain_choices(args: argparse.Namespace, config: TrainConfig, ranks: int) -> str:
    """Return the line about what was chosen for this machine's GPUs for a new run; empty if nothing was."""
    here = gpus()
    return choices_text(config, given_names(*_given(args)) if here else (), ranks, here)


def ranks_of(config: TrainConfig) -> int:
    """Return the ranks of this machine: as configured, else one per GPU, else 2 or more; UserError with fewer GPUs."""
    parallel, nproc = config.parallel, config.nproc
    least = parallel.pipeline_parallel * parallel.data_parallel * parallel.tensor_parallel
    if nproc is None and parallel.sequence_parallel is not None:
        nproc = least * parallel.sequence_parallel
    return ranks_to_start(nproc, max(2, least))
