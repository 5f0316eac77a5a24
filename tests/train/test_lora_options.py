"""Options of adapters: training, files and merged weights are those of PEFT, on one rank and on several."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.optimizers import create_loraplus_optimizer

from bmburst.blocks.kinds import KINDS, kind_of
from bmburst.cli import main
from bmburst.train.config import OptimizerConfig, ParallelConfig, ScheduleConfig, TrainConfig
from bmburst.train.resolve import resolve
from bmburst_ops.dropout import Dropout, keys
from tests import tiny
from tests.distributed.programs import run_program
from tests.refusals import refused
from tests.train import run_program as program

STEPS, SEED, DECAY, RATE = 5, 3, 0.1, 0.02
SHAPE = tiny.config(vocab_size=tiny.BYTES, hidden_size=16, intermediate_size=24, num_heads=4, num_kv_heads=2)
PATTERNS = {
    "rank_pattern": {"layers.0.self_attn.q_proj": 3, "(v|down)_proj": 1},
    "alpha_pattern": {r"layers\.1\..*": 7, "q_proj": 2.5},
}
SAVED = ["embed_tokens", "lm_head", "norm"]
CASES: dict[str, dict[str, Any]] = {
    "plain": {"lora_dropout": 0.3, "target_modules": ["v_proj", "o_proj", "down_proj"]},
    "rslora": {"use_rslora": True, **PATTERNS},
    "whole": {"modules_to_save": SAVED},
    "all": {"use_rslora": True, "lora_dropout": 0.2, "modules_to_save": ["lm_head", "input_layernorm"], **PATTERNS},
}
RATIO = {"all": 4.0, "rslora": 2.0}


def write(folder: Path, name: str, shape: Any = SHAPE) -> None:
    """Write a base, and an adapter by PEFT with numbers in every matrix."""
    if not (folder / "base").exists():
        tiny.save(folder / "base", shape)
    given = {"r": 2, "lora_alpha": 3, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | CASES[name]
    torch.manual_seed(1)
    model = get_peft_model(tiny.load(folder / "base"), LoraConfig(init_lora_weights=False, **given))
    model.save_pretrained(folder / name)


def config(folder: Path, name: str, run: str, **changes: Any) -> TrainConfig:
    asked = {"sequence_length": 48, "init_from": str(folder / "base"), "lora.init_from": str(folder / name)}
    lora = replace(resolve((), asked).lora, loraplus_lr_ratio=RATIO.get(name, 1.0))
    values: dict[str, Any] = {
        "lora": lora,
        "init_from": folder / "base",
        "seed": SEED,
        "steps": STEPS,
        "model": SHAPE,
        "parallel": ParallelConfig(),
        "optimizer": OptimizerConfig(lr=RATE, weight_decay=DECAY, clip_norm=None),
        "schedule": ScheduleConfig(kind="constant", warmup_steps=0),
    }
    return program.config(folder, run, **values | changes)


class SameMasks(torch.nn.Module):
    """Drops what bmburst drops, computed for whole sequences at once."""

    def __init__(self, rate: float, name: str) -> None:
        super().__init__()
        self.rate, self.name, self.step = rate, name, 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        numbers = torch.arange(x.shape[0] * x.shape[1])
        rows, columns = keys(numbers, f"dropout {SEED} {self.step}"), keys(torch.arange(x.shape[2]), self.name)
        kept = Dropout(self.rate, rows, columns)(torch.ones(len(numbers), x.shape[2]))
        return x * kept.view(x.shape)


def pefts(folder: Path, name: str, batches: list[Any]) -> tuple[list[float], list[dict[str, float]], Any]:
    """Train PEFT's model on batches; return losses, norms of the gradient by kind, and the model."""
    model = PeftModel.from_pretrained(tiny.load(folder / "base"), folder / name, is_trainable=True)
    masks = []
    for path, module in model.base_model.model.named_modules():
        if hasattr(module, "lora_dropout") and CASES[name].get("lora_dropout"):
            masks.append(SameMasks(CASES[name]["lora_dropout"], path))
            module.lora_dropout["default"] = masks[-1]
    rates = {"betas": (0.9, 0.999), "eps": 1e-8}
    if name in RATIO:
        optimizer = create_loraplus_optimizer(
            model, torch.optim.AdamW, lr=RATE, loraplus_lr_ratio=RATIO[name], loraplus_weight_decay=DECAY, **rates
        )
    else:
        trained = [each for each in model.parameters() if each.requires_grad]
        groups = [
            {"params": [each for each in trained if (each.dim() > 1) is decays], "weight_decay": DECAY * decays}
            for decays in (True, False)
        ]
        optimizer = torch.optim.AdamW(groups, lr=RATE, **rates)
    losses, norms = [], []
    for step, (ids, labels) in enumerate(batches, 1):
        for mask in masks:
            mask.step = step
        logits = model(torch.from_numpy(ids)).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(labels).flatten())
        optimizer.zero_grad()
        loss.backward()
        squares = dict.fromkeys(KINDS, 0.0)
        for path, each in model.named_parameters():
            if each.grad is not None:
                squares[kind_of(path, tuple(each.shape))] += each.grad.double().square().sum().item()
        norms.append({kind: math.sqrt(square) for kind, square in squares.items() if square})
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, model.eval()


@pytest.mark.parametrize(("size", "tensor"), [(1, 1), (2, 1), (2, 2)])
def test_training_is_pefts(tmp_path: Path, size: int, tensor: int) -> None:
    for name in CASES:
        write(tmp_path, name)
    run_program(size, _training_is_pefts, tmp_path, tensor, tensor=tensor)
    for name in CASES:
        batches, losses, norms = torch.load(tmp_path / f"{name}.pt", weights_only=False)
        wanted, of_kinds, model = pefts(tmp_path, name, batches)
        assert losses == pytest.approx(wanted, rel=2e-5, abs=0), name
        assert wanted[-1] != pytest.approx(wanted[0], rel=1e-3)
        for ours, theirs in zip(norms, of_kinds, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-7), name
        require_files(tmp_path, name, model)


def _training_is_pefts(folder: Path, tensor: int) -> None:
    import bmtrain as bmt

    from bmburst.train.trainer import Trainer

    for name in CASES:
        changes = {"parallel": ParallelConfig(tensor_parallel=tensor)}
        if tensor == 1:  # one chunk after another, recomputed
            changes |= {"recompute": "block", "micro_batch_size": 1, "mlp_chunk_tokens": 7}
        asked = config(folder, name, f"run-{name}", **changes)
        made = Trainer(asked)
        made.restore()
        batches, steps = [], []
        for step in range(STEPS):
            batches.append(made.batches.coming().whole())
            steps.append(made.step())
            if step == 2:
                made.save()
        again = Trainer(asked.replace(resume=True))
        again.restore()
        assert [again.step().loss for _ in range(2)] == [each.loss for each in steps[3:]], name
        made.save()
        if bmt.rank() == 0:
            found = batches, [each.loss for each in steps], [dict(each.grad_norms) for each in steps]
            torch.save(found, folder / f"{name}.pt")


def require_files(folder: Path, name: str, wanted: Any) -> None:
    """PEFT reads the last checkpoint, and its model and the merged one are the trained one."""
    run, merged = folder / f"run-{name}", folder / f"merged-{name}"
    found = PeftModel.from_pretrained(tiny.load(folder / "base"), run / "checkpoints" / "step-000005")
    ids = torch.arange(40).view(2, 20)
    logits = wanted(ids).logits
    torch.testing.assert_close(found(ids).logits, logits, rtol=2e-3, atol=2e-3)
    assert not torch.allclose(tiny.load(folder / "base")(ids).logits, logits, rtol=0.1, atol=0.1)
    assert main(["convert", str(run), str(merged), "--to", "huggingface", "--merge"]) == 0
    torch.testing.assert_close(tiny.load(merged)(ids).logits, found(ids).logits, rtol=1e-4, atol=1e-5)
