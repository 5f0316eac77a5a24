"""Lists of commands that measure: those of the repository are checked, and a list is run within a budget."""

import json
from pathlib import Path

import pytest

from benchmarks import suite
from tests.refusals import refused, says

LISTS = sorted((Path(suite.__file__).parent / "suites").glob("*.yaml"))
SLEEPS = "import time; print('asleep', flush=True); time.sleep(600)"
WHERE = "import os; print(os.getcwd())"


def listed(folder, *records, gpus=0):
    path = folder / "list.yaml"
    path.write_text(json.dumps({"gpus": gpus, "records": records}))
    return path


def record(name, code, **fields):
    return {"name": name, "command": f'python -c "{code}"', "seconds": 5, **fields}


def ran(path, output, *words):
    status = suite.main([str(path), "--output", str(output), *words])
    return status, json.loads((output / "suite.json").read_text())["outcomes"]


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_every_command_of_a_list_is_understood_by_its_program(path, capsys):
    assert suite.main([str(path), "--dry-run"]) == 0, capsys.readouterr().out
    runs = suite.read_suite(path).runs
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 * len(runs) + 1 and all(run.asked for run in runs)
    assert printed[-1].startswith(f"{len(runs)} commands, ")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("bmburst bench linear --gatez usual", ("--gatez", "--gates")),
        ("bmburst bench train --gpus 4 --preset llama-4-9b", ("llama-4-9b",)),
        ("bmburst bench attention --gpus 4 --cells nothing/*", ("--cells", "nothing")),
        ("bmburst bench grpo --prompt many", ("--prompt", "many")),
        ("bmburst train --step 1", ("--step", "--steps")),
        ("python -m benchmarks.train_jobs states", ("--output",)),
        ("python -m benchmarks.nothing", ("benchmarks.nothing",)),
        ("python -m pytest tests/gpus", ("tests/gpus",)),
        ("no-such-program train.py", ("no-such-program",)),
    ],
)
def test_a_command_that_its_program_refuses_is_found_without_running_it(command, words):
    with refused(*words):
        suite.check(command.split())


def test_a_list_with_a_command_that_is_refused_says_which(tmp_path, capsys):
    path = listed(tmp_path, {"name": "one", "command": "bmburst bench linear --gatez usual", "seconds": 1})
    assert suite.main([str(path), "--dry-run"]) == 2
    assert "one: 1 s, refused: unknown option '--gatez'" in capsys.readouterr().out


def test_commands_run_in_order_until_the_budget_ends_and_what_ran_does_not_run_again(tmp_path, capsys):
    out, marks = tmp_path / "out", tmp_path / "marks"
    path = listed(
        tmp_path,
        record("first", f"open('{marks}', 'a').write('1')"),
        record("broken", "import sys; print('no memory'); sys.exit(3)"),
        record("slow", SLEEPS, limit=1),
        record("long", "pass", seconds=10_000),
        record("other", "print('{path}')", needs=["no_such_module"]),
        {"name": "last", "command": "echo {path}", "seconds": 5},
    )
    status, found = ran(path, out)
    states = {name: row["state"] for name, row in found.items()}
    assert list(states.values()) == ["ran", "failed", "stopped", "left out", "left out", "ran"] and status == 1
    assert found["broken"]["reason"] == "status 3: no memory"
    assert "budget" in found["long"]["reason"] and "no_such_module" in found["other"]["reason"]
    assert (out / "slow.log").read_text() == "asleep\n" and (out / "last.log").read_text() == f"{out}/last\n"
    assert "| last | ran | " in capsys.readouterr().out
    status, again = ran(path, out, "--only", "f*,last,broken")
    assert marks.read_text() == "1" and again["first"] == found["first"] and again["slow"] == found["slow"]
    assert again["broken"]["state"] == "failed" and status == 1


def test_a_record_is_measured_in_turns_with_an_older_checkout(tmp_path):
    (tmp_path / "old" / "bmburst").mkdir(parents=True)
    path = listed(tmp_path, record("both", WHERE, old="4bf1eadd", turns=2))
    status, found = ran(path, tmp_path / "out")
    assert [row["state"] for row in found.values()] == ["ran", "left out"] * 2 and status == 0
    assert "4bf1eadd" in found["both-old"]["reason"]
    _, found = ran(path, tmp_path / "out", "--old", str(tmp_path / "old"))
    assert list(found) == ["both", "both-old", "both-2", "both-old-2"]
    where = [(tmp_path / "out" / f"{name}.log").read_text().strip() for name in found]
    assert where == [str(suite.ROOT), str(tmp_path / "old")] * 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"gpus": 2}, ("gpus", "records")),
        ({"gpus": 2, "records": [{"name": "a", "command": "bmburst", "second": 1}]}, ("record 0", "second")),
        ({"gpus": 2, "records": [{"name": "a", "command": "bmburst", "seconds": 0}]}, ("record 0", "seconds")),
        ({"gpus": 2, "records": [{"name": "a", "command": "bmburst"}]}, ("record 0", "seconds is missing")),
        ({"gpus": 2, "records": [{"name": "a", "command": "bmburst", "seconds": 1}] * 2}, ("two records", "a")),
    ],
)
def test_a_list_that_is_not_valid_is_refused(tmp_path, content, words):
    path = tmp_path / "list.yaml"
    path.write_text(json.dumps(content))
    with refused(*words):
        suite.read_suite(path)


def test_a_list_is_refused_on_a_machine_with_fewer_gpus(tmp_path, capsys):
    path = listed(tmp_path, record("one", "pass"), gpus=64)
    for words, said in (
        (["--output", str(tmp_path / "out")], ("64 GPUs", "--dry-run")),
        ([], ("--output",)),
        (["--only", "two"], ("two", "one")),
        (["--output", str(tmp_path / "out"), "--old", str(tmp_path)], ("--old", "checkout")),
    ):
        assert suite.main([str(path), *words]) == 2
        assert says(capsys.readouterr().err, *said)
    assert not (tmp_path / "out").exists()
