"""`bmburst plan`: predicts step time and memory of all sensible configurations, and prints the command of the best."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from bmburst.amounts import GIB, numbers, tokens
from bmburst.cli.calibration import calibrate_machine
from bmburst.cli.program import NOTHING_FITS, CommandParser
from bmburst.config import add_options, flat, given_options, hide_rare, leaves, option_name, read_layer
from bmburst.errors import UserError, no_directory, require_known
from bmburst.outputs import is_picture, require_file
from bmburst.schedule.parallelism import MOST_RANKS
from bmburst.train.config import TrainConfig

if TYPE_CHECKING:
    from bmburst.blocks.config import LlamaConfig, LoRAConfig
    from bmburst.plan.candidates import Offload, Task
    from bmburst.schedule.hardware import Hardware

HELP = (
    "Predict time and memory of a training step for every sensible mesh, attention strategy, recompute policy and ZeRO "
    "stage and group. Print those that fit, the fastest first, and the command of the best one. --generate: predict "
    "the first token, the time per token and the memory of generation. Needs no GPU. Exit status: 0 if something fits "
    "into memory, 1 if nothing does, 2 for bad input."
)
_USAGE = (
    "bmburst plan --preset NAME --sequence-length N --nproc N [--nodes N] [--hardware NAME|FILE] [--write FILE]\n"
    "       bmburst plan --model DIR --sequence-length N --nproc N [--hardware NAME|FILE] [--json]\n"
    "       bmburst plan --longest --preset NAME --nproc N [--hardware NAME|FILE] [--host-memory GIB] [--json]\n"
    "       bmburst plan --generate --preset NAME --sequence-length N --nproc N [--max-new-tokens N] [--json]\n"
    "       bmburst plan --calibrate --output machine.toml [--nproc N]\n"
    "       bmburst plan --help all"
)
_EPILOG = (
    "Utilisation counts 6 FLOPs per weight and token, causal attention as half, backward as twice the forward, and no "
    "recomputation. docs/plan.md describes the prediction and its measured errors."
)


# The settings of `bmburst train` that a plan takes, with the texts of their defaults.
_SETTINGS = MappingProxyType(
    {
        "preset": "none",
        "sequence_length": "none",
        "batch_size": "a micro-batch for each stage and data parallel group that is asked for",
        "micro_batch_size": "1",
        "dtype": "bfloat16",
        "host_memory": "that of the hardware",
        "loss_chunk_tokens": "1024",
        "mlp_chunk_tokens": "16384 where blocks are recomputed, else all",
        "init_from": "none",
        "optimizer.offload": "tried only if GPU memory is too small",
        "optimizer.state": "float32",
        "lora.rank": "0: all weights, and with --longest also 16",
        "lora.base": "dtype",
        "lora.targets": "q_proj,v_proj",
        "lora.rank_pattern": "none",
        "lora.modules_to_save": "none",
        "pack": "each sequence is one text; trees: with --shared-prompt",
        "dpo.beta": "none; its value does not matter",
    }
)
_DEGREES = MappingProxyType(
    {
        "data": ("--data-parallel", "data parallel degrees to try (default: all)"),
        "sequence": ("--sequence-parallel", "sequence parallel degrees to try (default: all)"),
        "tensor": ("--tensor-parallel", "tensor parallel degrees to try (default: all that fit into a node)"),
        "pipe": ("--pipeline-parallel", "numbers of pipeline stages to try (default: 1)"),
    }
)
_ZERO = MappingProxyType({"zero": "--parallel.zero_level", "group": "--parallel.zero_group"})
_OF_GENERATION = ("preset", "init_from", "sequence_length", "batch_size", "dtype")
_TREES = ("shared_prompt", "answers")
_OF_TRAINING = ("nodes", "recompute", *_ZERO, *_DEGREES, "ways", "write", "output", "longest", *_TREES)
_OF_HYBRIDS = ("sequence_length", "batch_size", "json")
_RARE = (
    *("micro_batch_size", "loss_chunk_tokens", "mlp_chunk_tokens", "pack", "dpo.beta", "optimizer.offload"),
    *("lora.targets", "lora.rank_pattern", "lora.modules_to_save", "recompute", "zero", "group"),
    *("max_new_tokens", "ways", "output", "calibrate", "json", *_TREES),
)
_TITLES = MappingProxyType({"": "task", "optimizer": "optimizer", "lora": "adapters", "dpo": "preference pairs"})


def configure(parser: CommandParser) -> None:
    """Add the settings of `bmburst train`, and the options of a plan."""
    parser.usage, parser.epilog = _USAGE, _EPILOG
    parser.of_train = [leaf.name for leaf in leaves(TrainConfig) if leaf.name not in _SETTINGS]
    add_options(parser, TrainConfig(), short={}, titles=_TITLES, only=_SETTINGS)
    add = parser.add_argument
    add(
        "--nproc", type=int, metavar="N", help="GPUs of each node (default: 8; with --calibrate: those of this machine)"
    )
    add(
        "--model",
        type=Path,
        metavar="DIR",
        help="folder with a config.json of transformers: a model of `--init-from`, or a hybrid with recurrent layers, "
        "whose step in transformers is estimated",
    )
    add("--nodes", type=int, metavar="N", default=1, help="number of nodes (default: 1)")
    add(
        "--hardware",
        metavar="NAME|FILE",
        default="h200",
        help="name of a GPU type, or a hardware file written by --calibrate (default: h200)",
    )
    add(
        "--generate",
        action="store_true",
        help="predict generation in place of training: --batch-size prompts of --sequence-length tokens",
    )
    add("--max-new-tokens", type=int, metavar="N", help="with --generate: tokens of each answer (default: 64)")
    add(
        "--recompute",
        metavar="POLICY,...",
        help="recompute policies to try, each also for the first N layers only (default: those of docs/memory.md)",
    )
    add(
        "--parallel.zero_level",
        "--parallel.zero-level",
        dest="zero",
        metavar="STAGE,...",
        help="ZeRO stages to try (default: 2,3)",
    )
    add(
        "--parallel.zero_group",
        "--parallel.zero-group",
        dest="group",
        metavar="RANKS,...",
        help="ranks over which ZeRO may shard: world, all; node, those of each node (default: world,node)",
    )
    for name, (option, text) in _DEGREES.items():
        field = option.removeprefix("--").replace("-", "_")
        add(option, f"--parallel.{field}", dest=name, metavar="N,...", help=text)
    add(
        "--shared-prompt",
        type=tokens,
        metavar="TOKENS",
        help="tokens of a prompt that all answers in a sequence share, read once (--pack trees)",
    )
    add(
        "--answers",
        type=int,
        metavar="N",
        help="with --shared-prompt: answers in a sequence, of equal length (default: 2)",
    )
    add("--ways", type=int, metavar="N", default=12, help="number of configurations to show (default: 12)")
    add(
        "--output",
        type=Path,
        metavar="FILE",
        help="write a picture of the comparison (.png); with --calibrate, the hardware file",
    )
    add("--write", type=Path, metavar="FILE", help="write the best as a recipe (.yaml) for bmburst train --config")
    add(
        "--longest",
        action="store_true",
        help="print the longest sequence of each mesh, its limiting memory and its memory by part",
    )
    add("--json", action="store_true", help="print the configurations as JSON")
    add(
        "--calibrate",
        action="store_true",
        help="measure this machine and write a hardware file; takes at most a minute",
    )
    hide_rare(parser, _RARE)
    parser.set_defaults(given=parser.get_default)


def run(args: argparse.Namespace) -> int:
    """Plan or calibrate, and return the exit status: `NOTHING_FITS` if all that is predicted is too large.

    Raises:
        UserError: An option cannot work, or it needs something that fits and nothing does (`DoesNotFit`).
    """
    given = {name: value for name, value in given_options(args, TrainConfig).items() if name in _SETTINGS}
    settings = dict(flat(read_layer(TrainConfig, given, "")))
    if args.calibrate:
        others = (*_SETTINGS, *_OF_TRAINING, "generate", "max_new_tokens", "model", "json")
        _refuse(args, settings, others, "--calibrate", ("output",))
        return calibrate_machine(args)
    if args.generate:
        _refuse(args, settings, (*_SETTINGS, *_OF_TRAINING), "--generate", _OF_GENERATION)
    elif args.max_new_tokens is not None:
        raise UserError(f"--max-new-tokens {args.max_new_tokens} is an option of --generate\nfix: add --generate")
    if args.longest:
        others = ("sequence_length", "output", "write", "ways", "zero", "group", "pipe", "pack", *_TREES)
        _refuse(args, settings, others, "--longest", ())
    if args.output is not None and args.output.suffix == ".png":
        require_file("--output", args.output, "a picture of bmburst", is_picture)
    if args.model is not None and not _is_own(args, settings):
        return _hybrid(args, settings)
    _require_question(args, settings)
    return _generate(args, settings) if args.generate else _plan(args, settings)


def _refuse(
    args: argparse.Namespace, settings: Mapping[str, Any], names: Sequence[str], mode: str, allowed: Sequence[str]
) -> None:
    """Refuse options that have no meaning with another one.

    Args:
        args: All options.
        settings: Those of `bmburst train` that were given.
        names: The options without a meaning.
        mode: The other option.
        allowed: Names that have one all the same.
    """
    for name in names:
        is_given = name in settings if name in _SETTINGS else getattr(args, name) != args.given(name)
        if is_given and name not in allowed:
            option = _DEGREES[name][0] if name in _DEGREES else _ZERO.get(name, option_name(name, {}))
            raise UserError(f"{mode} takes no {option}\nfix: leave {option} out, or leave {mode} out")


def _require_question(args: argparse.Namespace, settings: Mapping[str, Any]) -> None:
    has_model = settings.get("preset") is not None, settings.get("init_from") is not None
    if all(has_model):
        raise UserError("--preset and --init-from both name the model\nfix: leave --preset out, or --init-from")
    if not any(has_model):
        raise UserError(
            "--preset is missing\nallowed: --preset NAME, --init-from DIR, or --model DIR\nfix: --preset llama-3-8b"
        )
    if not args.longest:
        _require_length(settings)


def _require_length(settings: Mapping[str, Any]) -> None:
    if "sequence_length" not in settings:
        raise UserError("--sequence-length is missing\nfix: add it, for example --sequence-length 1M")


def _is_own(args: argparse.Namespace, settings: dict[str, Any]) -> bool:
    """Return whether --model is a model of bmburst; then it is as if --init-from had been given.

    Raises:
        UserError: There is no such folder, or another option names the model too.
    """
    from bmburst.blocks.families import FAMILIES
    from bmburst.config.files import read_json

    for name in ("preset", "init_from"):
        if name in settings:
            other = option_name(name, {})
            raise UserError(f"--model and {other} both name the model\nfix: leave --model out, or {other}")
    path = args.model / "config.json"
    if not path.is_file():
        what = "it has no config.json" if args.model.is_dir() else no_directory(args.model)
        raise UserError(f"--model {args.model}: {what}\nfix: give the directory of a model of transformers")
    if read_json(path).get("model_type") not in FAMILIES:
        return False
    settings["init_from"] = args.model
    return True


def _hybrid(args: argparse.Namespace, settings: Mapping[str, Any]) -> int:
    """Estimate a step of a hybrid of transformers."""
    from bmburst.plan.hybrid import hybrid_json, hybrid_report, hybrid_step
    from bmburst.schedule.hardware import load_hardware

    others = (*_SETTINGS, "generate", "max_new_tokens", *_OF_TRAINING)
    _refuse(args, settings, others, "--model of a hybrid", _OF_HYBRIDS)
    _require_length(settings)
    try:
        from bmburst.integrations.transformers_shapes import read_hybrid
    except ImportError as error:
        raise UserError(f"--model of a hybrid needs {error.name}\nfix: pip install transformers") from None

    model, hardware = read_hybrid(args.model), load_hardware(args.hardware)
    task = settings["sequence_length"], settings.get("batch_size", 1), _gpus(args)
    step = hybrid_step(model, *task, hardware)
    if args.json:
        print(json.dumps(hybrid_json(model, step, *task, hardware), indent=1))
    else:
        print(hybrid_report(model, step, *task, hardware))
    return 0 if step.fits else NOTHING_FITS


def _model(settings: Mapping[str, Any]) -> "tuple[LlamaConfig, str, str | None]":
    """Return the model's shape, name, and directory (None for a preset); UserError if it does not exist."""
    from bmburst.blocks.presets import preset
    from bmburst.train.resolve import read_hugging_face_config

    folder: Path | None = settings.get("init_from")
    if folder is not None:
        return read_hugging_face_config(folder), folder.resolve().name, str(folder)
    name: str = settings["preset"]
    return preset(name), name, None


def _gpus(args: argparse.Namespace) -> int:
    """Return the GPUs of each node; UserError unless there are GPUs and nodes."""
    gpus: int = 8 if args.nproc is None else args.nproc
    for option, number in (("--nproc", gpus), ("--nodes", args.nodes)):
        if not 1 <= number <= MOST_RANKS:
            raise UserError(f"{option} {number}\nallowed: 1 to {MOST_RANKS}\nfix: for example {option} 2")
    return gpus


def _generate(args: argparse.Namespace, settings: Mapping[str, Any]) -> int:
    from bmburst.plan.inference import GenerationTask, counts, predict_generation
    from bmburst.plan.presentation import generation_json, generation_report
    from bmburst.schedule.hardware import load_hardware

    model, name, _ = _model(settings)
    task = GenerationTask(
        model=model,
        preset=name,
        prompt=settings["sequence_length"],
        new_tokens=64 if args.max_new_tokens is None else args.max_new_tokens,
        batch=settings.get("batch_size", 1),
        dtype=settings.get("dtype", "bfloat16"),
    )
    hardware, asked_for = load_hardware(args.hardware), _gpus(args)
    asked = predict_generation(task, asked_for, hardware)
    found = [asked if gpus == asked_for else predict_generation(task, gpus, hardware) for gpus in counts(asked_for)]
    if args.json:
        print(json.dumps(generation_json(task, hardware, found), indent=1))
    else:
        print(generation_report(task, hardware, found, asked_for))
    return 0 if asked.fits else NOTHING_FITS


def _plan(args: argparse.Namespace, settings: Mapping[str, Any]) -> int:
    from bmburst.cli.recipe import require_recipe, write_recipe
    from bmburst.plan.candidates import SETTINGS, ZERO, ZERO_GROUPS, Task
    from bmburst.plan.presentation import as_json, report
    from bmburst.plan.search import best_of_each, remedy, search
    from bmburst.schedule.pipeline import default_batch

    if args.ways < 1:
        raise UserError(f"--ways {args.ways}\nallowed: at least 1\nfix: --ways 12, or leave it out")
    if args.output is not None and args.output.suffix != ".png":
        raise UserError(f"--output {args.output}\nallowed: a .png file\nfix: --output plan.png")
    if args.write is not None:
        require_recipe(args.write)
    model, name, directory = _model(settings)
    gpus, pairs = _gpus(args) * args.nodes, settings.get("dpo.beta") is not None
    lora = _adapters(settings)
    if lora is not None:
        lora.require_model(model)
    shared, answers, pack = _shared(args, settings, model)
    degrees = _degrees(args)
    pipe, data = degrees.get("pipe", (1,)), degrees.get("data", (1,))
    step = {name: settings[setting] for name, setting in SETTINGS.items() if setting in settings}
    step.setdefault("batch", default_batch(max(pipe), step.get("micro_batch", 1), max(data)))
    if args.longest:
        step["sequence"] = max(1, gpus)  # to begin with
    task = Task(
        model=model,
        preset=name,
        init_from=directory,
        gpus=gpus,
        nodes=args.nodes,
        lora=None if args.longest else lora,
        pairs=pairs,
        pack=pack,
        shared_prompt=shared,
        answers=answers,
        second_model=pairs and (lora is None or bool(lora.modules_to_save) or args.longest),
        host_memory=settings.get("host_memory"),
        **step,
    )
    if args.longest:
        return _longest(args, settings, task)
    hardware = _machine(args, settings)
    tried: dict[str, Any] = {
        "offload": _placements(settings),
        "recompute": _policies(args),
        "zero": [int(stage) for stage in _words("--parallel.zero_level", args.zero, tuple(map(str, ZERO)))],
        "groups": _words("--parallel.zero_group", args.group, ZERO_GROUPS),
        **degrees,
    }
    found = search(task, hardware, **tried)
    needs = "" if found[0].memory.fits else remedy(task, hardware, **tried)
    shown = best_of_each(found, args.ways)
    if args.json:
        print(json.dumps(as_json(task, hardware, shown), indent=1))
    else:
        print(report(task, hardware, shown, len(found), needs))
    if args.write is not None:
        write_recipe(args.write, found[0], needs)
    if args.output is not None:
        from bmburst.plan.presentation import draw_predictions

        draw_predictions(shown, args.output)
        print(f"{args.output}: drawn", file=sys.stderr)
    return 0 if found[0].memory.fits else NOTHING_FITS


def _shared(args: argparse.Namespace, settings: Mapping[str, Any], model: "LlamaConfig") -> tuple[int, int, str | None]:
    """Return the tokens of a shared prompt, the number of its answers, and how the run packs.

    Raises:
        UserError: They contradict other options.
    """
    pack, shared, answers = settings.get("pack"), args.shared_prompt, args.answers
    if shared is None:
        if answers is not None:
            raise UserError(f"--answers {answers} is an option of --shared-prompt\nfix: add --shared-prompt TOKENS")
        if pack == "trees":
            raise UserError(
                "--pack trees: how many tokens are shared is not known\nallowed: --shared-prompt TOKENS, --answers N\n"
                "fix: add --shared-prompt with the tokens of a prompt, or leave --pack out"
            )
        return 0, 2, pack
    answers = 2 if answers is None else answers
    if pack not in (None, "trees"):
        raise UserError(f"--shared-prompt {shared} needs --pack trees, got {pack}\nfix: leave --pack out")
    if answers < 2 or (settings.get("dpo.beta") is not None and answers != 2):
        allowed = "2, a chosen and a rejected one" if settings.get("dpo.beta") is not None else "at least 2"
        raise UserError(f"--answers {answers}\nallowed: {allowed}\nfix: leave --answers out")
    if model.sliding_window is not None:
        raise UserError(
            f"--shared-prompt {shared} with a model whose layers have windows of {model.sliding_window} tokens\n"
            "allowed: models without windows\nfix: leave --shared-prompt out"
        )
    most = settings["sequence_length"] - answers
    if not 1 <= shared <= most:
        raise UserError(
            f"--shared-prompt {shared} does not fit a sequence of {settings['sequence_length']} tokens with {answers} "
            f"answers\nallowed: 1 to {most}\nfix: a longer --sequence-length, of prompt and answers together"
        )
    return shared, answers, "trees"


def _longest(args: argparse.Namespace, settings: Mapping[str, Any], task: "Task") -> int:
    from bmburst.plan.longest import longest, longest_json, longest_report

    hardware = _machine(args, settings)
    found = longest(
        task,
        hardware,
        recompute=_policies(args),
        **_degrees(args),
        offload=_placements(settings),
        lora=_adapters({**settings, "lora.rank": settings.get("lora.rank") or 16}),
    )
    print(json.dumps(longest_json(found), indent=1) if args.json else longest_report(task, hardware, found))
    return 0


def _adapters(settings: Mapping[str, Any]) -> "LoRAConfig | None":
    from bmburst.blocks.lora import LoRAConfig

    given = {name.removeprefix("lora."): value for name, value in settings.items() if name.startswith("lora.")}
    lora = LoRAConfig(**given)
    return lora if lora.is_on else None


def _degrees(args: argparse.Namespace) -> dict[str, tuple[int, ...]]:
    """Return the degrees of parallelism that were given."""
    texts = {name: (option, getattr(args, name)) for name, (option, _) in _DEGREES.items()}
    return {name: numbers(option, text) for name, (option, text) in texts.items() if text is not None}


def _policies(args: argparse.Namespace) -> Sequence[str]:
    from bmburst.recompute.policy import POLICIES

    return POLICIES if args.recompute is None else tuple(args.recompute.split(","))


def _machine(args: argparse.Namespace, settings: Mapping[str, Any]) -> "Hardware":
    """Return the hardware, with --host-memory if it is given; UserError if its name is unknown."""
    from bmburst.schedule.hardware import load_hardware

    hardware = load_hardware(args.hardware)
    if (given := settings.get("host_memory")) is None:
        return hardware
    return dataclasses.replace(hardware, host_memory=given * GIB)


def _placements(settings: Mapping[str, Any]) -> "tuple[Offload, ...]":
    from bmburst.plan.candidates import Offload

    return tuple(each for each in Offload if each is not Offload.NOTHING or not settings.get("optimizer.offload"))


def _words(option: str, text: str | None, known: Sequence[str]) -> list[str]:
    words = list(known) if text is None else text.split(",")
    for word in words:
        require_known(option, word, known)
    return words
