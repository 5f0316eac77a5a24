"""The page of the paper says what records say, that there is none where there is none, and judges claims by numbers."""

import json
import re

import pytest

from benchmarks.paper import claims, overheads, tables
from benchmarks.paper.claims import CONFIRMED, NOT_CONFIRMED, NOT_TESTABLE, SMALLER, Times, by_share
from benchmarks.paper.tables import ATTENTION, FIRST, INFERENCE, MISSING, PAPER, PERPLEXITY, TRAIN, Recorded
from benchmarks.records import PAGE, PAGE_TABLES, claims_table, filled

RUN = {"ranks": 2, "device": "NVIDIA H200", "date": "2026-11-25 03:00:00 UTC", "commit": "0123456789"}


def written(folder, **records):
    for name, rows in records.items():
        rows = {key: {"status": "ok", "run": 0, **row} for key, row in rows.items()}
        (folder / f"{name}.json").write_text(json.dumps({"runs": [RUN], "rows": rows}))
    return Recorded(folder)


def spread(median, by=0.0):
    return {"median": median, "least": median - by, "most": median + by}


def times(by=0.0, **milliseconds):
    return {name: spread(value, by) for name, value in milliseconds.items()}


def step(seconds, peak=10.0, by=0.0, **more):
    return {
        "milliseconds": spread(seconds * 1e3, by * 1e3),
        "peak_memory_gib": peak,
        "tokens_per_second": 1 / seconds,
        **more,
    }


def line(lines, name):
    (found,) = (text for text in lines if text.startswith(f"| {name} |"))
    return found


def test_every_table_is_in_the_page_once():
    assert sorted(re.findall(r"<!-- table: ([\w-]+) -->", PAGE.read_text())) == sorted(PAGE_TABLES)


def test_what_is_not_recorded_is_said(tmp_path):
    text = filled(PAGE.read_text(), Recorded(tmp_path))
    for name in ("backward", "merge", "tile", "training-7b", "training-7b-zero-2", "scaling", "batches", "slow-link"):
        assert re.search(rf"<!-- table: {name} -->\n\nNot recorded yet\.\n\n<!-- end -->", text), name
    assert text.count(MISSING.capitalize()) > 10
    verdicts = [line.split(" | ")[2] for line in claims_table(Recorded(tmp_path))[2:-1]]
    by_formula = (SMALLER, NOT_CONFIRMED, SMALLER, CONFIRMED)
    assert tuple(verdicts[:4]) == by_formula and set(verdicts[4:]) == {MISSING, NOT_TESTABLE}


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
    found = tables.training(records, "llama-2-7b", layers=2)
    assert found[0] == "| s a step, 2 layers, ZeRO-3, 2 H200 | 4K | 32K |"
    assert line(found[:6], "ours") == "| ours | 0.100 | 0.500 |"
    assert line(found[:7], "ring-li") == "| ring-li | - | out of memory, 34.00 GiB more |"
    assert line(found[:7], "tensor-v1") == "| tensor-v1 | - | would not fit: 180 GiB |"
    assert "2 x NVIDIA H200, 2026-11-25, 0123456" in found[-1] and f"results/{TRAIN}.md" in found[-1]
    assert tables.training(records, "llama-2-7b") == ["Not recorded yet."]
    rows = {"step/llama-2-7b/32768/ours@2": step(2.5), "step/llama-2-7b/4096/ours@2-zero2": step(0.4)}
    whole = written(tmp_path, **{TRAIN: rows})
    assert tables.training(whole, "llama-2-7b")[0] == "| s a step, all layers, ZeRO-3, 2 H200 | 32K |"
    stage_2 = tables.training(whole, "llama-2-7b", zero=2)
    assert stage_2[0] == "| s a step, all layers, ZeRO-2, 2 H200 | 4K |" and "| ours | 0.400 |" in stage_2


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


def judge(name, records):
    """The verdict of the claim with this name, or of the one that begins so."""
    named = [claim for claim in claims.CLAIMS if claim.text == name]
    (claim,) = named or (claim for claim in claims.CLAIMS if claim.text.startswith(name))
    return claim.judge(records)


LONG = (16384, 32768, 65536, 131072)
FASTEST = "Fastest of all methods at long lengths, 7B"


def steps(method, seconds, by=0.0, **more):
    return {f"step/llama-2-7b/{n}/{method}@2": step(seconds, by=by, **more) for n in LONG}


@pytest.mark.parametrize(("slower", "verdict"), [(1.01, CONFIRMED), (1.0, NOT_CONFIRMED), (0.99, NOT_CONFIRMED)])
def test_a_verdict_follows_from_the_numbers(tmp_path, slower, verdict):
    """Who is as fast is not faster."""
    rows = steps("ours", 1.0) | steps("ulysses", slower)
    rows["step/llama-2-7b/131072/ring-li@2"] = {"status": "failed", "reason": "out of memory for 9.00 GiB more"}
    for name, speed in zip(("", "2x", "4x", "8x"), (100.0, 110.0, 120.0, 119.0 + slower), strict=True):
        key = f"step/llama-2-7b-x2/{name}4096"
        rows[f"{key}/ours@2"] = step(1.0) | {"tokens_per_second": speed}
        rows |= {f"{key}/tensor-v3@2": step(1.5, by=0.5), f"{key}/ring-li@2": step(1.0 if name else slower)}
    records = written(tmp_path, **{TRAIN: rows})
    fastest, higher = (judge(name, records) for name in (FASTEST, "Higher throughput"))
    assert fastest.verdict == verdict and f"32K: next ulysses, {slower:.3f} times ours" in fastest.numbers
    assert "overlap" not in fastest.numbers or slower == 1.0
    assert judge("Throughput grows", records).verdict == (CONFIRMED if slower >= 1 else NOT_CONFIRMED)
    assert higher.verdict == NOT_CONFIRMED and "batch 2: TP v3 takes 1.50 times as long" in higher.numbers
    assert "ranges overlap with TP v3 and RingAttention; batch 4" in higher.numbers
    assert judge("Ring self-attention", records).verdict == CONFIRMED
    assert judge("Nearly", records).verdict == NOT_TESTABLE


def test_ranges_that_overlap_are_said(tmp_path):
    rows = steps("ours", 1.0, by=0.03) | steps("ulysses", 1.05, by=0.03) | steps("tensor-v1", 1.2, by=0.03)
    found = judge(FASTEST, written(tmp_path, **{TRAIN: rows}))
    assert found.verdict == CONFIRMED and found.numbers.count("ranges overlap with ulysses") == len(LONG)
    assert "tensor-v1" not in found.numbers
    assert Times(2, 1, 3).overlaps(Times(4, 3, 5)) and not Times(2, 1, 3).overlaps(Times(5, 4, 6))


def test_what_ours_is_is_said(tmp_path):
    """By default it is no ring: the claims are about another method than the paper's."""
    for heads, said in ((2, "ours is `heads` by peer copies, not `burst`"), (1, "`heads` with ring by peer copies")):
        chosen = {"strategy": {"heads": heads, "outer": "ring"}, "transport": "peer", "cell": {"ranks": 2}}
        rows = steps("ours", 1.0, **chosen) | steps("tensor-v3", 1.1)
        records = written(tmp_path, **{TRAIN: rows})
        for name in (FASTEST, "Twice", "With ZeRO"):
            assert said in judge(name, records).numbers
    assert "heads x8 by peer" in judge("Twice", records).numbers and "heads x32" in judge("Nearly", records).numbers


def test_each_model_and_stage_of_zero_has_its_own_verdict(tmp_path):
    rows = steps("ours", 1.0) | steps("ulysses", 1.1)
    rows |= {f"step/llama-2-7b/{n}/{m}@2-zero2": step(s) for n in LONG for m, s in (("ours", 1.0), ("ulysses", 0.9))}
    records = written(tmp_path, **{TRAIN: rows})
    assert judge(FASTEST, records).verdict == CONFIRMED
    assert judge(f"{FASTEST} under ZeRO-2", records).verdict == NOT_CONFIRMED
    assert judge(FASTEST.replace("7B", "13B"), records) == claims.UNKNOWN


def test_who_is_first_from_32k_on_alone_is_said(tmp_path):
    rows = steps("ours", 1.0)
    rows |= {f"step/llama-2-7b/{n}/tensor-v1@2": step(0.9 if n == 16384 else 1.1) for n in (16384, 32768, 131072)}
    found = judge(FASTEST, written(tmp_path, **{TRAIN: rows}))
    assert found.verdict == "confirmed from 32K on, not at 16K" and "16K: next tensor-v1, 0.900" in found.numbers


@pytest.mark.parametrize(
    ("slower", "by", "saved", "verdicts"),
    [
        (1.2, 0.01, 1.0, (CONFIRMED, CONFIRMED)),
        (1.2, 0.2, 1.0, (NOT_CONFIRMED, NOT_CONFIRMED)),
        (0.9, 0.01, 1.0, (NOT_CONFIRMED, NOT_CONFIRMED)),
        (1.2, 0.01, 0.0, (NOT_CONFIRMED, CONFIRMED)),
    ],
)
def test_time_is_saved_where_ranges_do_not_overlap(tmp_path, slower, by, saved, verdicts):
    """Merging as results arrive must save memory too."""
    rows = {
        f"merge/{n}/mha/{m}@2": {
            "milliseconds": times(by, forward=f, backward=2 * f),
            "peak_gib": {"forward": 2.0 + (saved if m == "at-the-end" else 0)},
        }
        for n in (32768, 131072)
        for m, f in (("online", 1.0), ("no-overlap", slower), ("at-the-end", slower))
    }
    records = written(tmp_path, **{PAPER: rows})
    found = judge("Merging", records), judge("Transfers", records)
    assert tuple(verdict for verdict, _ in found) == (f"{verdicts[0]} on 2 GPUs", f"{verdicts[1]} on NVLink")
    assert (", ranges overlap" in found[1].numbers) == (by == 0.2)
    assert f"32K forward: {slower:.3f} times as long without" in found[1].numbers


def test_perplexities_are_equal_in_every_digit_or_not(tmp_path):
    for last, verdict in ((12.3456, CONFIRMED), (12.3475, NOT_CONFIRMED)):
        values = {"alone": 12.3459, "burst": last}
        rows = {name: {"perplexity": v, "loss": 2.5, "tokens": 70, "ranks": 2} for name, v in values.items()}
        found = {"machine": RUN, "trained": None, "model": "a model", "data": "d", "tokens": 8, "sequences": 9}
        (tmp_path / f"{PERPLEXITY}.json").write_text(json.dumps(found | {"rows": rows}))
        records = Recorded(tmp_path)
        assert judge("All", records).verdict == verdict
        assert f"| burst | 2 | 2.500000 | {last:.4f} |" in "\n".join(tables.perplexity(records))
        rows["no-lao"] = {"ranks": 2, "refused": "no window"}  # not a number that is compared
        (tmp_path / f"{PERPLEXITY}.json").write_text(json.dumps(found | {"rows": rows}))
        records = Recorded(tmp_path)
        assert judge("All", records).verdict == verdict
        assert "| no-lao | 2 | refused: no window | - |" in "\n".join(tables.perplexity(records))


@pytest.mark.parametrize(("burst", "verdict"), [(60, CONFIRMED), (77, SMALLER), (101, NOT_CONFIRMED)])
def test_bytes_are_judged_by_what_was_counted(tmp_path, burst, verdict):
    rows = {
        f"backward/65536/{heads}/{method}@2": {
            "bytes": moved,
            "milliseconds": times(forward=1.0, backward=2.0, transfers=3.25),
        }
        for heads, method, moved in (
            ("mha", "kv", 100),
            ("mha", "burst", burst),
            ("gqa", "kv", 25),
            ("gqa", "burst", 60),
        )
    }
    records = written(tmp_path, **{PAPER: rows})
    assert judge("At least 24 %", records).verdict == verdict
    numbers = judge("40 % less communication than `kv`", records).numbers
    assert f"MHA: {abs(100 - burst)}.0% {'more' if burst > 100 else 'fewer'}" in numbers and "140.0% more" in numbers
    assert "| mha | burst | 0.0 | 3.25 | 2.00 |" in overheads.backward(records)


def test_40_percent_less_is_40_percent(tmp_path):
    """By the paper's own table it is 37.3 %; over a ring with a reduce-scatter nothing is saved."""
    records = Recorded(tmp_path)
    names = ("RingAttention, as", "RingAttention with a", "`kv`")
    found = [judge(f"40 % less communication than {name}", records) for name in names]
    assert [verdict for verdict, _ in found] == [SMALLER, NOT_CONFIRMED, SMALLER]
    for (_, numbers), share in zip(found, ("37.3% fewer", "5.3% more", "26.3% fewer"), strict=True):
        assert share in numbers
    assert by_share(0.4, 0.4, "").verdict == CONFIRMED and by_share(0.399, 0.4, "").verdict == SMALLER


@pytest.mark.parametrize(("backward", "verdict"), [(2.0, CONFIRMED), (1.9, NOT_CONFIRMED)])
def test_burst_is_slower_than_kv_where_any_part_is(tmp_path, backward, verdict):
    by = {
        "kv": times(0.1, forward=1.0, backward=backward, transfers=3.0),
        "burst": times(0.1, forward=1.0, backward=2.0),
    }
    by["burst"] |= times(transfers=2.0)
    rows = {f"backward/65536/mha/{m}@2": {"bytes": 1, "milliseconds": found} for m, found in by.items()}
    found = judge("`burst` is never slower", written(tmp_path, **{PAPER: rows}))
    assert (
        found.verdict == f"{verdict} at 64K on 2 GPUs"
        and "forward: kv takes 1.00 times as long, ranges" in found.numbers
    )
    assert found.numbers.endswith("transfers: kv takes 1.50 times as long")


def test_one_gpu_is_compared_as_shown(tmp_path):
    rows = {f"accuracy/4096/mha/causal/{m}@1": {"errors": {"o": 2e-3 + d}} for m, d in (("ours", 0), ("one-gpu", 1e-7))}
    assert judge("On one GPU", written(tmp_path, **{ATTENTION: rows})).verdict == CONFIRMED
    rows["accuracy/4096/mha/causal/ours@1"]["errors"]["o"] = 3e-3
    assert judge("On one GPU", written(tmp_path, **{ATTENTION: rows})).verdict == NOT_CONFIRMED


@pytest.mark.parametrize(("size", "version"), [("7b", 1), ("7b", 3), ("13b", 1), ("13b", 3)])
@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ((1.1, 1.1, 1.2), CONFIRMED),
        ((0.7, 1.1, 1.2), "confirmed from 32K on, not at 4K"),
        ((0.7, 0.9, 1.2), NOT_CONFIRMED),
    ],
)
def test_first_tokens_are_judged_by_length(tmp_path, ratios, verdict, size, version):
    """Of the lengths that are recorded; one is in the record of the paper's 13B."""
    rows = {}
    for tokens, ratio in zip((4096, 32768, 131072), ratios, strict=True):
        key = f"prompt/llama-2-{size}/{tokens}/causal"
        seconds = {"heads": 2.0, f"tensor-v{version}": 2.0 * ratio}
        rows |= {
            f"{key}/{m}@2": {"first_token_seconds": s, "rounds": 3 - 2 * (tokens > 4096)} for m, s in seconds.items()
        }
    last = {key: row for key, row in rows.items() if "/131072/" in key}
    records = written(tmp_path, **{INFERENCE: {key: row for key, row in rows.items() if key not in last}, FIRST: last})
    found = judge(f"First token of {size.upper()} ahead of TP v{version}", records)
    assert (
        found.verdict == verdict
        and "1.20 times as long at 128K, on 2 GPUs with NVLink, measured once at 32K, 128K" in found.numbers
        and "64K" not in found.numbers
    )


def test_future_work_says_what_its_records_do(tmp_path):
    assert tables.sparse(Recorded(tmp_path)) == tables.cross(Recorded(tmp_path)) == ["Not recorded yet."]
    both = {"milliseconds": 9.0, "dense_milliseconds": 36.0, "ratio": 1.25}
    rows = [{"density": 0.2, "kernel": "fa4", "forward": both, "forward and backward": both}]
    rows.append({"density": 0.2, "kernel": "triton", "refused": "no"})
    head = {"machine": RUN, "tokens": 512, "block_size": 128, "heads": 4, "kv_heads": 2, "head_dim": 64}
    (tmp_path / f"{tables.SPARSE}.json").write_text(json.dumps(head | {"rows": rows}))
    found = tables.sparse(Recorded(tmp_path))
    assert "| 20.0% | fa4 | 9.0 of 36.0 (1.25) | 9.0 of 36.0 (1.25) |" in found
    assert "| 20.0% | triton | refused | refused |" in found
    case = {"mask": "causal", "layout": "zigzag", "key_layout": "striped"}
    rows = [case | {"strategy": "heads", "transport": "nccl", "forward and backward": {"ratio": 0.45}}]
    rows.append(case | {"strategy": "gather", "transport": "auto", "refused": "no"})
    head = {"machine": RUN | {"commit": f"{RUN['commit']}+"}, "queries": 5, "keys": 7, "heads": 4, "kv_heads": 2}
    first, second, _ = tables.CROSS
    (tmp_path / f"{first}.json").write_text(json.dumps(head | {"rows": rows}))
    (tmp_path / f"{second}.json").write_text(json.dumps(head | {"rows": rows[:1]}))
    found = tables.cross(Recorded(tmp_path))
    assert found[0].endswith("| heads, nccl | gather |")
    assert any(line.endswith("2 x NVIDIA H200, 2026-11-25, 0123456+.") for line in found)
    assert found[2:4] == [
        "| H200, causal, zigzag and striped | 0.90 | refused |",
        "| H100, causal, zigzag and striped | 0.90 | - |",
    ]
