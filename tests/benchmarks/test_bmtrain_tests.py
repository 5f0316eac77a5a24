"""BMTrain's own test files are found in a clone, run on the host runtime, and put in a table."""

import importlib.util
import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.bmtrain_tests import FAILED, KNOWN, LATE, PASSED, SKIPPED, find_files, judge, run_file, table
from bmburst.cli import main
from bmburst.errors import UserError
from bmburst.setup.install_bmtrain import REQUIREMENT
from tests.refusals import says

ROOT = Path(__file__).parents[2]
RECORD = "benchmarks/results/bmtrain_tests_2cores_202611.md"
FILES = {
    "all": 'tests = [("sum", 2), ("training", 4)]',
    "sum": "import bmtrain as bmt, torch; bmt.init_distributed(); assert bmt.sum_loss(torch.ones(1).cuda()) == 1",
    "optim": "raise ValueError('a | b')",
    "store": "from bmtrain.store import nothing_of_this_name",
    "training": "",
}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    for name, text in FILES.items():
        (tmp_path / "tests" / f"test_{name}.py").write_text(text)
    return tmp_path


def test_files_run_on_the_ranks_that_bmtrains_list_gives_them(clone: Path) -> None:
    assert find_files(clone) == {"optim": 1, "store": 4, "sum": 2, "training": 4}
    assert find_files(clone, ["sum"]) == {"sum": 2}
    with pytest.raises(UserError) as error:
        find_files(clone, ["summ"])
    says(str(error.value), "summ | allowed: optim store sum training")
    with pytest.raises(UserError) as error:
        find_files(clone / "tests")
    says(str(error.value), "not a clone of BMTrain | git clone")


@pytest.mark.long
def test_a_file_passes_or_fails_with_its_error(clone: Path) -> None:
    passed, failed = (run_file(clone, name, ranks, 300) for name, ranks in (("sum", 2), ("optim", 1)))
    assert (passed.result, passed.why) == (PASSED, "")
    assert (failed.result, failed.why) == (FAILED, r"`ValueError: a \| b`")


def test_other_outcomes(clone: Path) -> None:
    skipped = run_file(clone, "training", 4, 60, memory={"training": 1 << 60})
    assert (skipped.result, skipped.seconds) == (SKIPPED, 0) and "GiB" in skipped.why
    late = judge("sum", 1, 124, 60.4, "")
    assert late.result == LATE and "60 seconds" in late.why
    known = judge("store", 4, 1, 2.0, "ImportError: cannot import name 'x' from 'y' (/a/path.py)\n")
    assert known.why.startswith(KNOWN["store"]) and known.why.endswith("`ImportError: cannot import name 'x' from 'y'`")
    machine = {"date": "2026-11-24", "device": "CPU", "bmburst": "0.1", "commit": "abc", "packages": {}, "command": "c"}
    text = table({"machine": machine, "rows": [asdict(each) for each in (skipped, late, known)]})
    assert "0 pass, 1 fail, 1 were not done in time, 1 need more memory" in text
    assert (
        f"| `test_store.py` | 4 | {FAILED} | 2 | {known.why} |" in text
        and f"| `test_sum.py` | 1 | {LATE} | 60 |" in text
    )


def test_a_late_file_is_ended(clone: Path) -> None:
    (clone / "tests" / "test_sum.py").write_text("import time; time.sleep(600)")
    assert run_file(clone, "sum", 1, 2.0).result == LATE


def test_what_bmtrain_lacks_it_lacks() -> None:
    """The reasons given for tests that fail on GPUs too, read from the installed BMTrain."""
    spec = importlib.util.find_spec("bmtrain")
    assert spec is not None and spec.origin is not None and REQUIREMENT == "bmtrain==1.0.1"
    folder = Path(spec.origin).parent
    assert not re.search(r"\ballgather_object\b", (folder / "store.py").read_text())
    assert "CheckpointBlockContext" not in (folder / "block_layer.py").read_text()
    assert "opt.state_dict(gather_opt) for opt" in (folder / "optim" / "optim_manager.py").read_text()
    assert set(KNOWN) == {"store", "grad_accu", "optim_state"}


def test_the_page_has_the_rows_of_the_record() -> None:
    rows = [re.findall(r"^\| .*$", (ROOT / path).read_text(), re.M) for path in (RECORD, "docs/bmtrain.md")]
    record_rows = [row for row in rows[0] if row.startswith("| `test_")]
    assert len(record_rows) == 26 and record_rows == [row for row in rows[1] if row.startswith("| `test_")]


def test_the_command_line_writes_the_record(clone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "record.json"
    words = ["--output", str(output), "--only", "optim"]
    assert main(["bench", "bmtrain-tests", str(clone), *words, "--timeout", "0.01"]) == 0
    (row,) = json.loads(output.read_text())["rows"]
    assert (row["name"], row["ranks"], row["result"]) == ("optim", 1, LATE)
    assert capsys.readouterr().out == output.with_suffix(".md").read_text()
    assert main(["bench", "bmtrain-tests", str(tmp_path / "none"), *words]) == 2
    assert says(capsys.readouterr().err, "none | not a clone of BMTrain | git clone")
