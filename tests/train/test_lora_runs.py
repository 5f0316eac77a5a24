"""LoRA runs: what their checkpoints hold, that they resume exactly, and what they refuse."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from bmburst.blocks.config import LoRAConfig
from bmburst.cli import main
from bmburst.train.config import OptimizerConfig, ParallelConfig, ScheduleConfig
from bmburst_ops import nf4
from tests import lazy, tiny
from tests.distributed.programs import run_program
from tests.pairs import long
from tests.refusals import refused
from tests.train import run_program as program
from tests.train.cases import require_equal, steps

LORA = LoRAConfig(rank=2, alpha=4, targets=("q_proj", "down_proj"))
FOUR_BIT = replace(LORA, base="4bit")


def base(folder):
    tiny.save(folder / "base", program.SHAPE)


def trainer(folder, name, **changes):
    # Its rate does not depend on the number of steps.
    schedule = ScheduleConfig(kind="constant", warmup_steps=0)
    changes = {"lora": LORA, "schedule": schedule, "init_from": folder / "base", "parallel": ParallelConfig()} | changes
    return program.trainer(folder, name, **changes)


def state(made):
    found = {}
    for shard in lazy.named_shards(made.model):
        whole = lazy.gather(shard)
        found[shard.name] = whole.view(torch.int32) if shard.name.endswith(".nf4") else whole  # no numbers
        if shard.storage.requires_grad:
            found |= {
                f"{shard.name}.{key}": made.optimizer.state_of(shard, key).clone() for key in lazy.state_names(shard)
            }
    return found


CASES = [
    (1, {}),
    (2, {"dtype": "bfloat16", "optimizer": OptimizerConfig(offload=True, offload_weights=True)}),
    (2, {"parallel": ParallelConfig(data_parallel=2, zero_level=2)}),
    *long(
        (3, {"recompute": "block", "optimizer": OptimizerConfig(offload=True), "lora": FOUR_BIT, "dtype": "bfloat16"})
    ),
]


@pytest.mark.parametrize(("size", "changes"), CASES)
def test_resumes_exactly_and_pefts_model_is_ours(tmp_path, size, changes):
    base(tmp_path)
    run_program(size, _resumes_exactly, tmp_path, changes)
    require_pefts(tmp_path, changes.get("dtype", "float32"), is_4bit=changes.get("lora", LORA).is_4bit)


def _resumes_exactly(folder, changes):
    made = trainer(folder, "run", **changes)
    made.restore()
    before = state(made)
    first = [made.step() for _ in range(3)]
    saved = made.save()
    assert first[-1].loss < first[0].loss
    after = state(made)
    for name, tensor in before.items():
        is_trained = ".lora_" in name
        assert torch.equal(tensor, after[name]) != is_trained or not tensor.any(), name
    names = {path.name for path in saved.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors", "state.json"} < names
    assert not any(name.startswith("model") for name in names)
    assert sum(path.stat().st_size for path in saved.iterdir()) < 120_000
    other = trainer(folder, "run", resume=True, **changes)
    other.restore()
    require_equal(state(other), after)
    assert steps(other, 2) == steps(made, 2)
    require_equal(state(other), state(made))


def require_pefts(folder, dtype, *, is_4bit):
    """PEFT reads the checkpoint as it is, and merges to the same weights as `bmburst convert`.

    In 4 bits, PEFT's model is that of the dequantized weights: it dequantizes before it merges.
    """
    from peft import PeftModel

    checkpoint = folder / "run" / "checkpoints" / "step-000003"
    values = json.loads((checkpoint / "adapter_config.json").read_text())
    assert (values["r"], values["lora_alpha"], set(values["target_modules"])) == (2, 4, set(LORA.targets))
    assert values["base_model_name_or_path"] == str(folder / "base")
    below = tiny.load(folder / "base")
    if is_4bit:
        for name, weight in below.named_parameters():
            if name.endswith("_proj.weight"):
                words = nf4.quantize(weight.data.to(getattr(torch, dtype)))
                weight.data = nf4.dequantize(words, tuple(weight.shape), getattr(torch, dtype)).float()
    model = PeftModel.from_pretrained(below, checkpoint)
    numbers = load_file(checkpoint / "adapter_model.safetensors")
    found = {name.replace(".default", ""): each for name, each in model.state_dict().items() if "lora_" in name}
    assert found.keys() == numbers.keys()
    assert all(torch.equal(found[name].to(getattr(torch, dtype)), numbers[name]) for name in numbers)
    assert all(each.any() for each in numbers.values())
    assert main(["convert", str(folder / "run"), str(folder / "merged"), "--to", "huggingface", "--merge"]) == 0
    merged, wanted = tiny.load(folder / "merged").state_dict(), model.merge_and_unload().state_dict()
    for name, weight in merged.items():
        torch.testing.assert_close(weight, wanted[name], rtol=1e-6, atol=1e-7)


def test_another_number_of_ranks_goes_on(tmp_path):
    base(tmp_path)
    for size, last in ((3, 2), (2, 4)):
        run_program(size, _train, tmp_path, last)
    run_program(1, _train_alone, tmp_path)


def _train(folder, steps):
    made = trainer(folder, "run", steps=steps, eval_every=0, resume=(folder / "run" / "checkpoints").exists())
    made.restore()
    made.train()


def _train_alone(folder):
    made, whole = trainer(folder, "run", resume=True), trainer(folder, "whole")
    made.restore()
    whole.restore()
    for _ in range(4):
        whole.step()
    for name, tensor in state(whole).items():
        torch.testing.assert_close(state(made)[name], tensor, rtol=1e-4, atol=1e-5)


def test_a_run_is_not_resumed_with_other_adapters(tmp_path):
    base(tmp_path)
    run_program(1, _a_run_is_not_resumed_with_other_adapters, tmp_path)


def _a_run_is_not_resumed_with_other_adapters(folder):
    made = trainer(folder, "run")
    made.restore()
    made.step()
    made.save()
    for lora, words in (
        (LoRAConfig(rank=3, alpha=4, targets=LORA.targets), ("lora.rank is 3", "fix: --lora.rank 2")),
        (LoRAConfig(rank=2, alpha=5, targets=LORA.targets), ("lora.alpha is 5", "fix: --lora.alpha 4")),
        (LoRAConfig(rank=2, alpha=4), ("lora.targets", "v_proj", "fix: --lora.targets q_proj,down_proj")),
        (FOUR_BIT, ("lora.base is 4bit", "fix: --lora.base dtype")),
    ):
        other = trainer(folder, "run", resume=True, lora=lora)
        with refused(*words):
            other.restore()
