"""Packed trees: rows are found again, prefixes are stored once, and a model's gradients are those of single rows."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import logsigmoid

import bmburst
from bmburst import Tree, pack_tree
from tests.attention.oracle import attention
from tests.distributed.processes import on_processes
from tests.distributed.threads import run_ranks
from tests.refusals import refused

PROMPTS = [3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1]
ROWS = [
    *([*PROMPTS[0], *answer] for answer in ([5, 3], [5, 3, 5, 8], [9], [5, 4, 4])),
    [*PROMPTS[1], 8, 2],
    [*PROMPTS[0], 9],  # a duplicate
    PROMPTS[0][:5],  # a prefix of other rows, which ends inside a node
    [0, 0],
]


def drawn(seed):
    """Return rows of few tokens, so that they share prefixes of all lengths."""
    rng = random.Random(seed)
    rows = [[rng.randrange(2) for _ in range(rng.randint(2, 12))] for _ in range(rng.randint(1, 9))]
    rows += [rng.choice(rows)[: rng.randint(2, 12)] for _ in range(rng.randint(0, 3))]
    rng.shuffle(rows)
    return rows


def holds(rows, packed):
    """Every row is found again at its path, and sees itself and nothing else."""
    assert len(packed.paths) == len(rows)
    lengths = packed.mask.lengths
    node = np.repeat(np.arange(len(lengths)), lengths)
    for row, path in zip(rows, packed.paths, strict=True):
        assert packed.tokens[path].tolist() == row[:-1] and packed.labels[path].tolist() == row[1:]
        assert packed.positions[path].tolist() == list(range(len(row) - 1))
        nodes = list(dict.fromkeys(node[path.numpy()].tolist()))
        assert [packed.mask.parents[n] for n in nodes] == [-1, *nodes[:-1]]
    covered = torch.cat(packed.paths).unique()
    assert covered.tolist() == list(range(packed.length))


@pytest.mark.parametrize("seed", range(60))
def test_rows_are_found_again_and_prefixes_are_stored_once(seed):
    rows = drawn(seed)
    packed = pack_tree(rows, least_saved=1)
    holds(rows, packed)
    # A token and its label are stored once for each different beginning of a row.
    assert packed.length == len({tuple(row[:n]) for row in rows for n in range(2, len(row) + 1)})
    for options in ({"least_saved": 5}, {"least_saved": 1, "max_depth": 2}, {"max_depth": 1}):
        other = pack_tree(rows, **options)
        holds(rows, other)
        assert other.length >= packed.length and len(other.mask.levels) <= options.get("max_depth", 64)
    assert len(pack_tree(rows, max_depth=1).mask.levels) == 1


def test_a_group_of_answers_is_a_prompt_and_its_answers():
    prompt, answers = list(range(1000)), [[7] * 300, [8] * 200, [9] * 100]
    packed = pack_tree([torch.tensor([*prompt, *answer]) for answer in answers])
    # The last token of the prompt predicts the first one of each answer, so each answer's node begins with it.
    assert packed.mask == Tree([-1, 0, 0, 0], [999, 300, 200, 100])


def test_short_prefixes_are_copied():
    rows = [[*range(200), 1000 + i, *range(50)] for i in range(2)]
    assert pack_tree(rows).mask.parents == (-1, -1)  # 199 pairs saved
    assert pack_tree(rows, least_saved=199).mask.parents == (-1, 0, 0)
    assert pack_tree([*rows, [*range(200), 2000]]).mask.parents == (-1, 0, 0, 0)  # 398 pairs saved


def test_values_of_rows_are_summed_where_they_share_tokens():
    rows = [[1, 2, 3], [1, 2, 4, 5]]
    packed = pack_tree(rows, least_saved=1)
    assert packed.tokens.tolist() == [1, 2, 2, 4] and packed.labels.tolist() == [2, 3, 4, 5]
    assert packed.sum_rows([10.0, torch.tensor([1.0, 2.0, 3.0])]).tolist() == [11, 10, 2, 3]
    with refused("1 rows", "has 2"):
        packed.sum_rows([1.0])
    with refused("row 1", "3 labels", "[4]"):
        packed.sum_rows([1.0, torch.ones(4)])
    with refused("values must be a list", "NoneType", "fix: "):
        packed.sum_rows(None)
    with refused("row 1 has values 'a'", "allowed: a number", "fix: "):
        packed.sum_rows([1.0, "a"])
    with refused("packed tree of 4 tokens", "dimension None"):
        packed.rows(torch.ones(4), dim=None)
    for wrong in ({"tokens": [1, 2, 2, 4]}, {"mask": None}, {"paths": [None]}):
        with refused("packed tree", "tensors", "fix: bmburst.pack_tree"):
            replace(packed, **wrong)
    for values, words in (
        (torch.ones(4).to(torch.float8_e4m3fn), "float8_e4m3fn | allowed: | values.float()"),
        (torch.ones(4).to_sparse(), "values | dense"),
        (torch.ones(4, device="meta"), "values | meta"),
    ):
        with refused(words):
            packed.counted_rows(values)
    with refused("row 0 has values", "allowed: "):
        packed.sum_rows([10**400, 1.0])
    for values, got in ((torch.ones(1, 6), "[1, 6]"), (torch.ones(()), "[]"), ([1.0] * 4, "list")):
        for pick in (packed.rows, packed.counted_rows):  # of padded tokens too, or of a rank's part
            with refused("packed tree of 4 tokens", got, "dimension -1", "fix: "):
                pick(values)


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        ([], {}, ["no rows"]),
        (None, {}, ["rows must be a list", "NoneType"]),
        (torch.tensor(3), {}, ["rows must be a list", "Tensor"]),
        ([[1, 2], [3]], {}, ["row 1", "[1]", "at least 2"]),
        ([[1, -2]], {}, ["row 0", "from 0 on"]),
        ([np.array([1, 2**63 + 5], np.uint64)], {}, ["row 0", "uint64"]),
        ([[1.0, 2.0]], {}, ["row 0", "float64"]),
        ([[[1, 2]]], {}, ["row 0", "[1, 2]"]),
        ([[1, 2]], {"least_saved": 0}, ["least_saved", "at least 1"]),
        ([[1, 2]], {"max_depth": 0}, ["max_depth", "at least 1"]),
        ([[1, 2]], {"labels": []}, ["labels of 0 rows", "1 rows"]),
        ([[1, 2]], {"labels": 2}, ["labels must be a list", "int"]),
        ([[1, 2], [1, 3, 4]], {"labels": [[1, 2], [1, 3]]}, ["row 1", "3 tokens", "[2]", "-100"]),
        ([[1, 2], [1, 3, 4]], {"labels": [[1, 2], [3, 4, -100]]}, ["label 1 of row 1", "is 4", "3", "not shifted"]),
    ],
)
def test_bad_rows_are_refused(rows, options, words):
    with refused(*words):
        pack_tree(rows, **options)


def _field(name, change):
    return lambda packed: {name: change(getattr(packed, name))}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (_field("tokens", lambda x: x.float()), "int64"),
        (_field("tokens", lambda x: -x - 1), "token below 0"),
        (_field("tokens", lambda x: x.flip(0)), "label | token that follows"),
        (_field("tokens", lambda x: x.to("meta")), "hold numbers | meta"),
        (_field("labels", lambda x: x + 1), "label | token that follows"),
        (_field("labels", lambda x: torch.full_like(x, -100)), "row 0 | counts | -100"),
        (_field("positions", lambda x: x.flip(0)), "positions | mask"),
        (_field("positions", lambda x: x.to_sparse()), "dense"),
        (_field("mask", lambda x: Tree([-1], [x.length])), "positions | mask"),
        (_field("paths", lambda x: (x[0] + 100, *x[1:])), "path of row 0"),
        (_field("paths", lambda x: (*x[:1], x[1].flip(0), *x[2:])), "path of row 1"),
        (_field("paths", lambda x: (x[0].double(), *x[1:])), "int64"),
        (_field("counted", lambda x: (x[0].long(), *x[1:])), "bool"),
        (lambda _: {"paths": (), "counted": ()}, "no row"),
    ],
)
def test_fields_that_are_not_those_of_rows_are_refused(changes, words):
    """Values of a row would be those of other tokens; or torch would say that an index is out of range."""
    packed = pack_tree([[1, 2, 3, 4], [1, 2, 4, 5], [1, 2]], [[1, 2, 3, 4], [1, -100, 4, 5], [1, -100]], least_saved=1)
    with refused(words, "fix: "):
        replace(packed, **changes(packed))


class Model(torch.nn.Module):
    """Two layers of attention with GQA and positions, in fp64; `attend` maps q, k and v to the output."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = (torch.nn.Embedding(n, 16, dtype=torch.float64) for n in (10, 32))
        self.inner = torch.nn.ModuleList(torch.nn.Linear(16, 16 + 2 * 4, dtype=torch.float64) for _ in range(2))
        self.outer = torch.nn.ModuleList(torch.nn.Linear(16, 16, dtype=torch.float64) for _ in range(2))
        with torch.no_grad():
            self.tokens.weight /= 4

    def forward(self, tokens, labels, positions, attend):
        hidden = self.tokens(tokens) + self.places(positions)
        for inner, outer in zip(self.inner, self.outer, strict=True):
            q, k, v = inner(hidden).unflatten(-1, (-1, 4)).split((4, 1, 1), -2)
            hidden = hidden + torch.tanh(outer(attend(q, k, v).flatten(-2)))
        return (hidden @ self.tokens.weight.T).log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def objective(rows):
    """A loss that no sum over tokens gives: a preference between sums of rows, and a clipped ratio of a row."""
    sums = torch.stack([row.sum() for row in rows])
    return -logsigmoid(sums[0] - sums[1]) + (sums - 1).exp().clamp(max=0.5).mean() + (sums[4] * sums[5]).tanh()


def single_rows(model):
    found = [
        model(*(torch.tensor(t)[None] for t in (row[:-1], row[1:], range(len(row) - 1))), _alone)[0] for row in ROWS
    ]
    loss = objective(found)
    return found, loss, torch.autograd.grad(loss, list(model.parameters()))


def _alone(q, k, v):
    return attention(q, k, v, "causal")[0]


def over_ranks(comm, layout, strategy, model, expected):
    rows, loss, gradients = expected
    packed = pack_tree(ROWS, least_saved=3)
    options = {"layout": layout, "mask": packed.mask, "group": comm}
    cut = bmburst.SequenceShard.cut(packed.length, **options)
    part = cut.tree(packed)

    def attend(q, k, v):
        return bmburst.burst_attention(q, k, v, length=packed.length, strategy=strategy, **options)

    logps = model(part.tokens, part.labels.clamp(min=0), part.positions.clamp(max=31), attend)
    found = cut.rows(packed, logps)
    torch.testing.assert_close(found, rows, rtol=1e-11, atol=1e-12)
    (mean,) = comm.all_reduce((logps.detach() * part.weights).sum()).wait()
    torch.testing.assert_close(mean, torch.cat(rows).detach().mean(), rtol=1e-6, atol=0)  # weights are in fp32
    found = objective(found)
    torch.testing.assert_close(found, loss, rtol=1e-11, atol=1e-12)
    # Every rank computes the loss, and `rows` sums the gradients of all of them.
    mine = torch.autograd.grad(found / comm.size, list(model.parameters()))
    for gradient, wanted in zip(mine, gradients, strict=True):
        (total,) = comm.all_reduce(gradient.contiguous()).wait()
        torch.testing.assert_close(total, wanted, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("layout", "strategy"), [("zigzag", "auto"), ("balanced", "gather"), ("striped", "burst")])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_model_on_a_tree_equals_the_model_on_each_row(size, layout, strategy):
    torch.manual_seed(0)
    model = Model()
    run_ranks(size, over_ranks, layout, strategy, model, single_rows(model))


def test_labels_count_by_row():
    rows = [[1, 2, 3], [1, 2, 4, 5], [1, 2, 3]]
    packed = pack_tree(rows, [[1, 2, -100], [1, -100, 4, 5], [-100, -100, 3]], least_saved=1)
    assert sorted(packed.labels.tolist()) == [2, 3, 4, 5] and packed.counts.tolist() == [1] * 4
    assert [row.tolist() for row in packed.counted_rows(packed.labels)] == [[2, 0], [0, 4, 5], [0, 3]]
    once = pack_tree(rows, [[-100] * 3, [-100, -100, 4, -100], [-100] * 3], least_saved=1)
    assert [row.tolist() for row in once.rows(once.labels)] == [[-100, -100], [-100, 4, -100], [-100, -100]]
    assert pack_tree(rows, least_saved=1).counts.tolist() == [3, 1, 1, 2]


@on_processes(2)
def test_ranks_with_other_rows_are_refused():
    rows = [[1, 2, 3], [1, 2, 4, 5]]
    packed = pack_tree(rows[:: -1 if dist.get_rank() else 1], least_saved=1)
    cut = bmburst.SequenceShard.cut(packed.length, layout="zigzag", size=2, rank=dist.get_rank())
    with refused("rank 1"):
        cut.tree(packed)
    same = pack_tree(rows, least_saved=1)
    with refused("[1, 3]", "[1, 2]"):
        cut.rows(same, torch.zeros(1, 3))
    with refused("tree", "list", "pack_tree"):
        cut.tree(rows)
    with refused("values | dense"):
        cut.rows(same, torch.ones(1, 2).to_sparse())
    assert [len(row) for row in cut.rows(same, torch.ones(1, 2))] == [2, 3]
