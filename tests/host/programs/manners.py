"""What the host runtime changes in a process, and what it leaves alone. Run as a script; asserts all the way."""

import sys

import torch
from torch import Tensor

before = torch.empty


def raises(call: object) -> bool:
    try:
        call()  # type: ignore[operator]
    except (RuntimeError, AssertionError, AttributeError, TypeError):
        return True
    return False


import bmburst  # noqa: E402
import bmburst.launch.start  # noqa: E402

assert torch.empty is before
assert "bmtrain" not in sys.modules
assert "bmtrain.C" not in sys.modules
assert raises(torch.cuda.current_stream)
assert raises(lambda: torch.zeros(1).cuda())
assert raises(lambda: torch.zeros(1, device="cuda"))

me = bmburst.launch.start.start(seed=3)
drawn = torch.rand(3)
assert bmburst.launch.start.start(seed=4) == me, "the second call must return the same facts"
assert (me.rank, me.world_size, me.local_rank, me.device, me.on_host) == (0, 1, 0, torch.device("cpu"), True)
generator = torch.Generator().manual_seed(3)
assert torch.equal(drawn, torch.rand(3, generator=generator))
assert torch.equal(torch.rand(3), torch.rand(3, generator=generator)), "the second call must not seed again"
assert torch.backends.cudnn.enabled, "BMTrain switches cuDNN off for the process; start must not"

import bmtrain as bmt  # noqa: E402

# The truth for everybody but BMTrain.
x = torch.randn(4, 6)
assert not torch.cuda.is_available()
assert not torch.cuda.is_initialized()
assert not x.is_cuda
assert not x.untyped_storage().is_cuda
assert not x.storage().is_cuda
assert not torch.nn.Parameter(x).is_cuda
assert x.device == torch.device("cpu")
assert x.cpu() is x
assert not isinstance(x, torch.cuda.FloatTensor)
asking = {"__name__": "bmtrain.made_up", "x": x}
assert eval("x.is_cuda and x.storage().is_cuda", asking)
assert not eval("x.is_cuda", {"__name__": "bmtrainlike.module", "x": x})
assert eval("x.cpu().data_ptr() != x.data_ptr()", asking), "BMTrain saves what it was given, not a view of its buffers"

# What torch does by the identity of its factories.
with torch.device("meta"):
    assert torch.empty(2).is_meta
    assert torch.tensor([1.0]).is_meta
assert torch.empty(2, device="meta").is_meta
assert torch.empty(2).device.type == "cpu"
assert torch.zeros(3, dtype=torch.int8).dtype == torch.int8


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return torch.zeros([2], dtype=x.dtype, device=x.device) + torch.ones_like(x).sum()


assert scripted(x).tolist() == [24.0, 24.0]


class Counting(torch.Tensor):
    calls: list[object] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        cls.calls.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


counting = x.as_subclass(Counting)
assert not counting.is_cuda
assert isinstance(torch.zeros_like(counting), Counting)
assert Counting.calls

# What would be an error without CUDA, and is what programs for BMTrain do.
view = x[2:4]
for moved in (
    view.cuda(),
    view.to("cuda"),
    view.to(torch.device("cuda", 0)),
    view.to(device="cuda", dtype=torch.float32),
):
    assert torch.equal(moved, view)
    assert (moved.storage_offset(), moved.storage().size()) == (0, 12), "BMTrain takes the whole storage"
assert x.to("cuda", torch.float64).dtype == torch.float64
assert x.to(torch.bfloat16).dtype == torch.bfloat16
assert x.to(x) is x
parameter = torch.nn.Parameter(x)
assert parameter.cuda() is parameter
assert torch.full((2,), 3.0, device="cuda:0").tolist() == [3.0, 3.0]
assert torch.empty(2, pin_memory=True).shape == (2,)
assert torch.nn.Linear(2, 2).cuda().weight.requires_grad
with torch.cuda.stream(None):
    pass
event = torch.cuda.Event(enable_timing=True)
event.record()
later = torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))
assert 0 <= event.elapsed_time(later) < 60e3
assert (
    torch.cuda.Stream().cuda_stream
    != torch.cuda.Stream(priority=-1).cuda_stream
    != torch.cuda.current_stream().cuda_stream
)
torch.cuda.set_rng_state(torch.zeros(16, dtype=torch.uint8))  # a CUDA generator's: kept for a CUDA that never comes
state = torch.cuda.get_rng_state()
first = torch.rand(2)
torch.cuda.set_rng_state(state)
assert torch.equal(torch.rand(2), first)

# A block whose inputs need no gradient runs again in backward: with the same random numbers.


class Dropping(bmt.DistributedModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.eye(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(torch.nn.functional.dropout(x, 0.5), self.weight)


block = bmt.Block(Dropping())
y = block(x)
torch.rand(5)
y.sum().backward()
(storage,) = block._storage_params.values()
bmt.optim.OptimManager().zero_grad()
torch.testing.assert_close(storage.grad[:36].view(6, 6), y.detach().sum(0).expand(6, 6))

# BMTrain's fused loss in fp16, with a target that does not count.
logits = torch.randn(5, 9).half().requires_grad_()
targets = torch.tensor([1, 8, -100, 0, 3])
loss = bmt.loss.FusedCrossEntropy()(logits, targets)
loss.backward()
leaf = logits.detach().float().requires_grad_()
torch.nn.functional.cross_entropy(leaf, targets).backward()
torch.testing.assert_close(logits.grad.float(), leaf.grad, rtol=1e-3, atol=2e-4)
sys.stdout.write("well behaved\n")
