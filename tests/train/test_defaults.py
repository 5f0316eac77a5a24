"""Learning rate, warm-up, beta2 and weight decay that follow the model and what is trained."""

import dataclasses
import json

import pytest

from bmburst.blocks.config import LoRAConfig
from bmburst.blocks.presets import PRESETS, preset
from bmburst.train.config import OptimizerConfig, ScheduleConfig, TrainConfig
from bmburst.train.resolve import resolve, write_run_config
from bmburst.train.sections import PUBLISHED, published, rate_by_size, warmup_by_size


@pytest.mark.parametrize(
    ("name", "lr", "warmup"),
    [
        ("llama-tiny", 2e-3, 10),
        ("llama-2-13b", 3e-4, 2000),
        ("llama-3-8b", 3e-4, 2000),
        ("llama-3-70b", 1.5e-4, 2000),
        ("minicpm-2b", 1.1e-3, 1064),
    ],
)
def test_presets_take_what_was_published(name, lr, warmup):
    for changes in ({}, {"model.max_position_embeddings": 1 << 20, "model.rope_theta": 1e7}):
        config = resolve((), {"preset": name, "steps": 400, **changes})
        assert (config.optimizer.lr, config.schedule.warmup_steps) == (lr, warmup)
        assert (config.optimizer.beta1, config.optimizer.beta2, config.optimizer.weight_decay) == (0.9, 0.95, 0.1)


def test_other_models_follow_their_size():
    sizes = {1 << 10: 2e-3, 10**6: 2e-3, 125 * 10**6: 7.3e-4, 8 * 10**9: 3e-4, 70 * 10**9: 1.9e-4}
    assert {size: rate_by_size(size) for size in sizes} == sizes
    cut = dataclasses.replace(preset("llama-3-8b"), num_layers=4)
    assert published(cut).lr == rate_by_size(cut.num_parameters) > 3e-4
    # the rule is near what is published, so that a model between two presets is not far from either
    for name in PUBLISHED:
        if not name.startswith("minicpm"):
            assert rate_by_size(PRESETS[name].num_parameters) == pytest.approx(PUBLISHED[name].lr, rel=0.3)


@pytest.mark.parametrize(("parameters", "warmup"), [(10**3, 10), (10**6, 10), (125 * 10**6, 173), (8 * 10**9, 2000)])
def test_warm_up_from_scratch_follows_the_size(parameters, warmup):
    assert warmup_by_size(parameters) == warmup
    for steps in (1, 30, 100_000):  # the first steps must be small, however few there are
        assert TrainConfig(preset="llama-3-8b", steps=steps).schedule.warmup_steps == 2000


def test_trained_weights_begin_lower(tmp_path):
    model, shape = preset("llama-3-8b"), {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    sizes = {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "rope_theta": 5e5,
        "rms_norm_eps": 1e-5,
    }
    values = {"model_type": "llama", "max_position_embeddings": 8192, "hidden_act": "silu", **shape, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(values))
    full, lora = (resolve((), {"init_from": str(tmp_path), "lora.rank": rank}) for rank in (0, 16))
    assert full.model == model
    assert (full.optimizer.lr, full.optimizer.beta2, full.optimizer.weight_decay) == (2e-5, 0.95, 0.1)
    for steps, warmup in ((1, 10), (100, 10), (250, 25), (100_000, 2000)):
        assert resolve((), {"init_from": str(tmp_path), "steps": steps}).schedule.warmup_steps == warmup
    assert (lora.optimizer.lr, lora.optimizer.beta2, lora.optimizer.weight_decay) == (2e-4, 0.999, 0.0)


def test_what_is_given_stays():
    given = OptimizerConfig(lr=1.0, beta2=0.5, weight_decay=0.0)
    for each in (LoRAConfig(rank=2), LoRAConfig()):
        config = TrainConfig(
            optimizer=given, schedule=ScheduleConfig(warmup_steps=0), lora=each, checkpoint_every=None, steps=77
        )
        assert (config.optimizer, config.schedule.warmup_steps) == (given, 0)


def test_a_run_folder_holds_the_numbers(tmp_path):
    config = resolve((), {"preset": "llama-3-8b", "steps": 300, "output": str(tmp_path)})
    values = json.loads(write_run_config(config, tmp_path).read_text())
    assert (values["optimizer"]["lr"], values["schedule"]["warmup_steps"]) == (3e-4, 2000)
    later = resolve((tmp_path / "config.json",), {"steps": 3000})  # a longer run goes on as it began
    assert (later.optimizer, later.schedule) == (config.optimizer, config.schedule)
