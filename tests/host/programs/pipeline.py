"""BMTrain's pipeline over 2 stages, its inspection and its checkpoint are plain torch's: asserts all the way."""

import sys
from pathlib import Path
from typing import Any

import bmtrain as bmt
import torch
from torch import Tensor
from torch.nn import functional

WIDTH, LAYERS, ROWS = 6, 5, 4  # rows of a rank; one stage has a layer more

bmt.init_distributed(seed=0, pipe_size=2)


def start(number: int) -> Tensor:
    """Return the weight of a layer."""
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(number)) / WIDTH**0.5


def layer(x: Tensor, weight: Tensor) -> Tensor:
    """Return what a layer makes of its input."""
    return torch.tanh(functional.linear(x, weight))


class Layer(bmt.DistributedModule):  # type: ignore[misc]
    """One layer."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(start(number))

    def forward(self, x: Tensor) -> Tensor:
        """See `layer`."""
        return layer(x, self.weight)


layers = bmt.PipelineTransformerBlockList([bmt.Block(Layer(n), mode="PIPE") for n in range(LAYERS)])
batch = torch.randn(2 * ROWS, 3, WIDTH, generator=torch.Generator().manual_seed(99))
mine = slice(bmt.rank() * ROWS, (bmt.rank() + 1) * ROWS)
x = batch[mine].cuda().requires_grad_()
y = layers(x)
y.square().sum().backward()
bmt.wait_loader()

weights, whole = [start(n).requires_grad_() for n in range(LAYERS)], batch.clone().requires_grad_()
wanted = whole
for weight in weights:
    wanted = layer(wanted, weight)
wanted.square().sum().backward()

close: Any = torch.testing.assert_close
close(y, wanted[mine])
close(x.grad, whole.grad[mine])
held = {name: p.grad.view(WIDTH, WIDTH) for name, p in layers.named_parameters() if p.grad is not None}
assert sorted(held) == [["0.weight", "1.weight", "2.weight"], ["3.weight", "4.weight"]][bmt.rank()]
for name, gradient in held.items():
    close(gradient, weights[int(name[0])].grad)

found = bmt.inspect.inspect_model(layers, "*")
for weight, row in zip(weights, found, strict=True):
    close(torch.tensor([row["mean"], row["grad_mean"]]), torch.stack([weight.mean(), weight.grad.mean()]).detach())
bmt.save(layers, "pipeline.pt")
if bmt.rank() == 0:
    kept = torch.load(Path("pipeline.pt"))
    assert all(torch.equal(kept[f"{n}.weight"], start(n)) for n in range(LAYERS))
    sys.stdout.write("a pipeline of 2 stages\n")
