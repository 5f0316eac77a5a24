"""The formulas of the paper's table 1 and of ours are what attention moves, keeps and writes when it runs."""

from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.attention.cells import Cell
from benchmarks.attention.method import LocalKernel, Setting, random_inputs
from benchmarks.attention.methods import all_methods
from benchmarks.engine.machine import RankGroup
from bmburst.attention.api import burst_attention
from bmburst.attention.call import decide
from bmburst.attention.heads import executor_of
from bmburst.attention.options import AttentionOptions
from bmburst_ops.flash import BackwardInputs
from bmburst_ops.merge import row_dots
from tests.benchmarks.formulas import METHODS, Shape
from tests.comm.counting import Counting
from tests.distributed.threads import run_ranks

STRATEGIES = {"burst": "burst", "kv": "kv", "gather": "gather", "heads": "heads (Ulysses) over NCCL"}
PEER = "heads (Ulysses) by peer copies, the default"
PEERS = {
    "ring-li-2021": "RingAttention (Li et al.)",
    "tensor-parallel-v1": "tensor parallel v1, attention's half",
    "tensor-parallel-v3": "tensor parallel v3, attention's half",
}


def shape(ranks, heads=12, kv_heads=12, itemsize=2):
    return Shape(ranks=ranks, batch=2, tokens=5 * ranks, heads=heads, kv_heads=kv_heads, head_dim=8, itemsize=itemsize)


def inputs(of, dtype):
    local = of.tokens // of.ranks
    return [torch.randn(of.batch, local, n, of.head_dim).to(dtype) for n in (of.heads, of.kv_heads, of.kv_heads)]


class CountingHere(Counting):
    """On the current stream too."""

    def all_to_all_here(self, tensor):
        nbytes = tensor.nbytes // self.size * (self.size - 1)
        self._count(nbytes, nbytes)
        return self._comm.all_to_all_here(tensor)


class CountingPeers(CountingHere):
    """Blocks that copy engines would move: what depends on the transport does what it does over peers."""

    transport = "peer"


def received(comm, strategy, of, dtype, counter=CountingHere, at_once=False):
    q, k, v = inputs(of, dtype)
    call = decide(comm, q, k, v, None, AttentionOptions(mask="full", layout="contiguous", strategy=strategy))
    counting = counter(call.comm)
    call = replace(call, comm=counting, strategy=replace(call.strategy, at_once=at_once))
    executor = executor_of(call)
    out, lse = executor.forward(call, q, k, v)
    forward, counting.received = counting.received, 0
    executor.backward(call, BackwardInputs(torch.randn_like(out), q, k, v, lse, row_dots(out, out)))
    return forward, counting.received


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("ranks", "kv_heads", "dtype"),
    [(2, 12, torch.bfloat16), (3, 12, torch.float32), (4, 2, torch.bfloat16), (3, 3, torch.bfloat16)],
)
def test_our_strategies_receive_what_the_formulas_say(strategy, ranks, kv_heads, dtype):
    of = shape(ranks, kv_heads=kv_heads, itemsize=dtype.itemsize)
    method = METHODS[STRATEGIES[strategy]]
    for at_once in (False, True)[: 1 + (strategy == "heads")]:
        for found in run_ranks(ranks, received, strategy, of, dtype, CountingHere, at_once):
            assert found == (method.forward(of), method.backward(of)), at_once


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kv_heads", [12, 6])
def test_copy_engines_move_what_nccl_would(ranks, kv_heads):
    of = shape(ranks, kv_heads=kv_heads)
    for found in run_ranks(ranks, received, "heads", of, torch.bfloat16, CountingPeers):
        assert found == (METHODS[PEER].forward(of), METHODS[PEER].backward(of))


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_peers_receive_what_the_formulas_say(name, ranks):
    """What a peer says that it receives is counted in test_methods."""
    of, method = shape(ranks), METHODS[PEERS[name]]
    said = all_methods("cpu")[name].traffic(cell(name, of))
    assert said.forward == method.forward(of)
    assert said.forward_backward - said.forward == method.backward(of)


def cell(name, of):
    sizes = {"tokens": of.tokens, "batch": of.batch, "heads": of.heads, "kv_heads": of.kv_heads}
    return Cell(suite="sequence", method=name, ranks=of.ranks, device="cpu", mask="full", head_dim=of.head_dim, **sizes)


def test_burst_moves_fewer_bytes_than_kv_with_mha_and_more_with_gqa():
    """In one dtype of 32 bits, the counted saving approaches the paper's quarter; in bf16, gradients travel in fp32."""
    for ranks, kv_heads, least, most in ((2, 32, 0.33, 0.34), (6, 32, 0.26, 0.28), (2, 8, -1.7, -1.6)):
        of = Shape(ranks=ranks, tokens=2 * ranks, heads=32, kv_heads=kv_heads, itemsize=4)
        (burst, *_), (kv, *_) = (run_ranks(ranks, received, name, of, torch.float32) for name in ("burst", "kv"))
        assert least < 1 - burst[1] / kv[1] < most
        assert burst == (METHODS["burst"].forward(of), METHODS["burst"].backward(of))
        assert kv == (METHODS["kv"].forward(of), METHODS["kv"].backward(of))


class Alone(RankGroup):
    """A group whose other ranks hold what this one does: a method runs without them."""

    def all_gather(self, part):
        return part.expand(self.size, *part.shape).contiguous()

    def reduce_scatter(self, parts):
        return parts.sum(0)

    def all_reduce(self, tensor, op=None):
        assert op is None  # a sum, of which the others have nothing
        return tensor

    def rotate(self, tensor):
        return tensor.clone(), []


def kept_by(attend, *given):
    kept = []
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        attend(*given)
    return sum({t.untyped_storage().data_ptr(): t.nbytes for t in kept}.values())


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("kv_heads", [12, 4])
def test_peers_keep_what_the_formulas_say(name, kv_heads):
    of = shape(4, kv_heads=kv_heads, itemsize=4)
    at, method = replace(cell(name, of), dtype="float32"), all_methods("cpu")[name]
    group = Alone(process_group=None, rank=1, size=4, device=torch.device("cpu"))
    q, k, v, _ = random_inputs(method, at, group.device, 0)
    attend = method.bind(at, Setting(group=group, kernel=LocalKernel()))
    assert kept_by(attend, q, k, v) == METHODS[PEERS[name]].kept(of)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ours_keeps_what_the_formulas_say(strategy):
    of = shape(3, kv_heads=3, itemsize=4)

    def kept(comm):
        q, k, v = (t.requires_grad_() for t in inputs(of, torch.float32))
        options = {"mask": "full", "layout": "contiguous", "strategy": strategy}
        return kept_by(lambda *given: burst_attention(*given, group=comm, **options), q, k, v)

    assert set(run_ranks(3, kept)) == {METHODS[STRATEGIES[strategy]].kept(of)}


class Written(TorchDispatchMode):
    """Counts the bytes of new tensors of a shape."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.nbytes, self._seen = shape, 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape[-2:] == self.shape and result.dim() == 4:
            if all(result.untyped_storage().data_ptr() != t.untyped_storage().data_ptr() for t in self._seen):
                self.nbytes += result.nbytes
            self._seen.append(result)
        return result


@pytest.mark.parametrize("kv_heads", [12, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_li_et_al_write_whole_rows_of_scores_and_weights(kv_heads, dtype):
    of = shape(4, kv_heads=kv_heads, itemsize=dtype.itemsize)
    name = "ring-li-2021"
    at, method = replace(cell(name, of), dtype=str(dtype).removeprefix("torch.")), all_methods("cpu")[name]
    group = Alone(process_group=None, rank=1, size=4, device=torch.device("cpu"))
    attend = method.bind(at, Setting(group=group, kernel=LocalKernel()))
    q, k, v = inputs(of, dtype)
    rows = of.tokens // of.ranks * of.heads // kv_heads
    with Written((rows, of.tokens)) as written:
        attend(q, k, v)
    assert written.nbytes == METHODS[PEERS[name]].scores(of) == METHODS[PEERS[name]].at_work(of)
