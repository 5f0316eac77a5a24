"""README.md and CONTRIBUTING.md do what they say: blocks run, commands and options exist, files are there.

The blocks run in order in one folder, as a reader would run them. A block whose first line names a file is saved under
that name; other Python blocks run one after the other in one process. A block under `<!-- needs: gpus -->`, network or
time is not run: each of its commands is checked as far as it goes without.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from bmburst.cli import COMMANDS
from tests.docs.blocks import read_blocks
from tests.docs.commands import exists
from tests.docs.scripts import run_script

ROOT = Path(__file__).parents[2]
README = read_blocks(ROOT / "README.md")
DOCUMENTS = {name: (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md")}
NOT_RUN = [block for name in DOCUMENTS for block in read_blocks(ROOT / name) if block.needs]
PROGRAMS = {"bmburst": "-m bmburst", "torchrun": "-m torch.distributed.run", "python": ""}
SCRIPT = re.compile(
    r"(?P<launcher>torchrun --nproc-per-node|bmburst launch --nproc) (?P<ranks>\d) (-- )?(?P<file>\w+\.py)"
)
SECONDS = 600  # for one block, on a machine that others load: more than that is a hang


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A fresh clone as far as the blocks look at it, with the files that blocks name."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("README.md", "CONTRIBUTING.md", "Makefile"):
        shutil.copy(ROOT / name, folder)
    for name in ("bmburst", "bmburst_ops", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for block in README:
        if block.file:
            (folder / block.file).write_text(block.text)
    return folder


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    """Run a program in the folder, in an environment without GPUs, and return what it printed."""
    home = tmp_path_factory.mktemp("home")
    for name, arguments in PROGRAMS.items():
        program = home / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        program.chmod(0o755)
    launcher = ("BMBURST", "RANK", "WORLD_", "LOCAL_")
    ours = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    ours |= {
        "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }

    def start(*words, check=True):
        done = subprocess.run(words, cwd=folder, env=ours, capture_output=True, text=True, timeout=SECONDS, check=False)
        printed = done.stdout + done.stderr
        assert done.returncode == 0 or not check, f"{shlex.join(words)}\n{printed}"
        return printed

    return start


@pytest.fixture(scope="module")
def shell(run, folder):
    """Run the shell blocks, and return what they printed.

    A script is started once by each of the launchers; the others start on processes that have imported torch already.
    """
    printed, started = [], set()
    for block in (block for block in README if block.language == "bash" and not block.needs):
        if (script := SCRIPT.fullmatch(block.text.strip())) and script["launcher"] in started:
            by_us = script["launcher"].startswith("bmburst")
            printed.append(run_script(folder, int(script["ranks"]), [script["file"]], host=by_us))
            continue
        if script:
            started.add(script["launcher"])
        printed.append(run("bash", "-euo", "pipefail", "-c", block.text))
    assert started == {"torchrun --nproc-per-node", "bmburst launch --nproc"}
    return "\n".join(printed)


def test_shell_blocks_run_in_order(shell, folder):
    assert "rank 0 holds 502 of 1001 tokens" in shell
    assert "step 9: loss" in shell
    losses = [float(loss) for loss in re.findall(r"step \d+: loss (\S+) nats", shell)]
    assert losses[-1] < losses[0] - 0.5, losses
    assert re.search(r"bits per byte +\d", shell)
    steps = (folder / "runs/small/metrics.jsonl").read_text().splitlines()
    assert len(steps) == 8


def test_python_blocks_run_in_one_process(run, folder):
    blocks = [block for block in README if block.language == "python" and not block.file]
    assert all(block.needs is None for block in blocks)
    (folder / "blocks.py").write_text("\n".join(block.text for block in blocks))
    run(sys.executable, "blocks.py")
    assert (folder / "runs/python/checkpoints/step-000002/model.safetensors").is_file()


def test_console_blocks_show_what_is_printed(run):
    shown = [block for block in README if block.language == "console"]
    assert shown
    for block in shown:
        for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
            command, _, expected = part.partition("\n")
            assert run(*shlex.split(command), check=False) == expected


def test_every_block_is_run_or_checked():
    known = {"bash", "python", "yaml", "console", "text"}
    assert {block.language for block in README} <= known
    named = [block.file for block in README if block.language in ("python", "yaml") and block.file]
    shell = "\n".join(block.text for block in README if block.language == "bash" and not block.needs)
    assert [name for name in named if name not in shell] == []
    assert {block.needs for block in NOT_RUN} <= {"gpus", "network", "time"}


@pytest.mark.parametrize("block", NOT_RUN, ids=lambda block: f"{block.needs}-{block.line}")
def test_commands_that_are_not_run_exist(block, folder, tmp_path, monkeypatch, capsys):
    subprocess.run(["bash", "-n", "-c", block.text], check=True)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("runs"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "BMBURST_LAUNCH_FOLDER"):
        monkeypatch.delenv(name, raising=False)
    started = []
    monkeypatch.setattr("bmburst.runtime.launch.launch", lambda *call: started.append(call) or 0)
    if block.needs == "gpus":
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    for command in block.commands():
        words = shlex.split(command)
        assert exists(words), f"nothing knows how to check: {command}"
    assert capsys.readouterr().err == ""


def test_the_table_of_commands_is_the_command_line():
    rows = re.findall(r"^\| `bmburst ([\w-]+)` \|", DOCUMENTS["README.md"], re.M)
    assert sorted(rows) == sorted(COMMANDS)


def test_the_tree_is_the_repository():
    text = next(block.text for block in README if block.text.startswith("bmburst/ "))
    paths, parent = [], ""
    for line in text.splitlines():
        name = line.split()[0]
        parent = parent if line.startswith(" ") else (name if name.endswith("/") else "")
        paths.append(parent + name if line.startswith(" ") else name)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    package = {f"bmburst/{p.name}{'/' * p.is_dir()}" for p in (ROOT / "bmburst").iterdir() if p.name != "__pycache__"}
    assert package - set(paths) == set(), "not in the README's tree"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_and_paths_lead_somewhere(name):
    text = DOCUMENTS[name]
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if not link.startswith("http")]
    paths = re.findall(r"`((?:bmburst|bmburst_ops|tests|benchmarks|docs|\.ci)/[\w./-]*)`", text)
    assert [path for path in links + paths if not (ROOT / path).exists()] == []
    assert text.isascii()


def test_fields_that_the_text_names_are_written():
    from bmburst.train.metrics import EvalMetrics, StepMetrics

    listed = dict(re.findall(r"^(\w+\.jsonl) +a line an? [^:]+: (.+)$", DOCUMENTS["README.md"], re.M))
    assert listed["metrics.jsonl"].split(", ") == list(StepMetrics.__dataclass_fields__)
    assert listed["evals.jsonl"].split(", ") == list(EvalMetrics.__dataclass_fields__)


def test_the_run_folder_is_as_shown(folder):
    text = next(block.text for block in README if block.text.startswith("config.json"))
    names = [line.split()[0] for line in text.splitlines()]
    short = "--steps 1 --sequence-length 512 --eval-sequences 1 --sample-tokens 1"
    run_script(folder, 2, ["-m", "bmburst", "train", "--data", "bmburst", *short.split(), "--output", "runs/shown"])
    written = {p.name for p in (folder / "runs/shown").iterdir()}
    assert written == {
        name.split("/")[0] for name, line in zip(names, text.splitlines(), strict=True) if line[0] != " "
    }
    inside = {name for name, line in zip(names, text.splitlines(), strict=True) if line[0] == " "}
    assert {p.name for p in (folder / "runs/shown/checkpoints/step-000001").iterdir()} == inside


def test_pre_commit_runs_what_make_check_runs():
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repo["repo"] == "local"
    tools = {hook["entry"].split()[0].removeprefix(".venv/bin/") for hook in repo["hooks"]}
    assert tools == set(re.findall(r"\$\(BIN\)/(ruff|mypy)", (ROOT / "Makefile").read_text()))
    assert {hook["language"] for hook in repo["hooks"]} == {"system"}
