"""The report of `bmburst doctor`, for a question to others: versions, topology, options and the last error.

Everything in it is listed here. Texts that a user chose (paths, names, keys, data) are left out, and their places say
so: numbers, yes and no, and words of bmburst's own options are all that is copied from a user's settings.
"""

import argparse
import json
import os
import platform
import re
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from bmburst import __version__
from bmburst.amounts import GIB, tokens
from bmburst.errors import UserError
from bmburst.launch import last_error
from bmburst.setup.doctor import Check, Finding
from bmburst.setup.system import driver_version

FORMAT = "bmburst-report-1"
PACKAGES = (
    *("torch", "triton", "numpy", "bmtrain", "model-center", "transformers", "tokenizers", "safetensors", "accelerate"),
    *("peft", "trl", "datasets", "pyarrow", "fla-core", "flash-attn", "flash-attn-4", "cpm-kernels", "PyYAML"),
    *("tqdm", "tensorboard", "wandb", "matplotlib", "starlette", "uvicorn", "setuptools"),
    *("nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
)
"""Packages whose versions are reported."""
_VARIABLES = re.compile(r"(BMBURST|NCCL|GLOO|TORCH|PYTORCH|CUDA|OMP|MKL|TRITON|FLASH_ATTENTION)_[A-Z0-9_]+")
_PLAIN = re.compile(r"[-+0-9.,:eE]*[KkMmGg]?")
_WORDS = ("true", "false", "none", "auto", "lo", "=lo", "INFO", "WARN", "TRACE", "OFF", "DETAIL", "PASSIVE", "ACTIVE")
_SET = "(set)"


def report(checks: Sequence[Check], findings: Sequence[Finding], run: Path | None = None) -> dict[str, Any]:
    """Return the report.

    Args:
        checks: The checks of the doctor.
        findings: Their findings. Their texts have paths and are left out.
        run: A run folder whose settings are reported.

    Raises:
        UserError: The run folder has no settings.
    """
    return {
        "format": FORMAT,
        "versions": _versions(),
        "machine": _machine(),
        "checks": {check.name: found.status for check, found in zip(checks, findings, strict=True)},
        "environment": {
            name: _shown(value) for name, value in sorted(os.environ.items()) if _VARIABLES.fullmatch(name)
        },
        "run": None if run is None else _settings_of(run),
        "last_error": last_error.read(),
    }


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"bmburst": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    try:
        import torch
    except (ImportError, OSError):
        return found
    return found | {"cuda of torch": torch.version.cuda}


def _machine() -> dict[str, Any]:
    """Return what this machine is: its kernel's number, processors, memory, GPUs, and which GPUs reach each other."""
    kernel = re.match(r"\d+(\.\d+)*", platform.release())
    found: dict[str, Any] = {
        "system": f"{platform.system()} {kernel[0] if kernel else ''} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        "driver": driver_version(),
        "gpus": [],
    }
    try:
        import torch
    except (ImportError, OSError):
        return found
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        facts = torch.cuda.get_device_properties(index)
        reach = [other for other in range(count) if other != index and torch.cuda.can_device_access_peer(index, other)]
        found["gpus"].append(
            {
                "name": facts.name,
                "capability": f"{facts.major}.{facts.minor}",
                "memory_gib": round(facts.total_memory / GIB, 1),
                "reaches": reach,
            }
        )
    return found


def _settings_of(run: Path) -> dict[str, Any]:
    from bmburst.config import flat, leaves
    from bmburst.train.config import TrainConfig

    try:
        stored = json.loads((run / "config.json").read_text(encoding="utf-8"))
        settings = dict(flat(stored))
    except (OSError, ValueError, AttributeError, RecursionError):
        raise UserError(
            f"--run {run}: no config.json that can be read\nallowed: a run folder\nfix: give the --output of the run"
        ) from None
    known = {leaf.name for leaf in leaves(TrainConfig)}
    return {name: _shown(value) for name, value in settings.items() if name in known}


def shown_options(parser: argparse.ArgumentParser, words: Sequence[str]) -> dict[str, Any]:
    """Return the options of a command line that the parser knows, without values that are the user's own."""
    found: dict[str, Any] = {}
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        action = parser._option_string_actions.get(name)
        if word == "--":
            break
        if action is None:
            continue
        value = value if equals else "" if after.startswith("--") else after
        is_number = action.type in (int, float, tokens) or _is_number_field(name)
        found[name] = _shown(value, numbers=is_number) if value else True
    return found


@cache
def _fields() -> Mapping[str, Any]:
    from bmburst.config import leaves
    from bmburst.train.config import EvalConfig, TrainConfig

    return {leaf.name: leaf for config in (EvalConfig, TrainConfig) for leaf in leaves(config)}


def _is_number_field(option: str) -> bool:
    leaf = _fields().get(option.lstrip("-").replace("-", "_"))
    if leaf is None:
        return False
    kinds = {leaf.annotation, *typing.get_args(leaf.annotation)}
    return bool(kinds & {int, float}) and not kinds & {str, Path}


@cache
def _own_words() -> frozenset[str]:
    """Return the values that bmburst's settings know by name."""
    found = set(_WORDS)
    for leaf in _fields().values():
        found |= set(leaf.spec.choices)
        for kind in (leaf.annotation, *typing.get_args(leaf.annotation)):
            if typing.get_origin(kind) is typing.Literal:
                found |= {str(choice) for choice in typing.get_args(kind)}
    from bmburst.blocks.presets import PRESETS

    return frozenset(found | set(PRESETS))


def _shown(value: Any, *, numbers: bool = True) -> Any:
    """Return a setting's value if it is a number, yes or no, or a word of bmburst's; else that it is set."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_shown(each) for each in value]
    if isinstance(value, str) and ((numbers and _PLAIN.fullmatch(value)) or value in _own_words()):
        return value
    return _SET
