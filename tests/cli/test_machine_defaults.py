"""Defaults by the GPUs of a machine: what is given is kept, a resumed run keeps its own, and one line says the rest."""

import json
import math
from dataclasses import replace
from functools import partial
from itertools import product

import pytest

from bmburst.cli import main
from bmburst.launch.devices import Gpu
from bmburst.plan.memory import reserved_memory
from bmburst.plan.search import predict, with_usable_memory
from bmburst.plan.ways import with_policies
from bmburst.recompute.policy import POLICIES
from bmburst.schedule.hardware import hardware_like
from bmburst.schedule.parallelism import divisors
from bmburst.train.config import TrainConfig
from bmburst.train.defaults import choices_text, defaults_of, spread
from bmburst.train.machine import planned
from bmburst.train.resolve import resolve
from tests.cli.commands import checkpoint, see_gpus, started
from tests.refusals import says

H100 = (Gpu("NVIDIA H100 80GB HBM3", (9, 0)),) * 8
T4 = (Gpu("Tesla T4", (7, 5)),) * 2


def test_without_gpus_the_defaults_are_those_of_the_configuration():
    assert defaults_of(()) == {}
    assert spread(TrainConfig(), (), 8, ()) == TrainConfig()
    assert choices_text(TrainConfig(), (), 8, ()) == ""
    assert (TrainConfig().dtype, TrainConfig().recompute) == ("float32", "block-keep-attention")


def test_what_is_given_is_kept(tmp_path):
    assert defaults_of(H100) == {"dtype": "bfloat16", "recompute": "auto"}
    assert defaults_of(T4) == {"recompute": "auto"}
    made = resolve((), {"seed": "1"}, defaults=defaults_of(H100))
    assert (made.dtype, made.recompute, made.seed) == ("bfloat16", "auto", 1)
    (tmp_path / "c.json").write_text(json.dumps({"dtype": "float32"}))
    made = resolve((tmp_path / "c.json",), {"recompute": "none"}, defaults=defaults_of(H100))
    assert (made.dtype, made.recompute) == ("float32", "none")


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, (8, 1, 8)),
        ({"micro_batch_size": "2"}, (8, 1, 16)),
        ({"batch_size": "4"}, (4, 2, 4)),  # of which 8 groups would have none
        ({"preset": "llama-3-8b", "sequence_length": "8192"}, (8, 1, 8)),
        ({"preset": "llama-3-8b", "sequence_length": "1048576", "model.max_position_embeddings": "1048576"}, (1, 8, 1)),
        ({"parallel.sequence_parallel": "4"}, (1, 4, 1)),
        ({"parallel.data_parallel": "2"}, (2, None, 1)),
    ],
    ids=str,
)
def test_sequences_are_on_as_few_gpus_as_they_fit_on(options, shape):
    made = resolve((), options, defaults=defaults_of(H100))
    found = spread(made, options, 8, H100)
    parallel = found.parallel
    assert (parallel.data_parallel, parallel.sequence_parallel, found.batch_size) == shape


H200 = (Gpu("NVIDIA H200", (9, 0)),) * 4


@pytest.mark.parametrize(
    ("gpus", "tokens"),
    [(H100[:2], 8192), (H100[:4], 32768), (H200[:1], 1024), (H200[:2], 4096), (H200, 8192)],
    ids=str,
)
def test_a_plain_command_takes_the_best_choice_by_hand(gpus, tokens):
    """llama-3-8b, 8 sequences a step: every mesh of data and sequence ranks, micro-batch and ZeRO level beside it."""
    longer = {"model.max_position_embeddings": "32768"}
    options = {"preset": "llama-3-8b", "sequence_length": f"{tokens}", "batch_size": "8", **longer}
    made = resolve((), options, defaults=defaults_of(gpus))
    found, machine = spread(made, options, len(gpus), gpus), hardware_like(gpus[0].name)

    def seconds(config):
        way = planned(config, len(gpus), 1, machine)
        room = with_usable_memory(machine, machine.memory - reserved_memory(way.task, machine), way.task)
        policies = [name for name in POLICIES if "offload" not in name]
        return min((each.seconds for each in map(partial(predict, hardware=room), with_policies(way, room, policies))
                    if each.memory.fits), default=math.inf)  # fmt: skip

    by_hand = []
    for data, micro, level in product(divisors(len(gpus)), divisors(8), (2, 3)):
        if 8 % (data * micro) == 0:
            parallel = replace(made.parallel, data_parallel=data, zero_level=level)
            by_hand.append(seconds(made.replace(parallel=parallel, micro_batch_size=micro)))
    levels = [replace(found.parallel, zero_level=level) for level in (2, 3)]  # of which a run takes the faster one
    assert min(seconds(found.replace(parallel=each)) for each in levels) <= 1.03 * min(by_hand) < math.inf
    assert found.parallel.data_parallel == len(gpus) or tokens == 32768  # each sequence fits on one GPU


def test_micro_batch_and_degrees_that_are_given_are_kept():
    options = {"preset": "llama-3-8b", "sequence_length": "4096", "batch_size": "8"}
    for given in ({"micro_batch_size": "1"}, {"parallel.zero_level": "2"}, {"parallel.data_parallel": "2"}):
        made = resolve((), options | given, defaults=defaults_of(H200))
        found = spread(made, {*options, *given}, 4, H200)
        assert found.micro_batch_size == 1 or "micro_batch_size" not in given
        assert found.parallel.zero_level == (2 if "parallel.zero_level" in given else "auto")
        assert found.parallel.data_parallel == 2 or "parallel.data_parallel" not in given


def test_one_line_says_what_was_chosen():
    made = spread(resolve((), {}, defaults=defaults_of(H100)), (), 8, H100)
    says(
        choices_text(made, (), 8, H100),
        "8 x NVIDIA H100 | dtype bfloat16 | recompute auto | data_parallel 8 x sequence_parallel 1 | batch_size 8 | "
        "micro_batch_size 1",
        lines=1,
    )
    given = ("dtype", "recompute", "parallel.data_parallel", "micro_batch_size")
    assert choices_text(made, given, 8, H100) == ""
    short = {"preset": "llama-3-8b", "sequence_length": "1024", "batch_size": "8"}
    alone = spread(resolve((), short, defaults=defaults_of(H200)), short, 1, H200)
    assert alone.micro_batch_size > 1 and alone.parallel == TrainConfig().parallel
    says(choices_text(alone, short, 1, H200), f"1 x NVIDIA H200 | micro_batch_size {alone.micro_batch_size};", lines=1)
    assert "micro_batch_size" not in choices_text(TrainConfig(), (), 1, H200)


def test_new_runs_get_them_and_older_ones_keep_theirs(launches, monkeypatch, tmp_path, capsys):
    folder = started(tmp_path, dtype="float32")  # begun by an older version, which wrote all its settings
    checkpoint(folder, 3)
    see_gpus(monkeypatch, *H100, by="cli.training")
    assert main(["train", "--output", str(folder), "--resume"]) == 0
    assert (launches.config()["dtype"], launches.config()["recompute"]) == ("float32", "block-keep-attention")
    capsys.readouterr()
    assert main(["train", "--output", "new", "--steps", "3"]) == 0
    made = launches.config()
    assert (made["dtype"], made["recompute"], made["batch_size"]) == ("bfloat16", "auto", 2)
    assert (made["parallel"]["data_parallel"], made["parallel"]["sequence_parallel"]) == (2, 1)
    assert "chosen for 2 x NVIDIA H100" in capsys.readouterr().err
    begun = started(tmp_path / "auto", dtype="float32")  # without a checkpoint
    assert main(["train", "--output", str(begun), "--resume", "auto"]) == 0
    made = launches.config()
    assert (made["dtype"], made["batch_size"], made["parallel"]["data_parallel"]) == ("float32", 1, 1)
