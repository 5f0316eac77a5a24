"""GRPO and RLOO of TRL, plain and on split sequences, on the ranks of one job. Each rank leaves what it saw of both."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from bmburst.integrations.transformers import SplitSequences
from bmburst.integrations.transformers_grpo import SplitRows
from tests import tiny
from tests.integrations import transformers_grpo_tools as tools
from tests.integrations.transformers_trainer_program import decided, reset, shard, start, whole_weight

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456"  # and 2 tokens: tiny's vocabulary of 61
PROMPTS = ("abc def", "h", "12345 6 01234", "xy", "hello", "zzzz", "a b c", "Q")
TIMES = frozenset({"step_time", "train_runtime", "eval_runtime", "eval_model_preparation_time", "epoch", "step"})
SPEEDS = ("per_second",)

GRPO: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "dapo": {"beta": 0.1, "num_generations": 0},
        "grpo": {"loss_type": "grpo", "gradient_accumulation_steps": 2, "num_iterations": 2},
        "experts": {
            "loss_type": "bnpo",
            "router_aux_loss_coef": 0.7,
            "temperature": 0.7,
            "mask_truncated_completions": True,
            "entropy_coef": 0.5,
            "pad_to_multiple_of": 8,
            "gradient_accumulation_steps": 2,
        },
        "dr_grpo": {"loss_type": "dr_grpo", "steps_per_generation": 2, "off_policy_mask_threshold": 1e-3},
        "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "delta": 1.5, "num_iterations": 2},
        "sapo": {"loss_type": "sapo", "scale_rewards": "batch"},
        "cispo": {"loss_type": "cispo", "epsilon_high": 2.0, "num_iterations": 2},
        "vespo": {"loss_type": "vespo", "num_iterations": 2},
        "vllm": {"beta": 0.05},
        "fsdp2": {"beta": 0.1, "gradient_accumulation_steps": 2},
        "sharded adapters": {"beta": 0.1, "gradient_accumulation_steps": 2, "learning_rate": 3.0},
        "adapters": {"beta": 0.1, "gradient_accumulation_steps": 2, "learning_rate": 3.0},
        "generation": {"max_completion_length": 9, "beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1},
        "tools": {"max_completion_length": 220, "beta": 0.1, "gradient_accumulation_steps": 2},
        "environments": {"max_completion_length": 220, "num_iterations": 2},
        "rloo": {"beta": 0.05, "gradient_accumulation_steps": 2, "num_iterations": 2},
        "shared": {
            "loss_type": "bnpo",
            "beta": 0.1,
            "num_generations": 0,
            "num_generations_eval": 2,
            "gradient_accumulation_steps": 2,
            "num_iterations": 2,
            "mask_truncated_completions": True,
        },
    }
)
"""What each run sets beside the common arguments. `num_generations` of 0 is all rows of a step."""


class SplitGRPO(SplitRows, GRPOTrainer):  # type: ignore[misc]
    pass


class SplitRLOO(SplitRows, RLOOTrainer):  # type: ignore[misc]
    pass


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of letters."""
    words = {character: i for i, character in enumerate(["<eos>", "<unk>", *LETTERS])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<eos>")


def rewarded(completions: list[str], **_: object) -> list[float]:
    """Return how often a letter of the first ten occurs."""
    return [float(sum(letter in LETTERS[:10] for letter in text)) + len(text) / 7 for text in completions]


def drawn(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Return completions that depend on the place of a row in the whole batch; some are truncated."""
    ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    found, ours = [], []
    for i in range(len(prompts)):
        row = trainer.accelerator.process_index * len(prompts) + i + 100 * trainer._step
        generator = torch.Generator().manual_seed(row)
        length = int(torch.randint(1, 9, (1,), generator=generator))
        completion = torch.randint(2, 59, (length,), generator=generator).tolist()
        found.append(completion + [0] * (row % 3 > 0))
        ours.append([int(j % 4 != 2) for j in range(len(found[-1]))])
    return {"prompt_ids": ids, "completion_ids": found, "logprobs": None, "env_mask": ours}


class Sampler:
    """In place of vLLM's engine: completions as `drawn`, and log-probabilities that are not the policy's."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def sync_weights(self) -> None:
        """Hold no weights."""

    def generate(
        self, prompts: list[list[int]], **_: object
    ) -> tuple[None, list[list[int]], list[list[list[float]]], None]:
        """See `trl.generation.vllm_generation.VLLMGeneration.generate`."""
        texts = [self._trainer.processing_class.decode(ids) for ids in prompts]
        found = drawn(texts, self._trainer)["completion_ids"]
        return None, found, [[[-3.5 - 0.1 * (j % 3)] for j in range(len(ids))] for ids in found], None


def folder_of(root: Path, *, dtype: torch.dtype = torch.float64, family: str = "llama") -> str:
    """Save a model and return its folder."""
    folder = root / ("policy" if family == "llama" else "experts")
    experts = {} if family == "llama" else {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = tiny.transformers_model(family, max_position_embeddings=512, **experts).to(dtype)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def trainer(root: Path, name: str, split: SplitSequences | None, **options: Any) -> Any:
    """Return the trainer of a run, TRL's own or split."""
    is_rloo = name == "rloo"
    of_experts = {"experts_implementation": "eager"} if name == "experts" else {}  # others have no fp64
    fields = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "num_generations": 2,
        "max_steps": 2,
        "learning_rate": 0.3,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 1e9,
        "logging_steps": 1,
        "shuffle_dataset": False,
        "max_completion_length": 12,
        "gradient_checkpointing": False,
    }
    fields |= GRPO.get(name, {})
    if not fields["num_generations"]:  # all rows of a step are answers to one prompt
        rows = fields["per_device_train_batch_size"] * fields.get("gradient_accumulation_steps", 1)
        fields["num_generations"] = rows * dist.get_world_size()
    arguments = (RLOOConfig if is_rloo else GRPOConfig)(
        output_dir=str(root / "out"),
        bf16=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        model_init_kwargs={"attn_implementation": "bmburst" if split else "sdpa", "dtype": "auto"} | of_experts,
        **(fields | options.pop("args", {})),
    )
    # A tree shares a prompt if that saves 256 tokens or more.
    rows = [{"prompt": 5 * LETTERS + prompt if name == "shared" else prompt} for prompt in PROMPTS]
    made: dict[str, Any] = {
        "model": str(root / ("experts" if name == "experts" else "policy")),
        "reward_funcs": rewarded,
        "args": arguments,
        "train_dataset": Dataset.from_list(rows),
        "eval_dataset": Dataset.from_list(rows[:3]),
        "processing_class": tokenizer(),
    }
    if name.endswith("adapters"):
        made["peft_config"] = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"])
    if not is_rloo and name not in ("generation", "vllm"):
        made["rollout_func"] = drawn
    if name in tools.KINDS:
        del made["rollout_func"]
        made |= tools.arguments(root, name)
    made |= options
    if split is None:
        return (RLOOTrainer if is_rloo else GRPOTrainer)(**made)
    return (SplitRLOO if is_rloo else SplitGRPO)(split=split, share_prompts=name == "shared", **made)


def trained(root: Path, name: str, split: SplitSequences | None) -> dict[str, Any]:
    """Train, and evaluate before and after; return what the trainer logs, and its weights."""
    made = trainer(root, name, split)
    if name == "vllm":
        made.use_vllm, made.vllm_generation, made._last_loaded_step = True, Sampler(made), -1
    if name in tools.KINDS:
        made.model.generate = tools.Answers(made, name)
    if name in ("fsdp2", "sharded adapters") and split is not None:
        shard(made)
    tokens: list[int] = []
    made.model.get_output_embeddings().register_forward_hook(
        lambda _, __, output: tokens.append(output.shape[:-1].numel()) if torch.is_grad_enabled() else None
    )
    computed: list[int] = []
    made.model.get_input_embeddings().register_forward_hook(
        lambda _, __, output: computed.append(output.shape[:-1].numel()) if torch.is_grad_enabled() else None
    )
    if name == "dapo":
        made.evaluate()
    if name == "grpo" and split is not None:  # without a reference model, TRL alone would then average no gradients
        with torch.random.fork_rng():  # TRL draws the rows of micro-batches
            made.evaluate()
        made.state.log_history.clear()
    made.train()
    made.evaluate()
    weights = made.accelerator.unwrap_model(made.model).named_parameters()
    return {
        "logged": [
            {key: value for key, value in line.items() if key not in TIMES and not key.endswith(SPEEDS)}
            for line in made.state.log_history
        ],
        "tokens": made.state.num_input_tokens_seen,
        "weights": {key: whole_weight(weight) for key, weight in weights if weight.requires_grad},
        "most tokens in the head": max(tokens, default=0),
        "computed": sum(computed),
        "completions": list(made._logs["completion"]),
    }


def run(root: Path, names: list[str], sequence: int) -> None:
    """Train each run of some names plain, then split over groups of `sequence` ranks."""
    split, found = start(sequence), {}
    for name in names:
        for kind in (None, split):
            reset()
            found[name, kind is not None] = trained(root, name, kind)
            if kind is not None and name == "rloo":
                found["decided", True] = {"told": decided(trainer(root, name, kind), "step", "should_training_stop")}
    torch.save(found, root / f"found{dist.get_rank()}.pt")
