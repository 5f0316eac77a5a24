"""Both rings between network namespaces with slow links, for real; or the reason why there can be none here."""

import re

import pytest

from benchmarks import netns
from bmburst.cli import main
from tests.refusals import says


@pytest.mark.long
def test_double_ring_over_slow_links(tmp_path, capsys):
    """Results are compared inside; here, that the kernel saw a third of the bytes at the slow ports."""
    file = tmp_path / "record.json"
    options = ["--port", "rank", "--slow", "400", "--fast", "800", "--repeats", "1"]
    status = main(["bench", "double-ring", *options, "--output", str(file)])
    printed, message = capsys.readouterr()
    if (problem := netns.refusal()) is not None:
        assert status == 2 and says(message, problem)
        assert not file.exists()
        return
    assert status == 0
    assert printed == file.with_suffix(".md").read_text()
    moved = dict(re.findall(r"\| (flat|double) ring \|.*\| ([\d.]+) \| [\d.]+ \|", printed))
    assert 2.8 < float(moved["flat"]) / float(moved["double"]) < 3.6  # 10 of 3 blocks of fp32 queries, and headers


def test_what_has_no_iproute2_is_told_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["bench", "double-ring"]) == 2
    assert says(capsys.readouterr().err, "cannot measure here", "'ip'", "iproute2")
