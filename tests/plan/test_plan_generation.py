"""`bmburst plan --generate`: bounds, measured times, memory and the command line."""

import json
import shlex

import pytest

from bmburst.amounts import GIB
from bmburst.blocks.presets import PRESETS
from bmburst.cli import CommandParser, main
from bmburst.cli import generate as generate_command
from bmburst.cli.program import NOTHING_FITS
from bmburst.plan.inference import (
    GenerationTask,
    InferenceMemory,
    InferenceWork,
    ShortPromptLimits,
    counts,
    predict_generation,
)
from bmburst.schedule.hardware import load_hardware
from tests.refusals import says

H200 = load_hardware("h200")
KIB = 1024


def task(tokens, preset="llama-3-8b", **more):
    return GenerationTask(model=PRESETS[preset], preset=preset, prompt=tokens, **more)


# Measured with bmburst on H200s in bf16: seconds to the first token, milliseconds a token.
@pytest.mark.parametrize(
    ("tokens", "gpus", "first", "token"),
    [(4 * KIB, 1, 0.095, 4.08), (32 * KIB, 1, 1.17, 4.93), (128 * KIB, 1, 9.91, 7.72)],
)
def test_predictions_are_what_was_measured_on_h200s(tokens, gpus, first, token):
    found = predict_generation(task(tokens, new_tokens=24), gpus, H200)
    assert found.first_token == pytest.approx(first, rel=0.05)
    assert found.token * 1e3 == pytest.approx(token, rel=0.05)


SHORT = {  # measured as above
    1: [(512, 0.012, 3.96), (KIB, 0.022, 4.01), (2 * KIB, 0.043, 4.05)],
    2: [(512, 0.010, 2.76), (KIB, 0.015, 2.78), (2 * KIB, 0.026, 2.81), (4 * KIB, 0.050, 2.87)],
}


@pytest.mark.parametrize(("gpus", "tokens", "first", "token"), [(n, *each) for n in SHORT for each in SHORT[n]])
def test_short_prompts_do_not_wait_for_the_host(gpus, tokens, first, token):
    found = predict_generation(task(tokens, new_tokens=24), gpus, H200)
    assert found.first_token == pytest.approx(first, rel=0.25)
    assert found.token * 1e3 == pytest.approx(token, rel=0.05)


def test_short_prompts_end_where_the_gpu_takes_longer_than_its_host_or_keeps_too_much():
    def most(preset, gib, itemsize=2, ranks=1):
        return ShortPromptLimits.of(PRESETS[preset], itemsize, gib * GIB, ranks).most

    assert most("llama-3-8b", 141) == 2048
    assert most("llama-2-7b", 141, ranks=2) == 4096
    assert 0 < most("llama-3-70b", 141) < 1024
    assert 0 < most("llama-3-8b", 24) < 1024
    assert most("llama-3-8b", 1) == 0
    assert most("llama-3-8b", 141, itemsize=4) == 0


# 2 S^2 H D L / 640e12 + 2 N S / 720e12 + bytes / 3.8e12, over P; 2 (N + head) + 4 L K D S bytes / (P 4.8e12).
@pytest.mark.parametrize(
    ("preset", "tokens", "gpus", "prefill", "token"),
    [
        ("llama-2-7b", 128 * KIB, 1, 9.6, 17),
        ("llama-2-7b", 256 * KIB, 2, 16.6, 16),
        ("llama-2-13b", 128 * KIB, 2, 8.0, 14),
        ("llama-3-8b", 4 * KIB, 1, 0.093, 3.2),
        ("llama-3-8b", 1024 * KIB, 8, 59, 4.0),
    ],
)
def test_bounds(preset, tokens, gpus, prefill, token):
    work = InferenceWork(config=PRESETS[preset])
    assert work.prefill_bound(tokens, gpus, H200) == pytest.approx(prefill, rel=0.03)
    assert work.decode_bound(tokens, gpus, H200) * 1e3 == pytest.approx(token, rel=0.03)


def test_bounds_follow_mask_batch_and_dtype():
    model = PRESETS["llama-2-7b"]
    one, full, two, wide = (
        InferenceWork(config=model, **more) for more in ({}, {"is_causal": False}, {"batch": 2}, {"itemsize": 4})
    )
    assert full.attention(1000) == 2 * one.attention(1000) and full.products(1000) == one.products(1000)
    assert two.prefill_bound(1000, 1, H200) == pytest.approx(2 * one.prefill_bound(1000, 1, H200))
    assert two.cache_bytes(1000) == wide.cache_bytes(1000) == 2 * one.cache_bytes(1000) == 2 * 1000 * 512 * KIB
    assert two.weight_bytes() == one.weight_bytes() == wide.weight_bytes() / 2


@pytest.mark.parametrize("gpus", [1, 2, 3, 6, 8, 16, 24])
def test_times_are_not_below_their_bounds_and_memory_is_that_of_generation(gpus):
    asked = task(64 * KIB, new_tokens=100, batch=3)
    found = predict_generation(asked, gpus, H200)
    assert found.first_token > found.first_token_bound and found.token > found.token_bound
    memory = InferenceMemory(config=asked.model, split=found.split, itemsize=2, chunk_tokens=65536 * gpus)
    assert found.memory == memory.total(3, 64 * KIB + 100)
    assert found.fits
    assert memory.total(3, found.longest) <= found.available < memory.total(3, found.longest + gpus)
    assert found.split.name == {1: "heads", 2: "heads", 3: "tokens", 6: "heads x tokens", 8: "heads"}.get(
        gpus, "heads x tokens"
    )


def test_more_gpus_are_faster_and_whole_weights_bound_what_fits():
    found = [predict_generation(task(256 * KIB), gpus, H200) for gpus in counts(8)]
    assert [each.gpus for each in found] == [1, 2, 4, 8]
    for name in ("first_token", "token", "memory"):
        values = [getattr(each, name) for each in found]
        assert values == sorted(values, reverse=True)
    assert counts(6) == (1, 2, 4, 6, 8) and counts(32) == (1, 2, 4, 8, 16, 32)
    short = predict_generation(task(256 * KIB, "llama-2-7b"), 1, H200)
    assert not short.fits and short.longest < 256 * KIB
    assert predict_generation(task(KIB, "llama-3-70b"), 1, load_hardware("h100")).longest == 0


def test_a_token_reads_whole_queries_keys_and_values_where_tokens_are_split():
    """Three ranks cannot share 8 KV heads: each reads all of q, k and v, and a third of the rest."""
    length, bandwidth = 128 * KIB, 0.9 * 4.8e12
    found = predict_generation(task(length, new_tokens=1), 3, H200)
    qkv, rest = 4096 * (4096 + 2 * 1024), 4096 * (4096 + 3 * 14336)
    read = 2 * (32 * (qkv + rest / 3) + 4096 * 128256 / 3) + 131072 * length / 3
    latency = 32 * (4.7e-4 / 32 + 2 * 1e-5 + 3e-5) + 3e-5
    assert found.token == pytest.approx(read / bandwidth + latency, rel=1e-6)


def plan(*words):
    return main(["plan", "--generate", *words])


def test_the_report_prints_the_way_and_a_command_that_generate_takes(capsys):
    assert plan("--preset", "llama-3-8b", "--sequence-length", "128K", "--nproc", "2", "--max-new-tokens", "32") == 0
    text = capsys.readouterr().out
    says(
        text, "llama-3-8b", "128K tokens", "first token", "ms a token", "cache by heads", "longest", "weights", lines=20
    )
    *_, command = text.strip().splitlines()
    program, name, *words = shlex.split(command)
    assert (program, name) == ("bmburst", "generate")
    parser = CommandParser(prog="bmburst generate", description="")
    generate_command.configure(parser)
    args = parser.parse_args(words)
    assert (args.nproc, args.max_new_tokens, args.cache, args.dtype) == (2, 32, "heads", "bfloat16")
    assert plan("--preset", "llama-3-8b", "--sequence-length", "1M", "--nproc", "3") == 0
    says(capsys.readouterr().out, "cache by tokens", "--cache tokens", lines=20)
    assert plan("--preset", "llama-2-7b", "--sequence-length", "1M", "--nproc", "1") == NOTHING_FITS
    text = capsys.readouterr().out
    says(text, "does not fit", "more GPUs", lines=20)
    assert "bmburst generate" not in text


def test_json_has_every_number_of_gpus(capsys):
    assert plan("--preset", "llama-3-8b", "--sequence-length", "4K", "--nproc", "6", "--batch-size", "8", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["task"] == {
        "preset": "llama-3-8b", "prompt": 4096, "new_tokens": 64, "batch": 8, "dtype": "bfloat16"
    }  # fmt: skip
    assert [way["gpus"] for way in found["ways"]] == [1, 2, 4, 6, 8]
    six = found["ways"][3]
    assert six["cache"] == {"name": "heads x tokens", "head_groups": 2, "token_groups": 3}
    assert six["tokens_per_second"] == pytest.approx(8 / six["token"])
    assert sum(six["memory"][name] for name in ("weights", "cache", "working")) < six["memory"]["available"]


ASKED = "--preset llama-3-8b --sequence-length 4K"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--generate --sequence-length 4K", "--preset | missing | fix:"),
        ("--generate --preset llama-3-8b", "--sequence-length | missing"),
        ("--generate --preset llama-3-9b --sequence-length 4K", "'llama-3-9b' | 'llama-3-8b'"),
        ("--generate --preset llama-3-8b --sequence-length 0", "sequence_length | '0' | at least 1"),
        (f"--generate {ASKED} --nproc 0", "--nproc 0 | allowed | 1"),
        (f"{ASKED} --nodes 0", "--nodes 0 | allowed | 1"),
        (f"--generate {ASKED} --max-new-tokens 0", "--max-new-tokens 0 | at least 1"),
        (f"--generate {ASKED} --batch-size -1", "batch_size | '-1' | at least 1"),
        (f"--generate {ASKED} --dtype int8", "dtype | 'int8' | bfloat16"),
        (f"--generate {ASKED} --nodes 2", "--nodes | --generate | fix:"),
        (f"--generate {ASKED} --parallel.zero_level 3", "--parallel.zero_level | fix:"),
        (f"--generate {ASKED} --hardware h900", "'h900'"),
        (f"--max-new-tokens 3 {ASKED}", "--max-new-tokens 3 | --generate"),
    ],
)
def test_bad_input_is_refused(argv, words, capsys):
    assert main(["plan", *argv.split()]) == 2
    says(capsys.readouterr().err, words)
