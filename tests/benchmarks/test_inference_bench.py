"""`bmburst bench inference`: cells, all methods on one and two ranks of the CPU, tables, pictures and refusals."""

import json
from functools import partial

import pytest
import torch

from benchmarks.engine.job import RankRun
from benchmarks.engine.kinds import FAILED, OK, REFUSED
from benchmarks.engine.report import markdown
from benchmarks.inference.cells import (
    HEADS,
    METHODS,
    NO_LAO,
    RING_LI,
    TENSOR_V1,
    TENSOR_V3,
    TOKENS,
    TRANSFORMERS,
    InferenceCell,
    InferenceSelection,
    list_cells,
)
from benchmarks.inference.kind import KIND, draw, paper
from benchmarks.inference.measure import random_weights
from bmburst.cli import main
from bmburst.schedule.hardware import load_hardware
from tests.benchmarks.made import results as made_results
from tests.refusals import says

results = partial(made_results, KIND)
SPLIT = (HEADS, TOKENS, NO_LAO, TENSOR_V1, TENSOR_V3, RING_LI)


def cell(method=HEADS, tokens=131072, **changes):
    values = {"suite": "prompt", "model": "llama-2-7b", "ranks": 2, "device": "cuda"}
    return InferenceCell(method=method, tokens=tokens, **{**values, **changes})


def selection(**changes):
    return InferenceSelection(**{"ranks": (2,), "device": "cuda", "methods": tuple(METHODS), **changes})


def measured(first=5.0, token=8.0, tokens=(1, 2)):
    return {
        "status": OK,
        "seconds": 20.0,
        "first_token_seconds": first,
        "token_milliseconds": token,
        "tokens_per_second": 1e3 / token,
        "bounds": {"first_token_seconds": 4.0, "token_milliseconds": 5.0},
        "ratios": {"first_token_seconds": first / 4, "token_milliseconds": token / 5},
        "peak_memory_gib": 60.0,
        "allocated_gib": 58.5,
        "tokens": list(tokens),
    }


def test_default_cells_are_those_of_the_papers_tables_and_a_million_tokens():
    found = list_cells(selection())
    lengths = {
        (one.model, one.mask): [each.tokens for each in found if each.method == HEADS and each.suite == "prompt"
        and (each.model, each.mask) == (one.model, one.mask)]
        for one in found
    }  # fmt: skip
    assert lengths["llama-2-7b", "causal"] == lengths["llama-2-13b", "full"] == paper()["tokens"]
    assert lengths["llama-3-8b", "causal"] == [4096 << n for n in range(9)]
    assert ("llama-3-8b", "full") not in lengths
    assert {one.batch for one in found if one.suite == "batch"} == {8, 32}
    assert found[0].key == "prompt/llama-2-7b/4096/causal/heads@2"
    models = [one.model for one in found]
    assert models == sorted(models, key=["llama-2-7b", "llama-2-13b", "llama-3-8b"].index)  # weights are made once
    (one,) = list_cells(selection(globs=("batch/*/8x*/tensor-v3",)))
    assert one.name == "batch/llama-3-8b/8x4096/causal/tensor-v3"
    for asked in ({"models": ("llama-2-7b",)}, {"tokens": (1 << 20,)}):  # no batch of long prompts by itself
        assert {each.suite for each in list_cells(selection(**asked))} == {"prompt"}
    more = list_cells(selection(models=("llama-2-7b",), batches=(1, 4), tokens=(8192,), methods=(HEADS,)))
    assert {(each.suite, each.batch) for each in more} == {("prompt", 1), ("batch", 4)}


@pytest.mark.long
def test_every_method_gives_the_same_tokens_on_one_and_two_ranks(tmp_path, monkeypatch, capsys):
    """In fp32, with and without a mask, one prompt and two; chunks are the methods' own."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = ["--models", "tiny", "--tokens", "92", "--new-tokens", "8", "--cell-seconds", "0.2"]
    rows = {}
    for ranks in (1, 2):
        output = tmp_path / f"r{ranks}.json"
        more = ["--batches", "1,2", "--masks", "causal,full", "--cells", "*causal*,prompt*"]
        done = main(["bench", "inference", "--ranks", str(ranks), *words, *more, "--output", str(output)])
        assert done == 0, capsys.readouterr().out
        rows |= json.loads(output.read_text())["rows"]
        assert list(tmp_path.glob(f"r{ranks}-prompt-tiny-full-{ranks}cpu-float32-first-token.png"))
        assert "the same by all methods in 1 of 1 columns" in (tmp_path / f"r{ranks}.md").read_text()
    tokens = {}
    for key, row in rows.items():
        suite, _, _, mask, method = key.split("@")[0].split("/")
        expected = REFUSED if method == TRANSFORMERS and (mask == "full" or row["cell"]["ranks"] > 1) else OK
        assert row["status"] == expected, (key, row.get("reason"))
        if expected == OK:
            tokens.setdefault((suite, mask), {})[method, row["cell"]["ranks"]] = row["tokens"]
            assert row["first_token_seconds"] > 0 and row["token_milliseconds"] > 0
    assert set(tokens["prompt", "causal"]) == {(m, n) for m in SPLIT for n in (1, 2)} | {(TRANSFORMERS, 1)}
    for own in tokens.values():
        assert len({tuple(found) for found in own.values()}) == 1, own
        assert len(set(next(iter(own.values())))) > 2  # no word over and over, whatever attention gives
    assert tokens["prompt", "causal"][HEADS, 1] != tokens["prompt", "full"][HEADS, 1]


def test_weights_are_the_same_each_time():
    one, other = (random_weights(cell(model="tiny").config, torch.float32, torch.device("cpu")) for _ in range(2))
    for name, place in one.places().items():
        assert torch.equal(place, other.places()[name])
        assert place.std() > 0.1 if place.ndim > 1 else bool((place == 1).all())


def test_cells_say_what_they_cannot_do():
    assert cell(TRANSFORMERS).refusal() and cell(TRANSFORMERS, ranks=1).refusal() is None
    assert "causal" in cell(TRANSFORMERS, ranks=1, mask="full").refusal()
    assert "32 query and 8 KV heads" in cell(TENSOR_V1, model="llama-3-8b", ranks=16).refusal()
    assert cell(HEADS, model="llama-3-8b", ranks=16).refusal() is None
    assert "one prompt" in cell(mask="full", batch=2).refusal()


def test_the_time_of_an_answer_is_bounded_before_it_begins():
    h200 = load_hardware("h200")
    assert cell().seconds(h200) == pytest.approx(4.8 + 24 * 0.0085, rel=0.03)  # the design's bounds of 7B on two
    assert cell(mask="full").seconds(h200) > 1.6 * cell().seconds(h200)
    assert cell(RING_LI).seconds(h200) > 5 * cell().seconds(h200)
    assert cell(NO_LAO).seconds(h200) > 5 * cell(RING_LI).seconds(h200)  # masks are made on the host


def test_tables_have_ratios_and_the_papers_figures(tmp_path):
    made = results(
        (cell(), measured()),
        (cell(RING_LI), {"status": FAILED, "reason": "out of memory for 20.00 GiB more"}),
        (cell(TENSOR_V1), measured(first=5.5, tokens=(1, 3))),
        (cell(model="llama-3-8b", suite="batch", batch=8, tokens=4096), measured()),
    )
    text = markdown(made)
    assert "| heads | 5.000 (1.25) |" in text and "| heads | 8.00 (1.60) |" in text and "60.0 (58.5)" in text
    assert "| ring-li | - [1] |" in text and "1. failed: out of memory for 20.00 GiB more" in text
    assert "| Burst | 16.01 |" in text and "| RingAttention | out of memory |" in text and "8 A100" in text
    assert text.count("the paper, s") == 1
    assert "same by all methods in 0 of 1 columns" in text
    assert "| tokens/s of all prompts | 8 |" in text and "| heads | 125 |" in text
    pictures = draw(made, tmp_path / "r")
    ends = ("first-token", "first-token-over-bound", "token", "memory")
    assert [path.name for path in pictures] == [
        *(f"r-prompt-llama-2-7b-causal-2-{end}.png" for end in ends),
        *(f"r-batch-llama-3-8b-4K-causal-2-{end}.png" for end in (*ends, "speed")),
    ]
    assert all(path.is_file() for path in pictures)


class _Short(RankRun):
    def __init__(self):
        pass

    def refusal(self, _):
        return None

    def measure(self, _):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 139.81 GiB")


def test_out_of_memory_is_a_result_with_what_was_asked_for():
    row = _Short()._row(cell())
    assert row["status"] == FAILED
    says(row["reason"], "out of memory", "20.00 GiB")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--models", "llama-3-9b"), "'llama-3-9b' | 'llama-3-8b'"),
        (("--masks", "window"), "'window' | causal"),
        (("--batches", "0"), "--batches | 0 | at least 1"),
        (("--new-tokens", "1"), "--new-tokens 1 | at least 2 | fix:"),
        (("--methods", "tensor"), "'tensor' | tensor-v1"),
        (("--tokens", "1023"), "--tokens 1023 | multiples of 4"),
        (("--dtype", "float64"), "float64 | bfloat16"),
        (("--layers", "2"), "--layers | bench train"),
    ],
)
def test_bad_input_is_refused_before_ranks_start(argv, words, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["bench", "inference", "--ranks", "2", *argv]) == 2
    says(capsys.readouterr().err, words)
    assert main(["bench", "train", "--ranks", "2", "--new-tokens", "3"]) == 2
    says(capsys.readouterr().err, "--new-tokens", "bench inference")


def test_the_papers_figures_have_one_number_a_length():
    found = paper()
    for methods in found["models"].values():
        assert len(methods) == 5
        assert all(len(seconds) == len(found["tokens"]) for seconds in methods.values())
