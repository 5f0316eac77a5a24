"""What a run shows at its start and end fits 80 columns, in units of the size of the value."""

import io
import re
from pathlib import Path

import pytest

from bmburst.amounts import GIB, bytes_text
from bmburst.blocks.config import LoRAConfig
from bmburst.data import open_corpus
from bmburst.plan.memory import memory_of
from bmburst.schedule.hardware import load_hardware
from bmburst.schedule.parallelism import MeshShape
from bmburst.train.config import ParallelConfig, TrainConfig
from bmburst.train.memory_plan import planned
from bmburst.train.report import ProgressBar, counted, end_text, prefixed, seconds_text, start_text
from bmburst.train.resolve import resolve


def rows(text):
    assert max(map(len, text.splitlines())) <= 80
    assert (
        len({re.match(r"  \S+(?: \S+)* +", line).end() for line in text.splitlines()}) == 1
    )  # values below each other
    return dict(re.split(r"  +", line.strip(), maxsplit=1) for line in text.splitlines())


def test_the_lines_at_the_start():
    config = resolve(
        (),
        {
            "preset": "llama-3-8b",
            "model.max_position_embeddings": 1 << 18,
            "sequence_length": 1 << 18,
            "batch_size": 2,
            "steps": 1000,
            "dtype": "bfloat16",
            "optimizer.offload": True,
            "recompute": "block+every-4",
            "parallel.data_parallel": 2,
            "output": "runs/long",
        },
    )
    hardware = load_hardware("h200")
    memory = memory_of(planned(config, 8, 1, hardware), hardware)
    said = rows(start_text(config, MeshShape(2, 4, 1), (123_456, 789), "tokenizer.json", memory))
    assert said["model"] == "llama-3-8b: 8.03B parameters, bfloat16"
    assert said["data"] == "stdlib (tokenizer.json): 123,456 sequences, 789 held out"
    assert said["ranks"] == "8: data 2 x sequence 4; recompute block+every-4"
    assert said["step"] == "512K tokens: 2 x 262,144"
    assert said["steps"] == "1,000: 524M tokens, 0.016 epochs"
    assert said["lr"] == "0.0003, cosine, after 2000 steps of warm-up; the run ends at 0.00015"
    assert (
        said["memory"]
        == f"{memory.total / GIB:.1f} GiB of each rank expected, {memory.in_host / GIB:.1f} GiB of each host"
    )
    assert said["folder"] == "runs/long"


def test_adapters_are_counted_and_unknown_memory_is_left_out():
    config = TrainConfig(
        lora=LoRAConfig(rank=4), checkpoint_every=None, output=Path("x"), parallel=ParallelConfig(tensor_parallel=1)
    )
    said = rows(start_text(config, MeshShape(1, 1, 1), (0, 1), "bytes", None))
    assert said["model"] == "llama-tiny: 1.07M parameters, 7.17K of adapters trained, float32"
    assert said["ranks"] == "1; recompute block-keep-attention" and "memory" not in said


def test_the_table_at_the_end():
    found = {
        "steps": 1200.0,
        "skipped_steps": 3.0,
        "seconds": 18.96,
        "tokens_per_second": 6913.4,
        "tokens_per_second_per_gpu": 3456.7,
        "mfu": 0.4512,
        "mfu_kernel": 0.478,
        "hardware_tflops": 412.3,
        "exposed_seconds": 0.0421,
        "data_seconds": 0.000336,
        "data_balance": 1.012,
        "data_balance_drawn": 1.21,
        "memory_gib": 125.02,
        "reserved_gib": 130.9,
    }
    said = rows(end_text(found))
    assert said["steps"].startswith("1,200, 3 skipped") and said["time a step"] == "19 s"
    assert said["waiting for data"] == "336 us" and said["exposed communication"] == "42.1 ms"
    assert said["tokens/s"] == "6,913, 3,457 a rank" and said["FLOP/s a rank"] == "412 TFLOP/s"
    assert said["MFU"] == "45.1%" and said["peak memory"] == "125.0 GiB, 130.9 GiB reserved"
    assert said["data groups"] == "slowest / mean 1.012 by predicted cost, 1.210 as drawn"
    few = rows(end_text({"steps": 1.0, "skipped_steps": 0.0, "seconds": 2e-6, "tokens_per_second": 4.613}))
    assert few.keys() == {"steps", "time a step", "tokens/s"} and few["time a step"] == "2 us"
    assert few["tokens/s"] == "4.61"


def test_units_fit_the_size():
    assert [seconds_text(each) for each in (1969.4, 98.71, 0.9996)] == ["1,969 s", "98.7 s", "1,000 ms"]
    assert [prefixed(each, "FLOP/s") for each in (6.44e9, 12.0)] == ["6.44 GFLOP/s", "12 FLOP/s"]
    assert [bytes_text(size * GIB) for size in (4.584, 9.994, 9.996, 203)] == [
        f"{text} GiB" for text in ("4.58", "9.99", "10.0", "203.0")
    ]
    assert (bytes_text(465 * 2**20), counted(819_200), counted(50)) == ("465.0 MiB", "819K", "50")


def test_a_log_says_why_the_first_step_lasts():
    stream = io.StringIO()
    ProgressBar(3, stream=stream).begin()
    assert "first step" in stream.getvalue()


@pytest.mark.parametrize(("megabytes", "is_shown", "is_said"), [(5, True, True), (1, True, False), (5, False, False)])
def test_a_log_says_that_a_long_text_is_tokenized(megabytes, is_shown, is_said, tmp_path, capfd):
    (tmp_path / "long.txt").write_text("a line of text\n" * (megabytes << 20 >> 4) + "more" * (megabytes << 17))
    open_corpus(tmp_path / "long.txt", "bytes", tmp_path, progress=is_shown)
    assert ("tokenizing" in capfd.readouterr().err) == is_said
