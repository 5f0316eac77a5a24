"""Rows that share prefixes, through models of transformers as a tree over ranks, equal the rows one by one, in fp64."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import PreTrainedModel

from bmburst import Documents, Tree, pack_tree
from bmburst.comm.checks import CheckedCommunicator
from bmburst.integrations.transformers import SplitSequences, register
from bmburst_ops import IGNORE_INDEX
from tests import tiny
from tests.distributed.threads import mesh_of, on_ranks, run_ranks
from tests.refusals import refused

PROMPTS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1]
ROWS = [
    *([*PROMPTS[0], *answer] for answer in ([5, 3], [5, 3, 5, 8], [9], [5, 4, 4])),
    [*PROMPTS[1], 8, 2],
    [*PROMPTS[0], 9],  # a duplicate
    PROMPTS[0][:6],  # a prefix of other rows
]
LABELS = [[IGNORE_INDEX if i < 10 else token for i, token in enumerate(row)] for row in ROWS]
LABELS[3][10] = IGNORE_INDEX  # its token is shared with rows 0 and 1, where it counts
LABELS[4], LABELS[6] = ROWS[4], ROWS[6]  # also tokens of the prompt, which other rows share and do not count
RELATIVE = 2e-6  # transformers computes norms and rotary embeddings in fp32


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()


def _model(family: str = "llama", **changes: Any) -> PreTrainedModel:
    changes = {"head_dim": 8, "num_key_value_heads": 2} | changes
    return tiny.transformers_model(family, attention="bmburst", **changes).double().eval()


def _objective(rows: Sequence[Tensor]) -> Tensor:
    """A loss that no sum over tokens gives: a preference, and a clipped ratio of each label."""
    sums = torch.stack([row.sum() for row in rows])
    ratios = [(row - row.detach() + 0.1).exp().clamp(max=1.105).sum() * (i - 2.5) for i, row in enumerate(rows)]
    return -logsigmoid(sums[0] - sums[1]) + (sums[4] * sums[5] * sums[6]).tanh() + torch.stack(ratios).sum() / 7


def _one_by_one(model: PreTrainedModel) -> list[Tensor]:
    """Return the log-probabilities of each row, alone through transformers' own attention."""
    own = copy.deepcopy(model)
    own.set_attn_implementation("eager")
    found = []
    for row, labels in zip(ROWS, LABELS, strict=True):
        logits = own(torch.tensor([row]), use_cache=False).logits[0, :-1]
        logps = logits.log_softmax(-1).gather(-1, torch.tensor(row)[1:, None])[:, 0]
        found.append(logps.masked_fill(torch.tensor(labels[1:]) == IGNORE_INDEX, 0))
    model_gradients = torch.autograd.grad(_objective(found), list(own.parameters()), retain_graph=True)
    count = sum(label != IGNORE_INDEX for labels in LABELS for label in labels[1:])
    mean = -torch.cat(found).sum() / count
    return [
        torch.cat(found).detach(),
        *model_gradients,
        mean.detach(),
        *torch.autograd.grad(mean, list(own.parameters())),
    ]


def _as_tree(world: CheckedCommunicator, model: PreTrainedModel, options: dict[str, Any], each: bool) -> list[Tensor]:
    """Return the same of the packed rows; gradients are averaged over ranks, as DDP averages them."""
    own = copy.deepcopy(model)
    split = SplitSequences(mesh_of(world), **options)
    packed = pack_tree(ROWS, LABELS, least_saved=1)
    assert len(packed.mask.levels) > 2
    part = split.part(tree=packed)
    rows = part.row_logps(own)
    loss = _objective(rows)
    mine = loss * world.size if each and world.rank == 0 else loss * 0 if each else loss  # a loss on one rank alone
    mean = part.loss(own)
    found = [torch.cat(rows).detach(), *torch.autograd.grad(mine, list(own.parameters())), mean.detach()]
    found += torch.autograd.grad(mean, list(own.parameters()))
    return [found[0], *(world.all_reduce(t.contiguous()).wait()[0] / world.size for t in found[1:])]


@pytest.mark.parametrize(
    ("family", "changes", "options"),
    [
        ("llama", {}, {"layout": "balanced"}),
        ("qwen3", {"tie_word_embeddings": True}, {"layout": "striped", "strategy": "burst"}),
        ("granite", {"logits_scaling": 4.0}, {"layout": "zigzag", "strategy": "gather"}),  # whole logits
        ("mistral", {"sliding_window": 13}, {"layout": "balanced"}),  # as long as the longest row, not the tree
    ],
)
def test_rows_of_a_tree_equal_the_rows_one_by_one(
    family: str, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    model = _model(family, **changes)
    expected = _one_by_one(model)

    def body(world: CheckedCommunicator, each: bool) -> None:
        found = _as_tree(world, model, options, each)
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert float((ours - theirs).norm() / theirs.norm()) < RELATIVE

    for size in (1, 2, 3):
        run_ranks(size, body, size == 2)


def test_logits_of_rows_are_divided_by_a_temperature() -> None:
    model = _model()
    own = copy.deepcopy(model)
    own.set_attn_implementation("eager")
    expected = []
    for row, labels in zip(ROWS, LABELS, strict=True):
        logits = own(torch.tensor([row]), use_cache=False).logits[0, :-1] / 0.7
        logps = logits.log_softmax(-1).gather(-1, torch.tensor(row)[1:, None])[:, 0]
        expected.append(logps.masked_fill(torch.tensor(labels[1:]) == IGNORE_INDEX, 0))

    def body(world: CheckedCommunicator) -> None:
        part = SplitSequences(mesh_of(world)).part(tree=pack_tree(ROWS, LABELS, least_saved=1))
        found = part.row_logps(copy.deepcopy(model), temperature=0.7)
        assert [len(row) for row in found] == [len(row) for row in expected]
        wanted = torch.cat(expected)
        assert float((torch.cat(found) - wanted).norm() / wanted.norm()) < RELATIVE

    run_ranks(2, body)


def test_a_layer_computes_a_shared_prompt_once_and_no_head_holds_all_logits() -> None:
    model = _model()
    shapes: dict[str, list[tuple[int, ...]]] = {"layer": [], "head": []}
    model.model.layers[0].mlp.register_forward_hook(lambda _, __, out: shapes["layer"].append(tuple(out.shape)))
    model.lm_head.register_forward_hook(lambda _, __, out: shapes["head"].append(tuple(out.shape)))
    prompt = [*range(3, 53)]
    packed = pack_tree([[*prompt, 7, 8], [*prompt, 9], [*prompt, 11]], least_saved=20)
    SplitSequences(mesh_of()).part(tree=packed).row_logps(model)
    assert packed.length == 49 + 2 + 1 + 1 and shapes == {"layer": [(1, 54, 24)], "head": [(1, 1, 61)]}


@pytest.mark.parametrize("documents", [None, Documents((9, 5, 7)), Documents((9, 5))])
def test_balanced_splits_batches_whose_layers_have_one_mask(documents: Documents | None) -> None:
    model, ids = _model(), torch.arange(3, 24)[None]
    whole = SplitSequences(mesh_of(), layout="zigzag").part(ids, documents=documents)
    real = 21 if documents is None else documents.length
    with torch.no_grad():
        expected, loss = whole.logits(model)[:, :real], whole.loss(model)

    def body(world: CheckedCommunicator) -> None:
        own, split = copy.deepcopy(model), SplitSequences(mesh_of(world), layout="balanced")
        part = split.part(ids, documents=documents)
        assert part.cut.layout.name == "balanced"
        with torch.no_grad():
            torch.testing.assert_close(part.whole(part.logits(own))[:, :real], expected)
            assert split.mean(part.loss(own)) == pytest.approx(loss.item())

    run_ranks(3, body)


def test_balanced_is_refused_where_masks_differ() -> None:
    split, ids = SplitSequences(mesh_of(), layout="balanced"), torch.arange(3, 24).expand(2, -1)
    with refused("'balanced' | one mask | each sample | 'zigzag'"):
        split.part(ids, documents=[Documents((9, 12)), Documents((8, 13))])
    with refused("'balanced' | window of 7 | 'zigzag'"):
        split.part(ids).loss(_model("mistral", sliding_window=7))


def _tree(**changes: Any) -> Any:
    return replace(pack_tree(ROWS, LABELS, least_saved=1), **changes)


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
REFUSED: list[tuple[Callable[[SplitSequences], object], str]] = [
    (lambda split: split.part(tree=ROWS), "tree | list | fix: bmburst.pack_tree"),
    (lambda split: split.part(tree=_tree().mask), "tree | bmburst.Tree | no tokens | pack_tree"),
    (lambda split: split.part(torch.tensor(ROWS[:1]), tree=_tree()), "input_ids | tree | pack_tree"),
    (lambda split: split.part(tree=_tree(), seq_idx=torch.zeros(1, 3)), "seq_idx | tree"),
    (lambda split: split.part(), "input_ids | NoneType"),
    (lambda split: split.part(torch.zeros(1, 3).long(), documents=Tree([-1, 0], [1, 2])), "tree=bmburst.pack_tree"),
    (lambda split: split.part(torch.tensor([ROWS[0]])).row_logps(_model()), "row_logps | plain batch | pack_tree"),
    (lambda split: split.part(tree=_tree()).row_logps(_model(), labels=1), "labels | split.part"),
    (lambda split: split.part(tree=_tree()).row_logps(_model(), temperature=0), "temperature | above 0"),
    (lambda split: split.part(tree=_tree()).row_logps(np.zeros(2)), "ndarray | fix: "),  # which has no hash
    (lambda split: split.part(tree=_tree()).loss(_model("mistral", sliding_window=7)), "window of 7 | tree | of 13"),
    (
        lambda split: split.part(tree=_tree()).loss(tiny.transformers_model("qwen3_next", attention="bmburst")),
        "Qwen3NextGatedDeltaNet | state | tree",
    ),
    (
        lambda split: split.part(tree=_tree()).loss(
            _model(
                rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, max_position_embeddings=8
            )
        ),
        "'dynamic' | rows of a tree | 5 to 14",
    ),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_is_no_tree_or_not_exact_on_one_is_refused(case: int) -> None:
    call, words = REFUSED[case]
    with refused(words):
        call(SplitSequences(mesh_of()))


def test_fields_of_a_tree_that_do_not_fit_are_refused() -> None:
    with refused("tokens | [3] | sum to | pack_tree"):
        _tree(tokens=torch.zeros(3).long())
    with refused("paths and counted | pack_tree"):
        _tree(counted=())


@on_ranks(2)
def test_trees_that_differ_between_ranks_are_refused_on_every_rank(world: CheckedCommunicator) -> None:
    others = [[*reversed(ROWS)], [[*ROWS[0][:-1], 7], *ROWS[1:]]]
    for rows in others:
        packed = pack_tree(rows if world.rank else ROWS, least_saved=1)
        with refused("tree | rank 1"):
            SplitSequences(mesh_of(world)).part(tree=packed)


def test_noise_of_whole_rows_is_refused_on_a_tree() -> None:
    from transformers.integrations.neftune import activate_neftune

    model = _model().train()
    activate_neftune(model, 5.0)
    with refused("NEFTune | tree"):
        SplitSequences(mesh_of()).part(tree=_tree()).row_logps(model)
