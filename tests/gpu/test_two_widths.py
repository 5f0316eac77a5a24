"""On real GPUs: values narrower than keys, as multi-head latent attention has them, by every kernel and strategy."""

from itertools import product

import pytest
import torch

import bmburst
from bmburst.comm.groups import communicator, single_rank_group
from bmburst.errors import UserError
from bmburst.schedule.parallelism import STRATEGIES
from bmburst_ops.flash.inputs import LATENT_WIDTHS
from tests.attention.oracle import draw, reference
from tests.gpu.test_transports import GPUS, errors, on_gpus
from tests.refusals import says

pytestmark = pytest.mark.gpu
LENGTH = 701
ADDED = 1.5  # errors over those of one GPU: parts are rounded to 16 bits, and the fp32 sums of ours once less there
LENGTHS = (1, 300, 2, 1, 97, 128, 64, 3, 105)
MASKS = {"causal": "causal", "documents": bmburst.Documents(LENGTHS), "window": bmburst.SlidingWindow(90)}
# Widths, heads of queries and of keys, mask. Packages pad the last ones. Each takes FlashAttention-4 half a minute.
CASES = [((192, 128), (8, 8), mask) for mask in MASKS]
CASES += [((192, 128), (8, 2), "causal"), ((96, 64), (8, 8), "causal"), ((96, 64), (8, 8), "documents")]
CASES += [((64, 128), (8, 8), "causal")]
SIZES = [size for size in (2, 4) if size <= GPUS] or [1]


def test_these_are_the_widths_that_packages_take():
    assert {widths for widths, *_ in CASES} > LATENT_WIDTHS


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kernel", ["auto", "cudnn", "torch", "triton"])
@on_gpus()
def test_every_strategy_over_every_transport(size, kernel):
    comm, done = communicator(None), set()
    for widths, heads, name in CASES:
        head_dim, value_dim = widths
        whole = draw(0, 1, LENGTH, *heads, head_dim, torch.bfloat16, value_dim=value_dim)
        mask, said = MASKS[name], (widths, heads, name)
        exact = reference(*whole[:4], mask)
        single: list[float] = []
        transports = ("auto", "nccl") if comm.size > 1 else ("auto",)
        for group, strategy, transport in [
            (single_rank_group(), "auto", "auto"),
            *((comm, *each) for each in product(STRATEGIES, transports)),
        ]:
            try:
                got = attend(group, whole, mask, kernel=kernel, strategy=strategy, transport=transport)
            except UserError as error:
                if f"kernel '{kernel}' cannot do" in str(error):  # cuDNN has no documents and no windows
                    continue
                says(error, "cannot work")
                assert strategy != "auto"
                continue
            found = errors(got, exact)
            if not single:
                single = found
                # Weights, dS and the results are rounded, and delta where it goes through 16 bits.
                assert max(single) < 4 * 2**-8, (*said, single)
                done.add((widths, name))
                continue
            excess = [ours / theirs for ours, theirs in zip(found, single, strict=True)]
            assert max(excess) < ADDED, (*said, strategy, transport, excess)
    assert {(widths, "causal") for widths, *_ in CASES} <= done


def attend(group, whole, mask, **options):
    """Return the whole output and gradients."""
    cut = {"layout": "zigzag", "group": group}
    q, k, v, grad = (bmburst.shard(t.cuda().bfloat16(), **cut) for t in whole[:4])
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    out = bmburst.burst_attention(*inputs, mask=mask, length=LENGTH, **options, **cut)
    return [bmburst.unshard(t, length=LENGTH, **cut) for t in (out, *torch.autograd.grad(out, inputs, grad))]


@pytest.mark.parametrize("size", range(1, min(GPUS, 2) + 1))
@on_gpus()
def test_calls_that_become_cuda_graphs(size):
    """A graph of one width is not taken for another, and all calls give the same bits."""
    comm = communicator(None)
    gen = torch.Generator("cuda").manual_seed(comm.rank)
    q, k, wide = (torch.randn(1, 512, 8, 192, device="cuda", generator=gen).bfloat16() for _ in range(3))
    values = {width: wide[..., :width].contiguous().requires_grad_() for width in (192, 128, 64)}
    q, k = q.requires_grad_(), k.requires_grad_()

    def call(v):
        options = {"group": comm, "strategy": "heads" if comm.size > 1 else "auto"}
        out = bmburst.burst_attention(q, k, v, deterministic=True, **options)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), (q, k, v))]

    first = {width: call(v) for width, v in values.items()}
    for _ in range(8):
        for width, wanted in first.items():
            assert all(torch.equal(a, b) for a, b in zip(call(values[width]), wanted, strict=True)), width
