"""Under every mask a split sequence gives what one device gives, whatever the layout, strategy, kernel and length."""

import random

import numpy as np
import pytest
import torch

import bmburst
from bmburst import BlockSparse, Causal, Documents, Full, PrefixLM, SlidingWindow, Tree
from bmburst.attention.call import decide
from bmburst.attention.options import AttentionOptions
from bmburst.mesh import Mesh
from bmburst.schedule.mask import Mask
from bmburst_ops.flash import ReferenceKernel
from tests.attention.oracle import draw, problem, reference
from tests.attention.test_burst_attention import compare, split_attention
from tests.comm.counting import counted
from tests.distributed.processes import on_processes
from tests.distributed.threads import on_ranks, run_ranks
from tests.mask_oracle import random_mask, random_tree
from tests.pairs import pairwise
from tests.refusals import refused

MASKS = {
    "documents": lambda n: Documents(_lengths(n)),
    "documents, full": lambda n: Documents(_lengths(n), causal=False),
    "window": lambda _: SlidingWindow(4),
    "window, both ways": lambda _: SlidingWindow(3, causal=False),
    "prefix": lambda n: PrefixLM(n // 3),
    "prefixes": lambda n: PrefixLM([x // 2 for x in _lengths(n)], _lengths(n)),
    "blocks": lambda n: BlockSparse(_map(-(-n // 5)), 5),
    "tree": lambda n: _tree(n),
    "documents & window": lambda n: Documents(_lengths(n)) & SlidingWindow(3),
    "blocks & documents": lambda n: BlockSparse(_map(-(-n // 4)), 4) & Documents(_lengths(n), causal=False),
}
STRATEGIES = ["heads", "gather", "kv", "burst"]
LAYOUTS = ["zigzag", "contiguous", "balanced"]


def _lengths(tokens):
    """Return long and short documents, single tokens among them."""
    found = []
    while sum(found) < tokens:
        found.append(min((1, 7, 1, 2, 12, 3)[len(found) % 6], tokens - sum(found)))
    return found


def _tree(tokens):
    """Return two trees of up to four levels, with nodes of a single token."""
    lengths, parents = _lengths(tokens), []
    for i in range(len(lengths)):
        parents.append(-1 if i in (0, 5) else (i - 1, i - 1, parents[-1])[i % 3])
    return Tree(parents, lengths)


def _map(blocks):
    """Return a map with rows and columns that are all off, and a diagonal that is partly on."""
    cells = np.random.default_rng(blocks).random((blocks, blocks)) < 0.4
    cells[blocks // 2] = False
    cells[:, 0] = False
    return cells


@pytest.mark.parametrize(("name", "strategy", "layout", "few"), pairwise(MASKS, STRATEGIES, LAYOUTS, [False, True]))
def test_equals_one_device_in_fp64(name, strategy, layout, few):
    _compare_ranks(2, name, strategy, layout, few)


@pytest.mark.long
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "heads+ring", "heads+gather"])
@pytest.mark.parametrize("name", MASKS)
def test_equals_one_device_in_fp64_on_four_ranks(name, strategy, few):
    for layout in LAYOUTS:
        _compare_ranks(4, name, strategy, layout, few)


def _compare_ranks(size, name, strategy, layout, few):
    length, kv_heads = (8 * size + 1, 1) if few else (37, size)
    run_ranks(size, compare, layout, MASKS[name](length), length, size, kv_heads, {"strategy": strategy})


@pytest.mark.parametrize("seed", range(24))
def test_any_mask_on_any_number_of_ranks(seed):
    """Masks that nobody chose, under whatever strategy is cheapest."""
    rng = random.Random(seed)
    size, length = rng.randint(1, 5), rng.randint(9, 60)
    layout = rng.choice(("contiguous", "zigzag", "striped", "balanced"))
    run_ranks(size, compare, layout, random_mask(rng, length), length, 4, rng.choice((1, 2, 4)), {"strategy": "auto"})


@pytest.mark.parametrize("seed", range(12))
def test_any_tree_on_any_number_of_ranks(seed):
    rng = random.Random(100 + seed)
    size, length = rng.randint(1, 5), rng.randint(9, 60)
    layout = rng.choice(("contiguous", "zigzag", "striped", "balanced"))
    strategies = ["auto", "kv", "burst"] if layout == "striped" else ["auto", "gather", "kv", "burst", "heads"]
    heads = size if size > 2 else 4
    options = {"strategy": rng.choice(strategies)}
    run_ranks(size, compare, layout, random_tree(rng, length), length, heads, rng.choice((1, heads)), options)


@pytest.mark.parametrize(("size", "layout", "strategy"), pairwise([1, 2, 3], LAYOUTS, STRATEGIES))
def test_trees_without_branches_are_plain_masks_bit_by_bit(size, layout, strategy):
    whole, lengths = draw(3, 1, 37, 6, 6, 8), _lengths(37)

    def body(comm):
        for tree, plain in (
            (Tree([-1], [37]), Causal()),
            (Tree([-1] * len(lengths), lengths), Documents(lengths)),
        ):
            both = [split_attention(comm, whole, layout, mask, strategy=strategy) for mask in (tree, plain)]
            assert all(map(torch.equal, *both))

    run_ranks(size, body)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_tree_is_planned_once_and_a_level_is_a_kernel_call(strategy, monkeypatch):
    """A training step makes its tree anew; each layer calls attention, and planning takes longer than a call may."""
    counts = {"plan": 0, "kernel": 0}

    def counted_calls(owner, name, kind):
        real = getattr(owner, name)

        def counting(*arguments, **options):
            counts[kind] += 1
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, counting)

    counted_calls(Mask, "rows", "plan")
    for name in ("forward", "backward"):
        counted_calls(ReferenceKernel, name, "kernel")
    first = STRATEGIES.index(strategy) + 8  # a tree that no other case has planned
    parents, lengths, size = [-1, 0, 0, 2, 2], [first, 9, 8, 7, 29 - first], 2
    pairs = 1 if strategy == "heads" else size  # of each rank

    def body(comm):
        q, k = (torch.randn(1, 28, heads, 8, requires_grad=True) for heads in (4, 2))
        options = {"length": 53, "strategy": strategy, "kernel": "reference", "group": comm}
        bmburst.burst_attention(q, k, k, mask=Tree(parents, lengths), **options).sum().backward()

    run_ranks(size, body)
    assert counts["plan"] > 0
    levels, passes = 3, 2
    assert passes * size * pairs < counts["kernel"] <= passes * size * pairs * levels
    counts["plan"] = 0
    run_ranks(size, body)
    assert counts["plan"] == 0


@pytest.mark.parametrize("ring_tensors", ["kv", "burst"])
def test_striped_rings(ring_tensors):
    for mask in (SlidingWindow(5), Documents(_lengths(29)), PrefixLM(11), SlidingWindow(4, causal=False)):
        run_ranks(3, compare, "striped", mask, 29, 2, 1, {"strategy": ring_tensors})


@on_processes(3)
def test_over_processes():
    comm = bmburst.communicator(None)
    for strategy in ("heads", "gather", "ring"):
        for name in ("documents", "window", "prefixes", "blocks"):
            compare(comm, "balanced", MASKS[name](31), 31, 3, 3, {"strategy": strategy})


@pytest.mark.parametrize("name", MASKS)
def test_the_default_device_is_the_programs_own(name):
    """What `torch.set_default_device` says is for its tensors: what is made here lies where the inputs do."""
    mask = MASKS[name](37)
    problem(37, 2, 1, mask, value_dim=8)  # made here, and kept

    def body(comm):
        with torch.device("meta"):
            compare(comm, "zigzag", mask, 37, 2, 1, {"strategy": "kv"})

    run_ranks(2, body)


@on_ranks(2)
def test_names_and_values_are_the_same(comm):
    whole = draw(2, 1, 24, 2, 2, 8)
    for name, mask in (("causal", Causal()), ("full", Full()), ("causal", Full() & Causal())):
        for by_name, by_value in zip(
            split_attention(comm, whole, "zigzag", name), split_attention(comm, whole, "zigzag", mask), strict=True
        ):
            assert torch.equal(by_name, by_value)


@on_ranks(2)
def test_the_mask_says_how_long_the_sequence_is(comm):
    """Without `length` the tokens behind the documents are padding."""
    q = torch.ones(1, 8, 2, 4)
    out = bmburst.burst_attention(q, q, q, mask=Documents([5, 6]), layout="contiguous", group=comm)
    assert bool(out[:, 3:].any()) == (comm.rank == 0)


@on_ranks(2)
def test_each_sample_may_have_its_own_mask(comm):
    whole = draw(4, 2, 26, 2, 1, 8)
    masks = (Documents([9, 17]), SlidingWindow(5) & Documents([20, 6]))
    expected = [reference(*(t[i : i + 1] for t in whole[:4]), mask) for i, mask in enumerate(masks)]
    got = split_attention(comm, whole, "zigzag", masks, with_lse=False)
    for ours, theirs in zip(got, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(ours.detach(), torch.cat(theirs), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@on_ranks(2)
def test_samples_are_joined_in_any_dtype_under_autocast(comm, low):
    """torch's own joining takes there, of 16-bit tensors, those of autocast's dtype alone."""
    masks = (Documents([5, 3]), SlidingWindow(5))
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        q = torch.randn(2, 8 // comm.size, 2, 8).to(dtype).requires_grad_()
        runs = []
        for is_on in (False, True):
            with torch.autocast("cpu", low, enabled=is_on):
                out = bmburst.burst_attention(q, q, q, mask=masks, group=comm)
            runs.append((out, *torch.autograd.grad(out.sum(), q)))
        assert all(a.equal(b) and a.dtype == dtype for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mask": Documents([5, 6])}, "11 tokens | sequence has 16 | 16 tokens | length=11"),
        ({"mask": BlockSparse(torch.ones(3, 3), 4)}, "16 tokens | 4 blocks of 4 | block_map | 3 | [4, 4]"),
        ({"mask": (Causal(), Full(), Causal())}, "3 masks | batch of 2 | one"),
        ({"mask": [Causal(), Full()]}, "mask | tuple | list of 2"),
        ({"mask": (Causal(), Full()), "layout": "balanced"}, "layout | 'balanced' | one mask | each sample | 'zigzag'"),
        ({"mask": "casual"}, "mask | 'casual' | 'causal' | causal, full"),
        ({"mask": 3}, "mask | name | int | causal, full | bmburst.Documents"),
        (
            {"mask": SlidingWindow(4), "layout": "striped", "strategy": "gather"},
            "'gather' | 'striped' | strategy='auto'",
        ),
    ],
)
@on_ranks(2)
def test_what_cannot_work_is_refused_on_every_rank(comm, options, words):
    q = torch.ones(2, 8, 2, 4)
    with refused(words):
        bmburst.burst_attention(q, q, q, length=16, group=comm, **options)


@on_ranks(2)
def test_ranks_with_different_masks_are_told(comm):
    q = torch.ones(1, 8, 2, 4)
    with refused("disagree", "fix: ", "2 documents of 6 to 10 tokens", "2 documents of 7 to 9 tokens"):
        bmburst.burst_attention(q, q, q, mask=Documents([6 + comm.rank, 10 - comm.rank]), group=comm)


@pytest.mark.parametrize(("strategy", "window_tokens"), [("gather", 7), ("ring", 32)])
@on_ranks(4)
def test_blocks_that_nobody_needs_do_not_move(comm, strategy, window_tokens):
    """A document that lives on one rank moves nothing; a window moves what the next rank sees, in a ring one block."""
    group, counting = counted(comm)
    q = torch.randn(1, 32, 2, 4, requires_grad=True)
    for mask, tokens in ((Documents([32] * 4), 0), (SlidingWindow(8), window_tokens)):
        if strategy == "gather" and comm.rank == 0:
            tokens = 0
        options = {"strategy": strategy, "layout": "contiguous", "group": group, "mask": mask}
        counting.received = 0
        bmburst.burst_attention(q, q, q, **options).sum().backward()
        assert bool(counting.received) == isinstance(mask, SlidingWindow)
        counting.received = 0
        with torch.no_grad():
            bmburst.burst_attention(q, q, q, **options)
        assert counting.received == tokens * 2 * 2 * 4 * 4  # K and V, heads, head_dim, bytes


@on_ranks(4)
def test_the_mesh_decides_how_many_ranks_exchange_heads(comm):
    comm.ulysses_degree = 2
    q = torch.zeros(1, 8, 4, 8)
    options = AttentionOptions(mask=Documents([20, 12]))
    assert decide(comm, q, q, q, None, options).strategy.ulysses_degree == 2
    compare(comm, "balanced", Documents([20, 12]), 32, 4, 2, {})


@on_processes(2)
def test_what_a_mesh_says_is_its_own():
    """Two meshes may have the same group, and so may a caller without any."""
    exchanging, whole = Mesh.over_process_group(heads=2), Mesh.over_process_group(nodes=2)
    assert (exchanging.sequence.ulysses_degree, exchanging.sequence.nodes) == (2, None)
    assert (whole.sequence.ulysses_degree, whole.sequence.nodes) == (None, 2)
    group = bmburst.communicator(None)
    assert (group.ulysses_degree, group.nodes) == (None, None)
    q = torch.zeros(1, 8, 2, 4)
    assert bmburst.burst_attention(q, q, q, strategy="ring").shape == q.shape
    with exchanging.current(), refused("mesh", "Ulysses degree 2"):
        bmburst.burst_attention(q, q, q, strategy="ring")
