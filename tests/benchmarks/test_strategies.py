"""The benchmark of strategies runs, and says what `auto` takes."""

import json
import subprocess
import sys


def test_two_ranks_measure_each_strategy(tmp_path):
    path = tmp_path / "found.json"
    command = [sys.executable, "-m", "bmburst", "launch", "--nproc", "2", "--", "-m", "benchmarks.strategies"]
    done = subprocess.run(
        [*command, "--cases", "3", "--output", str(path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    *_, divided, odd = json.loads(path.read_text())["rows"]
    assert {"heads", "gather", "ring"} < set(divided) and "heads" not in odd  # 7 heads on 2 ranks
    assert (divided["query_heads"], odd["query_heads"]) == (40, 7) and odd["auto"] in ("gather", "ring")
    table = path.with_suffix(".md").read_text()
    assert table == done.stdout[done.stdout.index("| query") :]
    assert len(table.splitlines()) == 5 and "| 7 / 7 | 128 | causal | - |" in table
