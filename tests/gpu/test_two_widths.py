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
from tests.gpu.over_gpus import (
    ADDED,
    GPUS,
    LENGTH,
    LENGTHS,
    attend,
    errors,
    errors_of,
    excess,
    hold_graphs,
    on_gpus,
    transports,
)
from tests.refusals import says

pytestmark = pytest.mark.gpu
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
    comm = communicator(None)
    for widths, heads, name in CASES:
        head_dim, value_dim = widths
        whole = draw(0, 1, LENGTH, *heads, head_dim, torch.bfloat16, value_dim=value_dim)
        mask, said = MASKS[name], (widths, heads, name)
        exact = reference(*whole[:4], mask)
        given = whole, mask, exact
        try:
            single = errors(attend(single_rank_group(), whole, mask, kernel=kernel), exact)
        except UserError as error:  # cuDNN has no documents and no windows
            says(error, f"kernel '{kernel}' cannot do")
            assert name != "causal"
            continue
        # Weights, dS and the results are rounded, and delta where it goes through 16 bits.
        assert max(single) < 4 * 2**-8, (*said, single)
        for strategy, transport in product(STRATEGIES, transports(comm)):
            options = {"strategy": strategy, "transport": transport, "kernel": kernel, "refusal": "cannot"}
            found = errors_of(comm, *given, **options)
            assert found is None or excess(found, single) < ADDED, (*said, strategy, transport, found)


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

    hold_graphs(call, values)
