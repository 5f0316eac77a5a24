"""`bmburst plan`: predicts step time and memory of all sensible configurations, and prints the command of the best."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bmburst.amounts import GIB, GIB_TOO, TOKENS_TOO, gibibytes, numbers, tokens
from bmburst.errors import UserError, require_known
from bmburst.outputs import is_picture, require_file, write_text

if TYPE_CHECKING:
    from bmburst.blocks.config import LoRAConfig
    from bmburst.plan.candidates import Offload, Task
    from bmburst.schedule.hardware import Hardware

HELP = (
    "Predict time and memory of a training step for every sensible mesh, attention strategy, recompute policy and ZeRO "
    "stage. Print those that fit, the fastest first, and the command of the best one. --generate: predict the first "
    "token, the time per token and the memory of generation. Needs no GPU."
)
_USAGE = (
    "bmburst plan --model NAME|DIR --seq TOKENS --gpus N [--nodes N] [--hardware NAME|FILE] [--write recipe.yaml]\n"
    "       bmburst plan --longest --model NAME --gpus N [--hardware NAME|FILE] [--host-memory GIB] [--json]\n"
    "       bmburst plan --generate --model NAME --seq TOKENS --gpus N [--new-tokens N] [--batch N] [--json]\n"
    "       bmburst plan --calibrate --output machine.toml [--ranks N]\n"
    "       bmburst plan --check"
)
_EPILOG = (
    "Utilisation counts 6 FLOPs per weight and token, causal attention as half, backward as twice the forward, and no "
    "recomputation. docs/plan.md describes the prediction and its measured errors."
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.usage, parser.epilog = _USAGE, _EPILOG
    add = parser.add_argument
    add("--model", metavar="NAME|DIR", help="preset, for example llama-3-8b, or a Hugging Face directory")
    add("--seq", type=tokens, metavar="TOKENS", help=f"tokens of a sequence, or of a prompt, {TOKENS_TOO}")
    add("--gpus", type=int, metavar="N", default=8, help="total number of GPUs (default: 8)")
    add(
        "--nodes",
        type=int,
        metavar="N",
        default=1,
        help="number of nodes, with the same number of GPUs each (default: 1)",
    )
    add(
        "--hardware",
        metavar="NAME|FILE",
        default="h200",
        help="name of a GPU type, or a hardware file written by --calibrate (default: h200)",
    )
    add(
        "--generate",
        action="store_true",
        help="predict generation instead of training: prompts of --seq tokens, --batch of them at once",
    )
    add("--new-tokens", type=int, metavar="N", help="with --generate: tokens of each answer (default: 64)")
    add("--batch", type=int, metavar="N", default=1, help="sequences a step, over all GPUs (default: 1)")
    add(
        "--micro-batch",
        type=int,
        metavar="N",
        default=1,
        help="sequences that a data parallel group computes at once (default: 1)",
    )
    add(
        "--dtype",
        default="bfloat16",
        metavar="bfloat16|float16|float32",
        help="dtype of weights and activations (default: bfloat16)",
    )
    add(
        "--loss-chunk",
        type=tokens,
        metavar="TOKENS",
        default=1024,
        help=f"tokens of a rank whose logits are computed at once, {TOKENS_TOO} (default: 1024)",
    )
    add(
        "--mlp-chunk",
        type=tokens,
        metavar="TOKENS",
        help=f"tokens of a rank that an MLP computes at once, {TOKENS_TOO}; 0: all (default: as bmburst train)",
    )
    add(
        "--recompute",
        metavar="POLICY,...",
        help="recompute policies to try, each also for the first N layers only (default: those of docs/recompute.md)",
    )
    add(
        "--optimizer-offload",
        action="store_true",
        help="keep the optimizer in host memory; without this option it is tried only if GPU memory is too small",
    )
    add(
        "--lora",
        type=int,
        metavar="RANK",
        help="train adapters of this rank, on q_proj and v_proj, instead of the weights (with --longest: in addition, "
        "default: 16)",
    )
    add(
        "--dpo",
        action="store_true",
        help="train on preference pairs: count a reference's forward pass and, without --lora, its weights",
    )
    add(
        "--host-memory",
        type=gibibytes,
        metavar="GIB",
        help=f"host memory of each machine, in GiB, {GIB_TOO}; a tenth is kept in reserve (default: the hardware's)",
    )
    add("--zero", metavar="STAGE,...", help="ZeRO stages to try (default: 2,3)")
    add("--tensor", metavar="N,...", help="tensor parallel degrees to try (default: all that fit into a node)")
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
        help="instead of --seq: print the longest sequence of each mesh, its limiting memory and its memory by part",
    )
    add("--json", action="store_true", help="print the configurations as JSON")
    add("--check", action="store_true", help="predict recorded and published runs, and print the errors")
    add(
        "--calibrate",
        action="store_true",
        help="measure this machine and write a hardware file; takes at most a minute",
    )
    parser.set_defaults(given=parser.get_default)
    add(
        "--ranks",
        type=int,
        metavar="N",
        help="with --calibrate: number of ranks whose links are measured (default: all GPUs)",
    )


def run(args: argparse.Namespace) -> int:
    """Plan, check or calibrate, and return the exit status.

    Raises:
        UserError: An option cannot work.
    """
    if args.check and args.calibrate:
        raise UserError("--check and --calibrate cannot be combined\nfix: run bmburst plan once with each")
    for name, what in (("check", "predicts recorded runs"), ("calibrate", "measures this machine")):
        if getattr(args, name) and (args.model is not None or args.seq is not None):
            raise UserError(
                f"--{name} {what} and takes no --model and --seq\nfix: leave them out, or leave --{name} out"
            )
        for option in ("optimizer_offload", "host_memory", "lora", "dpo", "write"):
            if getattr(args, name) and getattr(args, option) != args.given(option):
                words = f"--{option.replace('_', '-')}"
                raise UserError(f"--{name} {what} and takes no {words}\nfix: leave {words} out")
        if getattr(args, name) and args.json:
            raise UserError(f"--json prints planned configurations, but --{name} {what}\nfix: leave out one of the two")
    _check_generate(args)
    _check_longest(args)
    if args.ranks is not None and not args.calibrate:
        raise UserError(
            f"--ranks {args.ranks} is an option of --calibrate\nfix: give --gpus, the number of GPUs to plan for"
        )
    if args.output is not None and args.calibrate:
        require_file("--output", args.output, "a hardware file of bmburst plan --calibrate", _is_hardware)
    elif args.output is not None and args.output.suffix == ".png":
        require_file("--output", args.output, "a picture of bmburst", is_picture)
    if args.calibrate:
        return _calibrate(args)
    if args.check:
        from bmburst.plan.accuracy import compare_predictions, markdown

        print(markdown(compare_predictions()))
        return 0
    return _generate(args) if args.generate else _plan(args)


def _check_generate(args: argparse.Namespace) -> None:
    """Refuse --new-tokens without --generate, and --generate with options of a training step."""
    if not args.generate:
        if args.new_tokens is not None:
            raise UserError(f"--new-tokens {args.new_tokens} is an option of --generate\nfix: add --generate")
        return
    for name in ("check", "calibrate"):
        if getattr(args, name):
            raise UserError(f"--generate and --{name} cannot be combined\nfix: run bmburst plan once with each")
    training = ("nodes", "micro_batch", "loss_chunk", "mlp_chunk", "recompute", "zero", "tensor", "ways", "write")
    for name in (*training, "output", "optimizer_offload", "host_memory", "lora", "dpo", "longest"):
        if getattr(args, name) != args.given(name):
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option} says nothing of generation, which runs on one node\nfix: leave {option} out")


def _check_longest(args: argparse.Namespace) -> None:
    """Refuse options that have no meaning with --longest."""
    if not args.longest:
        return
    for name in ("check", "calibrate", "seq", "output", "write", "ways", "zero"):
        if getattr(args, name) != args.given(name):
            option = f"--{name}"
            raise UserError(f"--longest and {option} cannot be combined\nfix: leave {option} out")


def _require_question(args: argparse.Namespace) -> None:
    for name in ("model",) if args.longest else ("model", "seq"):
        if getattr(args, name) is None:
            raise UserError(f"--{name} is missing\nfix: add it, for example bmburst plan --model llama-3-8b --seq 1M")


def _generate(args: argparse.Namespace) -> int:
    from bmburst.cli.files import named_model
    from bmburst.plan.inference import GenerationTask, counts, predict_generation
    from bmburst.plan.presentation import generation_json, generation_report
    from bmburst.schedule.hardware import load_hardware

    _require_question(args)
    model, name, _ = named_model(args.model)
    task = GenerationTask(
        model=model,
        preset=name,
        prompt=args.seq,
        new_tokens=64 if args.new_tokens is None else args.new_tokens,
        batch=args.batch,
        dtype=args.dtype,
    )
    hardware = load_hardware(args.hardware)
    asked = predict_generation(task, args.gpus, hardware)
    found = [asked if gpus == args.gpus else predict_generation(task, gpus, hardware) for gpus in counts(args.gpus)]
    if args.json:
        print(json.dumps(generation_json(task, hardware, found), indent=1))
    else:
        print(generation_report(task, hardware, found, args.gpus))
    return 0


def _plan(args: argparse.Namespace) -> int:
    from bmburst.cli.files import named_model, require_recipe, write_recipe
    from bmburst.plan.candidates import ZERO, Task
    from bmburst.plan.presentation import as_json, report
    from bmburst.plan.search import best_of_each, search

    _require_question(args)
    if args.ways < 1:
        raise UserError(f"--ways {args.ways}\nallowed: at least 1\nfix: --ways 12, or leave it out")
    if args.output is not None and args.output.suffix != ".png":
        raise UserError(f"--output {args.output}\nallowed: a .png file\nfix: --output plan.png")
    if args.write is not None:
        require_recipe(args.write)
    model, name, directory = named_model(args.model)
    task = Task(
        model=model,
        preset=name,
        init_from=directory,
        sequence=max(1, args.gpus) if args.longest else args.seq,  # --longest finds it
        gpus=args.gpus,
        nodes=args.nodes,
        batch=args.batch,
        micro_batch=args.micro_batch,
        dtype=args.dtype,
        loss_chunk=args.loss_chunk,
        mlp_chunk=args.mlp_chunk,
        lora=None if args.longest else _adapters(args.lora),
        pairs=args.dpo,
        second_model=args.dpo and (args.lora is None or args.longest),
        host_memory=args.host_memory,
    )
    if args.longest:
        return _longest(args, task)
    hardware = _machine(args)
    found = search(
        task,
        hardware,
        offload=_placements(args),
        recompute=_policies(args),
        zero=[int(stage) for stage in _words("--zero", args.zero, tuple(map(str, ZERO)))],
        tensor=None if args.tensor is None else numbers("--tensor", args.tensor),
    )
    shown = best_of_each(found, args.ways)
    if args.json:
        print(json.dumps(as_json(task, hardware, shown), indent=1))
    else:
        print(report(task, hardware, shown, len(found)))
    if args.write is not None:
        write_recipe(args.write, found[0])
    if args.output is not None:
        from bmburst.plan.presentation import draw_predictions

        draw_predictions(shown, args.output)
        print(f"{args.output}: drawn", file=sys.stderr)
    return 0


def _longest(args: argparse.Namespace, task: "Task") -> int:
    from bmburst.plan.longest import longest, longest_json, longest_report

    hardware = _machine(args)
    found = longest(
        task,
        hardware,
        recompute=_policies(args),
        tensor=None if args.tensor is None else numbers("--tensor", args.tensor),
        offload=_placements(args),
        lora=_adapters(16 if args.lora is None else args.lora),
    )
    print(json.dumps(longest_json(found), indent=1) if args.json else longest_report(task, hardware, found))
    return 0


def _adapters(rank: int | None) -> "LoRAConfig | None":
    from bmburst.blocks.config import LoRAConfig

    if rank is None:
        return None
    if rank < 1:
        raise UserError(f"--lora {rank}\nallowed: the rank of adapters, at least 1\nfix: --lora 16, or leave it out")
    return LoRAConfig(rank=rank)


def _policies(args: argparse.Namespace) -> Sequence[str]:
    from bmburst.recompute.policy import POLICIES

    return POLICIES if args.recompute is None else tuple(args.recompute.split(","))


def _machine(args: argparse.Namespace) -> "Hardware":
    """Return the hardware, with --host-memory if it is given.

    Raises:
        UserError: The hardware is unknown, or --host-memory is not above 0.
    """
    from bmburst.schedule.hardware import load_hardware

    hardware = load_hardware(args.hardware)
    if args.host_memory is None:
        return hardware
    if not 0 < args.host_memory < 1e9:
        raise UserError(f"--host-memory {args.host_memory:g}\nallowed: GiB above 0, {GIB_TOO}\nfix: --host-memory 128G")
    return dataclasses.replace(hardware, host_memory=args.host_memory * GIB)


def _placements(args: argparse.Namespace) -> "tuple[Offload, ...]":
    from bmburst.plan.candidates import Offload

    return tuple(each for each in Offload if each is not Offload.NOTHING or not args.optimizer_offload)


def _calibrate(args: argparse.Namespace) -> int:
    import torch

    from bmburst.plan.rates import calibrate

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = args.ranks if args.ranks is not None else max(1, gpus)
    if ranks < 1 or (gpus and ranks > gpus):
        allowed = f"1 to {gpus}" if gpus else "at least 1"
        raise UserError(f"--ranks {ranks}\nallowed: {allowed}\nfix: leave it out for {max(1, gpus)}")
    text = calibrate(args.hardware, ranks, lambda words: print(f"measuring: {words}", file=sys.stderr, flush=True))
    if args.output is None:
        print(text, end="")
    else:
        write_text("--output", args.output, text)
        print(f"{args.output}: bmburst plan --hardware {args.output} uses it")
    return 0


def _is_hardware(path: Path) -> bool:
    with path.open("rb") as file:
        first = file.readline(1000)
    return first.startswith(b"# Measured ") and b"bmburst plan --calibrate" in first


def _words(option: str, text: str | None, known: Sequence[str]) -> list[str]:
    words = list(known) if text is None else text.split(",")
    for word in words:
        require_known(option, word, known)
    return words
