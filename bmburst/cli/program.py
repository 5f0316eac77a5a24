"""The command line: runs one command, and turns bad input into one message and an exit status.

Every command is a module `bmburst/cli/<command>.py` with `HELP` (a description), `configure(parser)` and `run(args)`,
and for one on ranks `settle(args)`. These raise a UserError for options that cannot work. Small commands share a module
(`TOGETHER`), which has a `Command` of the first three for each. A module is imported only when its command is called,
so that `bmburst --help` takes milliseconds.
"""

import argparse
import contextlib
import difflib
import errno
import importlib
import math
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from bmburst import __version__
from bmburst.amounts import GIB_TOO, MOST, TOKENS_TOO, at_home, whole, why_not_text
from bmburst.config import FieldHelpFormatter, nearest_name, short_help, show_rare
from bmburst.errors import DoesNotFit, UserError, unknown
from bmburst.launch import last_error
from bmburst.outputs import FULL, write_fix

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "train": "train a LLaMA-family model on long sequences, from text to a saved checkpoint",
        "generate": "answer prompts with a model, split over ranks, with a KV cache",
        "eval": "evaluate a checkpoint on held-out text: loss, bits per byte, perplexity",
        "serve": "answer questions through OpenAI's API, with a model split over ranks",
        "launch": "start any BMTrain script on all ranks and supervise it",
        "doctor": "show what is installed and usable, and the commands that repair the rest",
        "check": "run a configuration on N ranks and on one rank, and compare every tensor",
        "data": "tokenize text into a token file",
        "convert": "convert weights between Hugging Face, bmburst and ModelCenter",
        "bench": "measure attention and training steps against one GPU and other projects",
        "plan": "predict step time and memory for every mesh, and print the best command",
        "build-bmtrain": "build BMTrain from source for this Python and CUDA",
    }
)
_COMMANDS_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "train": "sft dpo pretrain pt finetune fine-tune fit",
        "generate": "chat infer inference predict complete",
        "eval": "evaluate test validate",
        "serve": "api deploy webchat",
        "launch": "run",
        "doctor": "env",
        "data": "preprocess tokenize prepare",
        "convert": "export merge merge-lora merge_lora",
        "bench": "benchmark",
    }
)
"""Our commands, and those of axolotl, LLaMA-Factory, ms-swift, TRL, torchtune, accelerate and vLLM that mean them."""
TOGETHER: Mapping[str, str] = MappingProxyType(
    {
        "doctor": "machine",
        "build-bmtrain": "machine",
        "launch": "machine",
        "bench": "machine",
        "data": "files",
        "convert": "files",
    }
)
"""Modules of the commands that share one."""
# argparse's messages for a value of the wrong type, for one that is none of the allowed, and for none.
_WRONG_TYPE = re.compile(r"argument (\S+): invalid (int|float|tokens|gibibytes) value: '(.*)'", re.DOTALL)
_WRONG_CHOICE = re.compile(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", re.DOTALL)
_MISSING = re.compile(r"the following arguments are required: (.*)")
_KINDS = MappingProxyType(
    {
        "int": "a whole number",
        "float": "a number",
        "tokens": f"a whole number, {TOKENS_TOO}",
        "gibibytes": f"a number of GiB, {GIB_TOO}",
    }
)
_BAD_PATHS = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM)
_FEWEST_FILES, _ENOUGH_FILES = 256, 4096  # open files that ranks of a small and of a large job need
INTERRUPTED, _BAD_INPUT, _BROKEN_PIPE = 130, 2, 141
NOTHING_FITS = 1
"""Exit status of a plan without a configuration that fits into memory."""
_ON_RANKS = ("train", "generate", "eval", "serve", "check")
_TASKS = (
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpiexec", "PMI_SIZE", "PMI_RANK"),
    ("a PyTorchJob", "PET_NNODES", "PET_NODE_RANK"),
    ("SkyPilot", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK"),
)
"""What starts a command several times and sets no RANK; how many times it says, and which one of them this is."""
LAUNCHED = "BMBURST_LAUNCH_FOLDER"
"""Environment variable that the launcher sets in its ranks. The launcher prints the first rank's error once."""


class Command(NamedTuple):
    """A command of a module with several, as other modules define it."""

    HELP: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


class CommandParser(argparse.ArgumentParser):
    """An argument parser without abbreviations, whose errors are UserErrors that name the nearest option.

    Attributes:
        words: The words that it is to read, for commands whose options depend on them.
        of_train: Dotted names of settings of `bmburst train` that the command does not take, for messages.
    """

    def __init__(self, *, prog: str, description: str, words: Sequence[str] = ()) -> None:
        super().__init__(
            prog=prog, description=description, allow_abbrev=False, formatter_class=FieldHelpFormatter, add_help=False
        )
        self.add_argument("-h", "--help", action=_Help, nargs="?", metavar="all", help="show this help and exit")
        self.words = words
        self.of_train: Collection[str] = ()
        self.register("type", int, whole)
        self.register("type", float, _number)

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message as a UserError."""
        if found := _WRONG_TYPE.fullmatch(message):
            option, kind, value = found.groups()
            is_large = kind == "int" and value.lstrip("+-").isdecimal()
            allowed = f"a whole number of at most {MOST:,}" if is_large else _KINDS[kind]
            raise UserError(f"{option} {value}\nallowed: {allowed}\nfix: {self.prog} --help all lists every option")
        if found := _WRONG_CHOICE.fullmatch(message):
            option, value, listed = found.groups()
            kind = f"value of {option}" if option.startswith("-") else "name"
            raise unknown(kind, value, (name.strip("'") for name in listed.split(", ")), f"{self.prog} --help")
        if found := _MISSING.fullmatch(message):
            be, them = ("are", "them") if "," in found[1] else ("is", "it")
            raise UserError(f"{found[1]} {be} missing\nfix: add {them}; {self.prog} --help says what to give")
        raise UserError(f"{message}\nfix: {self.prog} --help all lists every option")

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return the parsed arguments.

        Raises:
            UserError: An option or argument is unknown, or an option lacks its value.
        """
        own = argv[: argv.index("--")] if "--" in argv else argv  # words after "--" belong to a script
        texts = {option for option, action in self._option_string_actions.items() if action.type is any_text}
        words: list[str] = []
        for before, word in zip(("", *own), own, strict=False):
            is_name = before not in texts and word.partition("=")[0] not in texts
            if (reason := why_not_text(word, is_name=is_name)) is not None:
                raise UserError(f"argument {word!a} {reason}\nfix: rename the file, or correct the argument")
            words.append(at_home(word) if is_name else word)
        try:
            args, rest = self.parse_known_args([*words, *argv[len(words) :]])
        except UserError:  # a required option may be missing because its name was misspelled
            given = (word.partition("=")[0] for word in own if word.startswith("--"))
            if unknown := next((word for word in given if word not in self._option_string_actions), None):
                raise self._unexpected(unknown, own) from None
            if free := self._free_words(words):  # or in the place of what is required
                raise self._unexpected(free[0], own) from None
            raise
        if rest:
            raise self._unexpected(rest[0], own)
        return args

    def _free_words(self, words: Sequence[str]) -> list[str]:
        """Return the words that no option takes, also where required ones are missing. Only for a message."""
        for action in self._actions:
            action.required = False
        with contextlib.suppress(UserError):
            return self.parse_known_args(words)[1]
        return []

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Return the value of an option, also that of `--prompt=--`: argparse before Python 3.13 takes it for none."""
        if not action.option_strings or arg_strings != ["--"]:
            return super()._get_values(action, arg_strings)
        value = self._get_value(action, "--")
        self._check_value(action, value)
        return [value] if action.nargs in (argparse.ONE_OR_MORE, argparse.ZERO_OR_MORE) else value

    def _unexpected(self, argument: str, given: Sequence[str]) -> UserError:
        word, is_assigned, value = argument.partition("=")
        known: dict[str, str] = {}
        for option in self._option_string_actions:
            if option.startswith("--"):
                # For an option with two spellings the message shows the first, as in help.
                known.setdefault(option[2:].replace("-", "_"), option)
        help_all = f"fix: {self.prog} --help all lists every option"
        if not word.startswith("-") or word == "--":  # such as of `vllm serve MODEL`, `axolotl train FILE`, Hydra
            meant = known.get((nearest_name(word, known) or "") if is_assigned else _place_of(word, known))
            is_free = meant is not None and meant not in given
            fix = f"fix: {meant} {value if is_assigned else word}" if is_free else help_all
            return UserError(f"unexpected argument '{argument}'\n{fix}")
        name = word.lstrip("-").replace("-", "_")
        if any(
            name in (other, other.removeprefix("parallel."), other.removesuffix(".source")) for other in self.of_train
        ):
            return UserError(f"{word} is a setting of bmburst train, not of {self.prog}\nfix: leave it out")
        near = nearest_name(name, known)
        hint = f"; did you mean '{known[near]}'?" if near else ""
        return UserError(f"unknown option '{word}'{hint}\n{help_all}")


def _place_of(word: str, known: Collection[str]) -> str:
    """Return the name of the option that a word without one is meant for: a file, a model or the name of a shape."""
    if word.endswith((".yaml", ".yml", ".json")) and "config" in known:
        return "config"
    if of_command := next((name for name in ("checkpoint", "input") if name in known), None):
        return of_command
    if os.path.isfile(word):
        return "data"
    return "init_from" if "/" in word or os.path.isdir(word) else "preset"


class _Help(argparse.Action):
    """Prints help and exits: `--help` the options that people use, `--help all` every option."""

    def __call__(
        self, parser: argparse.ArgumentParser, _namespace: object, values: object, _option: str | None = None
    ) -> None:
        if values not in (None, "all"):
            raise UserError(f"--help {values}\nallowed: --help, or --help all\nfix: --help all lists every option")
        if values == "all":
            show_rare(parser)
        print(parser.format_help().rstrip() if values == "all" else short_help(parser) or parser.format_help().rstrip())
        parser.exit()


def any_text(text: str) -> str:
    """Return the value of an option that may hold line breaks: the type of options that are not names or numbers."""
    return text


def _number(text: str) -> float:
    number = float(text)
    if math.isnan(number):
        raise ValueError("not a number")
    return number


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 2 for bad input, 130 for Ctrl-C, else the command's own.

    Args:
        argv: Arguments without the program name; None for `sys.argv[1:]`.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    started, status = time.time(), 1
    _open_standard_files()
    try:
        status = _caught(words)
    except Exception as error:
        if LAUNCHED not in os.environ:
            last_error.record(error)
        raise
    finally:
        if status not in (0, INTERRUPTED) and LAUNCHED not in os.environ:
            _note_command(words, started)
    return status


def _open_standard_files() -> None:
    """Open what a service has closed (`>&-`) on the null device: else prints fail, and sockets get these numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            try:
                os.fstat(number)  # a process of multiprocessing has None too, and may have a pipe of its own there
            except OSError:
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number, this one
            setattr(sys, name, open(os.devnull, "r" if number == 0 else "w", encoding="utf-8"))  # noqa: SIM115  # stays


def _note_command(words: Sequence[str], started: float) -> None:
    """Keep the command beside its error, for a report of the doctor."""
    if not words or words[0] not in COMMANDS:
        return
    with contextlib.suppress(Exception):  # the command has failed already, and that is what the user must see
        from bmburst.cli.report import shown_options

        parser = _parser(words[0], words[1:])
        last_error.add_command(words[0], shown_options(parser, words[1:]), started)


def _caught(words: Sequence[str]) -> int:
    """Run a command, and turn bad input into a message and a status."""
    command = words[0] if words else ""
    try:
        if command in ("-h", "--help"):
            print(_overview(), flush=True)
            return 0
        if command == "--version":
            print(f"bmburst {__version__}", flush=True)
            return 0
        if command not in COMMANDS:
            raise _unknown_command(command)
        _require_open_files()
        _require_working_folder()
        return _run(command, words[1:])
    except UserError as error:
        if LAUNCHED in os.environ:
            raise
        last_error.record(error)
        name = f"bmburst {command}" if command in COMMANDS else "bmburst"
        print(f"{name}: {error}", file=sys.stderr)
        return NOTHING_FITS if isinstance(error, DoesNotFit) else _BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the output, for example head, has closed the pipe. Python would fail again in its flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except OSError as error:
        if error.errno in FULL and error.filename is None and LAUNCHED not in os.environ:
            # Files that an option names have messages of their own: this is the output itself.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python fails again in its flush at exit
            fix = write_fix(error, None, "")
            print(f"bmburst {command}: cannot write the output: {error.strerror}\nfix: {fix}", file=sys.stderr)
            return _BAD_INPUT
        # The user gave a path that no file system accepts, or has no permission for it.
        if error.errno not in _BAD_PATHS or error.filename is None or LAUNCHED in os.environ:
            raise
        refusal = UserError(f"{error.filename}: {error.strerror}\nfix: give a path that exists and that you may access")
        print(f"bmburst {command}: {refusal}", file=sys.stderr)
        return _BAD_INPUT


def ranks_to_start(asked: int | None, fewest: int = 2) -> int:
    """Return the number of ranks: `asked`, else one per GPU, else `fewest` on the CPU; UserError with fewer GPUs."""
    from bmburst.launch import devices
    from bmburst.launch.spec import require_devices

    here = len(devices.gpus())
    nproc = here or fewest if asked is None else asked
    require_devices(nproc, here)
    return nproc


def add_time_limits(parser: argparse.ArgumentParser, step: str) -> None:
    """Add the options that end a run whose ranks do no step, named `step` in their help."""
    from bmburst.launch.spec import DEFAULT_HANG_TIMEOUT as HANG
    from bmburst.launch.spec import DEFAULT_START_TIMEOUT as START

    for name, default, text in (
        ("hang", HANG, f"time without a {step} of a rank after which the run ends; 0: never (default: {HANG:g})"),
        ("start", None, f"time until a rank's first {step} (default: {START:g}, or --hang-timeout)"),
    ):
        parser.add_argument(f"--{name}-timeout", type=float, metavar="SECONDS", default=default, help=text)


def leaves_errors_to_rank_0() -> bool:
    """Return whether this rank leaves errors of all ranks to rank 0: it is another rank, and torchrun started it."""
    return os.environ.get("RANK", "0") != "0" and LAUNCHED not in os.environ


def _require_open_files() -> None:
    """Raise a low limit on open files as far as permitted. Importing torch alone can exceed it.

    Raises:
        UserError: The hard limit is below what any command needs.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _ENOUGH_FILES:
        return
    most = _ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH_FILES)
    if most < _FEWEST_FILES:
        raise UserError(
            f"the limit of open files is {hard} (ulimit -n)\n"
            f"allowed: at least {_FEWEST_FILES}; each rank opens one for every connection\n"
            f"fix: ulimit -n {_ENOUGH_FILES}; in a service set LimitNOFILE, in a container --ulimit nofile="
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _require_working_folder() -> None:
    """Raise UserError unless the folder in which the command was started is still there."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the working directory was removed\nfix: cd to a folder that exists") from None


def find_command(name: str) -> Any:
    """Import a command of `COMMANDS`, and return its module, or its `Command` where commands share a module."""
    module = importlib.import_module(f"bmburst.cli.{TOGETHER.get(name, name.replace('-', '_'))}")
    return module.COMMANDS[name] if name in TOGETHER else module


def _run(name: str, words: Sequence[str]) -> int:
    command, parser = find_command(name), _parser(name, words)
    try:
        args = parser.read(words)
    except SystemExit as stop:  # --help has printed
        sys.stdout.flush()
        return int(stop.code or 0)
    if name in _ON_RANKS:
        _require_started(getattr(args, "nproc", None))
        _note_tasks()
    status = command.run(args)
    sys.stdout.flush()
    return int(status)


def _require_started(nproc: object) -> None:
    """Check --nproc where RANK is set, so that this process is a rank and starts none: it would have no effect.

    Containers of a cluster may set RANK and WORLD_SIZE for one process on each node.

    Raises:
        UserError: There are other numbers of ranks, in all and on this host.
    """
    sizes = [os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")]
    if nproc is None or "RANK" not in os.environ or LAUNCHED in os.environ or str(nproc) in sizes:
        return
    raise UserError(
        f"--nproc {nproc} has no effect: RANK and WORLD_SIZE are set, so another launcher has started {sizes[0]}\n"
        "fix: leave --nproc out; or env -u RANK -u WORLD_SIZE bmburst ..., which starts them; "
        "or torchrun --nproc-per-node, on several nodes"
    )


def _note_tasks() -> None:
    """Note on standard error, once, that srun or a cluster has started several of this command, which is no rank.

    Each is a run of its own, which may be meant: they may have other options.
    """
    if "RANK" in os.environ:
        return
    for launcher, size, rank in _TASKS:
        if (count := os.environ.get(size, "")).isdecimal() and int(count) > 1 and os.environ.get(rank) == "0":
            print(
                f"note: {launcher} has started this command {count} times, and each is a run of its own, with ranks of "
                "its own; one run over all of them: torchrun -m bmburst ... (docs/multi_node.md)",
                file=sys.stderr,
            )


def _parser(name: str, words: Sequence[str]) -> CommandParser:
    command = find_command(name)
    parser = CommandParser(prog=f"bmburst {name}", description=command.HELP, words=words)
    command.configure(parser)
    return parser


def _overview() -> str:
    width = max(map(len, COMMANDS))
    rows = [f"  {name:{width}}  {summary}" for name, summary in COMMANDS.items()]
    usage = "usage: bmburst COMMAND [OPTIONS]\n\nTrain on sequences longer than one GPU holds, exactly.\n\ncommands:\n"
    return usage + "\n".join(rows) + "\n\nbmburst COMMAND --help lists the command's options. bmburst --version"


def _unknown_command(command: str) -> UserError:
    listed = ", ".join(COMMANDS)
    if not command:
        return UserError(f"no command was given\ncommands: {listed}\nfix: bmburst train, or bmburst --help")
    elsewhere = next((ours for ours, theirs in _COMMANDS_ELSEWHERE.items() if command.lower() in theirs.split()), None)
    near = elsewhere or next(iter(difflib.get_close_matches(command, COMMANDS, n=1, cutoff=0.7)), None)
    hint = f"; did you mean '{near}'?" if near else ""
    return UserError(f"unknown command '{command}'{hint}\ncommands: {listed}\nfix: give one of them, or bmburst --help")
