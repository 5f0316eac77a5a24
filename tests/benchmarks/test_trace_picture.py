"""Pictures of a profiler's timeline."""

import json

import pytest

from benchmarks.attention.cells import Cell
from benchmarks.attention.kind import timeline_title as attention_title
from benchmarks.engine.timing import draw_timeline, hidden, lanes
from benchmarks.training.cells import TrainCell
from benchmarks.training.kind import timeline_title as train_title

EVENTS = [
    {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9000},
    {"cat": "kernel", "name": "kernel_cutlass_kernel_flash_attncute_fwd", "ts": 1000, "dur": 2000},
    {"cat": "kernel", "name": "void pytorch_flash::flash_bwd_kernel", "ts": 3000, "dur": 1000},
    {"cat": "kernel", "name": "nvjet_tst_128x256_64x4_1x2_h_bz_TNT", "ts": 4500, "dur": 500},
    {"cat": "kernel", "name": "_dots_kernel", "ts": 4600, "dur": 100},
    {"cat": "kernel", "name": "ncclDevKernel_AllGather_RING_LL", "ts": 4750, "dur": 500},
    {"cat": "gpu_memcpy", "name": "Memcpy PtoP (Device -> Device)", "ts": 500, "dur": 1000},
    {"cat": "gpu_memcpy", "name": "Memcpy PtoP (Device -> Device)", "ts": 1200, "dur": 200},
    {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 6000, "dur": 10},
    {"cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "ts": 6500, "dur": 500},
    {"cat": "kernel", "name": "keys_kernel", "ts": 7500, "dur": 500},
]


def test_what_ran_is_sorted_by_kind_and_joined():
    assert lanes(EVENTS) == {
        "attention": [(0.5, 3.5), (7.0, 7.5)],
        "matrix products": [(4.0, 4.5)],
        "other kernels": [(pytest.approx(4.1), pytest.approx(4.2))],
        "NCCL's kernels": [(4.25, 4.75)],
        "copies between GPUs": [(0.0, 1.0)],
        "copies to and from the host": [(5.5, pytest.approx(5.51))],
        "copies inside the GPU": [(6.0, 6.5)],
    }
    assert lanes(EVENTS[:1]) == {}


def test_what_moves_beside_kernels_is_hidden():
    computing = [(0.5, 3.5), (4.0, 4.5)]
    assert hidden([(0.0, 1.0)], computing) == 0.5
    assert hidden([(3.0, 4.25)], computing) == pytest.approx(0.6)
    assert hidden([(5.0, 6.0)], computing) == 0
    assert hidden([], computing) == 1
    assert hidden([(0.0, 1.0)], []) == 0
    assert hidden([(0.0, 1.0), (3.0, 4.25), (5.0, 6.0)], computing) == pytest.approx(1.25 / 3.25)


def test_many_spans_are_not_compared_in_pairs():
    count = 50_000  # pairs would take minutes
    computing = [(float(i), i + 0.5) for i in range(count)]
    assert hidden([(i + 0.25, i + 0.75) for i in range(count)], computing) == pytest.approx(0.5)


def test_a_picture_is_drawn_where_a_gpu_took_part(tmp_path, monkeypatch):
    trace, picture = tmp_path / "t.json", tmp_path / "t.png"
    trace.write_text(json.dumps({"traceEvents": EVENTS}))
    titles = []
    monkeypatch.setattr("benchmarks.engine.timing.set_title", lambda _, *words: titles.append(words))
    title = ("Timeline of attention", "64K tokens, 2 GPUs")
    assert draw_timeline(trace, picture, title) == picture
    assert picture.read_bytes().startswith(b"\x89PNG") and titles == [title]
    trace.write_text(json.dumps({"traceEvents": EVENTS[:1]}))
    assert draw_timeline(trace, tmp_path / "none.png", title) is None
    assert not (tmp_path / "none.png").exists()


def test_titles_of_timelines_are_words():
    attention = Cell(
        suite="sequence", method="ours", ranks=2, device="cuda", tokens=65536, heads=32, kv_heads=8, mask="causal"
    )
    assert attention_title(attention, "forward_backward") == (
        "Timeline of attention, forward + backward, by bmburst",
        "64K tokens, 32 q / 8 kv heads, causal, 2 GPUs",
    )
    step = TrainCell(
        suite="step", method="ulysses", ranks=4, device="cuda", preset="llama-3-8b", layers=2, tokens=131072
    )
    assert train_title(step) == (
        "Timeline of a training step by ulysses",
        "llama-3-8b, 2 of 32 layers, 128K tokens, 4 GPUs",
    )
