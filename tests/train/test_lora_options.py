"""Options of adapters: training, files and merged weights are those of PEFT, on one rank and on several."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from peft.optimizers import create_loraplus_optimizer

from bmburst.blocks.kinds import KINDS, MATRICES, kind_of
from bmburst.blocks.lora import LoRAConfig
from bmburst.cli import main
from bmburst.config import to_dict
from bmburst.plan.candidates import Candidate, Task
from bmburst.plan.memory import memory_of
from bmburst.schedule.hardware import hardware_like
from bmburst.train.config import DPOConfig, OptimizerConfig, ParallelConfig, ScheduleConfig, TrainConfig
from bmburst.train.resolve import check_paths, resolve
from bmburst.train.trainer import Trainer
from bmburst_ops.dropout import Dropout, keys
from tests import lazy, tiny
from tests.distributed.programs import run_program
from tests.pairs import long
from tests.refusals import refused
from tests.train import run_program as program
from tests.train.cases import adamw

STEPS, SEED, DECAY, RATE = 4, 3, 0.1, 0.005
EPS = 1e-2  # felt: without it a gradient that is nothing but rounding moves a weight as much as any other
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
FIRST, SECOND = ("plain", "rslora"), ("whole", "all")
RATIO = {"all": 4.0, "rslora": 2.0}


def write(folder: Path, name: str, shape: Any = SHAPE) -> None:
    """Write a base, and an adapter by PEFT with numbers in every matrix."""
    if not (folder / "base").exists():
        tiny.save(folder / "base", shape)
    given = {"r": 2, "lora_alpha": 3, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | CASES[name]
    torch.manual_seed(1)
    model = get_peft_model(tiny.load(folder / "base"), PeftConfig(init_lora_weights=False, **given))
    model.save_pretrained(folder / name)


def config(folder: Path, name: str, run: str, **changes: Any) -> TrainConfig:
    asked = {"sequence_length": 48, "init_from": str(folder / "base"), "lora.init_from": str(folder / name)}
    lora = replace(resolve((), asked).lora, loraplus_lr_ratio=RATIO.get(name, 1.0))
    decayed = KINDS if name in RATIO else MATRICES  # PEFT's optimizer of LoRA+ decays norms without a bias
    values: dict[str, Any] = {
        "lora": lora,
        "init_from": folder / "base",
        "seed": SEED,
        "steps": STEPS,
        "model": SHAPE,
        "parallel": ParallelConfig(),
        "optimizer": OptimizerConfig(lr=RATE, weight_decay=DECAY, weight_decay_on=decayed, eps=EPS, clip_norm=None),
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
    rates = {"betas": (0.9, 0.999), "eps": EPS}
    if name in RATIO:
        optimizer = create_loraplus_optimizer(
            model, torch.optim.AdamW, lr=RATE, loraplus_lr_ratio=RATIO[name], loraplus_weight_decay=DECAY, **rates
        )
    else:
        optimizer = adamw(model, DECAY, lr=RATE, **rates)
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


@pytest.mark.parametrize(
    ("size", "tensor", "names"),
    [(2, 1, FIRST), (2, 2, SECOND), *long((1, 1, FIRST + SECOND), (2, 1, SECOND), (2, 2, FIRST))],
)
def test_training_is_pefts(tmp_path: Path, size: int, tensor: int, names: tuple[str, ...]) -> None:
    for name in names:
        write(tmp_path, name)
    run_program(size, _training_is_pefts, tmp_path, tensor, names, tensor=tensor)
    for name in names:
        batches, losses, norms = torch.load(tmp_path / f"{name}.pt", weights_only=False)
        wanted, of_kinds, model = pefts(tmp_path, name, batches)
        assert losses == pytest.approx(wanted, rel=2e-5, abs=0), name
        assert wanted[-1] != pytest.approx(wanted[0], rel=1e-3)
        for ours, theirs in zip(norms, of_kinds, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-7), name
        require_files(tmp_path, name, model)


def _training_is_pefts(folder: Path, tensor: int, names: tuple[str, ...]) -> None:
    for name in names:
        changes = {"parallel": ParallelConfig(tensor_parallel=tensor)}
        if tensor == 1 and "lora_dropout" in CASES[name]:  # one chunk after another, recomputed, drops the same
            changes |= {"recompute": "block", "micro_batch_size": 1, "mlp_chunk_tokens": 7}
        asked = config(folder, name, f"run-{name}", **changes)
        made = Trainer(asked)
        with refused("init_from", "not loaded", "fix: trainer.restore()"):  # or the base would be random
            made.step()
        made.restore()
        batches, steps = [], []
        for step in range(STEPS):
            batches.append(made.batches.coming().whole())
            steps.append(made.step())
            if step == 2:
                made.save()
        again = Trainer(asked.replace(resume=True))
        again.restore()
        assert [again.step().loss for _ in range(STEPS - 3)] == [each.loss for each in steps[3:]], name
        made.save()
        if lazy.bmt.rank() == 0:
            found = batches, [each.loss for each in steps], [dict(each.grad_norms) for each in steps]
            torch.save(found, folder / f"{name}.pt")


def require_files(folder: Path, name: str, wanted: Any) -> None:
    """PEFT reads the last checkpoint, and its model and the merged one are the trained one."""
    run, merged = folder / f"run-{name}", folder / f"merged-{name}"
    found = PeftModel.from_pretrained(tiny.load(folder / "base"), run / "checkpoints" / f"step-{STEPS:06d}")
    ids = torch.arange(40).view(2, 20)
    logits = wanted(ids).logits
    torch.testing.assert_close(found(ids).logits, logits, rtol=2e-3, atol=2e-3)
    assert not torch.allclose(tiny.load(folder / "base")(ids).logits, logits, rtol=0.05, atol=0.05)
    assert main(["convert", str(run), str(merged), "--to", "huggingface", "--merge"]) == 0
    torch.testing.assert_close(tiny.load(merged)(ids).logits, found(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rank": 0, "dropout": 0.1}, "lora.dropout 0.1 has no effect | lora.rank"),
        ({"rank": 0, "alpha": 32.0}, "lora.alpha 32 | lora.rank | fix: --lora.rank 16"),
        ({"rank": 0, "targets": ("o_proj",)}, "o_proj | fix: --lora.rank 16"),
        ({"dropout": 1.0}, "dropout: 1.0 | below 1"),
        ({"modules_to_save": ("embed",)}, "modules_to_save | 'embed' | embed_tokens"),
        ({"rank_pattern": ("q_proj",)}, "lora.rank_pattern | 'q_proj' | NAME=NUMBER"),
        ({"rank_pattern": ("q_proj=0.5",)}, "'q_proj=0.5' | integer"),
        ({"alpha_pattern": ("(q_proj=2",)}, "'(q_proj=2' | regular expression"),
        ({"alpha_pattern": ("up_proj=2",)}, "lora.alpha_pattern | 'up_proj' | lora.targets"),
        ({"alpha_pattern": ("q_proj=inf",)}, "'q_proj=inf' | a number above 0"),
        ({"modules_to_save": ("q_norm",)}, "modules_to_save | no module q_norm"),
        ({"rank": 0, "init_from": "x"}, "lora.init_from x | lora.rank | resolve"),
    ],
)
def test_settings_without_meaning_are_refused(values: dict[str, Any], words: str) -> None:
    with refused(words):
        LoRAConfig(**{"rank": 4} | values).require_model(SHAPE)


def test_alphas_keep_their_digits() -> None:
    patterns: Any = {"q_proj": 0.123456789, "k_proj": 1e6 + 0.5, "v_proj": 7.0}
    lora = LoRAConfig(rank=4, alpha_pattern=patterns)
    assert lora.alpha_pattern == ("q_proj=0.123456789", "k_proj=1000000.5", "v_proj=7")
    assert lora.scale_of("model.layers.0.self_attn.q_proj") == 0.123456789 / 4


def test_one_of_two_tied_matrices_is_not_trained_alone() -> None:
    with refused("modules_to_save embed_tokens | embedding is its head | leave embed_tokens out"):
        LoRAConfig(rank=2, modules_to_save=("embed_tokens",)).require_model(replace(SHAPE, tie_embeddings=True))


def test_settings_that_preference_training_does_not_take(tmp_path: Path) -> None:
    for name, words in (
        ("plain", "lora.dropout 0.3 | dpo.beta 0.1 | TRL"),
        ("rslora", "lora.init_from | dpo.reference"),
    ):
        write(tmp_path, name)
        with refused(words):
            config(tmp_path, name, "run", dpo=DPOConfig(beta=0.1), pack="documents")
    lora = LoRAConfig(rank=2, modules_to_save=("norm",))
    values = {"model": SHAPE, "preset": None, "lora": lora, "dpo": DPOConfig(beta=0.1), "pack": "documents"}
    # Its frozen weights are not those of the reference.
    assert TrainConfig(**values, sequence_length=48, init_from=tmp_path / "base").reference == tmp_path / "base"
    with refused("dpo.beta 0.1 without a reference"):
        TrainConfig(**values, sequence_length=48, checkpoint_every=None)
    # Those of a base in 4 bits are not those of init_from, which is not.
    values |= {"lora": replace(lora, base="4bit"), "sequence_length": 48, "init_from": tmp_path / "base"}
    with refused("lora.modules_to_save norm | lora.base 4bit | allowed: no modules_to_save | --dpo.reference DIR"):
        TrainConfig(**values)
    TrainConfig(**values | {"dpo": DPOConfig(beta=0.1, reference=tmp_path / "other")})
    TrainConfig(**values | {"lora": LoRAConfig(rank=2, base="4bit")})


def test_settings_come_from_the_adapter(tmp_path: Path) -> None:
    """Of a file, of options and of Python; another value than the adapter's is refused before ranks start."""
    write(tmp_path, "all")
    asked = {"lora": {"init_from": str(tmp_path / "all")}, "sequence_length": 48}
    found = resolve((), asked)
    wanted = LoRAConfig(
        rank=2,
        alpha=3,
        targets=("all-linear",),
        dropout=0.2,
        rslora=True,
        rank_pattern=("(v|down)_proj=1", "layers.0.self_attn.q_proj=3"),  # in the order of PEFT's file
        alpha_pattern=(r"layers\.1\..*=7", "q_proj=2.5"),
        modules_to_save=("lm_head", "input_layernorm"),
        init_from=tmp_path / "all",
    )
    assert replace(found.lora, targets=("all-linear",)) == wanted and found.lora.matrices == wanted.matrices
    assert found.init_from is not None and found.init_from.resolve() == (tmp_path / "base").resolve()
    given = to_dict(wanted) | {"rank_pattern": {"(v|down)_proj": 1, "layers.0.self_attn.q_proj": 3}}
    assert resolve((), asked | {"lora": given, "init_from": str(tmp_path / "base")}).lora == wanted
    text = tmp_path / "text.txt"
    text.write_text("word " * 4000)
    for name, value, there in (
        ("dropout", 0.5, ""),
        ("rslora", "false", "true"),
        ("rank_pattern", ("q_proj=4",), "=3"),
        ("rank_pattern", ("layers.0.self_attn.q_proj=3", "(v|down)_proj=1"), ""),  # the order changes nothing here
        ("rank_pattern", ("down_proj=1", "v_proj=1", "0.self_attn.q_proj=3", "k_proj=2"), ""),
        ("alpha_pattern", ("q_proj=2.5", r"layers\.1\..*=7"), "=7,q_proj=2.5"),  # but here: layers.1 has a q_proj
        ("alpha_pattern", (r"layers\.1\..*=7", "q_proj=2.500001"), "=2.5"),
        ("modules_to_save", ("input_layernorm", "lm_head"), ""),
    ):
        lora = asked["lora"] | {name: value}
        run = resolve((), asked | {"lora": lora, "data.source": str(text), "output": str(tmp_path / "run")})
        if not there:  # the same, or a rate of training
            check_paths(run)
            continue
        with refused(f"lora.{name} is", f"{there}", "all", "fix: "):
            check_paths(run)


def test_dropout_is_a_function_of_token_and_feature() -> None:
    rows, columns = keys(torch.arange(3000), "a"), keys(torch.arange(700), "b")
    dropout = Dropout(0.3, rows, columns)
    kept = dropout(torch.ones(3000, 700, dtype=torch.float64))
    assert {round(each, 9) for each in kept.unique().tolist()} == {0.0, round(1 / 0.7, 9)}
    dropped = (kept == 0).double()
    assert dropped.mean().item() == pytest.approx(0.3, abs=3 * (0.21 / dropped.numel()) ** 0.5)
    for dim, count in ((0, 3000), (1, 700)):  # no row or column is special
        assert dropped.mean(dim).std().item() == pytest.approx((0.21 / count) ** 0.5, rel=0.15)
    for other in (dropped.roll(1, 0), dropped.roll(1, 1)):
        assert torch.corrcoef(torch.stack([dropped.flatten(), other.flatten()]))[0, 1].abs() < 5e-3
    part = dropout.at(slice(100, 200)).of_columns(slice(3, 9))(torch.ones(100, 6, dtype=torch.float64))
    assert torch.equal(part, kept[100:200, 3:9])
    assert not torch.equal(keys(torch.arange(700), "c"), columns)


def test_the_plan_counts_what_is_trained() -> None:
    lora = LoRAConfig(rank=2, rank_pattern=("layers.0.self_attn.q_proj=5",), modules_to_save=("lm_head", "norm"))
    hidden, table, norms = SHAPE.hidden_size, SHAPE.vocab_size * SHAPE.hidden_size, 2 * SHAPE.num_layers + 1
    kv = SHAPE.num_kv_heads * SHAPE.head_dim
    adapters = SHAPE.num_layers * 2 * (2 * hidden + hidden + kv) + 3 * 2 * hidden
    task = Task(model=SHAPE, sequence=48, gpus=1, lora=lora, dtype="float32")
    assert task.adapters == adapters and lora.saved(SHAPE) == table + norms * hidden
    assert task.trained == adapters + table + norms * hidden
    assert task.trained_in_blocks == adapters + (norms - 1) * hidden
    frozen = replace(task, lora=replace(lora, modules_to_save=()))
    held = [
        memory_of(Candidate(task=each, data=1, recompute="block"), hardware_like("h200")).lines
        for each in (task, frozen)
    ]
    assert held[0]["optimizer"] - held[1]["optimizer"] == pytest.approx(8 * lora.saved(SHAPE), abs=1)
