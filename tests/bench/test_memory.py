"""What a cell's memory is read as."""

import torch

from bmburst.attention.recording import recording
from bmburst.bench.memory import Gauge


def test_a_cell_is_not_charged_with_what_graphs_of_the_last_one_keep(monkeypatch):
    given_back = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(recording("work") is not before))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    before = recording("work")
    Gauge(torch.device("cuda", 0)).clear()
    assert given_back == [True]
