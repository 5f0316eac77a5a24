"""What repeats recorded runs says what they say, and `python -m benchmarks.records` sees to it."""

import json
import re

import pytest

from benchmarks import records
from benchmarks.engine.kinds import Results, load_kind
from benchmarks.engine.report import markdown


def test_what_repeats_records_is_up_to_date():
    old = [str(path) for path, text in records.derived() if path.read_text() != text]
    assert not old, "run python -m benchmarks.records"


def test_the_planners_rows_get_the_numbers_of_the_records():
    text = records._MEASURED.read_text()
    numbers = r"(?m)^(\w+_ms|seconds|memory_gib|outside_gib|peak_gib) = .*$"
    scrambled = re.sub(numbers, r"\1 = 77", text)
    mended = records._with_rows(scrambled)
    left = [block for block in mended.split("\n\n") if "= 77" in block]
    assert all("main_job" in block for block in left)  # a record of that has no JSON
    assert [block for block in mended.split("\n\n") if block not in left] == [
        block for block in text.split("\n\n") if "main_job" not in block
    ]


@pytest.mark.parametrize("head", ["", "# A title\n\nBy hand.\n\n"])
def test_a_record_keeps_what_stands_above_its_tables(tmp_path, head):
    """A run writes no title; where one was added by hand, it stays."""
    source = records._RESULTS / "cross_2xh200_202611.json"
    run = json.loads(source.read_text())["machine"]
    cell = {"suite": "sequence", "method": "ours", "ranks": 2, "device": "cuda", "tokens": 64, "heads": 32}
    row = {"cell": cell | {"kv_heads": 32}, "run": 0, "status": "refused", "reason": "no"}
    content = {"format": load_kind("attention").format, "running": None, "runs": [run], "rows": {"k": row, "l": row}}
    (tmp_path / "attention_x.json").write_text(json.dumps(content))
    tables = markdown(Results.read(load_kind("attention"), tmp_path / "attention_x.json"))
    (tmp_path / "attention_x.md").write_text(head + tables)
    path, text = next(records.tables(tmp_path))
    assert path == tmp_path / "attention_x.md" and text == head + tables.rstrip() + "\n"
    assert tables.startswith("## ") and text.count("\n## ") + text.startswith("## ") == 3


@pytest.mark.parametrize("head", ["", "# A title\n\nBy hand: 65 or\nmore.\n\n"])
@pytest.mark.parametrize("old", ["", "| mask |\n", "| mask |\n|---|\n| full |\n\n", "65,536 keys; ms:\n\n| a |\n"])
def test_nothing_of_an_old_table_stays(head, old):
    """Not its head either, where an earlier table had no line above it."""
    assert records.notes_above(head + old, "65,537 keys; ms:\n\n| b |\n") == head


def test_records_name_the_commit_and_the_program_of_their_runs():
    """What is written by hand above a table follows the JSON beside it."""
    seen = 0
    for path, _, record in records.row_records(records._RESULTS):
        run = record["machine"]
        said = re.search(r"Python [^`]*?commit (\w{7}\+?)", path.read_text())
        if said and run["commit"]:
            whole = run["commit"]
            assert said[1] == whole[:7] + whole[40:], path.name
            (program,) = re.findall(r"-m benchmarks\.[\w.]+ |bmburst bench [\w-]+ ", run["command"])
            assert program in " ".join(path.read_text().split()), path.name
            seen += 1
    assert seen >= 4


@pytest.mark.parametrize("check", [True, False])
def test_what_is_old_is_said_and_written_unless_asked_not_to(tmp_path, capsys, check):
    file = tmp_path / "table.md"
    file.write_text("old")
    words = ["--check"] if check else []
    assert records.main(words, [(file, "new")]) == check
    assert capsys.readouterr().out.endswith("table.md\n") and file.read_text() == ("old" if check else "new")
    assert records.main(words, [(file, file.read_text())]) == 0 and not capsys.readouterr().out
