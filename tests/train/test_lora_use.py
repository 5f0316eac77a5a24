"""Trained adapters are evaluated, generated with and merged; those of another model are refused."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from bmburst.blocks.config import LoRAConfig
from bmburst.checkpoint.adapter import adapter_shapes
from bmburst.checkpoint.hugging_face import expected_shapes
from bmburst.cli import main
from bmburst.cli.run_folder import checkpoint_bytes
from bmburst.inference.generator import Generator, Source
from bmburst.train.clock import FlopsMeter
from bmburst.train.config import EvalConfig, OptimizerConfig, TrainConfig
from bmburst.train.evaluate import evaluate_checkpoint
from bmburst.train.trainer import Trainer
from tests import tiny
from tests.distributed.programs import on_program, run_program
from tests.refusals import refused, says
from tests.train import run_program as program

LORA = LoRAConfig(rank=2, alpha=8, targets=("all-linear",))
SHAPE = tiny.config(vocab_size=tiny.BYTES, hidden_size=16, intermediate_size=24, num_heads=2, num_kv_heads=1)
PROMPT = list(range(97, 110))


def config(folder, **changes):
    changes = {"lora": LORA, "init_from": folder / "base", "optimizer": OptimizerConfig(lr=0.1)} | changes
    return program.config(folder, "run", steps=4, eval_every=0, **{"parallel": program.ParallelConfig(), **changes})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a base, a run whose adapter says something, the merged model, and another base of the shape."""
    folder = tmp_path_factory.mktemp("lora")
    tiny.save(folder / "base", SHAPE)
    tiny.save(folder / "other", SHAPE, seed=9)
    run_program(2, _train, folder)
    return merged(folder)


def merged(folder, end=""):
    words = ["convert", str(folder / f"run{end}"), str(folder / f"merged{end}"), "--to", "huggingface", "--merge"]
    assert main(words) == 0
    return folder


def _train(folder, end="", base="dtype"):
    from bmburst.train.trainer import run

    run(replace(config(folder, lora=replace(LORA, base=base)), output=folder / f"run{end}"))


def losses(folder, *asked):
    """Return the loss of each of some pairs of model and adapter on one text, over 2 ranks."""
    run_program(2, _losses, folder, asked)
    return json.loads((folder / "losses.json").read_text())


def _losses(folder, asked):
    found = []
    for model, adapter in asked:
        given = {"checkpoint": folder / model, "adapter": None if adapter is None else folder / adapter}
        text = str(folder / "text.txt")
        measured, _ = evaluate_checkpoint(EvalConfig(**given, data=text, sequence_length=64, max_sequences=4))
        found.append(measured.loss)
    (folder / "losses.json").write_text(json.dumps(found))


def test_evaluation_adds_the_adapter(trained):
    base, merged, unmerged, run = losses(
        trained, ("base", None), ("merged", None), ("base", "run"), ("run/checkpoints/step-000004", None)
    )
    assert merged < base - 0.1
    assert [unmerged, run] == pytest.approx([merged, merged], rel=1e-6, abs=0)


@pytest.fixture(scope="module")
def in_4bit(trained):
    """The folder with a run on a base in 4 bits, too, and its merged model."""
    run_program(2, _train, trained, "-4bit", "4bit")
    return merged(trained, "-4bit")


def test_an_adapter_on_4_bits_is_used_on_4_bits(in_4bit):
    run = in_4bit / "run-4bit" / "checkpoints" / "step-000004"
    (in_4bit / "peft").mkdir()
    shutil.copy(run / "adapter_config.json", in_4bit / "peft")
    save_file(load_file(run / "adapter_model.safetensors"), in_4bit / "peft" / "adapter_model.safetensors")  # no note
    merged, unmerged, plain = losses(in_4bit, ("merged-4bit", None), ("base", "run-4bit"), ("base", "peft"))
    assert unmerged == pytest.approx(merged, rel=1e-6, abs=0)
    assert abs(plain - merged) > 1e-3
    answers = []
    for given in ("merged-4bit", "run-4bit"):
        (found,) = Generator(Source.open(in_4bit / given)).generate([PROMPT], max_new_tokens=12, logprobs=1)
        answers.append([each.logprob for each in found.logprobs])
    assert answers[0] == pytest.approx(answers[1])


def test_answers_are_those_of_the_merged_model(trained):
    def answer(*given):
        source = Source.open(*(trained / each for each in given))
        assert source.tokenizer is not None or given == ("base",) or given == ("merged",)
        (found,) = Generator(source).generate([PROMPT], max_new_tokens=12, logprobs=1)
        return found

    plain, wanted = answer("base"), answer("merged")
    for given in (("base", "run"), ("run",), ("base", "run/checkpoints/step-000004")):
        found = answer(*given)
        assert found.tokens == wanted.tokens
        assert [each.logprob for each in found.logprobs] == pytest.approx([each.logprob for each in wanted.logprobs])
    assert plain.tokens != wanted.tokens


@on_program(2)
def test_the_sample_of_a_run_is_written_with_its_adapter(in_4bit):
    for end, base in (("", "dtype"), ("-4bit", "4bit")):
        made = Trainer(
            replace(config(in_4bit, lora=replace(LORA, base=base), resume=True), output=in_4bit / f"run{end}")
        )
        made.restore()
        (found,) = Generator(made.model).generate([PROMPT], max_new_tokens=12)
        (wanted,) = Generator(in_4bit / f"merged{end}").generate([PROMPT], max_new_tokens=12)
        assert found.tokens == wanted.tokens


def test_the_command_line_takes_adapters(trained, capfd):
    adapter = ["--adapter", str(trained / "run")]
    for model in (["--checkpoint", str(trained / "base"), *adapter], ["--checkpoint", str(trained / "run")]):
        assert main(["generate", *model, "--prompt", "line 1:", "--max-new-tokens", "4", "--nproc", "1"]) == 0
        text = ["--data", str(trained / "text.txt"), "--sequence-length", "64", "--max-sequences", "2"]
        assert main(["eval", *model, *text, "--nproc", "2"]) == 0
        passkeys = ["--lengths", "700", "--depths", ".5", "--samples", "1", "--output", str(trained / "keys.json")]
        assert main(["eval", *model, "--passkey", *passkeys, "--nproc", "1"]) == 0
    assert capfd.readouterr().out.count("perplexity") == 2


@pytest.mark.usefixtures("no_ranks")
def test_adapters_of_another_model_are_refused(trained, capfd, tmp_path):
    run, other, base = (str(trained / name) for name in ("run", "other", "base"))
    text = ["--data", str(trained / "text.txt")]
    prompt = ["--prompt", "line 1:", "--nproc", "2"]
    tiny.save(tmp_path / "small", tiny.config(vocab_size=tiny.BYTES, hidden_size=8, num_heads=2, num_kv_heads=1))
    shutil.copytree(trained / "run", tmp_path / "run")
    capfd.readouterr()
    resumed = ["train", "--output", str(tmp_path / "run"), "--resume", "--steps", "9"]
    for words, said in (
        (["convert", run, str(tmp_path / "out"), "--to", "huggingface", "--merge", "--base", other], "another model"),
        (["convert", run, str(tmp_path / "out"), "--to", "huggingface", "--merge", "--base", run], "LoRA adapter"),
        (["generate", "--checkpoint", other, "--adapter", run, *prompt], "another model"),
        (["generate", "--checkpoint", str(tmp_path / "small"), "--adapter", run, *prompt], "another model"),
        (["generate", "--checkpoint", base, "--adapter", base, *prompt], "no adapter"),
        (["generate", "--checkpoint", run, "--adapter", run, *prompt], "LoRA adapter"),
        (["eval", "--checkpoint", other, "--adapter", run, *text], "another model"),
        (["eval", "--checkpoint", str(tmp_path / "small"), "--adapter", run, *text], "another model"),
        (["eval", "--checkpoint", base, "--adapter", base, *text], "no adapter"),
        (["eval", "--checkpoint", run, "--adapter", run, *text], "LoRA adapter"),
        ([*resumed, "--init-from", other], "another model"),
        (["train", "--init-from", str(trained / "run/checkpoints/step-000004"), *text], "LoRA adapter"),
    ):
        assert main(words) == 2, words
        says(capfd.readouterr().err.strip(), said, "fix: ")


def test_a_base_in_another_dtype_is_the_same_model(trained, tmp_path):
    words = ["convert", str(trained / "base"), str(tmp_path / "half"), "--to", "huggingface", "--dtype", "bfloat16"]
    assert main(words) == 0
    merge = ["--to", "huggingface", "--merge", "--base", str(tmp_path / "half")]
    assert main(["convert", str(trained / "run"), str(tmp_path / "merged"), *merge]) == 0
    found, wanted = (load_file(each / "merged" / "model.safetensors") for each in (tmp_path, trained))
    for name, weight in wanted.items():
        assert found[name].dtype == torch.bfloat16
        torch.testing.assert_close(found[name].float(), weight, rtol=2**-7, atol=2**-9)


@pytest.mark.long
def test_a_base_that_moved_is_named_again(trained, tmp_path):
    shutil.copytree(trained / "run", tmp_path / "run")
    shutil.copytree(trained / "base", tmp_path / "moved")
    path = tmp_path / "run" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"init_from": str(tmp_path / "gone")}))
    words = ["train", "--output", str(tmp_path / "run"), "--resume", "--steps", "5", "--nproc", "2"]
    assert main(words) == 2
    assert main([*words, "--init-from", str(tmp_path / "moved")]) == 0
    said = json.loads((tmp_path / "run/checkpoints/step-000005/adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == str(tmp_path / "moved")


def test_options_without_effect_are_refused():
    with refused("lora.rank 4", "init_from", "checkpoint_every never", "fix: --init-from DIR"):
        TrainConfig(lora=LoRAConfig(rank=4))
    assert TrainConfig(lora=LoRAConfig(rank=4), checkpoint_every=None).lora.is_on


def test_what_a_run_needs_counts_adapters_alone(trained):
    shapes = adapter_shapes(LORA, expected_shapes(SHAPE)).values()
    count = sum(rows * columns for rows, columns in shapes)
    assert LORA.parameters(SHAPE) == count > 0
    files = (trained / "run/checkpoints/step-000004").glob("*.safetensors")
    written = sum(path.stat().st_size for path in files if path.name != "random.safetensors")
    counted = checkpoint_bytes(config(trained))
    assert counted == pytest.approx(written, rel=0.5) and counted < written
    given = {"model": SHAPE, "recompute": "none", "ranks": 1, "peak": 1e12}
    full, adapted = FlopsMeter(**given).of(100, 0, 1), FlopsMeter(**given, adapters=count).of(100, 0, 1)
    weights = SHAPE.num_parameters - SHAPE.vocab_size * SHAPE.hidden_size
    assert full.mfu == pytest.approx(600 * weights / 1e12)
    assert adapted.mfu == pytest.approx((400 * weights + 600 * count) / 1e12)
    assert full.tflops - adapted.tflops == pytest.approx((200 * weights - 600 * count) / 1e12)
