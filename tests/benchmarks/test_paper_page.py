"""The page of the paper says what records say, that there is none where there is none, and judges claims by numbers."""

import json
import re

import pytest

from benchmarks.paper import page, tables
from benchmarks.paper.page import PAGE, TABLES, filled
from benchmarks.paper.tables import ATTENTION, INFERENCE, MISSING, PAPER, PERPLEXITY, TRAIN, Recorded

RUN = {"ranks": 2, "device": "NVIDIA H200", "date": "2026-11-25 03:00:00 UTC", "commit": "0123456789"}


def written(folder, **records):
    for name, rows in records.items():
        rows = {key: {"status": "ok", "run": 0, **row} for key, row in rows.items()}
        (folder / f"{name}.json").write_text(json.dumps({"runs": [RUN], "rows": rows}))
    return Recorded(folder)


def times(**milliseconds):
    return {name: {"median": value} for name, value in milliseconds.items()}


def step(seconds, peak=10.0, **more):
    return {
        "milliseconds": {"median": seconds * 1e3},
        "peak_memory_gib": peak,
        "tokens_per_second": 1 / seconds,
        **more,
    }


def line(lines, name):
    (found,) = (text for text in lines if text.startswith(f"| {name} |"))
    return found


def test_every_table_is_in_the_page_once():
    assert sorted(re.findall(r"<!-- table: ([\w-]+) -->", PAGE.read_text())) == sorted(TABLES)


def test_what_is_not_recorded_is_said(tmp_path):
    text = filled(PAGE.read_text(), Recorded(tmp_path))
    for name in ("backward", "merge", "tile", "training-7b", "training-13b", "zero", "scaling", "batches", "slow-link"):
        assert re.search(rf"<!-- table: {name} -->\n\nNot recorded yet\.\n\n<!-- end -->", text), name
    assert text.count(MISSING.capitalize()) > 10
    verdicts = {line.split(" | ")[2] for line in page.claims_table(Recorded(tmp_path))[2:-1]}
    assert page.CONFIRMED not in verdicts and page.NOT_CONFIRMED not in verdicts


def test_a_table_is_written_again_between_its_markers():
    page = "before\n<!-- table: burst-and-kv -->\nold\n<!-- end -->\nafter\n"
    once = filled(page, Recorded())
    assert once.startswith("before\n<!-- table: burst-and-kv -->\n\n| ") and once.endswith("<!-- end -->\nafter\n")
    assert "24.2%" in once and "old" not in once and filled(once, Recorded()) == once


def test_steps_are_shown_with_what_ran_out_of_memory(tmp_path):
    reason = {"status": "failed", "reason": "it took the ranks down: out of memory for 34.00 GiB more"}
    fit = {"status": "refused", "reason": "would not fit: about 180 GiB a rank by the planner, of 140 GiB"}
    key = "step/llama-2-7b-x2"
    rows = {f"{key}/32768/ours@2": step(0.5, 20.0), f"{key}/32768/ring-li@2": reason, f"{key}/4096/ours@2": step(0.1)}
    records = written(tmp_path, **{TRAIN: rows | {f"{key}/32768/tensor-v1@2": fit}})
    found = tables.training(records, "llama-2-7b")
    assert found[0] == "| s a step, 2 layers, 2 H200 | 4K | 32K |"
    assert line(found[:6], "ours") == "| ours | 0.100 | 0.500 |"
    assert line(found[:7], "ring-li") == "| ring-li | - | out of memory, 34.00 GiB more |"
    assert line(found[:7], "tensor-v1") == "| tensor-v1 | - | would not fit: 180 GiB |"
    assert "2 x NVIDIA H200, 2026-11-25, 0123456" in found[-1] and f"results/{TRAIN}.md" in found[-1]


def test_first_tokens_stand_beside_the_papers(tmp_path):
    key = "prompt/llama-2-7b/131072/causal"
    records = written(tmp_path, **{INFERENCE: {f"{key}/heads@2": {"first_token_seconds": 5.1099}}})
    found = tables.first_token(records, "llama-2-7b")
    assert line(found, "8 A100: Burst") == "| 8 A100: Burst | 0.44 | 0.84 | 1.68 | 3.27 | 6.49 | 16.01 | 49.32 |"
    assert line(found, "2 H200, causal: heads (default)").endswith("| - | - | - | - | - | 5.110 | - |")
    assert not any("no mask" in text for text in found)
    slow = {"status": "refused", "reason": "an answer takes 20 s at least, more than --cell-seconds 8"}
    records = written(tmp_path, **{INFERENCE: {f"{key}/no-lao@2": slow}})
    assert line(tables.first_token(records, "llama-2-7b"), "2 H200, causal: no LAO").endswith("| not run: 20 s | - |")


def test_the_readmes_tables_have_two_gpus_and_one(tmp_path):
    rows = {
        "sequence/65536/mha/ours@2": {"milliseconds": times(forward=54.4, forward_backward=190.6)},
        "sequence/65536/mha/one-gpu@1": {"milliseconds": times(forward=108.2, forward_backward=377.0)},
        "batch/8x65536/mha/ours@2": {"milliseconds": times(forward=430.0, forward_backward=1500.0)},
    }
    records = written(tmp_path, **{PAPER: rows})
    found = tables.readme_lengths(records)
    assert line(found, "2 H200, forward").startswith("| 2 H200, forward | 54 (108) | - |")
    assert line(found, "8 A100, forward + backward").startswith(
        "| 8 A100, forward + backward | 181 (1,236) | 668 (4,937)"
    )
    assert line(tables.readme_batches(records), "2 H200, forward + backward").endswith("| - | - | - | 1,500 (-) |")


CLAIMS = {claim.text.split()[0]: claim for claim in page.CLAIMS}


@pytest.mark.parametrize(("slower", "verdict"), [(1.2, page.CONFIRMED), (0.9, page.NOT_CONFIRMED)])
def test_a_verdict_follows_from_the_numbers(tmp_path, slower, verdict):
    key = "step/llama-2-7b-x2"
    lengths = (16384, 32768, 65536, 131072)
    rows = {f"{key}/{n}/ours@2": step(1.0) for n in lengths} | {f"{key}/{n}/ulysses@2": step(slower) for n in lengths}
    rows |= {f"{key}/131072/ring-li@2": {"status": "failed", "reason": "out of memory for 9.00 GiB more"}}
    speeds = (100.0, 110.0, 120.0, 130.0 * slower / 1.2)
    for name, speed in zip(("", "2x", "4x", "8x"), speeds, strict=True):
        rows[f"{key}/{name}4096/ours@2"] = step(1.0) | {"tokens_per_second": speed}
    ablation = {
        f"merge/{n}/mha/{m}@2": {"milliseconds": times(forward=f, backward=f)}
        for n in (32768, 131072)
        for m, f in (("online", 1.0), ("no-overlap", slower))
    }
    records = written(tmp_path, **{TRAIN: rows, PAPER: ablation})
    judged = {name: CLAIMS[name].judge(records) for name in ("Fastest", "Transfers", "Throughput")}
    assert {name: found.verdict for name, found in judged.items()} == dict.fromkeys(judged, verdict)
    assert f"32K: next ulysses, {slower:.2f} times ours" in judged["Fastest"].numbers
    assert CLAIMS["Ring"].judge(records).verdict == page.CONFIRMED
    assert CLAIMS["Nearly"].judge(records).verdict == page.NOT_TESTABLE


def test_who_is_first_from_32k_on_alone_is_said(tmp_path):
    rows = {f"step/llama-2-7b-x2/{n}/ours@2": step(1.0) for n in (16384, 32768, 65536, 131072)}
    rows |= {f"step/llama-2-7b-x2/{n}/tensor-v1@2": step(0.9 if n == 16384 else 1.1) for n in (16384, 32768, 131072)}
    found = CLAIMS["Fastest"].judge(written(tmp_path, **{TRAIN: rows}))
    assert found.verdict == "confirmed from 32K on, not at 16K" and "16K: next tensor-v1, 0.90" in found.numbers


def test_perplexities_are_equal_in_every_digit_or_not(tmp_path):
    for last, verdict in ((12.3456, page.CONFIRMED), (12.3475, page.NOT_CONFIRMED)):
        values = {"alone": 12.3459, "burst": last}
        rows = {name: {"perplexity": v, "loss": 2.5, "tokens": 70, "ranks": 2} for name, v in values.items()}
        found = {"machine": RUN, "trained": None, "model": "a model", "data": "d", "tokens": 8, "sequences": 9}
        (tmp_path / f"{PERPLEXITY}.json").write_text(json.dumps(found | {"rows": rows}))
        records = Recorded(tmp_path)
        assert CLAIMS["All"].judge(records).verdict == verdict
        assert f"| burst | 2 | 2.500000 | {last:.4f} |" in "\n".join(tables.perplexity(records))


def test_bytes_are_judged_by_what_was_counted(tmp_path):
    rows = {
        f"backward/65536/{heads}/{method}@2": {
            "bytes": moved,
            "milliseconds": times(forward=1.0, backward=2.0, transfers=3.25),
        }
        for heads, method, moved in (("mha", "kv", 100), ("mha", "burst", 60), ("gqa", "kv", 25), ("gqa", "burst", 60))
    }
    records = written(tmp_path, **{PAPER: rows})
    verdict, numbers = CLAIMS["40"].judge(records)
    assert verdict == "confirmed for MHA" and "40% fewer" in numbers and "140% more" in numbers
    assert "| mha | burst | 0.0 | 3.25 | 2.00 |" in tables.backward(records)


def test_one_gpu_is_compared_as_shown(tmp_path):
    rows = {f"accuracy/4096/mha/causal/{m}@1": {"errors": {"o": 2e-3 + d}} for m, d in (("ours", 0), ("one-gpu", 1e-7))}
    assert CLAIMS["On"].judge(written(tmp_path, **{ATTENTION: rows})).verdict == page.CONFIRMED
    rows["accuracy/4096/mha/causal/ours@1"]["errors"]["o"] = 3e-3
    assert CLAIMS["On"].judge(written(tmp_path, **{ATTENTION: rows})).verdict == page.NOT_CONFIRMED


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ((1.1, 1.1, 1.2), page.CONFIRMED),
        ((0.7, 1.1, 1.2), "confirmed from 32K on, not at 4K"),
        ((0.7, 0.9, 1.2), page.NOT_CONFIRMED),
    ],
)
def test_first_tokens_are_judged_by_length(tmp_path, ratios, verdict):
    rows = {}
    for tokens, ratio in zip((4096, 32768, 131072), ratios, strict=True):
        key = f"prompt/llama-2-7b/{tokens}/causal"
        rows |= {f"{key}/{m}@2": {"first_token_seconds": s} for m, s in (("heads", 2.0), ("tensor-v1", 2.0 * ratio))}
    assert CLAIMS["First"].judge(written(tmp_path, **{INFERENCE: rows})).verdict == verdict
