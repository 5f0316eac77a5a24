"""The main job from the command line, as a user runs it: train, resume, evaluate, continue someone else's weights."""

import dataclasses
import json
import os
import tempfile
from pathlib import Path

import pytest

from bmburst.train.metrics import StepMetrics
from tests import tiny
from tests.distributed.started import run_bmburst
from tests.refusals import says
from tests.train.run_program import SHAPE

ROOT = Path(__file__).parents[2]
CACHE = str(Path(tempfile.gettempdir()) / "bmburst-tests")
LIBRARIES = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
ENVIRONMENT = os.environ | {"PYTHONPATH": LIBRARIES, "CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": CACHE}
ALWAYS = {declared.name for declared in dataclasses.fields(StepMetrics)}
KINDS = ("embeddings", "attention", "mlp", "head", "norms")
SOMETIMES = {"reward_margin", "reward_accuracy", "loss_scale", "data_balance", "data_balance_drawn"}
METRICS = ALWAYS - SOMETIMES - {"grad_norms"} | {f"grad_norm_{k}" for k in KINDS}


def bmburst(*words, cwd=ROOT, fresh=False):
    """Run the command in a process that has imported torch already, with its ranks, or as a user does."""
    return run_bmburst(*words, cwd=cwd, env=ENVIRONMENT, timeout=170, fresh=fresh)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short main job: the standard library's sources, 2 ranks, and everything else at its default."""
    folder = tmp_path_factory.mktemp("main") / "run"
    short = ("--steps", 4, "--sequence-length", 1024, "--eval-every", 2, "--checkpoint-every", 2, "--sample-tokens", 8)
    short += ("--eval-sequences", 2, "--schedule.warmup-steps", 1)
    done = bmburst("train", *short, "--output", folder)
    assert done.returncode == 0, done.stderr
    return folder, done


@pytest.mark.long
def test_a_fresh_command_says_nothing_but_of_its_run(tmp_path):
    """Neither what torch warns of as it is imported nor what ranks say."""
    short = ("--steps", 1, "--sequence-length", 256, "--eval-sequences", 1, "--sample-tokens", 1)
    done = bmburst("train", *short, "--output", tmp_path / "run", fresh=True)
    assert done.returncode == 0 and done.stderr.count("host runtime") == 1, done.stderr
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_run_folder(run):
    folder, done = run
    metrics = lines(folder / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, 5))
    assert all(set(line) == METRICS for line in metrics)
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert [line["step"] for line in lines(folder / "evals.jsonl")] == [2, 4]
    assert json.loads((folder / "config.json").read_text())["sequence_length"] == 1024
    assert (folder / "loss.png").stat().st_size > 10_000
    assert list((folder / "tensorboard").glob("events.out.*"))
    assert "|" in (folder / "sample.txt").read_text()
    assert (folder / "checkpoints" / "step-000004" / "model.safetensors").exists()
    assert "step 4/4" in done.stderr and "bits/byte" in done.stderr and "tokens/s" in done.stderr
    assert done.stderr.count("host runtime") == 1
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr


def test_continues_hugging_face_weights_on_longer_sequences(tmp_path):
    """Weights trained on 64 positions, continued on 128 with YaRN: the first loss is that of those weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    values = SHAPE.to_hugging_face() | {
        "max_position_embeddings": 128,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 64,
        },
    }
    scaled = LlamaForCausalLM(LlamaConfig(**values))
    tiny.save(tmp_path / "plain", SHAPE)
    scaled.load_state_dict(tiny.load(tmp_path / "plain").state_dict())
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 40)
    longer = ("--sequence-length", 128, "--model.max_position_embeddings", 128, "--model.rope_scaling.kind", "yarn")
    longer += ("--model.rope_scaling.factor", 2, "--model.rope_scaling.original_max_position_embeddings", 64)
    done = bmburst(
        "train", "--init-from", tmp_path / "plain", "--data", text, *longer, "--steps", 1, "--sample-tokens", 0,
        "--output", tmp_path / "run", "--data.held-out-fraction", 0.1,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

    from bmburst.data import Batches, PackedSequences, TokenFile

    corpus = TokenFile.open(next((tmp_path / "tokens").glob("*.tokens")))
    train = PackedSequences(corpus, split="train", sequence_length=128, held_out_fraction=0.1)
    inputs, labels = map(torch.from_numpy, next(Batches(train, batch_size=1, seed=0)).whole())
    logits = scaled(inputs).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
    assert lines(tmp_path / "run" / "metrics.jsonl")[0]["loss"] == pytest.approx(expected, rel=1e-5)


def test_bad_input_that_ranks_find_is_said_once_and_ends_with_2(tmp_path):
    (tmp_path / "long.jsonl").write_text('{"text": "too long to be read before"}\n' * 4000 + "{")
    done = bmburst("train", "--data", "long.jsonl", "--output", tmp_path / "run", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    said = [line for line in done.stderr.splitlines() if "host runtime" not in line and "tokenizing" not in line]
    assert "Traceback" not in says("\n".join(said), "long.jsonl:4001 | JSON")
