"""AdamW on BMTrain's shards."""

from collections.abc import Callable
from typing import Any

import bmtrain as bmt
import torch
from torch.optim.adamw import adamw

from bmburst.train.config import OptimizerConfig
from bmburst.zero import NamedShard, named_shards


class AdamW(bmt.optim.AdamOptimizer):  # type: ignore[misc]  # BMTrain has no types
    """BMTrain's Adam with decoupled weight decay in every dtype (arXiv:1711.05101, algorithm 2).

    BMTrain's 16-bit kernels decouple it. Its fp32 path adds it to the gradient, and on GPUs fails with the step counter
    that torch 2.11 wants; here fp32 parameters take torch's own functional AdamW.
    """

    param_groups: list[dict[str, Any]]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, scale: float = 1) -> Any:
        """Update this rank's shards; gradients are divided by `scale`. Returns what `closure` gave, called first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        for group in groups:
            if _is_wide(group):
                self._step_wide(group, scale)
        self.param_groups = [group for group in groups if not _is_wide(group)]
        try:
            super().step(scale=scale)
        finally:
            self.param_groups = groups
        return loss

    def _step_wide(self, group: dict[str, Any], scale: float) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        states = [self.state[p] for p in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        adamw(
            parameters,
            [p.grad if scale == 1 else p.grad / scale for p in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [torch.tensor(float(state["step"])) for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for state in states:
            state["step"] += 1


def _is_wide(group: dict[str, Any]) -> bool:
    return bool(group["params"][0].dtype == torch.float32)


def build_optimizer(model: torch.nn.Module, config: OptimizerConfig) -> AdamW:
    """Return AdamW over the model's shards, with weight decay on matrices only.

    Args:
        model: Of BMTrain modules; vectors are in the parameter group "no_decay".
        config: Rates; the learning rate is set anew before each step.
    """
    storages = {id(shard.storage): shard for shard in named_shards(model)}.values()
    groups = [
        {"params": [shard.storage for shard in storages if (shard.group == "no_decay") is flat], "weight_decay": decay}
        for flat, decay in ((False, config.weight_decay), (True, 0.0))
    ]
    return AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )


def state_names(shard: NamedShard) -> tuple[str, ...]:
    """Return what AdamW keeps of a parameter, each in fp32 and laid out as its storage."""
    moments = ("exp_avg", "exp_avg_sq")
    return moments if shard.dtype == torch.float32 else (*moments, "_param_fp32")


def initial_state(shard: NamedShard) -> dict[str, Any]:
    """Return what AdamW keeps of a parameter's storage before its first step."""
    state = {name: torch.zeros_like(shard.storage.data, dtype=torch.float32) for name in state_names(shard)}
    if "_param_fp32" in state:
        state["_param_fp32"].copy_(shard.storage.data)
    return {"step": 0, **state}
