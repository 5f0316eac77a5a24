"""Results as a run leaves them, made up, and records of benchmarks of rows that do run."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.engine.kinds import Results
from tests.docs.scripts import run_script

BENCH = ("-m", "bmburst", "bench")
ROOT = Path(__file__).parents[2]

HEADER = {"date": "2026-11-21", "command": "bmburst bench", "ranks": 8, "device": "NVIDIA H200", "python": "3.12"}
HEADER |= {"torch": "2.11", "bmburst": "0", "commit": None, "packages": {"triton": "3.6"}}


def results(kind, *rows, **header):
    """Return the results of one run: rows with their cells, and changes of its header."""
    made = Results(kind, runs=[HEADER | header])
    for at, row in rows:
        made.put(at, row)
    return made


def measured(folder, ranks, *words):
    """Run a benchmark of rows on ranks, or with 0 by the command, which starts its own; return record and table."""
    path = folder / "found.json"
    words = [*BENCH, *words, "--output", str(path)]
    if ranks:
        run_script(folder, ranks, words)
    else:
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300, cwd=ROOT)
        assert done.returncode == 0 and done.stdout.endswith(path.with_suffix(".md").read_text()), done.stderr
    return json.loads(path.read_text()), path.with_suffix(".md").read_text()
