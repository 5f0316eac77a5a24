"""Runs the commands of a list one after another within a budget of time, and keeps what each of them leaves.

    python -m benchmarks.suite benchmarks/suites/four_gpus.yaml --dry-run
    python -m benchmarks.suite benchmarks/suites/four_gpus.yaml --budget 1500 --output DIR

A list is a YAML file with a number of GPUs, and records (`Record`), the most important first. The output of a command
is in `DIR/NAME.log`. `DIR/suite.json` says after each command what ran, failed, was stopped or left out. The same
command line goes on: what ran is not run again.

A command that exceeds its limit or the budget is stopped. Benchmarks have written the cells or rows until then. A
record that is expected to take longer than what is left of the budget is left out, and a later one may fit.

`--old DIR` names a checkout of the commit that records are compared with. These run in turns here and there.

`--dry-run` runs nothing. It prints commands and expected times, and reads each command by its program's own parser.
"""

import argparse
import contextlib
import importlib
import io
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.engine.kinds import KINDS
from benchmarks.engine.report import markdown_table
from bmburst.cli import CommandParser, find_command
from bmburst.cli import main as bmburst
from bmburst.config import field, from_dict, read_config_file, read_json, write_json
from bmburst.errors import UserError, with_fix
from bmburst.launch import devices
from bmburst.outputs import require_file, require_folder

ROOT = Path(__file__).parents[1]
RAN, FAILED, STOPPED, LEFT_OUT = "ran", "failed", "stopped", "left out"
_PATIENCE = 30.0  # seconds between the signal that stops a command and the one that ends it
_LONGER = 1.5  # the limit of a record that has none, in its expected time
_EXAMPLE = "see the lists in benchmarks/suites"


@dataclass(frozen=True, kw_only=True)
class Record:
    """A command of a list, and what it is expected to take.

    Attributes:
        name: Its name, with which the names of its files begin.
        command: `bmburst ...`, `python -m ...`, which run in this Python, or another program; `{path}` is the folder of
            the output and the name.
        seconds: How long it is expected to take.
        limit: After how many seconds it is stopped; None: 1.5 times `seconds`.
        asked: What its result is to show.
        needs: Modules without which it cannot be measured.
        turns: How often it is run.
        old: The commit that it is compared with, in turns; "": none. Of a run: the commit in whose checkout it runs.
    """

    name: str = field("name")
    command: str = field("command line")
    seconds: float = field("expected time", above=0)
    limit: float | None = field("longest time", default=None, above=0)
    asked: str = field("what the result is to show", default="")
    needs: tuple[str, ...] = field("modules", default=())
    turns: int = field("runs", default=1, minimum=1)
    old: str = field("commit", default="")

    def words(self, folder: Path) -> list[str]:
        """Return the words of the command, whose files are in a folder."""
        return shlex.split(self.command.replace("{path}", str(folder / self.name)))

    def runs(self) -> Iterator["Record"]:
        """Yield a record for each run: here, and after it in the older checkout."""
        for number in range(1, self.turns + 1):
            again = "" if number == 1 else f"-{number}"
            yield replace(self, name=f"{self.name}{again}", old="")
            if self.old:
                yield replace(self, name=f"{self.name}-old{again}")


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A list."""

    gpus: int  # number of GPUs that its commands use
    runs: tuple[Record, ...]  # the runs of its records, in order


def read_suite(path: Path, only: str = "*") -> Suite:
    """Return the list in a file.

    Runs whose names match none of `only`, `GLOB,...`, are not in it.

    Raises:
        UserError: The file is no list, a record is not valid, or a pattern matches no run.
    """
    content = read_config_file(path)
    gpus, records = content.get("gpus"), content.get("records")
    if len(content) != 2 or type(gpus) is not int or not isinstance(records, list):
        raise UserError(
            f"{path} has {', '.join(content)}\nallowed: gpus, a number, and records, a list\nfix: {_EXAMPLE}"
        )
    runs = [run for number, values in enumerate(records) for run in _record(path, number, values).runs()]
    names = [run.name for run in runs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{path} has two records with the name {twice}\nfix: another name for one of them")
    patterns = only.split(",")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(f"--only {pattern} matches no record\nfix: one of {', '.join(names)}")
    kept = tuple(run for run in runs if any(fnmatchcase(run.name, pattern) for pattern in patterns))
    return Suite(gpus=gpus, runs=kept)


def _record(path: Path, number: int, values: object) -> Record:
    where = f"{path}: record {number}"
    if not isinstance(values, Mapping):
        raise UserError(f"{where} is {values!r}\nallowed: fields, such as name and command\nfix: {_EXAMPLE}")
    try:
        return from_dict(Record, values)
    except UserError as error:
        raise with_fix(UserError(f"{where}: {error}"), _EXAMPLE) from None


def check(words: Sequence[str]) -> str:
    """Read a command by its program's own parser, without running it, and return what it would measure, or "".

    Options of pytest, and of programs other than bmburst and Python's modules, are not read.

    Raises:
        UserError: The program does not exist or refuses an option, the command selects no cell, or a file of tests
            does not exist.
    """
    match words:
        case ["bmburst", "bench", kind, *options] if kind in KINDS:
            with contextlib.redirect_stdout(io.StringIO()) as listed, contextlib.redirect_stderr(io.StringIO()) as said:
                status = bmburst(["bench", kind, *options, "--list"])
            if status:
                raise UserError(said.getvalue())
            return f"{len(listed.getvalue().splitlines())} cells"
        case ["bmburst", name, *options]:
            parser = CommandParser(prog=f"bmburst {name}", description="", words=options)
            find_command(name).configure(parser)
            parser.read(options)
        case ["python", "-m", "pytest", *options]:
            if missing := [word for word in options if word.startswith("tests") and not (ROOT / word).exists()]:
                raise UserError(f"{missing[0]} does not exist\nfix: correct the path")
        case ["python", "-m", module, *options] if find_spec(module) is not None:
            _read(module, importlib.import_module(module).parser(), options)
        case [program, *_] if program == "python" or shutil.which(program) is None:
            raise UserError(
                f"{shlex.join(words)}\nallowed: bmburst ..., python -m MODULE ..., or another program\n"
                "fix: correct the name, or install the program"
            )
    return ""


def _read(module: str, parser: argparse.ArgumentParser, options: Sequence[str]) -> None:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            parser.parse_args(options)
        except SystemExit as end:
            raise UserError(f"{module}: {said.getvalue().strip().splitlines()[-1]}") from end


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status: 1 if a command failed or was stopped, 2 for bad input."""
    try:
        return _main(parser().parse_args(words))
    except UserError as error:
        print(f"benchmarks.suite: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("file", type=Path, help="the list")
    made.add_argument("--only", default="*", metavar="GLOB,...", help="names of records (default: all)")
    made.add_argument("--budget", type=float, default=1500.0, metavar="SECONDS", help="for all (default: 1500)")
    made.add_argument("--output", type=Path, metavar="DIR", help="folder of what is measured")
    made.add_argument("--old", type=Path, metavar="DIR", help="checkout of the commit to compare with")
    made.add_argument("--dry-run", action="store_true", help="print and check the commands only")
    return made


def _main(options: argparse.Namespace) -> int:
    suite = read_suite(options.file, options.only)
    if options.dry_run:
        return _print(suite)
    if options.output is None:
        raise UserError("--output is missing\nfix: --output DIR, or --dry-run")
    if options.old is not None and not (options.old / "bmburst").is_dir():
        raise UserError(f"--old {options.old} is no checkout of bmburst\nfix: git worktree add {options.old} COMMIT")
    if (found := len(devices.gpus())) < suite.gpus:
        raise UserError(f"{options.file} needs {suite.gpus} GPUs, this machine has {found}\nfix: --dry-run")
    require_folder("--output", options.output)
    options.output.mkdir(parents=True, exist_ok=True)
    state = options.output / "suite.json"
    require_file("--output", state, "the state of a list", lambda file: "outcomes" in read_json(file))
    before = read_json(state)["outcomes"] if state.exists() else {}
    outcomes = run(suite, options, state, before)
    columns = ("record", "state", "s", "expected", "asked", "reason")
    lines = [[name, *(_text(row.get(column, "-")) for column in columns[1:])] for name, row in outcomes.items()]
    print("\n".join(markdown_table(columns, lines)))
    return int(any(row["state"] in (FAILED, STOPPED) for row in outcomes.values()))


def _text(value: Any) -> str:
    return f"{value:.0f}" if isinstance(value, float) else str(value).replace("|", "/")


def _print(suite: Suite) -> int:
    """Print and check the commands of a list; return 2 if one is refused."""
    status = 0
    for each in suite.runs:
        words = each.words(Path("DIR"))
        try:
            found = check(words)
        except UserError as error:
            status, found = 2, f"refused: {error}"
        where = f", at {each.old}" if each.old else ""
        print(f"{each.name}: {each.seconds:.0f} s{where}{found and f', {found}'}\n  {shlex.join(words)}", flush=True)
    print(f"{len(suite.runs)} commands, {sum(each.seconds for each in suite.runs):.0f} s, {suite.gpus} GPUs")
    return status


def run(
    suite: Suite, options: argparse.Namespace, state: Path, before: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Run what did not run before and fits into the budget, and return what became of each run.

    `state` is the file of the outcomes, written after each command; `before` are those of earlier calls, by name.
    """
    ends = time.monotonic() + options.budget
    outcomes = dict(before)
    for each in suite.runs:
        if outcomes.get(each.name, {}).get("state") == RAN:
            continue
        left = ends - time.monotonic()
        words, reason = each.words(options.output.absolute()), _why_not(each, left, options.old)
        row: dict[str, Any] = {"command": shlex.join(words), "expected": each.seconds, "asked": each.asked}
        row |= {"state": LEFT_OUT, "reason": reason} if reason else _ran(each, words, left, options)
        outcomes[each.name] = row
        write_json(state, {"outcomes": outcomes})
        took = f" in {row['s']:.0f} s" if "s" in row else ""
        print(f"{each.name}: {row['state']}{took}{row['reason'] and ': '}{row['reason']}", flush=True)
    return outcomes


def _why_not(each: Record, left: float, old: Path | None) -> str:
    """Return why a run is left out, or "" if it is not."""
    if missing := [module for module in each.needs if find_spec(module) is None]:
        return f"the module {missing[0]} is not installed"
    if each.old and old is None:
        return f"--old does not name a checkout of {each.old}"
    return f"{left:.0f} s are left of the budget" if left < each.seconds else ""


def _ran(each: Record, words: Sequence[str], left: float, options: argparse.Namespace) -> dict[str, Any]:
    """Run a command and return its state, seconds, and the last line of its output if it did not run to its end."""
    ours = {"bmburst": [sys.executable, "-m", "bmburst"], "python": [sys.executable]}
    command = [*ours.get(words[0], words[:1]), *words[1:]]
    limit = min(left, each.limit or _LONGER * each.seconds)
    began, log = time.monotonic(), options.output / f"{each.name}.log"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            cwd=options.old if each.old else ROOT,
            # Kernels that are compiled for a command serve the next ones.
            env=os.environ | {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
    row: dict[str, Any] = {"state": RAN, "s": time.monotonic() - began, "reason": ""}
    if status:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "no output")
        row |= {"state": FAILED, "reason": f"status {status}: {last.strip()}"}
    return row if status is not None else row | {"state": STOPPED, "reason": f"not done after {limit:.0f} s"}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop a command that still runs, and end what it started and left behind."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)  # launchers end their ranks
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
