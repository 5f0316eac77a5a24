"""Options of other trainers are met with ours."""

import pytest

from bmburst.cli import main
from bmburst.config import leaves, nearest_name
from bmburst.train.config import TrainConfig
from tests.refusals import says


@pytest.mark.parametrize(
    ("command", "given", "meant"),
    [
        ("train", "--learning-rate", "--optimizer.lr"),
        ("train", "--num_train_epochs", "--epochs"),
        ("train", "--gradient-accumulation-steps=4", "--batch-size"),
        ("train", "--per_device_train_batch_size", "--micro-batch-size"),
        ("train", "--training.seq_len", "--sequence-length"),
        ("train", "--max-length", "--sequence-length"),
        ("train", "--bf16", "--dtype"),
        ("train", "--model_name_or_path", "--init-from"),
        ("train", "--gradient_checkpointing", "--recompute"),
        ("train", "--context-parallel", "--sequence-parallel"),
        ("train", "--tp", "--tensor-parallel"),
        ("train", "--pp", "--pipeline-parallel"),
        ("train", "--pipeline_model_parallel_size", "--pipeline-parallel"),
        ("train", "--lora_r", "--lora.rank"),
        ("train", "--max_grad_norm", "--optimizer.clip_norm"),
        ("train", "--save-steps", "--checkpoint-every"),
        ("train", "--warmup-steps", "--schedule.warmup_steps"),
        ("train", "--presett", "--preset"),
        ("plan", "--seq", "--sequence-length"),
        ("plan", "--gpus", "--nproc"),
        ("plan", "--batch", "--batch-size"),
        ("plan", "--loss-chunk", "--loss-chunk-tokens"),
        ("plan", "--optimizer-offload", "--optimizer.offload"),
        ("plan", "--lora", "--lora.rank"),
        ("plan", "--tensor", "--tensor-parallel"),
        ("plan", "--zero", "--parallel.zero_level"),
        ("generate", "--max-tokens", "--max-new-tokens"),
        ("generate", "--model", "--checkpoint"),
        ("eval", "--dataset", "--data"),
        ("data", "--train-file", "--input"),
        ("train", "--partial_pretrain", "--init-from"),
        ("train", "--deepspeed", "--parallel.zero_level"),
        ("train", "--save_strategy", "--checkpoint-every"),
    ],
)
def test_the_option_that_is_meant_is_named(capsys, command, given, meant):
    assert main([command, given, "3"]) == 2
    says(capsys.readouterr().err, f"'{given.partition('=')[0]}'", f"did you mean '{meant}'", "fix:", lines=2)


def test_names_of_files_too():
    known = {leaf.name: leaf for leaf in leaves(TrainConfig())}
    assert nearest_name("learning_rate", known) == "optimizer.lr"
    assert nearest_name("training.local_batch_size", known) == "micro_batch_size"
    assert nearest_name("optimizer.lrr", known) == "optimizer.lr"
    assert nearest_name("data.val_files", known) == "data.validation"
    assert nearest_name("data.response_key", known) == "data.columns"
    for none in ("frobnicate", "num_machines", "optimizer.name", "data.truncation", "data.balance_dp_token"):
        assert nearest_name(none, known) is None


@pytest.mark.parametrize(
    ("argv", "fix"),
    [
        (["train", "sft.yaml"], "fix: --config sft.yaml"),
        (["train", "model=tiny", "data=x"], "fix: --init-from tiny"),
        (["serve", "tiny", "--port", "0"], "fix: --checkpoint tiny"),
        (["generate", "--checkpoint", "tiny", "hello"], "fix: bmburst generate --help all"),
        (["train", "a=b"], "fix: bmburst train --help all"),
        (["data", "--output", "x", "a.json"], "fix: --input a.json"),  # and --input is missing
        (["plan", "llama-3-8b"], "fix: --preset llama-3-8b"),
        (["check", "Qwen/Qwen3-8B"], "fix: --init-from Qwen/Qwen3-8B"),
        (["train", __file__], f"fix: --data {__file__}"),
    ],
    ids=str,
)
def test_an_argument_without_its_option_is_given_one(capsys, argv, fix):
    assert main(argv) == 2
    says(capsys.readouterr().err, "unexpected argument", fix, lines=2)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["data"], "--input is missing | fix: add it; bmburst data --help"),
        (["convert", "a"], "OUTPUT, --to are missing"),
    ],
    ids=str,
)
def test_what_is_missing_is_named(capsys, argv, words):
    assert main(argv) == 2
    says(capsys.readouterr().err, words, lines=2)


def test_a_model_in_the_place_of_its_sizes(capsys, tmp_path):
    (tmp_path / "theirs.json").write_text('{"model": "Qwen/Qwen3-8B"}')
    assert main(["train", "--config", str(tmp_path / "theirs.json")]) == 2
    says(capsys.readouterr().err, "model: 'Qwen/Qwen3-8B' does not fit", "fix: init_from: 'Qwen/Qwen3-8B'", lines=3)


@pytest.mark.parametrize(
    "argv",
    [
        ["train", "--data", "a.jsonl", "--data", "b.jsonl"],
        ["train", "--data=a.jsonl", "--data.source", "b.jsonl"],
        ["eval", "--checkpoint", "tiny", "--data", "a.jsonl", "--data", "b.jsonl"],
    ],
    ids=" ".join,
)
def test_several_data_sets_are_not_the_last_one(capsys, argv):
    assert main(argv) == 2
    says(capsys.readouterr().err, "is given more than once", "fix: | YAML file | Mixtures", lines=3)


@pytest.mark.parametrize("name", ["data.columns", "data.validation", "lora.targets"])
def test_a_second_list_does_not_replace_the_first(capsys, name):
    assert main(["train", f"--{name}", "a=b", f"--{name.replace('_', '-')}=c,d"]) == 2
    says(capsys.readouterr().err, f"--{name.replace('_', '-')} is given more than once", "fix: | a=b,c,d", lines=3)
