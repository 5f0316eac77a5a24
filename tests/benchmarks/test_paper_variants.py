"""The variants of the paper's ablations compute attention, and move what the executor moves."""

from dataclasses import replace

import pytest
import torch

from benchmarks import slow_links
from benchmarks.paper.measure import Counting, Waiting, WholeTile, backward_transfers, forward_at_the_end
from bmburst.attention.call import decide
from bmburst.attention.options import AttentionOptions
from bmburst.attention.ring import ring_backward, ring_forward
from bmburst_ops.flash import CAUSAL, FULL, BackwardInputs, ReferenceKernel
from bmburst_ops.merge import row_dots
from bmburst_ops.pattern import Band
from tests.benchmarks.formulas import METHODS, Shape
from tests.distributed.threads import run_ranks
from tests.live_bytes import LiveBytes


def random(*shapes):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


@pytest.mark.parametrize("pattern", [CAUSAL, FULL], ids=["causal", "full"])
@pytest.mark.parametrize(("queries", "keys", "heads", "kv_heads"), [(7, 7, 4, 4), (5, 11, 6, 2), (11, 5, 4, 1)])
def test_the_whole_tile_is_attention(pattern, queries, keys, heads, kv_heads):
    """Of 11 queries and 5 keys the first six see none under a causal mask."""
    q, k, v = random((2, queries, heads, 8), (2, keys, kv_heads, 8), (2, keys, kv_heads, 8))
    (grad,) = random((2, queries, heads, 8))
    whole, reference = WholeTile(), ReferenceKernel()
    expected = reference.forward(q, k, v, pattern=pattern, scale=0.3)
    found = whole.forward(q, k, v, pattern=pattern, scale=0.3)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    given = BackwardInputs(grad, q, k, v, expected.lse, row_dots(grad, expected.out))
    options = {"pattern": pattern, "scale": 0.3, "deterministic": True}
    for a, b in zip(whole.backward(given, **options), reference.backward(given, **options), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_the_whole_tile_takes_no_window():
    (q,) = random((1, 3, 2, 8))
    assert WholeTile().refusal(q, q, Band(1, 0).needs) and WholeTile().refusal(q, q) is None


@pytest.mark.parametrize("strategy", ["kv", "burst"])
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_variants_give_what_the_ring_gives(strategy, mask):
    def body(comm):
        generator = torch.Generator().manual_seed(comm.rank)
        shapes = [(2, 6, heads, 8) for heads in (4, 2, 2, 4)]
        q, k, v, grad = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
        call = decide(comm, q, k, v, None, AttentionOptions(mask=mask, strategy=strategy))
        expected = ring_forward(call, q, k, v)
        given = BackwardInputs(grad, q, k, v, expected.lse, row_dots(grad, expected.out))
        gradients = ring_backward(call, given)
        waiting = replace(call, comm=Waiting(call.comm))
        whole = replace(call, kernel=WholeTile())
        forwards = [forward_at_the_end(call, q, k, v), ring_forward(waiting, q, k, v), ring_forward(whole, q, k, v)]
        for found in forwards:
            torch.testing.assert_close(tuple(found), tuple(expected), rtol=1e-12, atol=1e-12)
        for found in (ring_backward(waiting, given), ring_backward(whole, given)):
            torch.testing.assert_close(tuple(found), tuple(gradients), rtol=1e-11, atol=1e-12)
        return moved(call, given)

    for with_kernels, alone in run_ranks(3, body):
        assert with_kernels == alone > 0


def moved(call, given):
    """Bytes received in backward, and by its transfers alone."""
    found = []
    for run in (ring_backward, backward_transfers):
        counting = Counting(call.comm)
        run(replace(call, comm=counting), given)
        found.append(counting.received)
    return found


def test_partial_results_of_all_ranks_are_kept_until_the_end():
    """Merged as they come, one is there at a time, however many ranks there are."""

    def peaks(comm):
        q, k, v = (torch.randn(1, 64, 8, 64) for _ in range(3))
        call = decide(comm, q, k, v, None, AttentionOptions(mask="full", layout="contiguous", strategy="burst"))
        found = []
        for forward in (ring_forward, forward_at_the_end):
            seen = []
            for _ in range(8):  # a thread that is ahead of the others has more on its way
                with LiveBytes() as live:
                    forward(call, q, k, v)
                seen.append(live.peak / q.nbytes)
            found.append(min(seen))
        return found

    few, many = (list(map(min, *run_ranks(ranks, peaks))) for ranks in (3, 7))
    online, at_the_end = (b - a for a, b in zip(few, many, strict=True))
    # A block stays until the slowest thread has received it: up to two of them beside what a rank needs.
    assert at_the_end > 3 and at_the_end - online > 1.5


def test_a_waiting_ring_has_arrived_before_work_begins():
    class Late:
        rank, size, transport = 0, 2, "threads"

        def __init__(self):
            self.waited = 0

        def ring(self, *tensors, shift=1):
            owner = self
            assert shift == 1

            class Arriving:
                def wait(self):
                    owner.waited += 1
                    return tensors

            return Arriving()

    late = Late()
    Counting(late).ring(torch.zeros(3))
    assert late.waited == 0
    Waiting(late).ring(torch.zeros(3))
    assert late.waited == 1


@pytest.mark.parametrize(("setup", "strategy"), [("mha", "kv"), ("mha", "burst"), ("gqa", "kv"), ("gqa", "burst")])
def test_the_slow_link_carries_the_bytes_of_the_formula(setup, strategy):
    heads, kv_heads = slow_links.SETUPS[setup]
    of = Shape(ranks=3, tokens=12, heads=heads, kv_heads=kv_heads)
    for seconds, received in run_ranks(3, slow_links.move_once, setup, strategy, 4):
        assert seconds > 0 and received == METHODS[strategy].backward(of)
    row = {"heads": setup, "strategy": strategy, "seconds": 2.0, "bytes": 12_500_000}
    text = slow_links.backward_table({"machine": {"ranks": 3}, "rate": 100, "tokens": 4, "rows": [row]})
    assert f"| {setup} | {strategy} | 12.50 | 2.00 | 1.00 |" in text
