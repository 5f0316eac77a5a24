"""What a cell's memory is read as."""

from types import SimpleNamespace

from bmburst.bench import loop
from bmburst.bench.loop import Loop


def test_a_cell_is_not_charged_with_what_attention_kept_in_the_last(monkeypatch):
    log = []

    class OneCell(Loop):
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
        def line(self, *_): ...

    monkeypatch.setattr(loop, "empty_cache", lambda: log.append("given back"))
    OneCell()._try(SimpleNamespace(key="a cell"))
    assert log == ["given back", "clear", "refused"]
