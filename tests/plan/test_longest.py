"""The longest sequence that is found fits, a longer one does not, and its command trains it."""

import json
import re
import shlex
from dataclasses import replace

import pytest

from bmburst.blocks.config import LoRAConfig
from bmburst.blocks.presets import PRESETS
from bmburst.cli.program import NOTHING_FITS, main
from bmburst.plan.candidates import Candidate, Offload, Task
from bmburst.plan.counts import causal_pairs
from bmburst.plan.longest import STEP, longest, where_bytes_lie
from bmburst.plan.memory import memory_of, reserved_memory
from bmburst.plan.presentation import options
from bmburst.plan.search import predict, search, with_usable_memory
from bmburst.schedule.hardware import load_hardware
from bmburst.train.clock import FlopsMeter
from bmburst.train.machine import planned
from tests.plan.test_plan import read
from tests.refusals import says

GIB = 2**30
LORA = LoRAConfig(rank=16)
MACHINES = {name: load_hardware(name) for name in ("h100", "h200")}


def machine(name, host):
    return replace(MACHINES[name], host_memory=host * GIB)


def task(gpus, **more):
    return Task(model=PRESETS["llama-3-8b"], preset="llama-3-8b", sequence=gpus, gpus=gpus, **more)


@pytest.mark.parametrize(
    ("name", "gpus", "host"),
    [("h100", 1, 128), ("h200", 1, 128)]
    + [pytest.param(*each, marks=pytest.mark.long) for each in (("h200", 2, 256), ("h100", 4, 512))],
)
def test_no_longer_sequence_fits(name, gpus, host):
    hardware = machine(name, host)
    found = longest(task(gpus), hardware)
    assert [each.tokens for each in found] == sorted((each.tokens for each in found), reverse=True)
    meshes = [(each.found.candidate.data, each.found.candidate.tensor) for each in found]
    assert len(set(meshes)) == len(meshes)
    for each in found:
        way = each.found.candidate
        assert each.tokens % STEP == 0 and each.found.memory.fits
        more = replace(task(gpus), sequence=each.tokens + STEP)
        room = with_usable_memory(hardware, hardware.memory - reserved_memory(more, hardware), more)
        ways = search(more, room, zero=(3,), tensor=(way.tensor,))
        assert not any(one.memory.fits and one.candidate.data == way.data for one in ways)


@pytest.mark.long
def test_more_memory_is_never_shorter():
    lengths = [[longest(task(1), machine(name, host))[0].tokens for host in (110, 128, 256, 1024)] for name in MACHINES]
    for of_machine in lengths:
        assert of_machine == sorted(of_machine)
        assert of_machine[0] < of_machine[-1]
    assert all(small < large for small, large in zip(*lengths, strict=True))
    few = longest(task(1), machine("h100", 128), offload=[Offload.OPTIMIZER])[0].tokens
    assert few < lengths[0][1]


def test_a_million_tokens_of_adapters_fit_one_h100():
    found = longest(task(1), machine("h100", 125), lora=LORA)
    assert max(each.tokens for each in found if each.training == "lora") >= 1 << 20


@pytest.mark.parametrize("host", [256, 1863])  # with the larger, attention's outputs are in host memory too
def test_every_byte_has_a_place(host):
    for each in longest(task(2), machine("h200", host)):
        memory, places = each.found.memory, where_bytes_lie(each.found)
        assert sum(places["gpu"].values()) == pytest.approx(memory.total)
        assert sum(places["host"].values()) == pytest.approx(memory.in_host)
        assert places["gpu"]["weights"] > GIB
        assert min(places["gpu"].values()) > 0


def test_the_answer_names_what_limits_it_and_a_command_that_runs(capsys):
    words = "plan --longest --preset llama-3-8b --nproc 1 --hardware h100 --host-memory 128G"
    assert main(words.split()) == 0
    printed = capsys.readouterr().out
    assert main([*words.split(), "--json"]) == 0
    row, with_adapters = json.loads(capsys.readouterr().out)["longest"]
    assert row["training"] == "full"
    assert row["tokens"] > 500_000
    assert row["seconds"] > 500
    assert "GPU memory in" in row["limit"]
    assert [each["command"] for each in (row, with_adapters)] == re.findall("^bmburst train.*", printed, re.MULTILINE)
    assert row["limit"] in printed and "128 GiB of host memory" in printed
    config = read(shlex.split(row["command"])[2:])
    config.validate(1)
    assert config.sequence_length == row["tokens"]
    assert config.host_memory == 128
    way = planned(config, 1, 1, MACHINES["h100"])
    memory = memory_of(way, machine("h100", 128))
    assert memory.fits and (way.recompute, way.offload.value) == (row["recompute"], row["offload"])
    assert sum(row["bytes"]["gpu"].values()) == pytest.approx(memory.total)


@pytest.mark.long
def test_adapters_reach_further():
    """Frozen weights have neither gradients nor AdamW's state, and 4 of 6 products."""
    for gpus, host in ((1, 128), (2, 256)):
        found = longest(task(gpus), machine("h100", host), lora=LORA)
        full, lora = ([each for each in found if each.training == kind] for kind in ("full", "lora"))
        assert len(full) == len(lora)
        assert [each.found.seconds for each in full] == [
            each.found.seconds for each in longest(task(gpus), machine("h100", host))
        ]
        for one, other in zip(full, lora, strict=True):
            assert other.tokens > 1.1 * one.tokens
            way = other.found.candidate
            config = read(options(way))
            config.validate(gpus)
            again = planned(config, gpus, 1, machine("h100", host))
            assert again.task.lora == LORA and memory_of(again, machine("h100", host)) == other.found.memory
    small = longest(task(1), machine("h100", 64), lora=LORA)
    assert {each.training for each in small} == {"lora"}


def test_a_step_of_adapters():
    asked = replace(task(2), sequence=1 << 16)
    ways = [Candidate(task=replace(asked, lora=lora), ulysses_degree=2) for lora in (None, LORA)]
    full, lora = (predict(way, MACHINES["h200"]) for way in ways)
    trained = 32 * 16 * (2 * 4096 + 4096 + 1024)
    assert ways[1].task.trained == trained
    assert ways[1].task.parameters == ways[0].task.model.num_parameters + trained
    moved = 32 * 2 * (1 << 15) * (5 * 4096 + 4 * (4096 + 1024))  # see `bmburst_ops.linears.low_rank_backward`
    adapters = moved / MACHINES["h200"].memory_bandwidth
    assert lora.time.matmul == pytest.approx(4 / 6 * full.time.matmul + adapters, rel=1e-6)
    assert lora.time.attention == full.time.attention
    assert lora.time.optimizer < 0.01 * full.time.optimizer
    for found, adapters in ((full, 0), (lora, trained)):
        meter = FlopsMeter(model=asked.model, recompute="none", ranks=2, peak=found.hardware.peak, adapters=adapters)
        of_a_run = meter.of(asked.sequence, causal_pairs([asked.sequence]), found.seconds)
        assert found.utilisation == pytest.approx(of_a_run.mfu)
    moved = 2 * ways[0].task.model.num_parameters / 2
    assert full.memory.lines["gradients"] == pytest.approx(moved)
    assert lora.memory.lines["gradients"] == trained
    assert lora.memory.lines["optimizer"] == 12 * trained / 2
    streamed = predict(replace(ways[1], offload=Offload.WEIGHTS), MACHINES["h200"]).memory
    blocks = 32 * (4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) + 2 * 4096)
    assert sum(streamed.host.values()) == (blocks + 2 * trained) * 2 + 10 * trained
    assert streamed.host["optimizer"] == 10 * trained
    one = replace(asked, gpus=1)
    tables = 2 * 128256 * 4096 + 4096
    alone = predict(Candidate(task=replace(one, lora=LORA), offload=Offload.WEIGHTS), MACHINES["h200"]).memory
    assert alone.lines["weights"] == 2 * tables


def test_a_base_in_4_bits_needs_no_host_memory():
    """70B at 32K on one H200 whose host has little memory, and 8B at 64K on a GPU of 40 GB."""
    large = Task(model=PRESETS["llama-3-70b"], sequence=32 << 10, gpus=1, lora=replace(LORA, base="4bit"))
    found = search(large, machine("h200", 8))[0]
    assert found.memory.fits and found.candidate.offload is Offload.NOTHING
    assert not search(replace(large, lora=LORA), machine("h200", 64))[0].memory.fits
    small = Task(model=PRESETS["llama-3-8b"], sequence=64 << 10, gpus=1, lora=replace(LORA, base="4bit"))
    assert search(small, replace(machine("h100", 8), memory=40e9))[0].memory.fits
    with_seconds = [predict(Candidate(task=replace(large, lora=each)), MACHINES["h200"]) for each in (LORA, large.lora)]
    read = with_seconds[1].time.elementwise - with_seconds[0].time.elementwise
    matrices = 80 * 8192 * (2 * 8192 + 2 * 1024 + 3 * 28672)
    # Twice: 4.127 bits read and 16 written.
    assert read == pytest.approx(MACHINES["h200"].memory_seconds(2 * matrices * (16 + 4.127) / 8), rel=1e-3)
    assert all(each.candidate.tensor == 1 for each in search(replace(large, gpus=2), MACHINES["h200"]))


def test_host_memory_decides_where_the_optimizer_lies(capsys):
    def best(words):
        status = main(f"plan --json --preset llama-3-8b {words}".split())
        (first, *_) = json.loads(capsys.readouterr().out)["ways"]
        assert status == (0 if first["memory"]["fits"] else NOTHING_FITS)
        return first

    long, short = "--sequence-length 128K --nproc 1 --hardware h100", "--sequence-length 32K --nproc 8"
    found = {host: best(f"{long} --host-memory {host}") for host in ("64G", "128G", "1T")} | {None: best(long)}
    assert not found["64G"]["memory"]["fits"]
    assert all(found[host]["memory"]["fits"] and found[host]["offload"] != "nothing" for host in ("128G", "1T", None))
    assert found["128G"]["seconds"] >= found["1T"]["seconds"] == found[None]["seconds"]
    resident, moved = best(short), best(f"{short} --optimizer.offload")
    assert (resident["offload"], moved["offload"] != "nothing") == ("nothing", True)
    assert moved["seconds"] > resident["seconds"]
    assert moved["memory"]["host"]["optimizer"] > 60 * GIB
    assert "--host-memory 128G" in found["128G"]["command"] and "--host-memory" not in found[None]["command"]


@pytest.mark.parametrize(
    ("gpus", "host"), [(1, 128), *(pytest.param(4, n, marks=pytest.mark.long) for n in (512, 4096))]
)
def test_the_limit_is_the_memory_of_which_more_helps(gpus, host):
    hardware = machine("h100", host)
    lengths = {}
    for grown in ("memory", "host_memory"):
        more = longest(task(gpus), replace(hardware, **{grown: 1.05 * getattr(hardware, grown)}))
        lengths[grown] = {each.found.candidate.tensor: each.tokens for each in more}
    limits = set()
    for each in longest(task(gpus), hardware):
        longer = {grown: of[each.found.candidate.tensor] > each.tokens for grown, of in lengths.items()}
        named = {"memory": "GPU memory in" in each.limit, "host_memory": "host memory" in each.limit}
        assert named == longer or (all(named.values()) and not any(longer.values()))
        limits.add(tuple(named.values()))
    assert ((True, True) in limits) == (host < 4096)


def test_every_mesh_can_follow_its_policy():
    """Ranks that share matrices compute no inputs again, but move the inputs of some layers to the host."""
    found = {each.found.candidate.tensor: each for each in longest(task(4), machine("h100", 512))}
    assert set(found) == {1, 2, 4}
    for each in found.values():
        read(options(each.found.candidate)).validate(4)
    assert "+every-" in found[1].found.candidate.recompute
    plain = longest(task(4), machine("h100", 512), recompute=["block", "block+offload"])
    assert all(found[each.found.candidate.tensor].tokens >= each.tokens for each in plain)
    for tensor in (2, 4):
        assert "+offload-first-" in found[tensor].found.candidate.recompute
    (only,) = longest(task(4), machine("h100", 512), recompute=["block+every-4"])
    assert only.found.candidate.tensor == 1
    of_search = search(replace(task(4), sequence=4096), MACHINES["h200"], recompute=["block+every-4"])
    assert {each.candidate.tensor for each in of_search} == {1}


def test_a_single_policy_is_tried_with_the_optimizer_in_host_memory():
    """Where another policy would fit beside the optimizer, but the one that is asked for does not."""
    asked = replace(task(4), sequence=3 << 14)
    assert search(asked, MACHINES["h100"], recompute=["block-keep-attention"], tensor=[1])[0].memory.fits
    alone = search(asked, MACHINES["h100"], recompute=["none"], tensor=[1], offload=[Offload.NOTHING])
    assert not alone[0].memory.fits
    best = search(asked, MACHINES["h100"], recompute=["none"], tensor=[1])[0]
    assert best.candidate.offload is not Offload.NOTHING


REFUSALS = {
    "--generate --sequence-length 4K --preset llama-3-8b --lora.rank 8": "--lora.rank | --generate | fix: ",
    "--sequence-length 4K --preset llama-3-8b --nproc 2 --tensor-parallel 2 --lora.rank 8 --lora.base 4bit": (
        "lora.base 4bit | tensor_parallel 2 | --tensor-parallel 1"
    ),
    "--sequence-length 4K --preset llama-3-8b --pipeline-parallel 2 --parallel.zero_level 2 --lora.rank 8 "
    "--lora.base 4bit": ("lora.base 4bit | pipeline_parallel 2 | zero_level 2 | fix: --parallel.zero_level 3"),
    "--sequence-length 4K --preset llama-3-8b --lora.base 4bit": "lora.base 4bit | lora.rank | fix: ",
    "--sequence-length 4K --preset llama-3-8b --lora.rank 8 --lora.base 8bit": "8bit | dtype | 4bit",
    "--longest --preset llama-3-8b --nproc 0": "--nproc 0 | allowed: 1",
    "--calibrate --optimizer.offload": "--calibrate | --optimizer.offload | fix: leave --optimizer.offload out",
    "--longest --preset llama-3-8b --nproc 2 --tensor-parallel 2 --recompute block+every-4": (
        "block+every-4 | tensor | fix: "
    ),
    "--sequence-length 4096 --preset llama-3-8b --nproc 2 --tensor-parallel 2 --recompute block+every-4": (
        "block+every-4 | tensor | fix: "
    ),
    "--sequence-length 4096 --preset llama-3-8b --nproc 2 --tensor-parallel 2 --recompute block+offload-mlp-first-4": (
        "block+offload-mlp-first-4 | tensor | fix: block, "
    ),
    "--longest --nproc 1": "--preset | missing",
    "--longest --preset llama-3-8b --sequence-length 4096": (
        "--longest | --sequence-length | fix: leave --sequence-length out"
    ),
    "--longest --preset llama-3-8b --host-memory 0": "host_memory | '0' | above 0 | 128G",
    "--longest --preset llama-3-8b --host-memory much": "host_memory | 'much' | 128G",
    "--longest --generate --preset llama-3-8b": "--longest | --generate",
    "--longest --calibrate": "--longest | --calibrate",
    "--longest --preset llama-3-8b --output plan.png": "--longest | --output",
}


@pytest.mark.parametrize("words", REFUSALS)
def test_bad_input_is_refused_in_a_few_lines(words, capsys):
    assert main(["plan", *words.split()]) == 2
    says(capsys.readouterr().err.strip(), REFUSALS[words])


@pytest.mark.usefixtures("no_ranks")
def test_train_refuses_host_memory_before_ranks_start(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--host-memory", "900T"]) == 2
    says(capsys.readouterr().err.strip(), "host_memory | machine | allowed: | fix: --host-memory")
    assert main(["train", "--host-memory", "8M", "--optimizer.offload", "--steps", "1"]) == 2
    says(capsys.readouterr().err.strip(), "optimizer.offload | in reserve | fix: ", lines=3)
    for policy in ("block+offload", "block+offload-first-1"):
        words = ["train", "--host-memory", "1M", "--sequence-length", "4096", "--recompute", policy, "--steps", "1"]
        assert main(words) == 2
        says(
            capsys.readouterr().err.strip(),
            f"train: recompute {policy}: | allowed: | 921.6 KiB | 1.0 MiB | in reserve",
            lines=3,
        )
    for value in ("0", "-1", "x", "5Q"):
        assert main(["train", "--host-memory", value]) == 2
        says(capsys.readouterr().err.strip(), f"host_memory | {value} | 128G")


def test_nothing_fits_anywhere(capsys):
    asked = "--longest --preset llama-3-70b --nproc 1 --hardware h100 --host-memory 16G"
    assert main(["plan", *asked.split()]) == NOTHING_FITS
    says(capsys.readouterr().err.strip(), "llama-3-70b", "at any length", "NVIDIA H100", "fix: ", "more of host memory")
