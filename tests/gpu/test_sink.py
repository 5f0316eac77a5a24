"""On real GPUs: attention sinks under every strategy and transport, with the fastest kernel and with ours."""

from itertools import product

import pytest
import torch

import bmburst
from bmburst.comm.groups import communicator, single_rank_group
from bmburst.schedule.parallelism import STRATEGIES
from tests.attention.oracle import draw, reference
from tests.gpu.over_gpus import ADDED, GPUS, LENGTH, SOFTCAP, errors_of, excess, hold_graphs, on_gpus, transports
from tests.gpu.test_softcap import MASKS as CAUSAL_MASKS

pytestmark = pytest.mark.gpu
# The gradient of a sink is one number a head: a sum over rows of terms of both signs, in each of which the output was
# rounded to 16 bits, by the kernel and with the sink. That does not cancel as the terms do. Nor has it enough numbers
# for a comparison with one GPU's error.
ONE_GPU = OF_SINK = 4 * 2**-8
MASKS = {"full": "full", **CAUSAL_MASKS}
# Each mask once; kernels are compiled for each number of query heads of a KV head, and with a softcap once more.
CASES = [(name, (8, 2), None) for name in MASKS]
CASES += [("causal", (8, 8), None), ("causal", (8, 2), SOFTCAP), ("windows of documents", (8, 8), SOFTCAP)]


@pytest.mark.parametrize("size", range(1, min(GPUS, 4) + 1))
@pytest.mark.parametrize("kernel", ["auto", "triton"])
@on_gpus()
def test_every_strategy_over_every_transport(size, kernel):
    comm = communicator(None)
    for name, (heads, kv_heads), softcap in CASES:
        mask = MASKS[name]
        spread = 1.0 if softcap is None else 2.0
        whole = draw(0, 1, LENGTH, heads, kv_heads, 64, torch.bfloat16, spread=spread)
        sink = torch.linspace(0, 10, heads, dtype=torch.float64).float().double()  # as a row's log-sum-exp, and less
        exact = reference(*whole[:4], mask, softcap=softcap, sink=sink)
        said = name, heads, kv_heads, softcap
        plain = reference(*whole[:4], mask, softcap=softcap)
        assert (plain[0] - exact[0]).norm() > 0.1 * exact[0].norm(), said  # the sink matters
        given = whole, mask, exact
        options = {"kernel": kernel, "softcap": softcap, "sink": sink}
        *single, of_sink = errors_of(single_rank_group(), *given, **options)
        # Weights, dS, the results and the results with the sink are rounded; a package's tanh is off by 2^-11.
        bent = SOFTCAP * 2**-11 if softcap else 0.0
        assert max(single) < ONE_GPU + bent and of_sink < OF_SINK + bent, (*said, single, of_sink)
        for strategy, transport in product(STRATEGIES, transports(comm)):
            found = errors_of(comm, *given, strategy=strategy, transport=transport, **options)
            if found is not None:
                worst = excess(found[:-1], single)
                assert worst < ADDED and found[-1] < OF_SINK + bent, (*said, strategy, transport, found)


@pytest.mark.parametrize("size", range(1, min(GPUS, 2) + 1))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_gpus()
def test_calls_that_become_cuda_graphs(size, dtype):
    """A graph of one sink is not taken for another, nor an old value for a new one; all calls give the same bits."""
    comm = communicator(None)
    gen = torch.Generator().manual_seed(comm.rank)
    inputs = [torch.randn(1, 512, heads, 64, generator=gen).cuda().bfloat16().requires_grad_() for heads in (8, 4, 4)]
    values = {"small": torch.linspace(-1, 1, 8), "large": torch.linspace(3, 6, 8)}
    sinks = {name: value.cuda().to(dtype).requires_grad_() for name, value in values.items()}
    updated = torch.zeros(8).cuda().to(dtype).requires_grad_()  # one tensor that changes, as by an optimizer

    def call(sink):
        options = {"sink": sink, "group": comm, "strategy": "heads" if comm.size > 1 else "auto"}
        out = bmburst.burst_attention(*inputs, deterministic=True, **options)
        leaves = inputs if sink is None else [*inputs, sink]
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]

    def both(name):
        """Call with a sink's own tensor and with the one that changes."""
        if name == "none":
            return call(None)
        with torch.no_grad():
            updated.copy_(sinks[name])
        return [*call(sinks[name]), *call(updated)]

    first = hold_graphs(both, {name: name for name in (*sinks, "none")})
    for name in sinks:
        assert all(torch.equal(a, b) for a, b in zip(first[name][:5], first[name][5:], strict=True)), name
    for one, other in (("small", "large"), ("large", "none"), ("small", "none")):
        assert not any(torch.equal(a, b) for a, b in zip(first[one], first[other], strict=False)), (one, other)
