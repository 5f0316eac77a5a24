"""What scripts ask of torch.cuda, on the host runtime. Run as a script; asserts all the way."""

import io
import os
import pickle
import sys
from unittest import mock

import torch

from bmburst import host

host.install()
cuda = torch.cuda
CPU = torch.device("cpu")

# Tensors, by every way that leads to a GPU.
x = torch.arange(6.0).view(2, 3)
for place in ("cuda", "cuda:0", 0, torch.device("cuda"), torch.device("cuda", 1)):
    made = [
        *(torch.zeros(2, device=place), torch.scalar_tensor(1.0, device=place), torch.asarray([1], device=place)),
        *(torch.normal(0.0, 1.0, (2,), device=place), torch.logspace(0, 1, 3, device=place)),
        *(torch.tril_indices(2, 2, device=place), torch.triu_indices(2, 2, device=place)),
        *(torch.hann_window(4, device=place), torch.empty_permuted((2, 2), (0, 1), device=place)),
        *(x.new_zeros(2, device=place), x.new_ones(2, device=place), x.new_empty(2, device=place)),
        *(x.new_full((2,), 3, device=place), x.new_tensor([1, 2], device=place), x.to(place)),
        torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([1.0]), (2,), device=place, check_invariants=True),
    ]
    assert {tensor.device for tensor in made} == {CPU}, place
for name in ("Float", "Double", "Half", "BFloat16", "Char", "Byte", "Short", "Int", "Long", "Bool"):
    ones = getattr(cuda, f"{name}Tensor")([1, 1])
    assert ones.device == CPU and ones.dtype == getattr(torch, f"{name}Tensor")([1]).dtype and ones.tolist() == [1, 1]
    assert x.type(f"torch.cuda.{name}Tensor").dtype == x.type(getattr(cuda, f"{name}Tensor")).dtype == ones.dtype
assert x.type() == "torch.FloatTensor" and x.type(torch.int64).dtype == torch.int64
assert x.type("torch.cuda.FloatTensor").data_ptr() != x.data_ptr(), "a copy to a GPU has memory of its own"
assert torch.scalar_tensor(2.5, dtype=torch.float64).item() == 2.5
assert x.pin_memory().tolist() == x.tolist() and torch.zeros(1, pin_memory=True).item() == 0
layer = torch.nn.Linear(3, 2, device="cuda").cuda().to("cuda:0", torch.float64)
assert {parameter.device for parameter in layer.parameters()} == {CPU}
with torch.device("cuda"):
    assert torch.zeros(1).device == CPU
with torch.device("meta"):
    assert torch.zeros(1).is_meta
torch.set_default_device("cuda")
assert torch.zeros(1).device == CPU
torch.set_default_device("cpu")

# Files that were written on a GPU, or are wanted on one.
on_cpu, on_gpu = io.BytesIO(), io.BytesIO()
torch.save({"x": x, "state": layer.state_dict()}, on_cpu)
with mock.patch("torch.serialization.location_tag", return_value="cuda:0"):
    torch.save({"x": x, "state": layer.state_dict()}, on_gpu)
for file in (on_cpu, on_gpu):
    for wanted in (None, "cpu", CPU, "cuda", "cuda:1", torch.device("cuda:0"), {"cuda:0": "cuda:1"}, {"cuda:0": "cpu"}):
        file.seek(0)
        read = torch.load(file, map_location=wanted)
        assert read["x"].device == CPU and torch.equal(read["x"], x), wanted
    for function in (lambda storage, _: storage, lambda storage, _: storage.cuda(0), lambda *_: None):
        file.seek(0)
        assert torch.equal(torch.load(file, map_location=function)["x"], x)
    file.seek(0)
    assert torch.load(file, map_location="meta")["x"].is_meta

# Random numbers.
generator = torch.Generator(device="cuda").manual_seed(5)
assert isinstance(generator, torch.Generator) and generator.device == CPU
assert not isinstance(3, torch.Generator) and isinstance(torch.default_generator, torch.Generator)
same = torch.Generator().manual_seed(5)
drawn = torch.rand(3, device="cuda", generator=generator)
assert torch.equal(drawn, torch.rand(3, generator=same))
assert torch.equal(pickle.loads(pickle.dumps(generator)).get_state(), generator.get_state())
for seed in (cuda.manual_seed, cuda.manual_seed_all, torch.manual_seed):
    seed(7)
    first = torch.rand(3, device="cuda")
    seed(7)
    assert torch.equal(torch.rand(3, device="cuda"), first) and cuda.initial_seed() == 7
for get, put in ((cuda.get_rng_state, cuda.set_rng_state), (cuda.get_rng_state_all, cuda.set_rng_state_all)):
    state = get()
    first = torch.rand(3)
    put(state)
    assert torch.equal(torch.rand(3), first)
with torch.random.fork_rng():
    torch.rand(3)
cuda.seed()
cuda.seed_all()

# The device.
assert not cuda.is_available() and not cuda.is_initialized()
os.environ["LOCAL_WORLD_SIZE"] = "4"
assert cuda.device_count() == 4, "each rank of this host counts as a device"
asking = {"__name__": "torch.made_up", "count": cuda.device_count}
assert eval("count()", asking) == 0
cuda.init()
cuda.set_device(0)
assert cuda.current_device() == 0
facts = cuda.get_device_properties(cuda.current_device())
free, total = cuda.mem_get_info()
assert 0 < free <= total == facts.total_memory and facts.multi_processor_count == os.cpu_count()
assert "CPU" in facts.name and cuda.get_device_name(0) == facts.name
assert cuda.get_device_capability("cuda:0") == (facts.major, facts.minor) == (0, 0)
assert not cuda.can_device_access_peer(0, 1)
with cuda.device(0), cuda.device_of(x), cuda.device("cuda:0"):
    assert cuda.current_device() == 0
assert cuda.memory_allocated() == cuda.max_memory_allocated() == cuda.memory_reserved() == 0
cuda.empty_cache()
cuda.ipc_collect()
cuda.reset_peak_memory_stats()
cuda.reset_max_memory_allocated()
cuda.set_per_process_memory_fraction(0.5)
assert "host runtime" in cuda.memory_summary()

# Streams, events, profiles.
start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
side = cuda.Stream()
start.record()
with cuda.stream(side):
    assert cuda.current_stream() is side
    y = x * 2
end.record(side)
cuda.current_stream().wait_stream(side)
cuda.current_stream().wait_event(end)
y.record_stream(side)
end.synchronize()
cuda.synchronize()
assert start.elapsed_time(end) >= 0 and start.query() and not cuda.is_current_stream_capturing()
cuda.nvtx.range_push("forward")
cuda.nvtx.mark("here")
cuda.nvtx.range_pop()
with cuda.nvtx.range("step"):
    cuda.nvtx.range_end(cuda.nvtx.range_start("part"))
cuda.profiler.start()
cuda.profiler.stop()
cuda.cudart().cudaProfilerStart()
cuda.cudart().cudaProfilerStop()

# torch.compile finds every function of torch in its tables, by identity.
from torch._dynamo import trace_rules  # noqa: E402

assert trace_rules.get_torch_obj_rule_map()
sys.stdout.write("as on a GPU\n")
