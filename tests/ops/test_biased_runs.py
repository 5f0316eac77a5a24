"""Runs of blocks are true of every pair of their tokens, by brute force, and kernels that obey them give the right."""

from dataclasses import fields, replace

import pytest
import torch

from bmburst_ops.biased import BiasedReferenceKernel, BiasedTritonKernel, Pairs, Tokens
from bmburst_ops.biased import triton as kernels
from bmburst_ops.biased.formula import visible
from bmburst_ops.biased.triton import diagonal_runs, line_runs
from bmburst_ops.biased.triton_blocks import GENERAL, NEAR, PARTLY
from bmburst_ops.flash import BackwardInputs
from bmburst_ops.flash.triton import BlockSizes
from tests.ops.biased_oracle import draw, draw_bee, long_segments
from tests.ops.test_biased import DEVICE, error, ours
from tests.pairs import long

SIZES = {"uneven": BlockSizes(32, 16, 4, 1), "even": BlockSizes(16, 16, 4, 1)}


def case(name):
    """Return formula, relations, queries and keys, and in which order the tokens of either side stand."""
    formula, relations, tokens = ours(draw_bee(3, 2, 131, instances=2) if name == "mixed" else long_segments())
    if name == "one way":  # all that is ahead has row 0
        formula = replace(formula, bidirectional=False)
    places = torch.arange(tokens.shape[1], device=DEVICE)
    order = {
        "whole": places,
        "one way": places,
        "mixed": places,
        "swapped": torch.cat((places[:37], places[37:39].flip(0), places[39:117])),
        "striped": torch.cat([places[first::2] for first in range(2)]),
        "pieces": torch.cat(places.split(16)[::2] + places.split(16)[1::2][::-1]),
    }[name]
    others = {
        "striped": places[::2],
        "swapped": torch.cat((places[:85], places[85:87].flip(0), places[87:])),
        "pieces": places[5:],
    }.get(name, places)
    return formula, relations, taken(tokens, order), taken(tokens, others)


def taken(tokens, order):
    return Tokens(*(getattr(tokens, field.name)[:, order] for field in fields(tokens)))


def listed(runs):
    """Return the runs of each line of each batch, as lists."""
    return [
        [line[:count] for line, count in zip(lines, counts, strict=True)]
        for lines, counts in zip(runs.runs.tolist(), runs.counts.tolist(), strict=True)
    ]


def tiles(formula, relations, queries, keys, blocks):
    """Return for each pair of blocks which pairs see each other, their row of the table, and distances."""
    seen = visible(queries, keys)
    relations = torch.cat((relations, relations.new_zeros(len(relations), 99)), 1)
    rows = formula.buckets(queries, keys, relations)
    ahead = keys.position[:, None] - queries.position[:, :, None]
    near = formula.distances(seen.device)[ahead.clamp(-formula.max_distance, formula.max_distance).long()
                                          + formula.max_distance]  # fmt: skip

    def at(b, i, j):
        cut = b, slice(i * blocks.queries, (i + 1) * blocks.queries), slice(j * blocks.keys, (j + 1) * blocks.keys)
        is_whole = cut[1].stop <= seen.shape[1] and cut[2].stop <= seen.shape[2]
        return seen[cut], rows[cut], near[cut], ahead[cut], is_whole

    return at


RUN_CASES = [("swapped", 128, "uneven"), ("mixed", 128, "uneven"), ("one way", 128, "even"), ("pieces", 3, "even")]
RUN_CASES += long(("whole", 128, "uneven"), ("striped", 128, "uneven"), ("pieces", 128, "even"))


@pytest.mark.parametrize(("name", "most", "cut"), RUN_CASES)
def test_runs_are_what_they_say(name, cut, most):
    formula, relations, queries, keys = case(name)
    blocks, pairs = SIZES[cut], Pairs(formula, relations, queries, keys)
    at = tiles(formula, relations, queries, keys, blocks)
    lines = line_runs(pairs, blocks.over_keys, most)
    kinds, done = set(), set()

    def look(b, i, j, kind):
        seen, rows, near, _, is_whole = at(b, i, j)
        kinds.add(min(kind, 1))
        if kind >= 0:
            assert is_whole and seen.all() and (rows == kind).all()
        elif kind == NEAR.value:
            assert is_whole and seen.all() and (rows == near).all()
        elif kind == PARTLY.value:
            assert (rows == near)[seen].all()

    for side, found in (("queries", lines), ("keys", line_runs(pairs, blocks.over_queries, most))):
        for b, own in enumerate(listed(found.runs)):
            for line, runs in enumerate(own):
                ends = [0] + [end for start, stop, _ in runs for end in (start, stop)]
                assert ends == sorted(ends) and len(runs) <= most
                inside = {place: kind for start, stop, kind in runs for place in range(start, stop)}
                others = found.key_extents.shape[1] if side == "queries" else found.query_extents.shape[1]
                for place in range(others):
                    i, j = (line, place) if side == "queries" else (place, line)
                    if place in inside:
                        look(b, i, j, inside[place])
                        if side == "queries" and inside[place] >= 0:
                            done.add((b, i, j))
                    else:
                        assert not at(b, i, j)[0].any()

    ratio = blocks.queries // blocks.keys
    query_blocks, key_blocks = lines.query_extents.shape[1], lines.key_extents.shape[1]
    diagonals = diagonal_runs(pairs, blocks.over_keys, most)
    assert diagonals.counts.shape[1] == ratio * (query_blocks - 1) + key_blocks
    added = set()
    for b, own in enumerate(listed(diagonals)):
        for line, runs in enumerate(own):
            offset = line - ratio * (query_blocks - 1)
            for start, stop, kind in runs:
                for i in range(start, stop):
                    place = b, i, ratio * i + offset
                    assert place not in added and 0 <= place[2] < key_blocks
                    look(*place, kind)
                    # Whatever is left over is general, and the kernel leaves out what others have done.
                    assert place not in done or (kind == GENERAL.value and len(runs) == most)
                    added.add(place)
                    if kind in (NEAR.value, PARTLY.value):
                        assert torch.equal(at(*place)[3], at(b, start, ratio * start + offset)[3])
    for b in range(len(queries.position)):
        for i in range(query_blocks):
            for j in range(key_blocks):
                assert not at(b, i, j)[0].any() or (b, i, j) in done | added
    if name in ("whole", "one way") and most == 128:
        assert kinds == {0, 1, NEAR.value, GENERAL.value, PARTLY.value} - ({0} if name == "whole" else set())


KERNEL_CASES = [
    ("pieces", 2, "uneven"),
    *long(("one way", 128, "even"), ("whole", 128, "uneven"), ("striped", 128, "even")),
]


@pytest.mark.parametrize(("name", "most", "cut"), KERNEL_CASES)
def test_kernels_equal_the_plain_one_on_every_kind_of_block(name, most, cut):
    formula, relations, queries, keys = case(name)
    sizes = kernels.BiasedBlockSizes(*[SIZES[cut]] * 4)
    size, rows, columns = *queries.shape, keys.shape[1]
    q, k, v, table, grad, _ = draw(1, size, max(rows, columns), 1, 16, formula.rows, torch.float32)
    wide = [t.to(DEVICE) for t in (grad[:, :rows], q[:, :rows], k[:, :columns], v[:, :columns], table)]
    results = []
    for kernel, dtype in ((BiasedReferenceKernel(), torch.float64), (BiasedTritonKernel(sizes, most), torch.float32)):
        grad, q, k, v, table = (t.to(dtype) for t in wide)
        pairs = Pairs(formula, relations, queries, keys)
        part = kernel.forward(q, k, v, table, pairs, scale=0.3)
        delta = (grad * part.out).sum(-1).transpose(1, 2)
        lse = results[0][1].to(dtype) if results else part.lse
        gradients = kernel.backward(BackwardInputs(grad, q, k, v, lse, delta), table, pairs, scale=0.3)
        results.append((part.out, part.lse, *gradients))
    wanted, found = results
    seen = wanted[1] > -torch.inf
    assert torch.equal(found[1] > -torch.inf, seen)
    for value, true in zip(found[2:], wanted[2:], strict=True):
        assert error(value, true.cpu()) < 5e-6
    assert error(found[0], wanted[0].cpu()) < 3e-6 and error(found[1][seen], wanted[1][seen].cpu()) < 1e-6


def test_lines_without_blocks_have_no_runs():
    """Where spans have nothing in common, and where a side has no tokens."""
    formula, relations, queries, keys = case("whole")
    later = taken(keys, slice(0, 0)), Tokens(**{**vectors_of(keys), "span": keys.span + 9})
    for others in later:
        for blocks in SIZES.values():
            for side in (blocks.over_keys, blocks.over_queries):
                assert not line_runs(Pairs(formula, relations, queries, others), side).runs.counts.any()


def vectors_of(tokens):
    return {field.name: getattr(tokens, field.name) for field in fields(tokens)}
