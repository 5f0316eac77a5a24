"""What tests share that compare training with a reference or with itself: cases, ranks, steps, results, and states."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bmburst.train.config import TrainConfig
from bmburst.train.schedule import learning_rate
from tests import lazy
from tests.distributed.programs import run_program


@dataclass(frozen=True)
class Case:
    """How a step is done; none of it may change what comes out."""

    data: int
    sequence: int

    def __str__(self) -> str:
        return "-".join(map(str, astuple(self)))

    @property
    def group(self) -> tuple[int, int]:
        """Ranks in all, and in a tensor group: what processes are started with."""
        return self.data * self.sequence, 1


class NoHostReads(TorchDispatchMode):
    """Inside this block, no number of a tensor is read one by one: on a GPU the host would wait for it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def run_cases(train: Callable[[Path, Any], None], folder: Path, cases: Iterable[Any], **options: Any) -> None:
    """Call `train(folder, case)` for each case, once for all cases of the same `group`.

    `train` leaves what came of a case in `<case>.pt`.
    """
    of_group: dict[tuple[int, int], list[Any]] = {}
    for case in cases:
        of_group.setdefault(case.group, []).append(case)
    for (size, tensor), alike in sorted(of_group.items()):
        run_program(size, _each, train, folder, alike, tensor=tensor, **options)


def _each(train: Callable[[Path, Any], None], folder: Path, cases: list[Any]) -> None:
    for case in cases:
        train(folder, case)


def result(folder: Path, name: object) -> dict[str, Any]:
    """Return what was left of a case or a run."""
    loaded: dict[str, Any] = torch.load(folder / f"{name}.pt", map_location="cpu", weights_only=True)
    return loaded


def labelled(peer: Any, messages: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels of a conversation, of its answers alone, as a tokenizer of transformers has them."""
    found = peer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = torch.tensor(found["input_ids"]), torch.tensor(found["assistant_masks"])
    return ids, ids.masked_fill(mask == 0, -100)


def losses_alone(model: Any, ids: Any, labels: Any, lengths: Sequence[int]) -> Iterator[tuple[int, int, float]]:
    """Yield place, length of the document and loss of each label of a sequence: each document alone in transformers."""
    parts = (torch.as_tensor(each)[: sum(lengths)].split(list(lengths)) for each in (ids, labels))
    for tokens, wanted in zip(*parts, strict=True):
        with torch.no_grad():
            logits = model(tokens[None]).logits[0].double()
        losses = torch.nn.functional.cross_entropy(logits, wanted, reduction="none").tolist()
        yield from ((place, len(tokens), loss) for place, loss in enumerate(losses) if wanted[place] != -100)


def adamw(model: torch.nn.Module, weight_decay: float, **options: Any) -> torch.optim.AdamW:
    """Return torch's AdamW for a model, with weight decay on matrices alone."""
    parameters = list(model.parameters())
    groups = [
        {"params": [each for each in parameters if (each.dim() > 1) is decays], "weight_decay": weight_decay * decays}
        for decays in (True, False)
    ]
    return torch.optim.AdamW(groups, **options)


def as_configured(model: torch.nn.Module, config: TrainConfig) -> dict[str, Any]:
    """Return torch's AdamW for a model, and the learning rate of each step, of a run's configuration."""
    own = config.optimizer
    assert own.lr is not None
    return {
        "optimizer": adamw(model, own.weight_decay, betas=(own.beta1, own.beta2), eps=own.eps),
        "rate": lambda step: learning_rate(config.schedule, own.lr, step, config.steps),
    }


def record(trainer: Any, batches: Iterable[Any]) -> dict[str, Any]:
    """Train on each batch; return losses, norms and numbers of tokens, and the whole gradients of the first."""
    seen: dict[str, Any] = {"losses": [], "norms": [], "tokens": []}
    for batch in batches:
        facts = trainer.backward(batch)
        if "gradients" not in seen:
            seen["gradients"] = {s.name: lazy.gather(s, s.storage.grad) for s in lazy.named_shards(trainer.model)}
        trainer.update(facts)
        for name, value in zip(("losses", "norms", "tokens"), (facts.loss, facts.grad_norm, facts.tokens), strict=True):
            seen[name].append(value)
    return seen


def reference_steps(
    model: torch.nn.Module,
    losses: Iterable[torch.Tensor],
    *,
    optimizer: torch.optim.Optimizer,
    clip: float | None = None,
    rate: Callable[[int], float] | None = None,
) -> dict[str, Any]:
    """Train a model of transformers in one process; return what `record` does, and the parameters after each step.

    Args:
        model: The model; updated.
        losses: The mean loss of each step, computed when it is its turn.
        optimizer: See `adamw`.
        clip: Largest norm of a gradient.
        rate: The learning rate of each step, from 1; None: that of the optimizer.
    """
    found: dict[str, Any] = {"losses": [], "norms": [], "parameters": []}
    for step, loss in enumerate(losses, 1):
        loss.backward()  # type: ignore[no-untyped-call]
        if step == 1:
            found["gradients"] = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf") if clip is None else clip)
        for group in optimizer.param_groups if rate else ():
            group["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(loss.item())
        found["norms"].append(norm.item())
        found["parameters"].append({name: p.detach().clone() for name, p in model.named_parameters()})
    return found


def held(trainer: Any) -> dict[str, torch.Tensor]:
    """Return this rank's weights and optimizer state by name, with its number of steps."""
    found = {}
    for shard in lazy.named_shards(trainer.model):
        found[shard.name] = shard.local().detach().cpu().clone()
        if shard.storage.requires_grad:
            for key in lazy.state_names(shard):
                found[f"{shard.name}.{key}"] = trainer.optimizer.state_of(shard, key).cpu().clone()
            taken = trainer.optimizer.state.get(shard.storage, {}).get("step", 0)
            found[f"{shard.name}.step"] = torch.tensor(taken)
    return found


def steps(trainer: Any, count: int) -> list[tuple[float, float]]:
    """Take steps; return their losses and norms."""
    return [(step.loss, step.grad_norm) for step in (trainer.step() for _ in range(count))]


def require_near(ours: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], limit: float) -> None:
    """Check that the norm of each difference is within a limit, relative to that of the tensor that is wanted."""
    assert ours.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert ours[name].shape == tensor.shape, name
        assert (ours[name] - tensor).norm() <= limit * tensor.norm(), name


def require_equal(ours: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Check that states are equal bit by bit."""
    assert ours.keys() == wanted.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, wanted[name]), name
