"""What a cell's memory is read as."""

from types import SimpleNamespace

from benchmarks.engine import job
from benchmarks.engine.job import RankRun


def test_a_cell_is_not_charged_with_what_attention_kept_in_the_last(monkeypatch):
    log = []

    class OneCell(RankRun):
        def __init__(self):
            self.gauge = SimpleNamespace(clear=lambda: log.append("clear"))

        def takes_part(self, _):
            return True

        def from_all(self, value):
            return [value]

        def _keep(self, _, row):
            log.append(row["reason"])

        def refusal(self, _):
            return "refused"

        def measure(self, _): ...

    monkeypatch.setattr(job, "empty_cache", lambda: log.append("given back"))
    OneCell()._try(SimpleNamespace(key="a cell"))
    assert log == ["given back", "clear", "refused"]
