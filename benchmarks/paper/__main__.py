"""Prints or runs the commands that reproduce `docs/paper.md`: `python -m benchmarks.paper --run`.

Each section of the page has its commands. A command needs no GPU, one, or two, and writes one record. The name of a
record contains the model of its GPU. On another GPU, the command is skipped, unless `--output` names another folder.
With `--run` the commands run in order. If one fails, the others still run, and the exit status is 1. Finally, the
tables of the page are generated from the records.
"""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from benchmarks.paper.tables import (
    ATTENTION,
    FIRST,
    INFERENCE,
    PAPER,
    PAPER_H100,
    PERPLEXITY,
    RESULTS,
    SLOW_LINK,
    SPARSE,
    SPARSE_RANKS,
    TRAIN,
    TRAIN_H100,
    gpu_of,
)

_ROOT = Path(__file__).parents[2]
_PAGE = "python -m benchmarks.records"
_BLOCKS = "bmburst launch --nproc {} -- -m benchmarks.sparse_cross block-sparse"
_CROSS = "bmburst launch --nproc 2 -- -m benchmarks.sparse_cross cross"
_TRAIN = "bmburst bench train --repeats 5 --cell-seconds 10"
_METHODS = "--cells 'step/*' --methods 'ours,ulysses,zigzag*,tensor*,ring-li'"
_FIRST = "bmburst bench inference --masks causal --repeats 3 --cell-seconds 15"


@dataclass(frozen=True, slots=True)
class Command:
    """A command that measures a record, or a part of it.

    Attributes:
        gpus: Number of GPUs that it needs; 0: it runs on CPUs.
        record: Name of the record; "": the command takes a folder.
        text: The command line, without `--output`.
        again: Whether the command accepts `--again`, which repeats the cells that the record contains.
    """

    gpus: int
    record: str
    text: str
    again: bool = True

    @property
    def gpu(self) -> str:
        """The GPU in the record's name; "" for a record of CPUs."""
        return gpu_of(self.record)

    def words(self, folder: Path, *, again: bool = False) -> list[str]:
        """Return the command line.

        Args:
            folder: Folder of the record.
            again: Whether to measure cells again that the record contains.
        """
        file = folder / f"{self.record}.json" if self.record else folder
        return [*shlex.split(self.text), *(["--again"] if again and self.again else []), "--output", str(file)]


SECTIONS: Mapping[str, tuple[Command, ...]] = MappingProxyType(
    {
        "claims": (
            Command(
                1, ATTENTION, "bmburst bench attention --gpus 1 --tokens 4K --cells 'accuracy/4096/mha/causal/*@1'"
            ),
        ),
        "table-1": (
            Command(2, PAPER, "bmburst bench paper --gpus 2 --cells 'backward/*'"),
            Command(0, SLOW_LINK, "python -m benchmarks.slow_links backward", again=False),
        ),
        "gao-and-lao": (Command(2, PAPER, "bmburst bench paper --gpus 2 --cells 'merge/*,tile/*'"),),
        "tables-2-and-3": (
            Command(
                2,
                INFERENCE,
                "bmburst bench inference --gpus 2 --models llama-2-7b,llama-2-13b --masks causal,full "
                "--tokens 4K,8K,16K,32K,64K,128K,256K --cells 'prompt/*' "
                "--methods heads,tokens,no-lao,tensor-v1,tensor-v3,ring-li --repeats 2 --cell-seconds 20",
            ),
            Command(
                2,
                FIRST,
                f"{_FIRST} --gpus 2 --models llama-2-7b,llama-2-13b --tokens 4K,8K,16K,32K,64K,128K "
                "--cells 'prompt/*' --methods heads,tokens,tensor-v1,tensor-v3,ring-li",
            ),
        ),
        "table-4": (Command(0, PERPLEXITY, "python -m benchmarks.paper.perplexity", again=False),),
        "figures-2-and-3": (
            Command(2, TRAIN, f"{_TRAIN} --gpus 2 --preset llama-2-7b --tokens 1K,4K,16K,32K,64K,128K {_METHODS}"),
            Command(2, TRAIN, f"{_TRAIN} --gpus 2 --preset llama-2-13b --tokens 1K,4K,16K,32K,64K {_METHODS}"),
            Command(2, TRAIN, f"{_TRAIN} --gpus 2 --preset llama-2-13b --layers 2 --tokens 4K,32K,128K {_METHODS}"),
            Command(
                2,
                TRAIN_H100,
                f"{_TRAIN} --gpus 2 --preset llama-2-13b --layers 2 --tokens 4K,32K,128K {_METHODS}",
            ),
            Command(
                2,
                TRAIN,
                f"{_TRAIN} --gpus 2 --preset llama-2-7b --zero 2 --tokens 1K,4K,16K,32K,64K,128K {_METHODS}",
            ),
            Command(2, TRAIN, f"{_TRAIN} --gpus 2 --preset llama-2-13b --zero 2 --tokens 4K,32K {_METHODS}"),
        ),
        "figure-4": (
            Command(1, FIRST, f"{_FIRST} --gpus 1 --models llama-2-13b --tokens 64K --cells 'prompt/*/heads'"),
            Command(
                2,
                FIRST,
                f"{_FIRST} --gpus 2 --models llama-2-13b --tokens 64K --cells 'prompt/*/heads,prompt/*/tensor*'",
            ),
            *(
                Command(
                    gpus,
                    TRAIN,
                    f"{_TRAIN} --gpus {gpus} --preset llama-2-7b --layers 2 --tokens 4K,32K,64K --cells 'step/*/ours'",
                )
                for gpus in (1, 2)
            ),
            Command(
                2,
                TRAIN,
                f"{_TRAIN} --gpus 2 --preset llama-2-7b --layers 2 --tokens 4K --batch 1,2,4,8 --cells 'step/*' "
                "--methods ours,tensor-v3,ring-li",
            ),
        ),
        "readme": (
            Command(2, PAPER, "bmburst bench paper --gpus 2 --cells 'batch/*,sequence/*'"),
            Command(2, PAPER_H100, "bmburst bench paper --gpus 2 --cells 'sequence/1048576/*'"),
        ),
        "predictions": (Command(0, "", "python -m benchmarks.paper.curve", again=False),),
        "future-work": (
            Command(1, SPARSE, _BLOCKS.format(1), again=False),
            Command(2, SPARSE_RANKS, _BLOCKS.format(2), again=False),
            Command(2, "cross_2xh200_202611", _CROSS, again=False),
            Command(
                2,
                "cross_2xh100_202611",
                f"{_CROSS} --case causal/zigzag/striped --case causal/zigzag/zigzag --case full/zigzag/zigzag",
                again=False,
            ),
            Command(
                2,
                "cross_striped_2xh100_202611",
                f"{_CROSS} --case causal/striped/striped",
                again=False,
            ),
        ),
    }
)
"""The commands by section of the page, in its order."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print or run the commands, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", choices=tuple(SECTIONS), metavar="SECTION", help=f"one section: {', '.join(SECTIONS)}")
    add("--gpus", type=int, choices=(0, 1, 2), default=2, help="omit commands that need more GPUs (default: 2)")
    add(
        "--output",
        type=Path,
        default=RESULTS,
        metavar="DIR",
        help="folder of the records (default: benchmarks/results)",
    )
    add(
        "--again", action="store_true", help="also measure cells that the records contain; by default only missing ones"
    )
    add("--run", action="store_true", help="run the commands instead of printing them")
    options = parser.parse_args(arguments)
    chosen = list(_chosen(options.only, options.gpus))
    if not options.run:
        for text in _printed(chosen, options.output, again=options.again):
            print(text)
        return 0
    own = None if options.output.resolve() != RESULTS else gpu_name()
    failed = [text for _, command in chosen if (text := _run(command, options.output, own, again=options.again))]
    if options.output.resolve() == RESULTS and subprocess.run(_program(shlex.split(_PAGE)), cwd=_ROOT).returncode:
        failed.append(_PAGE)
    for text in failed:
        print(f"failed: {text}")
    return int(bool(failed))


def _chosen(only: str | None, gpus: int) -> Iterator[tuple[str, Command]]:
    for name, commands in SECTIONS.items():
        if only in (None, name):
            yield from ((name, command) for command in commands if command.gpus <= gpus)


def _printed(chosen: Sequence[tuple[str, Command]], folder: Path, *, again: bool) -> Iterator[str]:
    shown = folder.relative_to(_ROOT) if folder.is_relative_to(_ROOT) else folder
    section = ""
    for name, command in chosen:
        if name != section:
            yield f"# {name}"
            section = name
        where = f"{command.gpus} x {command.gpu}" if command.gpus else "CPUs"
        yield f"{shlex.join(command.words(shown, again=again))}  # {where}"
    yield f"# the page\n{_PAGE}"


def _run(
    command: Command,
    folder: Path,
    own: str | None,
    *,
    again: bool,
    run: Callable[[list[str]], int] = lambda words: subprocess.run(words, cwd=_ROOT).returncode,
) -> str:
    """Run a command; return it if it failed, else nothing.

    Args:
        command: The command.
        folder: Folder of its record.
        own: Name of this machine's GPU; None if any GPU may write the record.
        again: See `Command.words`.
        run: Runs a command line and returns its exit status.
    """
    text = shlex.join(command.words(folder, again=again))
    if own is not None and command.gpu not in own:
        print(f"skipped: the record is for {command.gpu}, but this machine has {own or 'no GPU'}: {text}", flush=True)
        return ""
    print(f"$ {text}", flush=True)
    return text if run(_program(command.words(folder.absolute(), again=again))) else ""


def _program(words: Sequence[str]) -> list[str]:
    """Return the command line with this Python interpreter as its program."""
    program, *rest = words
    return [sys.executable, "-m", program, *rest] if program == "bmburst" else [sys.executable, *rest]


def gpu_name() -> str:
    """Return the name of this machine's first GPU; "" without one."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""


if __name__ == "__main__":
    sys.exit(main())
