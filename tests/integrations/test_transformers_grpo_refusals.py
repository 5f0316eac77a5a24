"""What GRPO and RLOO on split sequences refuse, by name and before work starts."""

import hashlib
import inspect
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator, ParallelismConfig
from datasets import Dataset
from transformers import AutoModelForSequenceClassification
from trl import DPOTrainer, GRPOConfig, GRPOTrainer, KTOTrainer, RLOOTrainer, SFTTrainer

from bmburst.integrations import trainer_arguments
from bmburst.integrations.grpo_rows import rows_of_ranks
from bmburst.integrations.transformers import SplitSequences, recompute, register
from bmburst.integrations.transformers_grpo import SplitRows, _OwnRows, _require_tokens, _require_turns_alone
from tests import tiny
from tests.distributed.threads import mesh_of, run_ranks
from tests.integrations.transformers_grpo_program import PROMPTS, SplitGRPO, rewarded, tokenizer
from tests.refusals import refusal_of, refused, says

READ = {
    (GRPOTrainer, "_compute_loss"): "80295546bbdb",
    (GRPOTrainer, "_generate_and_score_completions"): "1fa48922792d",
    (GRPOTrainer, "_generate_single_turn"): "e0f02e4fc094",
    (GRPOTrainer, "_get_per_token_logps_and_entropies"): "ea73c3909275",
    (GRPOTrainer, "_prepare_inputs"): "f824e7fb0714",
    (GRPOTrainer, "compute_loss"): "a2d6ef8bd29c",
    (GRPOTrainer, "prediction_step"): "008b55545107",
    (GRPOTrainer, "training_step"): "9e18632f7dd8",
    (RLOOTrainer, "_compute_loss"): "c1f9fa0cd5a6",
    (RLOOTrainer, "_generate_and_score_completions"): "93ebbf5e70d3",
    (RLOOTrainer, "_generate_single_turn"): "c68ae4ca477d",
    (RLOOTrainer, "_get_per_token_logps_and_entropies"): "ea73c3909275",
    (RLOOTrainer, "_prepare_inputs"): "f824e7fb0714",
    (RLOOTrainer, "compute_loss"): "3fc1ac07b5c4",
    (RLOOTrainer, "prediction_step"): "008b55545107",
    (RLOOTrainer, "training_step"): "9e18632f7dd8",
}
"""A digest of each method of TRL that SplitRows replaces or depends on, as it was read."""


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()


def _split() -> SplitSequences:
    return SplitSequences(mesh_of())


def _trainer(folder: Path, **options: Any) -> Any:
    arguments = {"output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": "none", "max_steps": 1}
    made: dict[str, Any] = {
        "model": tiny.transformers_model(attention="bmburst"),
        "reward_funcs": rewarded,
        "args": GRPOConfig(**arguments, **options.pop("args", {})),
        "train_dataset": Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
        "processing_class": tokenizer(),
    }
    return options.pop("kind", SplitGRPO)(**({"split": _split()} | made | options))


def test_the_methods_of_trl_are_those_that_were_read() -> None:
    """If not, read them: what they call, gather and log. Then enter the digests here, and the version in SplitRows."""
    found = {
        (owner, name): hashlib.sha256(inspect.getsource(inspect.unwrap(vars(owner)[name])).encode()).hexdigest()[:12]
        for owner, name in READ
    }
    assert found == READ


def test_another_version_of_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ("1.15.2", "1.160.0"):
        monkeypatch.setattr(trainer_arguments, "version", {"trl": other}.get)
        with refused(f"TRL is {other} | GRPOTrainer | allowed: 1.16.* | fix: pip install"):
            SplitGRPO(split=_split(), model="folder that does not exist")


@pytest.mark.parametrize("kind", [DPOTrainer, KTOTrainer, SFTTrainer])
def test_other_trainers(kind: type) -> None:
    """They are refused before they read the data."""
    other: Any = type("Other", (SplitRows, kind), {})
    with refused(f"{kind.__name__} | GRPOTrainer, RLOOTrainer | SplitBatches | docs/fine_tuning.md"):
        other(split=_split(), model="folder that does not exist")


def test_a_trainer_that_replaces_the_same_method() -> None:
    class Mine(GRPOTrainer):  # type: ignore[misc]
        def _get_per_token_logps_and_entropies(self) -> None: ...

    other: Any = type("Other", (SplitRows, Mine), {})
    with refused("Mine | _get_per_token_logps_and_entropies | fix: "):
        other(split=_split(), model="folder that does not exist")


def test_a_loss_in_front_of_the_mixin() -> None:
    """It would change the gradient of the last rank's rows only. Behind the mixin it changes those of all."""

    class Scaled(SplitGRPO):
        def compute_loss(self, *given: Any, **options: Any) -> Any:
            return 2 * super().compute_loss(*given, **options)

    class Derived(Scaled): ...

    with refused("Scaled defines compute_loss in front of SplitRows | other ranks' rows | fix: class"):
        Derived(split=_split(), model="folder that does not exist")


def test_a_loss_of_what_ranks_gather(tmp_path: Path) -> None:
    """Before the last turn it is not known. TRL's own methods use it in metrics only, which are dropped then."""

    class Mine(SplitGRPO):
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            return super()._compute_loss(model, inputs)

    for kind, is_own in ((SplitGRPO, False), (Mine, True)):
        trainer = _trainer(tmp_path, kind=kind)
        turns, count = _OwnRows(trainer, []), torch.tensor([3])
        turns.begin(0, is_own=True, is_last=False)
        found = turns.gather(count)
        assert found.isnan().all() if is_own else torch.equal(found, count)
        turns.require_known(trainer.split.mesh, torch.tensor(2.0))
        if is_own:
            with refused(
                "the loss of Mine is NaN | in turn | allowed: losses of the rows | fix: leave what is gathered"
            ):
                turns.require_known(trainer.split.mesh, found.sum())
            with refused("the loss of Mine fails (cannot convert float NaN | as floats"), turns.without_others():
                int(found)
        turns.begin(1, is_own=False, is_last=True)
        assert torch.equal(turns.gather(count + 1), count)
        turns.require_known(trainer.split.mesh, torch.tensor(torch.nan))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"top_entropy_quantile": 0.2}, "top_entropy_quantile=0.2 | quantile | allowed: 1.0 | fix: leave it out"),
        ({"use_adaptive_entropy": True}, "use_adaptive_entropy | in turn | allowed: False"),
        ({"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32 | adds in fp32 | allowed: False"),
        ({"use_transformers_continuous_batching": True}, "use_transformers_continuous_batching | allowed: False"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha | noise | allowed: None"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor | TRL ignores it | allowed: 0"),
        ({"torch_compile": True}, "torch_compile | all logits | allowed: False"),
        ({"ddp_static_graph": True}, "ddp_static_graph | backward | allowed: None, False"),
        ({"optim": "lomo"}, "optim='lomo' | each backward | adamw_torch"),
        ({"loss_type": "another"}, "loss_type='another' | 'dapo' | fix: leave it out"),
    ],
)
def test_arguments(tmp_path: Path, arguments: dict[str, Any], words: str) -> None:
    with refused(words):
        _trainer(tmp_path, args=arguments)


def test_models(tmp_path: Path) -> None:
    with refused("attention is 'eager' | attn_implementation"):
        _trainer(tmp_path, model=tiny.transformers_model())
    with refused("router | rows of a tree | router_aux_loss_coef=0.0"):
        experts = tiny.transformers_model("qwen3_moe", attention="bmburst")
        _trainer(tmp_path, share_prompts=True, model=experts)
    with refused("Qwen3NextGatedDeltaNet | next tokens of a tree | rows one by one"):
        recurrent = tiny.transformers_model("qwen3_next", attention="bmburst")
        _trainer(tmp_path, share_prompts=True, model=recurrent, args={"router_aux_loss_coef": 0.0})
    with refused("share_prompts=True | window of 7 tokens | max_completion_length 8 | fix: share_prompts=False"):
        narrow = tiny.transformers_model("mistral", attention="bmburst", sliding_window=7)
        _trainer(tmp_path, share_prompts=True, model=narrow, args={"max_completion_length": 8})
    logps = _trainer(tmp_path, share_prompts=True, model=narrow, args={"max_completion_length": 7})
    ids = torch.ones(2, 9, dtype=torch.int64)  # a prompt's length is known in a step only
    with refused("share_prompts=True | window of 7 tokens | row of 9 | fix: share_prompts=False"):
        logps._get_per_token_logps_and_entropies(narrow, ids, ids, 2)
    assert logps._get_per_token_logps_and_entropies(narrow, ids[1:], ids[1:].tril(7), 2)[0].shape == (1, 2)
    with refused("cannot generate with attention 'another' | generate_with"):
        _trainer(tmp_path, generate_with="another")
    for name in ("bmburst", 3):
        with refused(f"generate_with is {name!r} | attn_implementation"):
            _trainer(tmp_path, generate_with=name)


def test_tools_where_ranks_generate_together() -> None:
    """TRL's ranks would wait for each other, or get the answers of others."""
    alone = {"vllm_mode": "colocate", "vllm_tensor_parallel_size": 1, "use_vllm": True, "is_fsdp_enabled": True}
    for change, words in (
        ({}, None),
        ({"tools": []}, None),
        ({"use_vllm": False, "is_fsdp_enabled": False, "vllm_mode": "server"}, None),
        ({"use_vllm": False}, "tools with FSDP2 | turns | allowed: DDP; or vllm_mode='colocate' | fix: "),
        ({"vllm_mode": "server"}, "tools with vllm_mode='server' | turns"),
        ({"vllm_tensor_parallel_size": 2}, "vllm_mode='colocate', vllm_tensor_parallel_size=2 | turns"),
    ):
        made = SimpleNamespace(**{"tools": [max], **alone, **change})
        _require_turns_alone(made, 1)
        with refused(words) if words else nullcontext():
            _require_turns_alone(made, 2)


def test_arguments_of_the_mixin(tmp_path: Path) -> None:
    """They are refused before the trainer reads the data."""
    with refused("split must be a SplitSequences, got Mesh | fix: SplitSequences(mesh)"):
        _trainer(tmp_path, split=_split().mesh, model="folder that does not exist")
    with refused("share_prompts must be a bool | 'yes'"):
        _trainer(tmp_path, share_prompts="yes", model="folder that does not exist")


def test_a_second_split_that_accelerate_launch_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs accelerate refuses it itself, so it is set behind accelerate's check."""

    class Launched(GRPOTrainer):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            monkeypatch.setattr(Accelerator, "parallelism_config", ParallelismConfig(cp_size=2))

    with refused("parallelism_config | cp_size=2 | second time | SplitSequences"):
        _trainer(tmp_path, kind=type("Split", (SplitRows, Launched), {}))


def test_rows_that_are_not_known(tmp_path: Path) -> None:
    ones = torch.ones(2, 3, dtype=torch.int64)
    with refused("pixel_values | prompt_ids | fix: text | of a trainer of your own"):
        rows_of_ranks(_split().mesh, {"prompt_mask": ones, "pixel_values": ones})
    with refused("a prompt has no token | allowed: one or more"):
        rows_of_ranks(_split().mesh, {"prompt_mask": ones.tril(-1)})
    with refused("no completion of a rank has a token | fix: a rollout_func"):
        rows_of_ranks(_split().mesh, {"prompt_mask": ones, "completion_ids": ones[:, :0]})
    trainer = _trainer(tmp_path)
    with refused("no completion of a rank has a token"):  # TRL alone returns values of prompts
        trainer._get_per_token_logps_and_entropies(trainer.model, ones, ones, 0)
    for name in ("pixel_values", "token_type_ids"):
        with refused(f"rows with {name} | allowed: text"):
            trainer._get_per_token_logps_and_entropies(trainer.model, ones, ones, 2, **{name: ones})


def test_an_answer_without_a_token(tmp_path: Path) -> None:
    """TRL reads its last token, so that rank would fail alone, and the others wait for it."""
    made = {"prompt_ids": [[2], [3]], "logprobs": None}

    def answers(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return made | {"completion_ids": [[4], [] if "empty" in prompts else [5]]}

    trainer = _trainer(tmp_path, rollout_func=answers)
    assert trainer.rollout_func(["a", "b"], trainer) == answers(["a", "b"], trainer)

    def over_ranks(comm: Any) -> str:
        of_rank = SimpleNamespace(rollout_func=answers)
        _require_tokens(of_rank, mesh_of(comm))
        return refusal_of(of_rank.rollout_func, ["a", "empty" if comm.rank == 1 else "b"], of_rank)

    for told in run_ranks(3, over_ranks):
        says(told, "rollout_func | without a token on rank 1 | allowed: one token or more | fix: end an empty answer")


@pytest.mark.parametrize("share_prompts", [False, True])
def test_rotary_tables_that_depend_on_the_padding_of_trl(tmp_path: Path, share_prompts: bool) -> None:
    """Rows of 6 tokens in 12 columns have the tables of long texts in TRL; rows alone have those of short ones."""
    own = {"longrope": {"short_factor": [1.0] * 3, "long_factor": [2.0] * 3}, "dynamic": {"factor": 2.0}}
    ids, mask = torch.ones(2, 12, dtype=torch.int64), (torch.arange(12) >= 6).long().expand(2, -1)
    for kind, more in own.items():
        rope = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 8, **more}
        model = tiny.transformers_model("llama", attention="bmburst", rope_parameters=rope, max_position_embeddings=8)
        logps = _trainer(tmp_path, model=model, share_prompts=share_prompts)._get_per_token_logps_and_entropies
        with refused(f"'{kind}' | tables | to 12 | at most 8 with their padding"):
            logps(model, ids, mask, 2)
        assert logps(model, ids[:, 4:], mask[:, 4:], 2)[0].shape == (2, 2)


def test_log_probabilities_have_the_dtype_of_trl(tmp_path: Path) -> None:
    """Of fp64 weights they were fp64. A rank whose completions were all masked gathered fp32, and processes aborted."""
    trainer = _trainer(tmp_path, model=tiny.transformers_model(attention="bmburst").double())
    ids = torch.tensor([[3, 4, 5, 6]])
    ours = trainer._get_per_token_logps_and_entropies(trainer.model, ids, ids.sign(), 2, compute_entropy=True)
    trainer.model.set_attn_implementation("sdpa")
    theirs = GRPOTrainer._get_per_token_logps_and_entropies(
        trainer, trainer.model, ids, ids.sign(), 2, compute_entropy=True
    )
    for mine, other in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(mine, other)  # which compares dtypes, too
        assert other.dtype == torch.float32


def test_rows_of_one_rank_come_back_as_they_are() -> None:
    rows = {
        "prompt_mask": torch.ones(2, 3, dtype=torch.int32),
        "tool_mask": torch.tensor([[True, False]]),
        "advantages": torch.tensor([0.5, -1.0], dtype=torch.float64),
        "num_items_in_batch": torch.tensor(7),
        "old_logps": torch.zeros(2, 0),
    }
    (found,) = rows_of_ranks(_split().mesh, rows)
    assert found.keys() == rows.keys()
    for name, tensor in rows.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_reward_models_have_an_attention_of_whole_sequences(tmp_path: Path) -> None:
    """TRL loads them with the arguments of the policy."""
    judge = AutoModelForSequenceClassification.from_config(tiny.transformers_config(num_labels=1, pad_token_id=0))
    judge.set_attn_implementation("bmburst")
    trainer = _trainer(tmp_path, reward_funcs=judge, reward_processing_classes=tokenizer())
    assert judge.config._attn_implementation == "sdpa"
    assert trainer.model.config._attn_implementation == "bmburst"


def test_a_recompute_policy_stays(tmp_path: Path) -> None:
    """TRL switches activation checkpointing off for generation, and then on with torch's own function."""
    model = tiny.transformers_model(attention="bmburst")
    recompute(model, "block-keep-attention")
    kept = [layer._gradient_checkpointing_func for layer in model.model.layers]
    trainer = _trainer(tmp_path, model=model, args={"max_completion_length": 4, "num_generations": 2})
    seen: list[Any] = []
    model.model.layers[1].register_forward_hook(
        lambda layer, *_: seen.append((layer._gradient_checkpointing_func, torch.is_grad_enabled()))
    )
    trainer.train()
    assert any(with_gradients for _, with_gradients in seen)
    assert all(function is kept[1] for function, with_gradients in seen if with_gradients)
