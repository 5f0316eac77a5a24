"""Results as a run leaves them, made up."""

from benchmarks.engine.kinds import Results

HEADER = {"date": "2026-11-21", "command": "bmburst bench", "ranks": 8, "device": "NVIDIA H200", "python": "3.12"}
HEADER |= {"torch": "2.11", "bmburst": "0", "commit": None, "packages": {"triton": "3.6"}}


def results(kind, *rows, **header):
    """Return the results of one run: rows with their cells, and changes of its header."""
    made = Results(kind, runs=[HEADER | header])
    for at, row in rows:
        made.put(at, row)
    return made
