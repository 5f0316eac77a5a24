"""What a rank says when its GPU's memory is over, and that it says it once."""

import re
import sys
import types
from dataclasses import replace

import pytest
import torch

from bmburst.blocks.presets import preset
from bmburst.errors import RunError
from bmburst.launch.start import _start_bmtrain
from bmburst.memory import peak_bytes
from bmburst.plan.candidates import Candidate, Task
from bmburst.plan.memory import memory_of
from bmburst.schedule.hardware import load_hardware
from bmburst.train.check import record_steps
from bmburst.train.config import OptimizerConfig, ParallelConfig, TrainConfig
from bmburst.train.memory_plan import DeviceMemory, expected_memory, explain, explained, planned
from tests.distributed.programs import on_program
from tests.refusals import refused
from tests.train import run_program as program

GIB = 2**30
ERROR = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.81 GiB"


def config(length, **changes):
    values = {"preset": "llama-3-8b", "model": long(length), "sequence_length": length, "dtype": "bfloat16"}
    return TrainConfig(**values | changes)


def long(length):
    return replace(preset("llama-3-8b"), max_position_embeddings=length)


def said(run, ranks=8, gib=139.8, reserved=130.0, free=None, host=None, expands=False):
    memory = DeviceMemory(
        device="NVIDIA H200",
        total=int(gib * GIB),
        allocated=int(125 * GIB),
        peak=int(126.5 * GIB),
        reserved=int(reserved * GIB),
        free=None if free is None else int(free * GIB),
        host=None if host is None else int(host * GIB),
        expands=expands,
    )
    return explain(run, ranks, 1, memory, "rank 3 (host gpu07)", ERROR)


@pytest.mark.parametrize(
    ("parallel", "way"),
    [
        (ParallelConfig(strategy="heads"), {"ulysses_degree": 8, "outer": "none"}),
        (ParallelConfig(strategy="heads+ring", head_parallel=2), {"ulysses_degree": 2, "outer": "ring"}),
        (ParallelConfig(strategy="kv", transport="nccl"), {"outer": "ring", "ring_tensors": "kv", "transport": "nccl"}),
        (ParallelConfig(strategy="gather", tensor_parallel=2), {"outer": "gather", "tensor": 2}),
    ],
)
def test_every_line_of_the_planner_is_there_and_adds_up(parallel, way):
    text = said(config(2**21, parallel=parallel))
    lines = text.splitlines()
    assert lines[0] == "rank 3 (host gpu07) ran out of GPU memory: CUDA out of memory. Tried to allocate 2.00 GiB"
    assert "125.00 GiB allocated, 126.50 GiB at most in this step, 130.00 GiB reserved, of 139.80 GiB" in lines[1]
    task = Task(model=long(2**21), sequence=2**21, gpus=8, loss_chunk=1024)
    candidate = Candidate(task=task, **way)
    expected = memory_of(candidate, load_hardware("h200"))
    parts = dict(
        reversed(found) for found in re.findall(r"^ +([\d.]+) GiB  (.+)$", text.split("settings that")[0], re.M)
    )
    assert float(parts.pop("total")) == pytest.approx(expected.total / GIB, abs=0.01)
    assert {name: float(size) for name, size in parts.items()} == pytest.approx(
        {name: size / GIB for name, size in {**expected.lines, **expected.outside}.items()}, abs=0.01
    )


def settings_of(text):
    found = re.findall(r"^ +([\d.]+) GiB  (.+)$", text.partition("settings that would fit")[2], re.M)
    return {words: float(size) for size, words in found}


def test_settings_of_a_pipeline_are_ones_that_stages_can_do():
    run = config(2**19, parallel=ParallelConfig(pipeline_parallel=2), batch_size=2, recompute="none")
    fitting = settings_of(said(run))
    assert "--recompute block" in fitting
    assert not any("block+offload" in words or "offload_weights" in words for words in fitting)


def test_settings_that_would_fit_do_and_others_are_not_named():
    run = config(2**21)
    fitting = settings_of(said(run))
    assert fitting and all(size <= 139.8 for size in fitting.values())
    assert "--recompute block" in fitting
    tight = settings_of(said(run, gib=60))
    assert tight and all(size <= 60 for size in tight.values()) and "--recompute block" not in tight
    assert any(words.startswith(("2 times", "4 times")) for words in tight)
    assert "would fit: shorten --sequence-length" in said(run, gib=3)
    offloaded = config(2**21, optimizer=OptimizerConfig(offload=True))
    assert not any(words == "--optimizer.offload" for words in settings_of(said(offloaded)))
    assert " optimizer\n" in said(run) and " optimizer\n" not in said(offloaded)


@pytest.mark.parametrize("recompute", ["none", "block-keep-attention+first-3"])
def test_the_fewest_first_layers_that_would_fit_come_first(recompute):
    """Of what was too much 95 % at most: fewer layers would take more, and fewer still are not named."""
    run = config(2**15, recompute=recompute)
    now = memory_of(planned(run, 2, 1, load_hardware("h200")), load_hardware("h200")).total / GIB
    fitting = settings_of(said(run, ranks=2, gib=now))
    words = next(iter(fitting))
    assert words.startswith("--recompute block-keep-attention+first-") and fitting[words] <= 0.95 * now
    layers = int(words.rpartition("-")[2])
    assert layers > 3 * recompute.endswith("first-3")
    fewer = planned(config(2**15, recompute=f"block-keep-attention+first-{layers - 1}"), 2, 1, load_hardware("h200"))
    assert memory_of(fewer, load_hardware("h200")).total / GIB > 0.95 * now
    assert "--recompute block-keep-attention" in fitting


def test_first_layers_that_would_not_help_are_not_named():
    kept = settings_of(said(config(2**15), ranks=2, gib=70))
    assert kept and not any("block-keep-attention+first" in words for words in kept)


def test_weights_that_are_whole_on_every_rank_may_be_sharded():
    """llama-3-8b: 7 of 8 parts of 2 bytes for each of its 8.03e9 weights."""
    runs = [config(2**15, parallel=ParallelConfig(zero_level=level)) for level in (2, 3)]
    whole, sharded = (memory_of(planned(run, 8, 1, load_hardware("h200")), load_hardware("h200")).total for run in runs)
    assert 0.8 * 14e9 < whole - sharded <= 7 / 8 * 2 * 8.03e9
    assert settings_of(said(runs[0]))["--parallel.zero-level 3"] == pytest.approx(sharded / GIB, abs=0.01)
    assert "--parallel.zero-level 3" not in settings_of(said(runs[1]))


def test_settings_that_would_be_refused_are_not_named():
    zigzag = settings_of(said(config(2**21)))
    assert any(":0.5" in words for words in zigzag) and any("+offload," in words for words in zigzag)
    contiguous = settings_of(said(config(2**21, parallel=ParallelConfig(layout="contiguous"))))
    assert contiguous and not any(":0.5" in words for words in contiguous)
    poor = settings_of(said(config(2**21), host=200))
    assert poor and not any("+offload" in words for words in poor)
    assert "--optimizer.offload --recompute block, and 89.75 GiB of each host" in poor
    policies = [words.split(",")[0] for words in zigzag if words.startswith("--recompute")]
    assert policies[0] == "--recompute block-keep-attention+offload" and policies[-1] == "--recompute block+offload"


def test_weights_in_host_memory_are_named_where_it_has_room():
    """Of 8.03e9 weights on one GPU, 4 bytes of each block's leave it; the host keeps 14 for them."""
    streamed = "--optimizer.offload --optimizer.offload_weights"
    run = config(2**16, recompute="block", mlp_chunk_tokens=4096)
    fitting = settings_of(said(run, ranks=1, gib=60, host=200))
    (words,) = (each for each in fitting if each.startswith(f"{streamed}, and"))
    hosted = float(words.split("and ")[1].split(" GiB")[0])
    assert 14 * 7e9 / GIB < hosted < 14 * 8.03e9 / GIB
    streaming = config(2**16, optimizer=OptimizerConfig(offload=True, offload_weights=True))
    assert not any(words.startswith(streamed + ",") for words in settings_of(said(streaming, ranks=1, host=200)))
    of_bmtrain = run.replace(optimizer=OptimizerConfig(kernel="bmtrain"))  # has no effect there, and is left out
    assert settings_of(said(of_bmtrain, ranks=1, gib=60, host=200)) == fitting
    whole = config(2**16, recompute="block", parallel=ParallelConfig(zero_level=2))
    assert not any(streamed in words for words in settings_of(said(whole, ranks=1, gib=60, host=200)))
    for given, is_named in ((64, False), (128, True)):  # what is free does not count then
        said_to_have = settings_of(said(run.replace(host_memory=given), ranks=1, gib=60, host=90))
        assert any(words.startswith(streamed) for words in said_to_have) == is_named


def test_what_the_prediction_does_not_tell_is_said_beside_it():
    """Fragments where they are large, other programs on the GPU, and a model that the planner cannot spread."""
    assert "expandable_segments" in said(config(2**20), reserved=138)
    assert "expandable_segments" not in said(config(2**20), reserved=126)
    assert "expandable_segments" not in said(config(2**20), reserved=138, expands=True)  # it is done already
    assert "29.30 GiB of it are outside" in said(config(2**20), reserved=110, free=0.5)
    assert "outside" not in said(config(2**20), reserved=136, free=1.0)  # CUDA's context and NCCL
    assert "the planner cannot say" in said(config(2**20, parallel=ParallelConfig(data_parallel=3)), ranks=7)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("Tried to allocate 5.00 GiB. GPU 0 has"), "Tried to allocate 5.00 GiB"),
        (
            RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in"),
            "CUDA error: out of memory",
        ),
    ],
    ids=["allocator", "driver"],
)
def test_torchs_error_becomes_ours(monkeypatch, error, words):
    monkeypatch.setenv("RANK", "5")
    with refused("rank 5", "GPU memory", words, error=RunError, lines=50) as caught, explained(config(2**17)):
        raise error
    assert not caught.value.on_all_ranks


@on_program(1)
def test_check_explains_them_too(tmp_path):
    beyond = replace(program.SHAPE, vocab_size=2**30, hidden_size=2**22)  # bytes that no process can address
    with refused("rank 0", "host memory", "fix: ", error=RunError):
        record_steps(program.config(tmp_path, "run", model=beyond, recompute="none"), 1)


def test_a_gpu_without_memory_for_a_rank_is_no_traceback(monkeypatch):
    def full(_store, **_options):
        raise RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in")

    init = types.SimpleNamespace(init_distributed=full, print_dict=None)
    monkeypatch.setitem(sys.modules, "bmtrain", types.SimpleNamespace(init=init, config={"initialized": False}))
    monkeypatch.setitem(sys.modules, "bmtrain.init", init)
    monkeypatch.setenv("LOCAL_RANK", "3")
    with refused("GPU 3", "no memory left", "nvidia-smi", error=RunError):
        _start_bmtrain(0, 1, 1)


def test_a_host_whose_memory_is_over_is_no_traceback(monkeypatch):
    monkeypatch.setenv("RANK", "5")
    words = ("rank 5", "host memory", "1048576.00 GiB", "fix: ")
    with refused(*words, error=RunError) as caught, explained(config(2**17)):
        torch.empty(2**50, dtype=torch.uint8)
    assert not caught.value.on_all_ranks
    with pytest.raises(RuntimeError, match=r"shape '\[3\]' is invalid"), explained(config(2**17)):
        torch.zeros(4).view(3)


def test_on_a_cpu_the_process_so_far_and_the_tensors_to_come_are_expected(no_cuda):
    config = TrainConfig()
    before = peak_bytes()[0]
    found = expected_memory(config, 2, 2)
    assert before <= found.outside["process"] <= peak_bytes()[0]
    tensors = found.total - found.outside["process"]
    own = config.model.num_parameters / 2 * 4  # of a rank, in float32
    assert 3 * own < tensors < 2**28  # a gradient and two moments, and what 2,048 tokens need
