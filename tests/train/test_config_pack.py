"""What `--pack documents` goes together with, and what refuses it before a rank starts."""

import argparse
import dataclasses

import pytest

from bmburst.blocks.families import RopeScaling
from bmburst.cli import eval as eval_command
from bmburst.cli import training as train_command
from bmburst.config import given_options
from bmburst.data.packing import PACKS
from bmburst.train.config import EvalConfig, ParallelConfig, TrainConfig
from bmburst.train.resolve import check_resumable, resolve
from tests.refusals import refusal_of, says


@pytest.mark.parametrize(("command", "config"), [(train_command, TrainConfig), (eval_command, EvalConfig)])
def test_an_option_of_train_and_eval(command, config):
    field = next(f for f in dataclasses.fields(config) if f.name == "pack")
    assert field.default == PACKS[0] == "stream"  # as it was before there was a choice
    parser = argparse.ArgumentParser()
    command.configure(parser)
    for pack in PACKS:
        assert given_options(parser.parse_args(["--pack", pack]), config) == {"pack": pack}


def test_values():
    assert [TrainConfig(pack=pack).pack for pack in PACKS] == list(PACKS)
    for refusal in (refusal_of(resolve, (), {"pack": "document"}), refusal_of(TrainConfig, pack="document")):
        says(refusal, "pack", "'document'", "'documents'", "stream")


def test_a_rotation_that_hangs_on_the_length():
    options = {"model.rope_scaling.kind": "dynamic", "model.rope_scaling.factor": "2"}
    says(refusal_of(resolve, (), options | {"pack": "documents"}), "dynamic", "documents")
    assert resolve((), options).model.rope_scaling == RopeScaling(kind="dynamic", factor=2.0)
    resolve((), options | {"pack": "documents", "model.rope_scaling.kind": "linear"})


def test_a_layout_for_each_sequence():
    balanced = ParallelConfig(layout="balanced")
    text = refusal_of(TrainConfig, pack="documents", parallel=balanced, micro_batch_size=2, batch_size=2)
    says(text, "micro_batch_size 2", "balanced")
    TrainConfig(pack="documents", parallel=balanced, batch_size=2)
    TrainConfig(parallel=balanced, micro_batch_size=2, batch_size=2)
    TrainConfig(pack="documents", micro_batch_size=2, batch_size=2)


def test_a_window_has_no_balanced_layout():
    windowed = dataclasses.replace(TrainConfig().model, sliding_window=64)
    text = refusal_of(TrainConfig, parallel=ParallelConfig(layout="balanced"), model=windowed)
    says(text, "model.sliding_window", "balanced")
    TrainConfig(parallel=ParallelConfig(layout="striped"), model=windowed)


def test_is_kept_on_resume(tmp_path):
    stream, documents = resolve(), resolve((), {"pack": "documents"})
    check_resumable(documents, documents, tmp_path)
    says(refusal_of(check_resumable, stream, documents, tmp_path), "pack", "documents", "stream")
    # A run of before there was a choice.
    (tmp_path / "old.json").write_text('{"preset": "llama-tiny"}')
    check_resumable(resolve((tmp_path / "old.json",)), stream, tmp_path)
