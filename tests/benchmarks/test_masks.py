"""Documents and a sliding window in the suite: who sees whom, what work that is, and how it is shown."""

import math
import statistics
from itertools import accumulate, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.attention.cells import (
    Cell,
    Selection,
    facts,
    forward_flops,
    list_cells,
    mask_of,
    median_tokens,
    one_gpu_cell,
    pattern_of,
    plain_causal,
    sample_document_lengths,
    visible_pairs,
    window_tokens,
)
from benchmarks.attention.kind import KIND, draw
from benchmarks.attention.measure import measure_speed
from benchmarks.attention.method import LocalKernel, Method, Setting, prepare
from benchmarks.attention.methods import all_methods
from benchmarks.attention.packages import zigzag_positions
from benchmarks.engine.job import Job
from benchmarks.engine.kinds import OK, REFUSED
from benchmarks.engine.machine import Gauge, RankGroup
from benchmarks.engine.report import markdown, row_line
from bmburst.schedule.tiles import visible_area
from bmburst_ops.pattern import visible_ranges
from tests.benchmarks.made import results
from tests.mask_oracle import visible

METHODS = all_methods("cuda")
MASKED = ("documents", "window")


def cell(mask="documents", method="ours", **changes):
    values = {"suite": mask, "ranks": 8, "device": "cuda", "tokens": 131072, "heads": 32, "kv_heads": 8}
    return Cell(method=method, mask=mask, **{**values, **changes})


@pytest.mark.parametrize("tokens", [16, 17, 97, 256, 1000])
@pytest.mark.parametrize("mask", MASKED)
def test_mask_pattern_and_pairs_are_one_thing(mask, tokens):
    seen = visible(mask_of(mask, tokens), tokens)
    assert visible_pairs(mask, tokens) == seen.sum()
    everything = np.arange(tokens)
    assert visible_area(mask_of(mask, tokens), tokens, everything) == seen.sum()
    for start, stop in (
        mask_of(mask, tokens).rows(everything, tokens),
        visible_ranges(pattern_of(mask, tokens), tokens, tokens),
    ):
        assert (((everything >= start[:, None]) & (everything < stop[:, None])) == seen).all()


@pytest.mark.parametrize("tokens", [131072, 262144, 524288])
def test_work_is_that_of_the_mask_at_full_size(tokens):
    for mask in MASKED:
        area = visible_area(mask_of(mask, tokens), tokens, np.arange(tokens))
        assert forward_flops(cell(mask, tokens=tokens)) == 4.0 * area * 32 * 128


def test_documents_are_long_tailed_and_always_the_same():
    assert sample_document_lengths(131072)[:3] == sample_document_lengths(524288)[:3] == (7641, 5086, 1578)
    for tokens in (131072, 524288, 1 << 22):
        lengths = sample_document_lengths(tokens)
        assert sum(lengths) == tokens and min(lengths) >= 16
    logs = [math.log(n) for n in lengths]
    assert len(logs) > 500
    assert abs(statistics.mean(logs) - math.log(2048)) < 0.2 and abs(statistics.stdev(logs) - 1.3) < 0.1
    assert sum(sorted(lengths)[-len(lengths) // 10 :]) > 0.3 * sum(lengths)  # a tenth of them holds much of all


def test_short_sequences_have_short_documents_and_windows():
    assert [median_tokens(n) for n in (64, 1024, 32768, 1 << 20)] == [16, 64, 2048, 2048]
    assert [window_tokens(n) for n in (8, 256, 65536, 262144)] == [1, 16, 4096, 4096]
    for tokens in range(1, 200):
        lengths = sample_document_lengths(tokens)
        assert sum(lengths) == tokens and (min(lengths) >= 16 or lengths == (tokens,))


@pytest.mark.parametrize("mask", MASKED)
def test_one_gpu_gets_a_ranks_share_of_the_same_documents_or_window(mask):
    for ranks, heads, expected in ((8, (32, 8), (4, 1)), (2, (32, 32), (16, 16)), (8, (32, 4), (4, 1))):
        at = cell(mask, ranks=ranks, heads=heads[0], kv_heads=heads[1])
        one = one_gpu_cell(at)
        assert (one.heads, one.kv_heads, one.tokens, one.mask) == (*expected, at.tokens, mask)
        assert forward_flops(one) == forward_flops(at) / ranks and one == one_gpu_cell(one)
        plain = plain_causal(at)
        assert plain.mask == "causal" and (plain.heads, plain.kv_heads) == heads
        assert 0.96 < forward_flops(plain) / forward_flops(one) <= 1
    uneven = one_gpu_cell(cell(mask, ranks=3, heads=4, kv_heads=2))
    assert (uneven.heads, uneven.kv_heads) == (1, 1)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_zigzag_in_each_document_holds_every_token_once(size):
    lengths = (16, 61, 17, 1, 128)
    held = [zigzag_positions(lengths, size, rank) for rank in range(size)]
    assert len({len(own) for own in held}) == 1
    assert sorted(p for own in held for p in own if p >= 0) == list(range(sum(lengths)))
    chunks = [-(-n // (2 * size)) for n in lengths]
    for rank, own in enumerate(held):
        edges = [0, *accumulate(2 * n for n in chunks)]
        for (a, b), start, chunk in zip(pairwise(edges), accumulate(lengths, initial=0), chunks, strict=False):
            numbers = [(p - start) // chunk for p in own[a:b] if p >= 0]
            assert set(numbers) <= {rank, 2 * size - 1 - rank} and numbers == sorted(numbers)
            padding = [p < 0 for p in own[a:b]]
            assert padding == sorted(padding)  # behind the tokens, which do not see it


def test_what_cannot_do_a_mask_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ring_flash_attn", torch)
    able = {mask: {name for name, m in METHODS.items() if m.mask_refusal(cell(mask, name)) is None} for mask in MASKED}
    ours = {name for name in METHODS if name.startswith("ours")}
    both = ours | {"one-gpu", "ulysses"}
    assert able["window"] == both
    assert able["documents"] == both | {"ring-flash-attn", "ring-flash-attn-llama3"}
    assert "ignore the window in backward" in METHODS["ring-flash-attn"].refusal(cell("window"))
    assert "masks only, not 'documents'" in METHODS["ring-li-2021"].refusal(cell())
    assert "multiples of 64 tokens" in METHODS["ours-ring-peer-balanced"].refusal(cell(tokens=131072 + 16))
    assert METHODS["ours-ring-peer-balanced"].refusal(cell()) is None
    named = {
        c.method
        for c in list_cells(Selection(ranks=(8,), device="cuda", methods=tuple(METHODS), globs=("documents/*",)))
    }
    assert {"ours-balanced", "ours-gather-peer-balanced", "ours-heads-peer", "ours-ring-nccl-balanced"} <= named


@pytest.mark.parametrize("mask", MASKED)
def test_a_row_says_how_far_from_the_arithmetic_it_is(mask):
    """Three calls in turns: the method 12 ms, one GPU's kernel under the mask 9 ms, under a plain causal one 6 ms."""
    group = RankGroup(process_group=None, rank=0, size=1, device=torch.device("cpu"))
    at = cell(mask, "one-gpu", ranks=1, device="cpu", tokens=64, heads=2, kv_heads=2, head_dim=8, dtype="float32")
    timer = lambda *calls, **_: tuple((ms,) * 3 for ms in (12.0, 9.0, 6.0)[: len(calls)])  # noqa: E731
    job = Job(kind="attention", ranks=1, cells=(at,), output="", repeats=3, cell_seconds=1)
    setting = Setting(group=group, kernel=LocalKernel())
    row = measure_speed(all_methods("cpu")["one-gpu"], at, setting, Gauge.begin(group.device), job, timer)
    part, more = row["forward"], forward_flops(at) / forward_flops(plain_causal(at))
    assert part["ratio"] == 9 / 12
    assert part["arithmetic_ms"] == pytest.approx(6 * more) and part["times_arithmetic"] == pytest.approx(12 / 6 / more)
    assert part["arithmetic_tflops"] == pytest.approx(forward_flops(plain_causal(at)) / 6e9)
    assert row[mask] == facts(mask, 64)[mask]
    assert row["host_us"].keys() == {"forward", "backward"} and min(row["host_us"].values()) > 0


def test_waits_for_other_ranks_are_no_time_of_the_host():
    """Forward returns after 5 seconds, of which the host waited for 2, and backward after 7, of which 3."""

    class Waiting(Method):
        def bind(self, *_):
            return lambda q, k, v: q * k * v

        def meter(self, _):
            return SimpleNamespace(running=False, read=iter((0.0, 2.0, 3.0)).__next__)

    group = RankGroup(process_group=None, rank=0, size=1, device=torch.device("cpu"))
    at = cell("documents", ranks=1, device="cpu", tokens=8, heads=2, kv_heads=2, head_dim=8, dtype="float32")
    clock = iter((0.0, 5.0, 12.0)).__next__
    calls = prepare(Waiting(), at, Setting(group=group, kernel=LocalKernel()), clock)
    assert calls.host() == (3.0, 4.0)


def test_tables_say_what_was_packed(tmp_path):
    times = {"median": 5.0, "least": 4.0, "most": 6.0, "count": 3}
    part = {"milliseconds": times, "tflops": 500.0, "ratio": 0.9, "exposed_ms": 0.5, "bytes": 1e9}
    part |= {"arithmetic_ms": 4.0, "arithmetic_tflops": 620.0, "times_arithmetic": 1.24}
    row = {"status": OK, "peak_memory_gib": 1.0, "seconds": 1.0, "forward": part, "forward_backward": part}
    rows = [(cell(tokens=tokens), row | facts("documents", tokens)) for tokens in (131072, 524288)]
    rows.append((cell("window", tokens=262144), row | facts("window", 262144)))
    rows.append((cell("window", "ring-flash-attn", tokens=262144), {"status": REFUSED, "reason": "no window"}))
    made = results(KIND, *rows)
    text = markdown(made)
    assert (
        "## Attention of packed causal documents over tokens in all: 32 q / 8 kv heads, head dim 128, bfloat16" in text
    )
    lengths = sample_document_lengths(131072)
    drawn = "drawn log-normal, median 2048, sigma 1.3, seed 0"
    packed = f"{len(lengths)} documents, median {statistics.median(lengths):g}, longest {max(lengths)}; {drawn}"
    assert f"- 128K tokens: {packed}." in text
    assert "- 256K tokens: a query sees itself and the 4095 tokens before it." in text
    assert "| ours | 1.24 / 1.24 | 1.24 / 1.24 |" in text and text.count("forward / forward + backward |") == 2
    assert "ratio 0.900, 1.24 x arithmetic" in row_line(made, cell())
    names = {path.name for path in draw(made, tmp_path / "r")}
    ends = ("forward-ratio", "forward-tflops", "forward_backward-ratio", "forward_backward-tflops")
    assert names == {f"r-{mask}-gqa-8-{end}.png" for mask in ("documents", "window") for end in ends}
