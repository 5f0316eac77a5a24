"""Kernels started as CUDA graphs: the same bits as kernels that are called, whatever happened to memory in between."""

from itertools import pairwise

import pytest
import torch

import bmburst
from benchmarks.engine.machine import kept_by_graphs
from bmburst.attention import heads
from bmburst.comm.groups import communicator
from bmburst.comm.streams import CALLS, RECORDINGS
from bmburst_ops.flash import inputs as kernel_inputs
from bmburst_ops.flash import mask_corrections
from tests.gpu.over_gpus import GPUS, NEEDS_FA4, on_gpus

pytestmark = [pytest.mark.gpu, NEEDS_FA4]
MASKS = {
    "causal": "causal",
    "full": "full",
    "window": bmburst.SlidingWindow(700),
    "documents": bmburst.Documents([1, 900, 3, 2000, 1192]),
    "prefix": bmburst.PrefixLM([300, 40], [3000, 1096]),
}
TOKENS = 4096


@pytest.mark.parametrize("size", range(2, min(GPUS, 8) + 1))
@pytest.mark.parametrize("program", ["torch.distributed", "bmtrain"])
@on_gpus()
def test_started_kernels_give_what_called_ones_give(size, program):
    comm = communicator(None)
    size = comm.size
    tokens = TOKENS // (2 * size) * 2 * size  # the masks are for as many
    if tokens != TOKENS:
        cases = [(name, 24, seed) for name in ("causal", "full") for seed in range(3)]
    else:
        cases = [(name, kv_heads, seed) for name in MASKS for kv_heads in (24, 8) for seed in range(3)]
    cases = [(*case, tokens) for case in cases if case[1] % size == 0 and 24 % size == 0]
    if not cases:
        return
    expected = {case: called(size, *case) for case in cases}
    RECORDINGS.clear()
    noise = []
    for turn in range(2 * CALLS + 4):
        for case in cases:
            inputs, grad = drawn(size, *case[1:])
            for got, wanted in zip(attend(inputs, grad, MASKS[case[0]]), expected[case], strict=True):
                assert torch.equal(got, wanted), (turn, case)
            noise.append(torch.full((1 << 20,), turn, device="cuda"))  # other places for what comes next
        if turn == CALLS + 1:  # what only graphs still need may be let go
            kernel_inputs._offsets.cache_clear()
            mask_corrections._sent.cache_clear()
            noise = [torch.full((1 << 16,), -1, dtype=torch.int32, device="cuda") for _ in range(50)]
        if turn == CALLS + 2:  # boxes grow, and lie elsewhere
            far, grad = drawn(size, 24, 0, 16 * tokens)
            attend(far, grad, "causal")
    assert kept_by_graphs(torch.device("cuda", torch.cuda.current_device())) > 0  # something was recorded
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    for _ in range(CALLS + 2):
        for stream in (other, torch.cuda.current_stream()):
            with torch.cuda.stream(stream):
                case = cases[0]
                inputs, grad = drawn(size, *case[1:])
                for got, wanted in zip(attend(inputs, grad, MASKS[case[0]]), expected[case], strict=True):
                    assert torch.equal(got, wanted)
    torch.cuda.synchronize()


@pytest.mark.parametrize("kv_heads", [24, 8])
@on_gpus(2)
def test_documents_of_their_own_in_each_step_do_not_add_to_what_graphs_keep(kv_heads):
    inputs, grad = drawn(2, kv_heads, 0)
    RECORDINGS.clear()
    kept = []
    for count in (3, 4, 5, 6, 8):  # each pads more than the one before
        lengths = [TOKENS // count] * (count - 1)
        lengths.append(TOKENS - sum(lengths))
        for _ in range(CALLS + 2):
            attend(inputs, grad, bmburst.Documents(lengths))
        kept.append(kept_by_graphs(torch.device("cuda", torch.cuda.current_device())))
    assert 0 < kept[-1] <= kept[0]
    RECORDINGS.clear()
    assert kept_by_graphs(torch.device("cuda", torch.cuda.current_device())) == 0


@pytest.mark.parametrize("program", ["torch.distributed", "bmtrain"])
@on_gpus(2)
def test_memory_is_given_back_and_taken_again(program):
    """Other tests on the same GPUs may take or free memory in any round; a leak would show in every one."""
    device = torch.device("cuda", torch.cuda.current_device())
    inputs, grad = drawn(2, 8, 0, 16 * TOKENS)
    expected = attend(inputs, grad, "causal")
    taken, left = [], []
    for _ in range(6):
        for _ in range(2 * CALLS + 2):  # two outboxes take turns: a kernel has the same places in every second call
            results = attend(inputs, grad, "causal")
            assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
        assert kept_by_graphs(device) > 0
        taken.append(_beside_torch())
        bmburst.empty_cache()
        left.append(_beside_torch())
        assert kept_by_graphs(device) == 0
    # an inbox of all that attention reads, and more
    assert any(before - after > inputs[0].nbytes for before, after in zip(taken, left, strict=True))
    assert any(after <= before + (64 << 20) for before, after in pairwise(left))


def attend(inputs, grad, mask):
    out = bmburst.burst_attention(*inputs, mask=mask, strategy="heads", transport="peer", deterministic=True)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def drawn(size, kv_heads, seed, tokens=TOKENS):
    """This rank's q, k, v and dO."""
    gen = torch.Generator("cuda").manual_seed(seed)
    shapes = [(1, tokens // size, heads, 128) for heads in (24, kv_heads, kv_heads, 24)]
    q, k, v, grad = (torch.randn(shape, generator=gen, device="cuda").bfloat16() for shape in shapes)
    return [t.requires_grad_() for t in (q, k, v)], grad


def called(size, *which):
    """Return the results without any recording."""
    records, heads.records_kernels = heads.records_kernels, lambda *_: False
    try:
        return attend(*drawn(size, *which[1:]), MASKS[which[0]])
    finally:
        heads.records_kernels = records


def _beside_torch():
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()
