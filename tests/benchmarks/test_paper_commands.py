"""`python -m benchmarks.paper` measures every table of the page again."""

import json
import re
import shlex
import sys
from functools import cache

import pytest

from benchmarks.paper import __main__ as again
from benchmarks.paper.__main__ import SECTIONS, Command
from benchmarks.paper.tables import RESULTS, Recorded
from benchmarks.records import PAGE, PAGE_TABLES
from bmburst.cli import main

PAGE_SECTIONS = dict(re.findall(r"^(## .+?)$(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S))


class Seen(Recorded):
    """Notes the rows and the whole records that are read and exist."""

    def __init__(self):
        super().__init__()
        self.cells, self.records = set(), set()

    def record(self, name):
        found = super().record(name)
        if found is not None and "machine" in found:
            self.records.add(name)
        return found

    def row(self, name, key):
        found = super().row(name, key)
        if found is not None:
            self.cells.add((name, key))
        return found


def section_of(table):
    """The section of the commands that the part of the page with a table names."""
    (text,) = (text for text in PAGE_SECTIONS.values() if f"<!-- table: {table} -->" in text)
    (named,) = re.findall(r"^python -m benchmarks.paper --only (\S+) --run$", text, re.M)
    return named


def listed(command):
    """The cells that a command of bmburst bench lists."""
    words = shlex.split(command.text)
    return _cells(tuple(words[1:])) if words[:2] == ["bmburst", "bench"] else set()


@cache
def _cells(words):
    from contextlib import redirect_stdout
    from io import StringIO

    printed = StringIO()
    with redirect_stdout(printed):
        assert main([*words, "--list"]) == 0
    return {line.split()[0] for line in printed.getvalue().splitlines()}


@pytest.mark.parametrize("table", PAGE_TABLES)
def test_the_commands_of_a_section_measure_its_tables(table):
    """Claims are judged by what other sections measure, too."""
    commands = SECTIONS[section_of(table)]
    if table == "claims":
        commands = [command for section in SECTIONS.values() for command in section]
    seen = Seen()
    PAGE_TABLES[table](seen)
    covered = {(command.record, cell) for command in commands for cell in listed(command)}
    assert seen.cells <= covered
    assert seen.records <= {command.record for command in commands}


def test_sections_are_named_in_the_order_of_the_page():
    named = [re.findall(r"--only (\S+) --run", text) for text in PAGE_SECTIONS.values()]
    assert [name for names in named for name in names] == list(SECTIONS)
    for section in SECTIONS.values():
        for command in section:
            assert not command.record or (RESULTS / f"{command.record}.json").is_file()
            assert command.gpu.lower() in command.record


def test_commands_are_printed(capsys):
    assert again.main(["--only", "figure-4", "--gpus", "1", "--again"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "# figure-4" and lines[-1] == "python -m benchmarks.records"
    steps = next(line for line in lines if line.startswith("bmburst bench train"))
    assert "--gpus 1 " in steps and steps.endswith(
        "--again --output benchmarks/results/train_paper_2xh200_202611.json  # 1 x H200"
    )
    assert not any("--gpus 2" in line for line in lines)
    assert again.main(["--gpus", "0"]) == 0
    printed = capsys.readouterr().out
    assert "python -m benchmarks.slow_links backward --output" in printed and "bench" not in printed.replace(
        "benchmarks", ""
    )


def test_a_command_that_fails_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    """The file of a command is in the folder that was asked for, and the exit status says that one failed."""
    code = "import sys; open(sys.argv[-1], 'w').write('{}'); sys.exit(FAILS)"
    sections = {
        name: (Command(0, name, f"python -c {shlex.quote(code.replace('FAILS', fails))}", again=False),)
        for name, fails in (("first", "3"), ("second", "0"))
    }
    monkeypatch.setattr(again, "SECTIONS", sections)
    assert again.main(["--run", "--output", str(tmp_path)]) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first.json", "second.json"]
    said = capsys.readouterr().out
    assert said.count("failed: python -c") == 1 and "first.json" in said.splitlines()[-1]
    assert json.loads((tmp_path / "second.json").read_text()) == {}


@pytest.mark.parametrize(("own", "runs"), [("", False), ("NVIDIA A100", False), ("NVIDIA H900", True), (None, True)])
def test_a_record_is_continued_on_its_own_gpu_only(tmp_path, own, runs):
    ran = []
    command = Command(1, "r_2xh900", "bmburst bench paper --gpus 2")
    assert again._run(command, tmp_path, own, again=True, run=lambda words: ran.append(words) or 0) == ""
    words = ["-m", "bmburst", "bench", "paper", "--gpus", "2", "--again", "--output", str(tmp_path / "r_2xh900.json")]
    assert ran == ([[sys.executable, *words]] if runs else [])
