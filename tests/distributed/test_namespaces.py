"""Both rings between network namespaces with slow links, for real; or the reason why there can be none here."""

import re

import pytest

from benchmarks import netns
from benchmarks.slow_links import main


@pytest.mark.long
def test_double_ring_over_slow_links(tmp_path, capsys):
    """Results are compared inside; here, that the kernel saw a third of the bytes at the slow ports."""
    file = tmp_path / "record.md"
    options = ["--port", "rank", "--slow", "400", "--fast", "800", "--repeats", "1"]
    status = main(["double-ring", *options, "--output", str(file)])
    printed = capsys.readouterr().out
    if (problem := netns.refusal()) is not None:
        assert (status, printed) == (1, f"cannot measure here: {problem}\n")
        assert not file.exists()
        return
    assert status == 0
    assert printed.strip() in file.read_text()
    moved = dict(re.findall(r"\| (flat|double) ring \|.*\| ([\d.]+) \| [\d.]+ \|", printed))
    assert 2.8 < float(moved["flat"]) / float(moved["double"]) < 3.6  # 10 of 3 blocks of fp32 queries, and headers


def test_what_has_no_iproute2_is_told_so(monkeypatch, capsys):
    monkeypatch.setattr(netns.shutil, "which", lambda _: None)
    assert main(["double-ring"]) == 1
    assert capsys.readouterr().out == "cannot measure here: the program 'ip' is missing (package iproute2)\n"
