"""The command line as a whole: commands, help, exit status, one message for bad input."""

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import types
from contextlib import nullcontext
from pathlib import Path

import pytest

import bmburst
from bmburst.cli import COMMANDS, CommandParser, find_command, main
from bmburst.cli.program import any_text
from bmburst.errors import UserError
from tests.refusals import says

ROOT = Path(bmburst.__file__).parents[1]


@pytest.fixture
def command(monkeypatch):
    """Install a command "check" whose run is replaced, and return a function that sets it."""
    module = types.ModuleType("bmburst.cli.check")
    module.HELP = "A stand-in."

    def configure(parser):
        parser.add_argument("--count", type=int)
        parser.add_argument("--dry-run", action="store_true")
        parser.add_argument("--name")
        parser.add_argument("--names", nargs="+")
        parser.add_argument("--maybe", nargs="?", const="true")

    module.configure = configure
    module.run = lambda _: 0
    monkeypatch.setitem(sys.modules, "bmburst.cli.check", module)
    monkeypatch.delenv("BMBURST_LAUNCH_FOLDER", raising=False)

    def install(run):
        module.run = run

    return install


def refused(capsys, *argv):
    assert main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert 1 <= len(err.splitlines()) <= 3
    return err


def test_overview_names_every_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_found_with_help(name, capsys):
    assert isinstance(find_command(name).HELP, str)
    assert main([name, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: bmburst {name}")


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"bmburst {bmburst.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["trian"], "bmburst: unknown command 'trian'; did you mean 'train'? | fix:"),
        (["sft"], "'sft'; did you mean 'train'?"),
        (["merge"], "'merge'; did you mean 'convert'?"),
        (["chat"], "'chat'; did you mean 'generate'?"),
        (["build_bmtrain"], "'build_bmtrain' | 'build-bmtrain'"),
        (["xyz"], "'xyz' | train, generate, eval"),
        ([], "no command | train, generate, eval"),
        (["--verbose"], "'--verbose' | train, generate, eval"),
    ],
)
def test_unknown_commands(argv, words, capsys):
    says(refused(capsys, *argv), words)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--cuont", "3"], "'--cuont' | '--count'"),
        (["--cou", "3"], "'--cou' | '--count'"),
        (["--count=3", "--zzz=1"], "'--zzz'"),
        (["-q"], "'-q'"),
        (["stray"], "'stray'"),
        (["--count"], "--count | one argument"),
        (["--count", "x"], "--count x | whole number"),
        (["--dry-run=1"], "--dry-run"),
    ],
)
def test_bad_options(argv, words, command, capsys):
    text = refused(capsys, "check", *argv)
    assert text.startswith("bmburst check: ")
    says(text, words, "bmburst check --help all")


def test_two_dashes_as_a_value(command, capsys):
    seen = []
    command(lambda args: seen.append((args.name, args.names, args.maybe)) or 0)
    assert main(["check", "--name=--", "--names=--", "--maybe=--"]) == 0
    assert seen == [("--", ["--"], "--")]
    says(refused(capsys, "check", "--count=--"), "--count -- | whole number")


def test_a_value_that_is_none_of_the_allowed_names_the_nearest(capsys):
    says(refused(capsys, "bench", "atention"), "'atention' | did you mean 'attention'? | bmburst bench --help")
    words = "--runtime | 'tourch' | did you mean 'torch'? | bmtrain, torch"
    says(refused(capsys, "bench", "attention", "--runtime", "tourch"), words)


def test_exit_status_and_arguments_pass_through(command):
    seen = []
    command(lambda args: seen.append(args.count) or 7)
    assert main(["check", "--count", "3"]) == 7
    assert seen == [3]


ERROR = UserError("the value\nallowed: others\nfix: this")


@pytest.mark.parametrize(
    ("error", "launched", "status", "told"),
    [
        (ERROR, False, 2, f"bmburst check: {ERROR}\n"),
        (ERROR, True, None, ""),  # the launcher gets it
        (KeyboardInterrupt(), False, 130, ""),
        (RuntimeError("ours"), False, None, ""),  # it is not hidden
    ],
)
def test_errors_of_a_command(command, monkeypatch, capsys, error, launched, status, told):
    def fail(args):
        raise error

    command(fail)
    if launched:
        monkeypatch.setenv("BMBURST_LAUNCH_FOLDER", "x")
    with pytest.raises(type(error)) if status is None else nullcontext() as caught:
        assert main(["check"]) == status
    assert caught is None or caught.value is error
    assert capsys.readouterr().err == told


def test_words_that_look_like_values_are_values():
    parser = CommandParser(prog="p", description="")
    parser.add_argument("--shift", type=float)
    assert parser.read(["--shift", "-1.5"]).shift == -1.5


def test_the_users_folder_is_read_where_no_shell_wrote_it(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    parser = CommandParser(prog="p", description="")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--prompt", type=any_text)
    parser.add_argument("script", nargs="*")
    args = parser.read(["--output=~/run", "--prompt", "~/run", "--", "~/it"])
    assert (args.output, args.prompt, args.script) == (Path("/home/me/run"), "~/run", ["~/it"])


def run(*argv, code=None, program=None, timeout=60, **options):
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "RANK")}
    call = [program, *argv] if program else [sys.executable, *(["-c", code] if code else ["-m", "bmburst", *argv])]
    return subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, **options)


def test_an_output_that_is_full_or_closed_ends_no_command_with_a_traceback():
    command = f"{shlex.quote(sys.executable)} -m bmburst"
    full = run("-c", f"{command} train --help > /dev/full", program="bash")
    assert full.returncode == 2
    assert full.stderr == (
        "bmburst train: cannot write the output: No space left on device\n"
        "fix: free disk space, or write to another disk\n"
    )
    closed = run("-c", f"{command} train --help >&- <&-; echo $?; {command} train --lr x 2>&-; echo $?", program="bash")
    assert (closed.stdout.split(), closed.stderr) == (["0", "2"], "")


def test_a_working_folder_that_was_removed_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    says(refused(capsys, "train", "--steps", "1"), "working directory was removed | fix: cd")


@pytest.mark.parametrize("argv", [["--help"], ["train", "--help"], ["train", "--lr", "1"], ["eval", "--help"]])
def test_help_and_refusals_need_neither_torch_nor_yaml(argv):
    heavy = "{'torch', 'numpy', 'yaml', 'bmtrain', 'matplotlib', 'tqdm'}"
    code = f"import sys; from bmburst.cli import main; main({argv}); print(sorted({heavy} & set(sys.modules)))"
    assert run(code=code).stdout.splitlines()[-1] == "[]"


def test_training_starts_ranks_without_torch_and_steps_without_its_compiler(tmp_path):
    """The launcher imports torch while its ranks do; torch imports its compiler at the first call of an optimizer."""
    (tmp_path / "text.txt").write_text("a few words of text. " * 40)
    words = ["train", "--data", tmp_path / "text.txt", "--data.tokenizer", "bytes", "--sequence-length", 16]
    words += ["--steps", 2, "--output", tmp_path / "run", "--eval-every", 0, "--sample-tokens", 0]
    code = f"""
        import os, sys
        from bmburst.cli import main
        from bmburst.launch import handover
        def run_here(module, request, spec):
            assert spec.nproc == 1 and "torch" not in sys.modules
            from bmburst.train import trainer
            trainer._LONG = 0.0  # every part is shown when it ends
            return handover._call(module, request)
        handover.run_on_ranks = run_here
        assert main({[*map(str, words), "--nproc", "1"]}) == 0
        assert "torch" in sys.modules and "torch._dynamo" not in sys.modules
    """
    done = run(code=textwrap.dedent(code), timeout=300)
    assert done.returncode == 0, done.stderr
    parts = json.loads((tmp_path / "run" / "summary.json").read_text())["beginning_seconds"]
    model = "model", "initial weights", "kernels", "weights", "optimizer"
    assert [*parts] == ["imports", "ranks", "data", *model, "first step"]
    assert min(parts.values()) >= 0 and parts["imports"] > parts["kernels"] and parts["first step"] > 0
    says(done.stderr, "s to the end of the first step: imports", "first step", lines=99)
    shown = [line.split(":")[0] for line in done.stderr.splitlines() if re.fullmatch(r"[a-z ]+: \d+ s", line)]
    assert shown == ["ranks", "data", *model[:2], "model", *model[2:]]
    assert max(map(len, done.stderr.split("MFU")[1].splitlines()[:-1])) < 80  # the last line has the folder


def test_python_m_from_the_source_tree():
    done = run("--version")
    assert (done.returncode, done.stderr) == (0, "")
    done = run("train", "--layout", "zigzog")
    assert (done.returncode, done.stdout) == (2, "")
    told = says(done.stderr, "parallel.layout", "'zigzog'", "'zigzag'", "balanced, contiguous, striped, zigzag")
    assert told.startswith("bmburst train: ")


def test_a_reader_that_goes_away_is_no_traceback():
    code = "import sys; from bmburst.cli import main; sys.exit(main(['--help']))"
    call = f'(sleep 0.2; exec {sys.executable} -c "{code}") | true; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", call], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("141\n", "")
