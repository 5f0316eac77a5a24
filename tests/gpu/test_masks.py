"""On real GPUs: every mask under every strategy, over the memory of peers and over NCCL."""

import pytest
import torch

from bmburst import BlockSparse, Documents, PrefixLM, SlidingWindow
from bmburst.comm.groups import communicator, single_rank_group
from bmburst.schedule.parallelism import STRATEGIES
from tests.attention.oracle import draw, reference
from tests.gpu.over_gpus import GPUS, LENGTH, LENGTHS, errors_of, excess, on_gpus

pytestmark = pytest.mark.gpu
MASKS = {
    "documents": Documents(LENGTHS),
    "documents, full": Documents(LENGTHS, causal=False),
    "window": SlidingWindow(90),
    "window, both ways": SlidingWindow(33, causal=False),
    "documents & window": Documents(LENGTHS) & SlidingWindow(50),
    "prefixes": PrefixLM([n // 2 for n in LENGTHS], LENGTHS),
    "blocks": BlockSparse(torch.rand(11, 11, generator=torch.Generator().manual_seed(3)) < 0.5, 64, causal=True),
}


@pytest.mark.parametrize("size", range(1, min(GPUS, 4) + 1))
@pytest.mark.parametrize("program", ["torch.distributed", "bmtrain"])
@on_gpus()
def test_every_mask(size, program):
    for name, mask in MASKS.items():
        for heads, kv_heads in ((8, 8), (8, 2)):
            compare(name, mask, draw(0, 1, LENGTH, heads, kv_heads, 64, torch.bfloat16))


@pytest.mark.parametrize("size", range(1, min(GPUS, 4) + 1))
@on_gpus()
def test_whole_blocks(size):
    """Blocks that FlashAttention-4 takes where it is installed, over ranks also from recorded graphs."""
    tokens = 2 * 4 * 256
    on = torch.rand(tokens // 128, tokens // 128, generator=torch.Generator().manual_seed(4)) < 0.4
    for causal in (True, False):
        for kv_heads in (8, 2):
            whole = draw(0, 1, tokens, 8, kv_heads, 128, torch.bfloat16)
            compare(f"whole blocks, causal {causal}", BlockSparse(on, 128, causal), whole, calls=3)


def compare(name, mask, whole, calls=1):
    """Compare every way with one GPU's kernel, by their distance from the definition, at each of some calls."""
    comm, (heads, kv_heads) = communicator(None), (whole[0].shape[2], whole[1].shape[2])
    exact = reference(*whole[:4], mask)
    given = whole, mask, exact
    single = errors_of(single_rank_group(), *given, layout="contiguous")
    for layout, strategy in ways(comm.size, heads, kv_heads):
        for _ in range(calls):
            found = errors_of(comm, *given, layout=layout, strategy=strategy)
            assert found is None or excess(found, single) < 1.4, (name, heads, kv_heads, layout, strategy, found)


def ways(size, heads, kv_heads):
    """Every strategy in the default layout, and what cuts masks differently in the others.

    More would repeat, at a second each, what tests on CPUs do with all of them together.
    """
    if size == 1 or heads == kv_heads:
        return [("zigzag", "auto")]
    others = [(layout, strategy) for layout in ("contiguous", "balanced") for strategy in ("gather", "burst")]
    return [("zigzag", strategy) for strategy in STRATEGIES] + others
