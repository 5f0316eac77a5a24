"""A BMTrain program that uses most of BMTrain, and the same training in plain torch.

The functions import bmtrain themselves: they run in processes where the runtime was started.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

IN, WIDTH, DEPTH = 7, 12, 3  # sizes that no number of ranks divides
BATCH = 12  # rows of a step, over all ranks
LR, DECAY, MAX_NORM = 2e-2, 0.05, 0.3
STEPS = 6
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CASES = tuple((dtype, offload) for dtype in DTYPES for offload in (False, True))


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a training leaves behind."""

    state: dict[str, Tensor]
    losses: list[float]
    norms: list[float]  # before clipping


def start_state() -> dict[str, Tensor]:
    """Return the model's initial parameters, fp32."""
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    state = {"embed": drawn(WIDTH, IN)}
    for layer in range(DEPTH):
        state[f"layers.{layer}.up"] = drawn(2 * WIDTH + 1, WIDTH)
        state[f"layers.{layer}.bias"] = drawn(2 * WIDTH + 1)
        state[f"layers.{layer}.down"] = drawn(WIDTH, 2 * WIDTH + 1)
    return state | {"head": drawn(IN, WIDTH)}


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return inputs `[BATCH, IN]` and targets of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(BATCH, IN, generator=generator)
    return x, x.flip(-1).sin()


def layer(x: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
    """Return a block's output."""
    return x + functional.linear(functional.gelu(functional.linear(x, up, bias)), down)


def plain(steps: int) -> Iterator[Result]:
    """Train in fp32 with torch alone; yield the result with the weight decay of torch's Adam, then of AdamW.

    BMTrain's fp32 optimizers are torch's Adam; its fp16 and bf16 kernels decouple weight decay.
    """
    for optimizer_type in (torch.optim.Adam, torch.optim.AdamW):
        params = {name: torch.nn.Parameter(value) for name, value in start_state().items()}
        optimizer = optimizer_type(params.values(), lr=LR, weight_decay=DECAY)
        losses, norms = [], []
        for step in range(steps):
            x, target = batch(step)
            hidden = functional.linear(x, params["embed"])
            for index in range(DEPTH):
                hidden = layer(hidden, *(params[f"layers.{index}.{name}"] for name in ("up", "bias", "down")))
            loss = (functional.linear(hidden, params["head"]) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(params.values(), MAX_NORM)))
            optimizer.step()
            losses.append(float(loss.detach()))
        yield Result(state={name: p.detach() for name, p in params.items()}, losses=losses, norms=norms)


def build(dtype: torch.dtype) -> Any:
    """Return the model, in blocks of every kind."""
    import bmtrain as bmt

    class Layer(bmt.DistributedModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.up = bmt.DistributedParameter(torch.empty(2 * WIDTH + 1, WIDTH, dtype=dtype))
            self.bias = bmt.DistributedParameter(torch.empty(2 * WIDTH + 1, dtype=dtype))
            self.down = bmt.DistributedParameter(torch.empty(WIDTH, 2 * WIDTH + 1, dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            return layer(x, self.up, self.bias, self.down)

    class Model(bmt.DistributedModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embed = bmt.DistributedParameter(torch.empty(WIDTH, IN, dtype=dtype))
            kinds = [(3, True), (2, True), (3, False)]
            blocks = [bmt.Block(Layer(), zero_level=level, use_checkpoint=check) for level, check in kinds]
            self.layers = bmt.TransformerBlockList(blocks)
            self.head = bmt.DistributedParameter(torch.empty(IN, WIDTH, dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(self.layers(functional.linear(x, self.embed)), self.head)

    return Model()


def optimizer_for(model: Any, dtype: str, offload: bool, loss_scale: float | None) -> tuple[Any, Any]:
    """Return the optimizer and its manager."""
    import bmtrain as bmt

    kind = bmt.optim.AdamOffloadOptimizer if offload else bmt.optim.AdamOptimizer
    optimizer = kind(model.parameters(), lr=LR, weight_decay=DECAY)
    manager = bmt.optim.OptimManager(loss_scale=loss_scale)
    manager.add_optimizer(optimizer, bmt.lr_scheduler.NoDecay(optimizer, LR, 0, 1000))
    return optimizer, manager


def step_of(model: Any, optimizer: Any, manager: Any, dtype: torch.dtype, step: int) -> tuple[float, float]:
    """Train one step on this rank's rows; return the loss over all ranks and the gradient's norm."""
    import bmtrain as bmt

    x, target = (part.chunk(bmt.world_size())[bmt.rank()] for part in batch(step))
    loss = (model(x.to(dtype)).float() - target).square().mean()
    manager.zero_grad()
    manager.backward(loss)
    norm = manager.clip_grad_norm(optimizer.param_groups, MAX_NORM)
    manager.step()
    return float(bmt.distributed.all_reduce(loss.detach(), "avg")), float(norm)


def train(folder: str) -> None:
    """Train every case; leave a checkpoint, the optimizer's state, losses and norms of each in `folder`."""
    import bmtrain as bmt

    for name, offload in CASES:
        path, dtype = Path(folder) / f"{name}-{offload}", DTYPES[name]
        if bmt.rank() == 0:
            torch.save({key: value.to(dtype) for key, value in start_state().items()}, f"{path}.start")
        bmt.synchronize()
        model = build(dtype)
        bmt.load(model, f"{path}.start")
        optimizer, manager = optimizer_for(model, name, offload, 1024.0)
        trace = [step_of(model, optimizer, manager, dtype, step) for step in range(STEPS)]
        bmt.save(model, f"{path}.model")
        state = optimizer.state_dict(gather=True) if offload else None
        if bmt.rank() == 0:
            torch.save({"trace": trace, "optimizer": state}, f"{path}.rest")
    overflow(Path(folder))


def overflow(folder: Path) -> None:
    """One rank's infinite gradient halves the scale of all, and changes no parameter."""
    import bmtrain as bmt

    model = build(torch.float16)
    bmt.load(model, f"{folder}/fp16-False.start")
    _, manager = optimizer_for(model, "fp16", False, 1024.0)
    x, _ = batch(0)
    loss = model(x.half()).float().sum() * (torch.inf if bmt.rank() == bmt.world_size() - 1 else 1.0)
    manager.zero_grad()
    manager.backward(loss)
    manager.step()
    assert manager.loss_scale == 512.0
    bmt.save(model, str(folder / "overflow.model"))


def resume(folder: str, more: int) -> None:
    """Continue the fp32 offload case on this number of ranks for `more` steps, and save it."""
    import bmtrain as bmt

    model = build(torch.float32)
    bmt.load(model, f"{folder}/fp32-True.model")
    optimizer, manager = optimizer_for(model, "fp32", True, None)
    rest = torch.load(f"{folder}/fp32-True.rest")
    optimizer.load_state_dict(rest["optimizer"])
    for step in range(STEPS, STEPS + more):
        step_of(model, optimizer, manager, torch.float32, step)
    bmt.save(model, f"{folder}/resumed-{bmt.world_size()}.model")
