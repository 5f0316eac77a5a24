"""Numbers that the README and the documentation repeat are those of the recorded runs."""

import json
import re
import statistics
from pathlib import Path

import pytest

from benchmarks.hugging_face import TRAINERS
from benchmarks.predictions import predicted_choice
from bmburst.schedule.cost import Placement, Problem
from bmburst.schedule.hardware import load_hardware
from bmburst.schedule.layout import Zigzag
from bmburst.schedule.mask import Causal
from bmburst.schedule.strategy import choose_strategy
from bmburst.schedule.units import HeadShapes

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PERFORMANCE, MEMORY, ATTENTION_PAGE = (
    " ".join((ROOT / f"docs/{page}.md").read_text().split()) for page in ("performance", "memory", "attention")
)
TWO, ATTENTION, MASKS = "attention_2xh200_202611", "attention_4xh200_202611", "attention_masks_4xh200_202611"
TABLE = [
    ("64K, 128K, 256K, 32 heads", TWO, [f"sequence/{1 << n}/mha/causal" for n in (16, 17, 18)]),
    ("64K, 32 heads", ATTENTION, ["sequence/65536/mha/causal"]),
    ("128K, 256K, 512K, 1M, 32 heads", ATTENTION, [f"sequence/{1 << n}/mha/causal" for n in range(17, 21)]),
    ("64K, 128K, 256K, 32 query / 8 KV heads", ATTENTION, [f"sequence/{1 << n}/gqa/causal" for n in (16, 17, 18)]),
    ("64K, 32 / 8 heads, with projections and rotary", ATTENTION, ["block/65536/gqa/causal"]),
    ("128K, 512K of packed documents, 32 heads", MASKS, ["documents/131072/mha", "documents/524288/mha"]),
]


def rows(record):
    return json.loads((ROOT / f"benchmarks/results/{record}.json").read_text())["rows"]


def ratio(row):
    """Return the time of one GPU's kernel over a method's, forward and backward, as it is shown."""
    return f"{row['forward_backward']['ratio']:.2f}" if row is not None and row["status"] == "ok" else "-"


@pytest.mark.parametrize(("label", "record", "cells"), TABLE, ids=[f"{record}: {label}" for label, record, _ in TABLE])
def test_the_table_of_attention(label, record, cells):
    found, gpus = rows(record), 2 if record == TWO else 4
    shown = [
        ", ".join(ratio(found.get(f"{cell}/{name}@{gpus}")) for cell in cells)
        for name in ("ours", "ulysses", "ring-flash-attn")
    ]
    (line,) = (line for line in README.splitlines() if line.startswith(f"| {gpus} | {label} |"))
    assert line.startswith(f"| {gpus} | {label} | {' | '.join(shown)} | [")
    assert line.endswith(f"](benchmarks/results/{record}.md) |")


LATENT = {  # heads; head dims of keys and of values; numbers of a latent and a rotary key
    "deepseek_v2 (Lite)": (16, 192, 128, 576),
    "minicpm3": (40, 96, 64, 288),
    "kimi_linear": (32, 192, 128, 576),
    "glm4_moe_lite": (20, 256, 256, 576),
    "longcat_flash": (64, 192, 128, 576),
    "deepseek_v3": (128, 192, 128, 576),
}
SETTINGS = [
    *([("nccl", 1, ranks, tokens) for ranks in (2, 4, 8)] for tokens in (65536, 16384)),
    [("nccl", 2, 16, tokens) for tokens in (16384, 65536, 262144)],
]
"""Of each column: transport, nodes, ranks and tokens."""
OVER_PEER = [("peer", 1, ranks, tokens) for ranks in (2, 4, 8) for tokens in (65536, 16384)]


def saved_by_latents(model, transport, nodes, ranks, tokens):
    """Return the percentage of attention's time that latents save as the page shows it, where they are exchanged."""
    heads, width, value_width, latent = LATENT[model]
    asked = tokens, Causal(), Placement(transport, nodes), load_hardware("h200")
    costs = []
    for numbers in (0, latent):
        sizes = HeadShapes(
            layout=Zigzag(ranks, tokens // ranks), degree=1, batch=1, heads=heads, kv_heads=heads, head_dim=width,
            value_dim=value_width, itemsize=2, statistics_itemsize=4, latent_dim=numbers,
        )  # fmt: skip
        strategy = choose_strategy("auto", sizes, *asked)
        costs.append(Problem(sizes, *asked).cost(strategy).total)
    return f"{100 * (1 - costs[1] / costs[0]):.0f}" if strategy.latents else "-"


@pytest.mark.parametrize("model", LATENT)
def test_what_an_exchange_of_latents_saves(model):
    heads, width, value_width, latent = LATENT[model]
    shown = [f"{heads * (width + value_width)}, {latent}"]
    shown += [", ".join(saved_by_latents(model, *each) for each in column) for column in SETTINGS]
    assert f"| {model} | {' | '.join(shown)} |" in ATTENTION_PAGE
    assert {saved_by_latents(model, *each) for each in OVER_PEER} <= {"-", "1"}
    assert "Over `peer` they save at most 1 %" in ATTENTION_PAGE


INFERENCE = {1: "inference_1xh200_202611", 2: "inference_2xh200_202611"}
SHORT_PROMPTS = "inference_short_2xh200_202611"  # of 2 GPUs, measured later


@pytest.mark.parametrize("gpus", INFERENCE)
def test_the_table_of_inference(gpus):
    found = rows(INFERENCE[gpus])
    ours, theirs = (found.get(f"prompt/llama-3-8b/131072/causal/{name}@{gpus}") for name in ("heads", "transformers"))
    beside = "-" if theirs is None else f"{theirs['first_token_seconds']:.1f} s, {theirs['token_milliseconds']:.0f} ms"
    shown = [f"{ours['first_token_seconds']:.1f} s", f"{ours['token_milliseconds']:.1f} ms", beside]
    assert f"| {gpus} | {' | '.join(shown)} | [" in README


def test_the_tables_have_no_other_rows():
    assert len(re.findall(r"^\| \d \|", README, re.M)) == len(TABLE) + len(INFERENCE)


def test_the_page_on_inference_repeats_its_records():
    page = (ROOT / "docs/inference.md").read_text()
    lines = re.findall(r"^\| (llama-\S+) \| (\d) \| (\d+)([KM]) \| (\S+) \((\S+)\) \| (\S+) \((\S+)\) \|", page, re.M)
    assert len(lines) == 14
    for model, gpus, count, unit, *shown in lines:
        tokens = int(count) << {"K": 10, "M": 20}[unit]
        found = rows(INFERENCE[int(gpus)]) | rows(SHORT_PROMPTS)
        row = found[f"prompt/{model}/{tokens}/causal/heads@{gpus}"]
        ratios = row["ratios"]
        assert shown == [
            f"{row['first_token_seconds']:.3f}",
            f"{ratios['first_token_seconds']:.2f}",
            f"{row['token_milliseconds']:.2f}",
            f"{ratios['token_milliseconds']:.2f}",
        ]
    for prompts in (8, 32):
        row = rows(INFERENCE[1])[f"batch/llama-3-8b/{prompts}x4096/causal/heads@1"]
        assert f"{row['tokens_per_second']:,.0f}" in page


def test_what_attention_costs():
    ratios = [
        ratio(row)
        for record, gpus in ((TWO, 2), (ATTENTION, 4))
        for n in range(16, 21)
        if (row := rows(record).get(f"sequence/{1 << n}/mha/causal/ours@{gpus}")) is not None
    ]
    assert len(ratios) == 8
    assert f"at {min(ratios)} to {max(ratios)} of the speed of one GPU's kernel" in " ".join(README.split())


def test_attention_on_two_gpus():
    found = rows(TWO)
    ours, ulysses, ring = (
        [ratio(found.get(f"sequence/{1 << n}/mha/causal/{name}@2")) for n in (16, 17, 18)]
        for name in ("ours", "ulysses", "ring-flash-attn")
    )
    said = (
        f"{ours[0]} at 64K tokens, {ours[1]} at 128K, {ours[2]} at 256K, ahead of Ulysses ({ulysses[0]}, {ulysses[1]}) "
        f"and of ring-flash-attn ({ring[0]}, {ring[1]}) at 64K and 128K"
    )
    assert said in PERFORMANCE


def test_what_auto_takes_where_predictions_are_close():
    found = [(row, *predicted_choice(row, 2)) for row in rows("strategies_2xh200_202611")]
    ratios = [row[auto] / min(row[name] for name in costs) for row, auto, costs in found]
    fastest = ratios.count(1)
    assert max(ratios) <= 1.02
    said = (
        f"In {len(ratios)} such cases, measured on 2 H200s, it takes the fastest strategy in {fastest} "
        f"and one at most 2 % slower in {len(ratios) - fastest}"
    )
    assert said in ATTENTION_PAGE
    errors = [
        abs(cost / row[name] - 1) for row, _, costs in found for name, cost in costs.items() if row["tokens"] >= 131072
    ]
    said = "128K tokens and more, predictions there differ from the measured times by at most"
    assert f"{said} {100 * max(errors):.0f} %" in ATTENTION_PAGE


def test_training_steps():
    two, four = rows("train_2xh200_202611"), rows("train_4xh200_202611")
    long, short = four["step/llama-3-8b-x1/1048576/ours@4"], two["step/llama-2-7b-x2/262144/ours@2"]
    assert re.search(rf"1M tokens, one layer of it, takes {long['ratio']:.2f} times .* on 4 GPUs", PERFORMANCE)
    assert f"256K tokens, two layers, {short['ratio']:.2f} times on 2" in PERFORMANCE
    whole = [found[f"step/llama-3-8b/32768/ours@{ranks}"]["ratio"] for ranks, found in ((2, two), (4, four))]
    middle = four["step/llama-3-8b/131072/ours@4"]["ratio"]
    assert f"all layers, with 128K tokens takes {middle:.2f} times as long on 4 GPUs" in PERFORMANCE
    assert f"with 32K tokens {whole[0]:.2f} times on 2 GPUs and {whole[1]:.2f} on 4" in PERFORMANCE
    kept = [found[f"step/llama-3-8b/32768/ours@{ranks}-none"]["ratio"] for ranks, found in ((2, two), (4, four))]
    said = "If there is enough memory to recompute nothing, 32K tokens take"
    assert f"{said} {kept[0]:.2f} and {kept[1]:.2f} times as long" in PERFORMANCE


def test_what_policies_keep():
    found = rows("train_2xh200_202611")
    some, none, half = (
        f"{row['peak_memory_gib']:.1f} GiB and {row['milliseconds']['median'] / 1000:.2f} s"
        for row in (
            found[f"step/llama-3-8b/32768/ours@2{policy}"] for policy in ("", "-none", "-block-keep-attention+first-16")
        )
    )
    said = f"`block-keep-attention` takes {some} a step, `none` {none}, and `block-keep-attention+first-16` {half}"
    assert said in MEMORY


def page(name):
    return " ".join((ROOT / f"docs/{name}.md").read_text().split())


def metrics(record):
    return [json.loads(line) for line in (ROOT / f"benchmarks/results/{record}.jsonl").read_text().splitlines()]


def test_the_speed_of_transformers_under_fsdp2():
    by = {(row["tokens"], row["compiled"]): row for row in rows("hugging_face_2xh200_202611")}
    cells = [(tokens, compiled) for compiled in (True, False) for tokens in (32768, 131072)]
    times = [f"{by[cell]['seconds']:.2f}" for cell in cells]
    peaks = [f"{by[cell]['peak_allocated_gib']:.0f}" for cell in cells]
    shares = [
        f"{by[tokens, True]['tokens_per_second_a_rank'] / known[tokens]:.2f}"
        for known in TRAINERS.values()
        for tokens in (32768, 131072)
    ]
    said = page("hugging_face")
    assert f"takes {times[0]} s at 32K tokens and {times[1]} s at 128K with compiled layers" in said
    assert f"which is {shares[0]} and {shares[1]} of the tokens/s of `bmburst train`" in said
    assert f"and {shares[2]} and {shares[3]} times DeepSpeed ALST's" in said
    assert f"Without `torch.compile` it takes {times[2]} and {times[3]} s" in said
    assert f"is {peaks[0]} and {peaks[1]} GiB a GPU compiled, {peaks[2]} and {peaks[3]} GiB without" in said


def test_whole_steps_beside_peers():
    said = (ROOT / "benchmarks/results/peers_2xh200_202611.md").read_text()
    ours = {row["tokens"]: row["seconds"] for row in rows("peers_2xh200_202611") if "bmburst" in row["method"]}
    cells = json.loads((ROOT / "benchmarks/results/train_2xh200_202611.json").read_text())["rows"]
    for row in rows("peers_2xh200_202611"):
        tokens, reserved = row["tokens"], "-" if row["reserved_gib"] is None else f"{row['reserved_gib']:.1f}"
        ahead = "" if "bmburst" in row["method"] else f"{row['seconds'] / ours[tokens]:.2f} "
        numbers = f"{row['seconds']:.3f} | {tokens / 2 / row['seconds']:,.0f} | {row['peak_gib']:.1f} | {reserved}"
        assert f"| {tokens // 1024}K | {row['method']} | {numbers} | {ahead}|" in said
        if "cell" in row:
            assert cells[row["cell"]]["milliseconds"]["median"] == 1000 * row["seconds"]
            assert cells[row["cell"]]["ratio"] == row["ratio_to_bound"]
        elif "milliseconds" in row:
            assert row["milliseconds"]["median"] == 1000 * row["seconds"]
        else:
            assert statistics.median(step["step_s"] for step in row["steps"][1:]) == row["seconds"]
        method = re.sub(r"(block\S+)", r"`\1`", row["method"])
        shown = f"| {tokens // 1024}K | {method} | {row['seconds']:.3f} | {row['peak_gib']:.1f} | {ahead}|"
        assert shown in PERFORMANCE
    since = cells["step/llama-3-8b/131072/ours@2-block-keep-attention+offload-mlp-first-28+first-28"]
    assert (
        f"{since['milliseconds']['median'] / 1000:.2f}" in PERFORMANCE and f"{since['ratio']:.3f} times" in PERFORMANCE
    )


def test_the_speed_of_adapters():
    by = {row["method"]: row for row in rows("lora_peers_h100_202611")}
    ours, liger, mixed = (by[name]["seconds"] for name in ("bmburst", "peft-liger-cudnn", "peft-bmburst"))
    said, last = page("fine_tuning"), metrics("long_sequences_lora_2xh200_202611")[-1]
    assert f"| 64K | {ours:.1f} | {65536 / ours:,.0f} | {by['bmburst']['peak_gib']:.1f} |" in said
    assert f"| 256K | {last['seconds']:.1f} | {last['tokens_per_second']:,.0f} | {last['memory_gib']:.1f} |" in said
    assert "31.31 GiB" in by["peft"]["out_of_memory"]
    assert f"With Liger-Kernel they take {liger:.1f} s, {liger / ours:.2f} times as long" in said
    assert f"they take {mixed:.1f} s" in said


def test_long_sequences_on_h200s():
    said, steps = page("memory"), metrics("long_sequences_1xh200_202611")
    for step in (steps[0], steps[-1]):  # of 512K there is one, of 256K the second
        first = ", the first" if step["step"] == 1 else ""
        numbers = f"{step['seconds']:.1f}{first} | {100 * step['mfu']:.1f} % | {step['memory_gib']:.1f}"
        assert f"| 1 H200 | full | {step['run']} | {numbers} |" in said
    earlier, step = metrics("long_sequences_2xh200_202611")
    assert f"this choice took {step['seconds']:.1f} s, the earlier one {earlier['seconds']:.1f}" in said
    numbers = f"{step['seconds']:.1f}, the first | {100 * step['mfu']:.1f} % | {step['memory_gib']:.1f}"
    assert f"| 2 H200 | full | 1M | {numbers} |" in said
    first, later = (step["seconds"] for step in steps if step["run"] == "256K")
    assert f"The first step of 256K takes {first / later:.2f} times as long as a later one on the H200" in said


def test_long_sequences_on_one_h100():
    said, by = page("memory"), {step["run"]: step for step in metrics("long_sequences_2xh100_202611")}
    for kind, tokens, run in (("full", "256K", "256K"), ("full", "64K", "64K, alone"), ("LoRA", "256K", "256K, LoRA")):
        step = by[run]
        numbers = f"{step['seconds']:.1f} | {100 * step['mfu']:.1f} % | {step['memory_gib']:.1f}"
        assert f"| 1 H100 80 GB | {kind} | {tokens} | {numbers} |" in said
    gib = by["1M, LoRA, window of 4,096"]["memory_gib"]
    assert f"| LoRA | 1M | memory only | | {gib:.1f} |" in said and f"causal one: {gib:.1f} GiB" in said
    lora = by["256K, LoRA"]
    numbers = f"{lora['seconds']:.1f} | {lora['tokens_per_second']:,.0f} | {lora['memory_gib']:.1f}"
    assert f"| 1 H100 80 GB | 256K | {numbers} |" in page("fine_tuning")
    losses = [step["loss"] for step in metrics("text_64k_h100_202611")]
    last = sum(losses[-5:]) / 5
    assert len(losses) == 30 and f"from {losses[0]:.2f} to {last:.2f} nats a token within" in said


def test_the_speed_of_log_probabilities():
    forward, both, _ = rows("logprobs_2xh200_202611")
    words = [f"{row['seconds']:.1f} s and {row['peak_gib']:.1f} GiB" for row in (forward, both)]
    assert f"a forward pass takes {words[0]} a GPU, forward and backward together {words[1]}" in page("fine_tuning")


def test_the_first_steps_of_a_model():
    losses = [step["loss"] for step in metrics("first_steps_2xh200_202611")]
    assert f"from {losses[0]:.2f} to {losses[-1]:.2f} nats a token in its first {len(losses)} steps" in page("training")
    (line,) = re.findall(
        r"^\| loss, nats a token \| (.*) \|$",
        (ROOT / "benchmarks/results/first_steps_2xh200_202611.md").read_text(),
        re.M,
    )
    shown = (1, 2, 3, 5, 8, 10, 12, 15, 18, 20, 22, 25, 28, 30)
    assert line.split(" | ") == [f"{losses[step - 1]:.2f}" for step in shown]


def test_the_speed_of_blocks():
    found = [row for row in rows("block_sparse_h200_202611") if "refused" not in row]
    for kernel, words in (
        ("fa4", "FlashAttention-4 takes {:.2f} to {:.2f} times"),
        ("triton", "{:.1f} to {:.1f} times"),
    ):
        ratios = [row[way]["ratio"] for row in found if row["kernel"] == kernel for way in row if way.startswith("for")]
        assert len(ratios) == 6 and words.format(min(ratios), max(ratios)) in page("masks")


def test_losses_in_float16():
    record = (ROOT / "benchmarks/results/float16_h200_202611.md").read_text()
    losses = re.findall(r"^\| (b?float16)[^|]* \| ([\d.]+) \|", record, re.M)
    assert [kind for kind, _ in losses] == ["bfloat16", "float16", "float16", "float16"]
    words = "{} in bfloat16, {} in float16, and {} in float16 with everything in host memory"
    assert words.format(*(f"{float(loss):.3f}" for _, loss in losses[:3])) in page("training")
    skipped = {row["run"]: row["step"] for row in metrics("float16_h200_202611") if row.get("skipped_steps") == 1}
    assert len(skipped) == 3 and "bfloat16" not in skipped
