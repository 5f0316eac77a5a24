"""A Trainer, and loops of one's own, on the ranks of one job. Rank 0 leaves what every rank saw."""

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    DataCollatorWithFlattening,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

from bmburst import Mesh, UserError
from bmburst.integrations.transformers import SplitSequences, register
from bmburst.integrations.transformers_trainer import SplitBatches, share_batches
from tests import tiny

DRAWN = torch.randint(1, 61, (400,), generator=torch.Generator().manual_seed(3)).tolist()


def rows(*lengths: int) -> list[dict[str, Any]]:
    """Return samples of some lengths."""
    return [{"input_ids": DRAWN[7 * i : 7 * i + length]} for i, length in enumerate(lengths)]


TRAINED = rows(13, 1, 11, 19, 7, 1, 23, 12)  # two of them are shorter than 2 ranks, and have no label
EVALUATED = rows(14, 1, 9, 1, 1)  # in pairs; the last batch has no label


class SplitTrainer(SplitBatches, Trainer):
    pass


class Stream(IterableDataset[dict[str, Any]]):
    """Samples that can only be read in order."""

    def __init__(self, samples: list[dict[str, Any]]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.samples)


COMMON: dict[str, Any] = {
    **{"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"},
    **{"lr_scheduler_type": "constant", "logging_steps": 1},
    **{"per_device_eval_batch_size": 2, "gradient_accumulation_steps": 2},
}
"""Arguments of all trainers."""


def trainer(folder: Path, split: SplitSequences | None, collator: Any = None, **options: Any) -> Trainer:
    """Return a Trainer: transformers' own, or split. Two micro-batches of one sample are a step."""
    arguments = COMMON | {"max_steps": 3, "learning_rate": 1e-2} | options
    args = TrainingArguments(output_dir=str(folder), per_device_train_batch_size=1, **arguments)
    data: Any = Stream if options.get("neftune_noise_alpha") else list
    made: dict[str, Any] = {
        "model": tiny.transformers_model("qwen3", attention="bmburst" if split else "sdpa", use_cache=False),
        "args": args,
        "train_dataset": data(TRAINED),
        "eval_dataset": data(EVALUATED),
        "data_collator": collator or DataCollatorWithFlattening(),
    }
    return SplitTrainer(split=split, **made) if split else Trainer(**made)


RUNS: dict[str, dict[str, Any]] = {
    "ddp": {"include_num_input_tokens_seen": "all", "include_for_metrics": ["inputs"]},  # the latter has no effect
    "fsdp2": {"logging_steps": 2},  # the last of three steps is in no log
    "noise": {"neftune_noise_alpha": 40.0, "include_num_input_tokens_seen": "non_padding"},
}


def collator_of(name: str) -> Any:
    return padded if name == "noise" else DataCollatorWithFlattening()


def padded(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return a batch with padding before shorter samples, and two tokens of padding behind all."""
    most = max(len(sample["input_ids"]) for sample in samples)
    rows = [[0] * (most - len(one["input_ids"])) + one["input_ids"] + [0, 0] for one in samples]
    ids = torch.tensor(rows)
    mask = (ids != 0).long()
    first = torch.nn.functional.pad(mask[:, :-1], (1, 0)) == 0  # no token of the sample predicts its first one
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill((mask == 0) | first, -100)}


def trained(name: str, folder: Path, split: SplitSequences | None) -> dict[str, Any]:
    """Evaluate before the training, then train; return what the Trainer says, and its weights."""
    made = trainer(folder, split, collator_of(name), **RUNS[name])
    if split is not None and name == "fsdp2":
        shard(made)
    evaluated = made.evaluate()
    if split is not None:
        torch.rand(dist.get_rank())  # as after a checkpoint of fewer ranks: each goes on with random numbers of its own
    mean = made.train().training_loss
    logged: list[dict[str, float]] = made.state.log_history
    return {
        "eval_loss": evaluated["eval_loss"],
        "without labels": evaluated.get("eval_batches_without_labels"),
        "losses": [line["loss"] for line in logged if "loss" in line] + [mean],
        "norms": [line["grad_norm"] for line in logged if "grad_norm" in line],
        "tokens": made.state.num_input_tokens_seen,
        "flos": made.state.total_flos,
        "samples": made.get_total_train_batch_size(made.args),
        "seed of workers": getattr(made.get_train_dataloader().base_dataloader.worker_init_fn, "keywords", None),
        "weights": {name: whole_weight(weight) for name, weight in made.model.named_parameters()},
    }


class SplitTuner(SplitBatches, SFTTrainer):  # type: ignore[misc]
    pass


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single letters."""
    letters = Tokenizer(models.WordLevel({chr(i + 64): i for i in range(50)}, unk_token="@"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="A", pad_token="A", unk_token="@")


def routed(folder: Path, split: SplitSequences | None) -> dict[str, Any]:
    """Train and evaluate a model with experts, with TRL's loss of its router: padded batches, a last one that is short.

    The coefficient is not that of the model's configuration.
    """
    texts = ["BCDEFGHIJKLMNOPQRSTUVWX"[3 * i % 11 :][: 5 + 4 * i % 9] for i in range(17)]
    arguments = SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        num_train_epochs=1,
        optim="sgd",  # AdamW would take steps of full size for gradients that are nearly zero
        learning_rate=0.1,
        bf16=False,
        router_aux_loss_coef=0.7,
        **COMMON,
    )
    changes = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "use_cache": False}
    made: Any = (SplitTuner if split else SFTTrainer)(
        model=tiny.transformers_model("qwen3_moe", attention="bmburst" if split else "sdpa", **changes),
        args=arguments,
        train_dataset=Dataset.from_list([{"text": text} for text in texts[:9]]),
        eval_dataset=Dataset.from_list([{"text": text} for text in texts[10:]]),
        processing_class=tokenizer(),
        **({"split": split} if split else {}),
    )
    made.train()
    evaluated = made.evaluate()  # after the training: before it, DDP of a plain trainer would average no gradients
    return {
        "evaluated": [evaluated["eval_loss"], evaluated["eval_aux_loss"]],
        "logged": [
            [line[name] for name in ("loss", "aux_loss", "grad_norm")]
            for line in made.state.log_history
            if "loss" in line
        ],
        "weights": {name: weight.detach().clone() for name, weight in made.model.named_parameters()},
    }


def shard(made: Any) -> None:
    """Set what accelerate sets on GPUs for `fsdp=True`; on CPUs it offers DDP alone."""
    made.accelerator.state._shared_state["distributed_type"] = DistributedType.FSDP
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    made.accelerator.state._shared_state["fsdp_plugin"] = plugin
    made.is_fsdp_enabled = True


def whole_weight(weight: Any) -> Tensor:
    """Return a copy of a weight, or of all shards of it."""
    found: Tensor = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return found.detach().clone()


def _model(seed: int = 0) -> PreTrainedModel:
    return tiny.transformers_model("qwen3", attention="bmburst", seed=seed).train()


def _adapted(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    found: Any = get_peft_model(_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    return found


def _averaging(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def _sharded(model: Any, *, whole: bool) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer)
    found: nn.Module = fully_shard(model) if whole else model
    return found


def _layers_in_fsdp_1() -> nn.Module:
    found: Any = _model()
    layers = [FullyShardedDataParallel(layer, device_id=torch.device("cpu")) for layer in found.model.layers]
    found.model.layers = nn.ModuleList(layers)
    return found


def _nothing(model: nn.Module) -> None:
    del model


def _late_adapters() -> nn.Module:
    found: nn.Module = get_peft_model(_sharded(_model(), whole=True), LoraConfig(r=2, target_modules=["q_proj"]))
    return found


def _part_of_it() -> nn.Module:
    """Return a model of which a part was prepared, but not what is called."""
    found = _adapted()
    DistributedDataParallel(found.base_model)
    return found


# Each loop: a model, and what the script does to its gradients before a step.
LOOPS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], None]]] = {
    "ddp": (lambda: DistributedDataParallel(_model()), _nothing),
    "ddp of adapters": (lambda: DistributedDataParallel(_adapted(dist.get_rank())), _nothing),
    "fsdp2": (lambda: _sharded(_model(), whole=True), _nothing),
    "averaged by the script": (_model, _averaging),
    "not averaged": (_model, _nothing),
    "adapters not averaged": (_adapted, _nothing),
    "adapters behind FSDP2": (_late_adapters, _nothing),
    "another module wrapped": (_part_of_it, _nothing),
    "layers in FSDP 1 alone": (_layers_in_fsdp_1, _nothing),
    "layers sharded alone": (lambda: _sharded(_model(), whole=False), _nothing),
    "weights of two seeds": (lambda: _model(dist.get_rank()), _averaging),
    "adapters of two seeds": (lambda: _adapted(dist.get_rank()), _averaging),
}


def looped(split: SplitSequences, name: str, rate: float) -> tuple[int, str]:
    """Take 3 steps of two micro-batches; return how many were taken, and the message of a refusal.

    Args:
        split: Splits each batch.
        name: One of `LOOPS`.
        rate: Learning rate. The first step has none, as a warm-up from 0 begins.
    """
    make, reduce = LOOPS[name]
    model = make()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0)
    for step in range(3):
        ids = torch.tensor([DRAWN[31 * step : 31 * step + 23]])
        for last in (False, True):
            gathers = nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync()
            with gathers:
                try:
                    loss = split.part(ids).loss(model)
                except UserError as error:
                    return step, str(error)
                loss.backward()
        reduce(model)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = rate
    return 3, ""


def measured(split: SplitSequences) -> list[float]:
    """Evaluate in a loop of accelerate: the last of two batches has fewer samples than there are ranks."""
    accelerator, model = Accelerator(cpu=True), _model().eval()
    loader = accelerator.prepare(DataLoader(EVALUATED[:3], 2, collate_fn=DataCollatorWithFlattening()))
    found = []
    for batch in share_batches(loader, split.mesh):
        loss = split.part(**batch).loss(model).detach()
        found.append(float(accelerator.gather_for_metrics(loss.reshape(1)).mean()))
    return found


class Decides(TrainerCallback):
    """Decides on the last rank alone, when a step ends or when it is logged."""

    def __init__(self, event: str, decision: str) -> None:
        self._event, self._decision = event, decision

    def on_step_end(self, *given: Any, **_: Any) -> None:
        self._decide("step", given[2])

    def on_log(self, *given: Any, **_: Any) -> None:
        self._decide("log", given[2])

    def _decide(self, event: str, control: Any) -> None:
        if event == self._event and dist.get_rank() == dist.get_world_size() - 1:
            setattr(control, self._decision, True)


DECISIONS = (("step", "should_evaluate"), ("log", "should_training_stop"))


def decided(made: Trainer, event: str, decision: str) -> str:
    """Train with a callback that decides on one rank; return the message of a refusal."""
    made.add_callback(Decides(event, decision))
    return told(made.train)


def told(call: Callable[[], object]) -> str:
    """Return the message of a refusal, or nothing."""
    try:
        call()
    except UserError as error:
        return str(error)
    return ""


class Evaluates(TrainerCallback):
    """Calls the trainer itself on the last rank alone."""

    def __init__(self, made: Trainer, event: str) -> None:
        self._made = made
        setattr(self, event, self._evaluate)

    def _evaluate(self, *_: Any, **__: Any) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            self._made.evaluate()


def different(folder: Path, split: SplitSequences) -> dict[str, str]:
    """Return the messages where the last rank has other arguments or samples, or evaluates alone."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    found = {}
    for name, value in (("max_grad_norm", 0.01), ("max_steps", 2), ("disable_tqdm", not COMMON["disable_tqdm"])):
        reset()
        found[name] = told(trainer(folder, split, **({name: value} if is_last else {})).train)
    for event in ("on_train_begin", "on_step_end"):
        reset()
        made = trainer(folder, split)
        made.add_callback(Evaluates(made, event))
        found[event] = told(made.train)
    reset()
    samples = EVALUATED[: 2 if is_last else None]
    found["fewer samples"] = told(lambda: trainer(folder, split).evaluate(samples))
    return found


def reset() -> None:
    """Let accelerate forget the ranks of a job and the last trainer."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def start(sequence: int | None = None) -> SplitSequences:
    """Return what splits sequences over groups of ranks, by default all, after what accelerate needs."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    register()
    return SplitSequences(Mesh.over_process_group(sequence=sequence))


def save(folder: Path, found: dict[str, Any]) -> None:
    """Save what all ranks found."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    if dist.get_rank() == 0:
        torch.save(every, folder / "found.pt")


def run(folder: Path) -> None:
    """The runs of a Trainer and the loops."""
    split = start()
    found: dict[str, Any] = {"trained": {}, "loops": {}}
    for name in RUNS:
        reset()
        found["trained"][name] = trained(name, folder, split)
    found["decided"] = []
    for event, decision in DECISIONS:
        reset()
        found["decided"].append(decided(trainer(folder, split), event, decision))
    found["different"] = different(folder, split)
    reset()
    found["one group"] = routed(folder, split)
    found["measured"] = measured(split)
    for name in LOOPS:
        found["loops"][name] = looped(SplitSequences(split.mesh), name, 1e-3)
    save(folder, found)


def run_groups(folder: Path) -> None:
    """A router's loss on ranks that are groups of their own, and TRL's on the same ranks."""
    found: dict[str, Any] = {}
    for name, splits in (("two groups", start(sequence=1)), ("TRL", None)):
        reset()
        found[name] = routed(folder, splits)
    save(folder, found)
