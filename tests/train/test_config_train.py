"""TrainConfig: layers of presets, files and options, ranks, and what may change on resume."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from bmburst.blocks.families import RopeScaling
from bmburst.blocks.presets import PRESETS
from bmburst.config import leaves, to_dict
from bmburst.config.fields import choices_of
from bmburst.data.packing import PACKS
from bmburst.data.sources import STANDARD_LIBRARY as DATA_STANDARD_LIBRARY
from bmburst.data.tokenizer import ByteTokenizer
from bmburst.schedule.layout import LAYOUTS
from bmburst.schedule.parallelism import STRATEGIES, TRANSPORTS, MeshShape
from bmburst.train.config import BYTE_IDS, EvalConfig, OptimizerConfig, ParallelConfig, TrainConfig
from bmburst.train.resolve import check_paths, check_resumable, resolve, write_run_config
from bmburst.train.sections import STANDARD_LIBRARY
from bmburst_ops.flash import NAMES as KERNEL_NAMES
from tests.refusals import refusal_of, refused, says


def choices(cls, name):
    (leaf,) = (leaf for leaf in leaves(cls) if leaf.name == name)
    return set(choices_of(leaf.annotation, leaf.spec))


def write(path, values):
    path.write_text(json.dumps(values))
    return path


# Names that other parts own


def test_names_are_those_of_the_parts_that_take_them():
    assert choices(ParallelConfig, "layout") == choices(EvalConfig, "layout") == set(LAYOUTS)
    assert choices(TrainConfig, "pack") == set(PACKS) > choices(EvalConfig, "pack") == {"stream", "documents"}
    assert TrainConfig.pack == EvalConfig.pack == PACKS[0] == "stream"
    assert choices(ParallelConfig, "strategy") == set(STRATEGIES)
    assert choices(ParallelConfig, "kernel") == set(KERNEL_NAMES)
    assert choices(ParallelConfig, "transport") == set(TRANSPORTS) - {"threads"}
    assert ByteTokenizer.vocab_size == BYTE_IDS
    assert DATA_STANDARD_LIBRARY == STANDARD_LIBRARY


# The main job


def test_defaults_are_the_main_job():
    config = TrainConfig()
    assert config == resolve()
    assert config.model == PRESETS["llama-tiny"]
    assert (config.preset, config.sequence_length, config.data.source) == ("llama-tiny", 4096, "stdlib")
    config.validate(2)
    check_paths(config)


def test_configurations_are_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().steps = 3
    with pytest.raises(TypeError):
        OptimizerConfig(1e-3)


# Layers


def test_precedence_is_preset_then_files_then_options(tmp_path):
    low = write(tmp_path / "low.json", {"steps": 7, "seed": 1, "model": {"num_layers": 5}, "batch_size": 2})
    high = tmp_path / "high.yaml"
    high.write_text("seed: 2\nmodel:\n  hidden_size: 64\noptimizer: {lr: 1e-2}\n")
    config = resolve((low, high), {"batch_size": "3", "optimizer.lr": "0.5", "optimizer.beta2": "0.99"})
    assert (config.steps, config.seed, config.batch_size) == (7, 2, 3)
    assert config.optimizer == OptimizerConfig(lr=0.5, beta2=0.99, weight_decay=0.1)
    assert (config.model.num_layers, config.model.hidden_size, config.model.vocab_size) == (5, 64, 320)


def test_the_preset_lies_below_the_file_even_when_it_is_an_option(tmp_path):
    path = write(tmp_path / "a.json", {"preset": "llama-2-7b", "model": {"num_layers": 2}})
    assert resolve((path,)).model.hidden_size == 4096
    config = resolve((path,), {"preset": "llama-3-8b"})
    assert (config.preset, config.model.num_layers, config.model.num_kv_heads) == ("llama-3-8b", 2, 8)


def test_a_preset_that_a_file_leaves_without_effect_is_refused(tmp_path):
    path = write_run_config(TrainConfig(), tmp_path)
    says(refusal_of(resolve, (path,), {"preset": "llama-3-8b"}), "llama-3-8b", "no effect")
    assert resolve((path,), {"preset": "llama-tiny"}) == TrainConfig()
    says(refusal_of(resolve, (path,), {"preset": "llama-4"}), "preset", "'llama-4'", "llama-3-8b")


def test_the_same_preset_and_fields_of_the_model_begin_a_run_and_go_on_with_it(tmp_path):
    """As `--resume auto` reads them: above the whole configuration that the run has written."""
    options = {"preset": "llama-2-7b", "model.num_layers": "3", "model.max_position_embeddings": "64"}
    options |= {"sequence_length": "32"}
    mine = write(tmp_path / "mine.json", {"model": {"hidden_size": 64}})
    for files in ((), (mine,)):
        begun = resolve(files, options)
        path = write_run_config(begun, tmp_path)
        assert resolve((path, *files), options) == begun
    assert resolve((path, mine), options | {"model.num_layers": "5"}).model.num_layers == 5  # a resume then refuses it
    words = ("llama-2-7b", "no effect", str(path), "fix: leave --preset out")
    says(refusal_of(resolve, (path, mine), {"preset": "llama-2-7b", "model.num_layers": "3"}), *words)


def test_head_dim_follows_an_overridden_width():
    assert resolve((), {"model.hidden_size": "64"}).model.head_dim == 16
    assert resolve((), {"model.num_heads": "8"}).model.head_dim == 16
    assert resolve((), {"model.hidden_size": "64", "model.head_dim": "32"}).model.head_dim == 32


def test_rope_scaling_from_options_and_off_again(tmp_path):
    config = resolve((), {"model.rope_scaling.kind": "linear", "model.rope_scaling.factor": "2"})
    assert config.model.rope_scaling == RopeScaling(kind="linear", factor=2)
    path = write_run_config(config, tmp_path)
    assert resolve((path,)).model.rope_scaling == RopeScaling(kind="linear", factor=2)
    assert resolve((path,), {"model.rope_scaling": "none"}).model.rope_scaling is None
    assert resolve((path,), {"model.rope_scaling.factor": "3"}).model.rope_scaling.factor == 3
    text = refusal_of(resolve, (), {"model.rope_scaling.factor": "2"})
    says(text, "model.rope_scaling.kind", "missing", "linear, dynamic, yarn, llama3")


def test_a_runs_config_json_begins_another_run(tmp_path):
    config = resolve(
        (),
        {
            "output": str(tmp_path / "run"),
            "resume": "true",
            "steps": "9",
            "data.cache": str(tmp_path),
            "optimizer.clip_norm": "none",
            "parallel.sequence_parallel": "2",
            "parallel.zero_level": "2",
        },
    )
    path = write_run_config(config, tmp_path / "run")
    assert resolve((path,)) == config.replace(output=None, resume=False)
    assert set(json.loads(path.read_text())) == set(to_dict(config)) - {"output", "resume"}
    assert [file.name for file in path.parent.iterdir()] == ["config.json"], "temporary files are left"


def test_errors_name_the_file_and_the_nearest_key(tmp_path):
    path = write(tmp_path / "a.json", {"optimiser": {"lr": 1}})
    says(refusal_of(resolve, (path,)), path, "'optimiser'", "'optimizer.lr'", "known in")
    says(refusal_of(resolve, (write(path, {"model": "tiny"}),)), path, "model", "'tiny'", "model.*")


BAD = """
steps=0 sequence_length=0 batch_size=-1 seed=-1 dtype=float8 recompute=all nproc=0 hang_timeout=-1
optimizer.loss_scale=0.5 optimizer.loss_scale_steps=0 optimizer.lr=0 optimizer.lr=inf optimizer.weight_decay=nan
optimizer.beta1=1 optimizer.clip_norm=0 data.held_out_fraction=0 data.held_out_fraction=1
parallel.layout=zig-zag parallel.strategy=rings parallel.kernel=cuda parallel.transport=mpi
parallel.zero_level=1 parallel.zero_group=0 parallel.zero_group=rack
preset=lama-tiny preset=none model.num_kv_heads=3 model.vocab_size=100
"""


@pytest.mark.parametrize("option", BAD.split())
def test_bad_values_are_refused(option):
    name, _, value = option.partition("=")
    options = {name: value} | ({"data.tokenizer": "bytes"} if name == "model.vocab_size" else {})
    text = refusal_of(resolve, (), options)
    if option != "preset=none":
        assert value in text
        assert name.rpartition(".")[2] in text


# Python


def test_python_gets_the_presets_model():
    assert TrainConfig(preset="llama-2-7b").model == PRESETS["llama-2-7b"]
    says(refusal_of(TrainConfig, preset="x"), "preset", "'x'", "known: ", "--help")
    says(refusal_of(TrainConfig, preset=None), "preset", "model")
    says(refusal_of(TrainConfig, init_from=Path("x")), "init_from", "model", "fix: ")
    says(refusal_of(ParallelConfig, layout="ziczac"), "layout", "'ziczac'", "'zigzag'")


# Ranks


@pytest.mark.parametrize(
    ("values", "world", "mesh"),
    [
        ({}, 1, (1, 1)),
        ({}, 8, (1, 8)),
        ({"data_parallel": 2}, 8, (2, 4)),
        ({"data_parallel": 8}, 8, (8, 1)),
        ({"data_parallel": 2, "sequence_parallel": 3}, 6, (2, 3)),
        ({"tensor_parallel": 2}, 8, (1, 4, 2)),
        ({"data_parallel": 2, "tensor_parallel": 4}, 8, (2, 1, 4)),
        ({"data_parallel": 2, "sequence_parallel": 3, "tensor_parallel": 2}, 12, (2, 3, 2)),
        ({"pipeline_parallel": 4}, 8, (1, 2, 1, None, 1, 4)),
        ({"pipeline_parallel": 2, "sequence_parallel": 1, "tensor_parallel": 2}, 4, (1, 1, 2, None, 1, 2)),
    ],
)
def test_mesh(values, world, mesh):
    config = TrainConfig(parallel=ParallelConfig(**values), batch_size=8 if 8 % mesh[0] == 0 else mesh[0])
    assert config.mesh_shape(world) == MeshShape(*mesh)
    config.validate(world)


def degrees(**sizes):
    return {f"parallel.{name}_parallel": size for name, size in sizes.items()}


HEADS = {"parallel.strategy": "heads"}


@pytest.mark.parametrize(
    ("options", "world", "words"),
    [
        (degrees(data=3), 4, "data_parallel 3 | 4 ranks | 1, 2, 4"),
        (degrees(data=4), 2, "data_parallel 4 | 2 ranks | 1, 2"),
        (degrees(sequence=3), 4, "data_parallel 1 | sequence_parallel 3 | 3 ranks | 4"),
        (degrees(data=2, sequence=2), 2, "--nproc 4"),
        (degrees(data=2) | {"batch_size": 3}, 2, "--batch-size 4"),
        ({"batch_size": 2, "micro_batch_size": 4}, 2, "multiples of 4"),
        (degrees(data=2) | {"batch_size": 6, "micro_batch_size": 2}, 4, "--batch-size 8"),
        ({"sequence_length": 3}, 4, "sequence_length 3 | 4 sequence ranks"),
        ({}, 0, "0 ranks"),
        (degrees(tensor=3), 4, "tensor_parallel 3 | 4 ranks | 1, 2, 4 | fix: --nproc 3"),
        (degrees(tensor=2, data=3), 8, "data_parallel 3 | 8 ranks | tensor_parallel 2 | 1, 2, 4 | fix: --nproc 6"),
        (
            degrees(tensor=2, sequence=2),
            6,
            "data_parallel 1 | sequence_parallel 2 | tensor_parallel 2 | 4 ranks | 6 | fix: --nproc 4",
        ),
        (degrees(tensor=8), 8, "tensor 8 | 4 query heads | 2 KV heads | work: 4"),
        (
            HEADS,
            3,
            "strategy | 'heads' | 3 sequence ranks | 4 query heads | 2 KV heads | 1, 2, 4 | fix: --strategy auto",
        ),
        (HEADS | degrees(tensor=2), 8, "4 sequence ranks | 2 query heads | 1 KV heads | 1, 2 sequence ranks | fix: "),
        (
            HEADS | {"model.num_heads": 6, "model.hidden_size": 192},
            4,
            "4 sequence ranks | 6 query heads | 2 KV heads | 1, 2, 6 sequence ranks | fix: ",
        ),
        (degrees(tensor=4) | {"model.intermediate_size": 510}, 4, "tensor 4 | intermediate_size 510 | 3 and 5"),
        (degrees(pipeline=3), 4, "pipeline_parallel 3 | 4 ranks | 1, 2, 4 | --nproc 3"),
        (
            degrees(pipeline=2) | {"batch_size": 1},
            2,
            "pipeline_parallel 2 | 1 micro-batches | --batch-size",
        ),
        (degrees(pipeline=2, tensor=2), 6, "tensor_parallel 2 | 3 ranks of a stage | 1, 3 | --nproc 4"),
        (degrees(pipeline=2, sequence=2), 6, "pipeline_parallel 2 | sequence_parallel 2 | 4 ranks | 6 | --nproc 4"),
    ],
)
def test_ranks_that_do_not_match_are_refused(options, world, words):
    says(refusal_of(resolve((), options).validate, world), words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"parallel.pipeline_parallel": 5}, "pipeline_parallel 5 | 4 layers | 1 to 4 | --pipeline-parallel 4"),
        ({"dpo.beta": 0.1, "pack": "trees", "lora.rank": 2, "checkpoint_every": "never"}, "dpo.beta 0.1 | whole model"),
        ({"recompute": "block+offload"}, "'block+offload' | 2 stages | --recompute block"),
        ({"recompute": "block+every-2"}, "'block+every-2' | 2 stages | --recompute block"),
        ({"recompute": "block-keep-attention+offload-mlp-first-2"}, "2 stages | without offload"),
        (
            {"optimizer.offload_weights": "true", "optimizer.offload": "true"},
            "optimizer.offload_weights true | fix: --optimizer.offload_weights false",
        ),
        ({"parallel.zero_group": 1}, "parallel.zero_group 1 | fix: --parallel.zero_group world"),
        (
            {"lora.base": "4bit", "lora.rank": 2, "checkpoint_every": "never", "parallel.zero_level": 2},
            "lora.base 4bit | pipeline_parallel 2 | zero_level 2 | fix: --parallel.zero_level 3",
        ),
        ({"sample_tokens": 5}, "sample_tokens 5 | cannot generate | fix: --sample-tokens 0"),
        ({"context_report": "true"}, "context_report true | questions | fix: --context-report false"),
    ],
)
def test_what_stages_cannot_do_is_refused(options, words):
    says(refusal_of(resolve, (), {"parallel.pipeline_parallel": 2} | options), words)


DYNAMIC = {"model.rope_scaling.kind": "dynamic", "model.rope_scaling.factor": "2"}
BALANCED = {"parallel.layout": "balanced"}


@pytest.mark.parametrize(
    ("options", "words", "fine"),
    [
        ({"pack": "document"}, "pack | 'document' | 'documents' | stream", [{"pack": "documents"}]),
        (
            DYNAMIC | {"pack": "documents"},
            "dynamic | documents",
            [{"pack": "stream"}, {"model.rope_scaling.kind": "linear"}],
        ),
        (
            BALANCED | {"pack": "documents", "micro_batch_size": 2, "batch_size": 2},
            "micro_batch_size 2 | balanced",
            [{"pack": "stream"}, {"parallel.layout": "zigzag"}, {"micro_batch_size": 1}],
        ),
        (BALANCED | {"model.sliding_window": 64}, "model.sliding_window | balanced", [{"parallel.layout": "striped"}]),
    ],
)
def test_what_does_not_go_with_packing_or_a_layout_is_refused(options, words, fine):
    says(refusal_of(resolve, (), options), words)
    for change in fine:
        resolve((), options | change)


def test_a_pipeline_takes_what_it_can_do_and_its_defaults():
    config = resolve((), {"parallel.pipeline_parallel": "2", "recompute": "block+first-1"})
    config.validate(2)
    assert config.batch_size == 2
    wide = {"parallel.pipeline_parallel": 2, "parallel.data_parallel": 3, "micro_batch_size": 2}
    assert resolve((), wide).batch_size == 12
    assert (config.sampled, resolve().sampled, resolve((), {"sample_tokens": 7}).sampled) == (0, 256, 7)


@pytest.mark.parametrize(
    ("ranks", "heads", "strategy", "layout", "allowed"),
    [
        (4, 2, "heads", "zigzag", "4"),
        (4, 1, "heads+ring", "zigzag", "2"),
        (4, 2, "kv", "zigzag", "1"),
        (4, 2, "auto", "striped", "1, 4"),
        (4, 3, "auto", "zigzag", "1, 2, 4"),
        (3, 3, "4 query heads | 2 KV heads", "zigzag", "1"),
    ],
)
def test_an_exchange_of_heads_that_strategy_or_heads_forbid_is_refused(ranks, heads, strategy, layout, allowed):
    options = {"layout": layout} | ({} if "|" in strategy else {"strategy": strategy})
    with refused(f"head_parallel {heads}", strategy, f"allowed: {allowed}\n", "fix: ", "--head-parallel"):
        TrainConfig(parallel=ParallelConfig(head_parallel=heads, **options)).validate(ranks)
    TrainConfig(parallel=ParallelConfig(head_parallel=int(allowed[-1]), **options)).validate(ranks)


def test_a_sequence_of_one_token_a_rank_is_enough():
    resolve((), {"sequence_length": 4}).validate(4)


def test_a_sequence_beyond_the_models_positions_is_refused_with_the_fix():
    text = refusal_of(resolve, (), {"preset": "llama-2-7b", "sequence_length": "8192"})
    option = re.search(r"--(model\.max_position_embeddings) (\d+)", text)
    assert option
    resolve((), {"preset": "llama-2-7b", "sequence_length": "8192", option[1]: option[2]})


# Resume


def test_what_may_and_may_not_change_on_resume(tmp_path):
    before = resolve()
    may = "steps=500 batch_size=4 optimizer.lr=0.1 parallel.layout=striped data.cache=x checkpoint_every=1 nproc=4"
    may += " data.source=x.txt"
    for name, value in (option.split("=") for option in may.split()):
        check_resumable(before, resolve((), {name: value}), tmp_path)
    may_not = "seed=1 sequence_length=64 dtype=bfloat16 data.held_out_fraction=0.5"
    may_not += " model.num_layers=2 model.norm_eps=0.5 pack=documents"
    for name, value in (option.split("=") for option in may_not.split()):
        text = refusal_of(check_resumable, before, resolve((), {name: value}), tmp_path)
        assert text.startswith(f"{name} {value} differs from")
    scaled = resolve((), {"model.rope_scaling.kind": "linear", "model.rope_scaling.factor": "2"})
    says(refusal_of(check_resumable, before, scaled, tmp_path), "model.rope_scaling")
    says(refusal_of(check_resumable, scaled, before, tmp_path), "model.rope_scaling")
    old = write(tmp_path / "old.json", {"preset": "llama-tiny"})  # of before there was a choice of `pack`
    check_resumable(resolve((old,)), before, tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer.loss_scale": "8"}, "loss_scale 8 | no effect | float32 | --dtype float16"),
        ({"dtype": "bfloat16", "optimizer.loss_scale_steps": "9"}, "loss_scale_steps 9 | no effect | bfloat16"),
        ({"dtype": "float16", "optimizer.loss_scale": "12"}, "loss_scale 12 | power of 2 | --optimizer.loss_scale 8"),
        ({"dtype": "float16", "optimizer.kernel": "bmtrain"}, "kernel bmtrain | float16 | overflow | fix: | auto"),
        ({"optimizer.state": "int8"}, "state | 'int8' | 8bit, bfloat16, float32 | fix: "),
        (
            {"optimizer.state": "8bit", "optimizer.kernel": "bmtrain"},
            "optimizer.kernel bmtrain | optimizer.state 8bit | fix: --optimizer.kernel auto",
        ),
        ({"optimizer.offload_weights": "true"}, "offload_weights | fix: | --optimizer.offload"),
        (
            {"optimizer.offload": "true", "optimizer.offload_weights": "true", "parallel.zero_level": "2"},
            "zero_level 2 | fix: | 3",
        ),
        ({"optimizer.kernel": "bmtrain"}, "kernel bmtrain has no effect | float32 | bfloat16 | fix: leave"),
        (
            {"optimizer.kernel": "bmtrain", "optimizer.offload": "true", "dtype": "bfloat16"},
            "kernel bmtrain has no effect | optimizer.offload | fix: leave",
        ),
    ],
)
def test_optimizer_settings_that_do_not_go_together_are_refused(options, words):
    says(refusal_of(resolve, (), options), words)
    resolve((), {"dtype": "float16", "optimizer.loss_scale": "8", "optimizer.loss_scale_steps": "9"})
